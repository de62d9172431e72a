from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.layout import (
    RULES,
    Columns,
    Context,
    Layout,
    Overlap,
    Recompute,
    Workload,
    rules_for,
    valid_mask,
    violations,
)
from fivefold.layout.workload import Lora, Offload
from fivefold.model.spec import Attention, Block, BlockRun, FeedForward, ModelSpec

FULL, SELECTIVE = Recompute(kind="full"), Recompute(kind="selective")
TP, EP = Overlap(tp=True), Overlap(ep=True)


def modules(*names: str, kind: str = "selective") -> Recompute:
    return Recompute(kind=kind, modules=names)  # type: ignore[arg-type]


def some_layers(count: int, kind: str = "full") -> Recompute:
    return Recompute(kind=kind, layers=count)  # type: ignore[arg-type]


# id: (what both share, what makes it valid, what breaks the rule)
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
TITAN = {"runtime": "torchtitan"}
MAIN = {"runtime": "torchtitan@2026.9"}
SMALL_MODEL = {"model": "windowed", "zero": 1}
NANOTRON = {"runtime": "nanotron"} | SMALL_MODEL
ULYSSES = {"model": "plain", "cp": 2, "cp_kind": "a2a", "runtime": "deepspeed-zero"}
NO_SP = {"sequence_parallel": False}
LORA = {"trained": "adapters", "lora": Lora(rank=16)}
TRAINER = {"runtime": "fivefold"}
CASES: dict[str, Case] = {
    "tp-range": ({}, {"tp": 8}, {"tp": 0}),
    "cp-range": ({}, {"cp": 8}, {"cp": 128}),
    "pp-range": ({}, {"pp": 8}, {"pp": -2}),
    "ep-range": ({"model": "mixtral"}, {"ep": 8}, {"ep": 0}),
    "etp-range": ({"model": "mixtral"}, {"etp": 8}, {"etp": 0}),
    "dp-replicate-range": ({}, {"dp_replicate": 8}, {"dp_replicate": 0}),
    "vpp-range": ({"pp": 4}, {"vpp": 5}, {"vpp": 81}),
    "micro-batch-range": ({}, {"micro_batch": 8}, {"micro_batch": 1024}),
    "zero-range": ({}, {"zero": 1}, {"zero": 4}),
    "world-divides": ({}, {"tp": 4, "cp": 2, "pp": 4}, {"tp": 4, "cp": 2, "pp": 5}),
    "global-batch-divides": ({"tp": 8}, {"global_batch": 512}, {"global_batch": 516}),
    "heads-tp": ({"model": "gpt2", "seq_len": 1008, "world": 24, "global_batch": 24}, {"tp": 6}, {"tp": 8}),
    "ep-needs-experts": ({"ep": 4}, {"model": "mixtral"}, {"model": "llama-3-70b"}),
    "etp-needs-experts": ({"etp": 4}, {"model": "mixtral"}, {"model": "llama-3-70b"}),
    "expert-world-divides": (
        {"model": "deepseek-v3", "first_stage_layers": 7, "pp": 4, "world": 96, "global_batch": 480},
        {"ep": 8},
        {"ep": 16},
    ),
    "experts-ep": ({"model": "mixtral", "world": 16}, {"ep": 8}, {"ep": 16}),
    "expert-ffn-etp": ({"model": "mixtral", "world": 96, "global_batch": 480}, {"etp": 8}, {"etp": 3}),
    "ffn-tp": ({"model": "odd-ffn"}, {"tp": 2}, {"tp": 4}),
    "hidden-tp": ({"model": "odd-hidden"}, {"tp": 2}, {"tp": 4}),
    "sequence-parallel-needs-tp": ({"sequence_parallel": True}, {"tp": 2}, {"tp": 1}),
    "sequence-parallel-seq": ({"tp": 8}, {"seq_len": 8192}, {"seq_len": 8190}),
    "cp-ring-seq": ({"cp": 8}, {"seq_len": 8192}, {"seq_len": 8200}),
    "cp-a2a-seq": ({"cp": 8, "cp_kind": "a2a"}, {"seq_len": 8192}, {"seq_len": 8196}),
    "cp-a2a-heads": ({"cp_kind": "a2a"}, {"cp": 8}, {"cp": 16, "tp": 8}),
    "cp-a2a-kv-heads": (
        {"cp_kind": "a2a", "world": 48, "global_batch": 480, "model": "gpt2", "seq_len": 768},
        {"cp": 4},
        {"cp": 8},
    ),
    "cp-window": ({"model": "windowed", "cp": 4}, {"cp_kind": "a2a"}, {"cp_kind": "p2p"}),
    "learned-positions": ({"model": "gpt2"}, {"seq_len": 1024}, {"seq_len": 2048}),
    "vpp-needs-pp": ({"vpp": 2}, {"pp": 2}, {"pp": 1}),
    "schedule-vpp": ({"pp": 4, "vpp": 2}, {"schedule": "interleaved"}, {"schedule": "1f1b"}),
    "dualpipev-micro-batches": (
        {"pp": 4, "vpp": 2, "schedule": "dualpipev", **TRAINER},
        {"global_batch": 128},
        {"global_batch": 64},
    ),
    "v-shape-uneven": (
        {"pp": 4, "vpp": 2, "schedule": "zbv", **TRAINER},
        {},
        {"first_stage_layers": 18},
    ),
    "interleaved-micro-batches": ({"pp": 4, "vpp": 2}, {"global_batch": 512}, {"global_batch": 96}),
    "zero-runtime": ({}, {"zero": 1}, {"zero": 3}),
    "dp-replicate-divides": ({}, {"dp_replicate": 4}, {"dp_replicate": 3}),
    "dp-replicate-experts": ({"model": "mixtral", "ep": 8}, {"dp_replicate": 8}, {"dp_replicate": 16}),
    "optimizer-runtime": ({}, {"optimizer": "sgd"}, {"optimizer": "adafactor"}),
    "precision-runtime": (TITAN, {"precision": "bf16"}, {"precision": "fp16"}),
    "moe-imbalance": ({"model": "mixtral"}, {"moe_imbalance": 1.5}, {"moe_imbalance": 0.5}),
    "recompute-layers-kind": ({}, {"recompute": some_layers(4)}, {"recompute": some_layers(4, "selective")}),
    "recompute-layers-range": ({"pp": 4}, {"recompute": some_layers(20)}, {"recompute": some_layers(21)}),
    "recompute-layers-chunks": ({"pp": 4, "vpp": 2}, {"recompute": some_layers(4)}, {"recompute": some_layers(5)}),
    "recompute-modules-kind": ({}, {"recompute": modules("mlp")}, {"recompute": modules("mlp", kind="full")}),
    "recompute-modules-model": ({}, {"recompute": modules("mlp")}, {"recompute": modules("mlp", "mla_up_proj")}),
    "overlap-param-needs-zero": ({"overlap": Overlap(param=True)}, {"zero": 1}, {"zero": 0}),
    "overlap-tp-needs-sp": ({"tp": 8, "overlap": TP}, {}, {"sequence_parallel": False}),
    "overlap-ep-needs-ep": ({"model": "mixtral", "overlap": EP}, {"ep": 8}, {"ep": 1}),
    "megatron-layers-pp": ({}, {"pp": 16}, {"pp": 32}),
    "megatron-layers-vpp": ({}, {"pp": 8, "vpp": 2}, {"pp": 16, "vpp": 2}),
    "megatron-account-needs-even": ({"model": "six-kv", "pp": 4}, {}, {"account_for_loss": True, "pp": 1}),
    "megatron-uneven-needs-pp": ({"last_stage_layers": 20}, {"pp": 4}, {"pp": 1}),
    "megatron-uneven-counts": (
        {"pp": 4},
        {"first_stage_layers": 19, "last_stage_layers": 19},
        {"first_stage_layers": 19, "last_stage_layers": 18},
    ),
    "megatron-uneven-chunks": (
        {"pp": 4, "vpp": 2, "last_stage_layers": 18},
        {"first_stage_layers": 18},
        {"first_stage_layers": 20},
    ),
    "megatron-kv-heads": ({}, {"tp": 16}, {"model": "six-kv", "tp": 4}),
    "megatron-kv-heads-exact": ({"tp": 16, "model": "mixtral"}, {"version": "0.17"}, {"version": "0.15"}),
    "megatron-moe-needs-sp": ({"model": "mixtral", "tp": 4}, {}, {"sequence_parallel": False}),
    "megatron-cp-a2a-seq": ({"cp_kind": "a2a", "cp": 8}, {"seq_len": 8192}, {"seq_len": 8200}),
    "megatron-cp-a2a-kv-heads": ({"cp_kind": "a2a", "tp": 2}, {"cp": 4}, {"cp": 8}),
    "megatron-schedule": ({"pp": 4}, {"schedule": "1f1b"}, {"schedule": "afab"}),
    "megatron-muon": ({"optimizer": "muon"}, {"zero": 0}, {"zero": 1}),
    "megatron-grad-dtype": ({"grad_dtype": "bf16"}, {"precision": "bf16"}, {"precision": "fp16"}),
    "megatron-overlap-tp-domain": ({"tp": 16, "overlap": TP}, {"domain": 72}, {"domain": 8}),
    "megatron-overlap-ep-version": (
        {"model": "mixtral", "ep": 8, "overlap": EP},
        {"version": "0.14"},
        {"version": "0.13"},
    ),
    "megatron-overlap-ep-vpp": ({"model": "mixtral", "ep": 8, "pp": 2, "overlap": EP}, {"vpp": 2}, {"vpp": 1}),
    "megatron-overlap-ep-recompute": (
        {"model": "mixtral", "ep": 8, "overlap": EP},
        {"recompute": SELECTIVE},
        {"recompute": modules("moe")},
    ),
    "megatron-overlap-ep-mtp": (
        {"ep": 8, "overlap": EP, "model": "deepseek-v3"},
        {"pp": 2, "vpp": 31, "account_for_loss": True},
        {},
    ),
    "megatron-fp8-tokens": ({"precision": "fp8", "tp": 4}, {"seq_len": 8192}, {"seq_len": 8196}),
    "torchtitan-seq": (TITAN | {"tp": 8}, {"seq_len": 8192}, {"seq_len": 8200}),
    "torchtitan-kv-heads": (TITAN | {"model": "mixtral"}, {"tp": 8, "etp": 8}, {"tp": 16, "etp": 16}),
    "torchtitan-tp-needs-sp": (TITAN | {"tp": 8}, {}, {"sequence_parallel": False}),
    "torchtitan-cp-kind": (TITAN | {"cp": 4}, {"cp_kind": "p2p"}, {"cp_kind": "a2a"}),
    "torchtitan-etp": (TITAN | {"model": "mixtral", "tp": 4}, {"etp": 4}, {"etp": 1}),
    "torchtitan-ep": (TITAN | {"model": "mixtral", "cp": 4}, {"ep": 8}, {"ep": 2}),
    "torchtitan-uneven": (TITAN | {"pp": 4}, {}, {"first_stage_layers": 20}),
    "torchtitan-account": (TITAN | {"pp": 4}, {}, {"account_for_embedding": True}),
    "torchtitan-stages": (
        TITAN | {"model": "windowed", "global_batch": 6400},
        {"pp": 8},
        {"pp": 16},
    ),
    "torchtitan-layers-per-stage": (TITAN | {"pp": 4}, {"vpp": 7}, {"vpp": 8}),
    "torchtitan-micro-batches": (TITAN | {"pp": 8}, {"global_batch": 64}, {"global_batch": 32}),
    "torchtitan-tied-pp": (TITAN | {"model": "gpt2", "seq_len": 1024}, {"pp": 1}, {"pp": 4}),
    "torchtitan-mtp": (TITAN, {"model": "mixtral"}, {"model": "deepseek-v3"}),
    "torchtitan-recompute-layers": (TITAN, {"recompute": FULL}, {"recompute": some_layers(4)}),
    "torchtitan-recompute-selective": (TITAN, {"recompute": SELECTIVE}, {"recompute": modules("mlp")}),
    "torchtitan-tokens": (MAIN | {"tp": 8, "cp": 2}, {"seq_len": 8192}, {"seq_len": 8208}),
    "torchtitan-ep-mesh": (MAIN | {"model": "mixtral", "world": 12, "global_batch": 48}, {"ep": 4}, {"ep": 8}),
    "torchtitan-ep-tp": (MAIN | {"model": "mixtral", "tp": 4}, {"ep": 4}, {"ep": 2}),
    "torchtitan-no-etp": (MAIN | {"model": "mixtral", "ep": 8, "tp": 2}, {"etp": 1}, {"etp": 2}),
    "torchtitan-overlap-grad": (TITAN, {}, {"overlap": Overlap(grad=False)}),
    "torchtitan-overlap-param": (TITAN, {}, {"overlap": Overlap(param=False)}),
    "torchtitan-overlap-ep": (TITAN | {"model": "mixtral", "ep": 8}, {}, {"overlap": EP}),
    "torchtitan-grad-dtype": (TITAN, {"grad_dtype": "fp32"}, {"grad_dtype": "bf16"}),
    "torchtitan-schedule": (TITAN | {"pp": 4}, {"schedule": "afab"}, {"schedule": "zb-h1"}),
    "fivefold-experts": (TRAINER, {"model": "llama-3-70b"}, {"model": "mixtral"}),
    "fivefold-latent-attention": (TRAINER, {"model": "windowed"}, {"model": "latent"}),
    "fivefold-features": (TRAINER, {"model": "windowed"}, {"model": "sinks"}),
    "state-heads-tp": ({"model": "mamba2"}, {"tp": 4}, {"tp": 32}),
    "state-groups-tp": ({"model": "mamba2", "world": 32}, {"tp": 4}, {"tp": 8}),
    "linear-attention-cp": ({"model": "delta-net"}, {}, {"cp": 2}),
    "state-space-cp": ({"model": "mamba2", "cp": 2}, {}, TITAN),
    "state-space-cp-heads": ({"model": "mamba2"}, {"cp": 16}, {"cp": 32}),
    "state-space-cp-groups": ({"model": "mamba2", "world": 48, "global_batch": 480}, {"cp": 4}, {"cp": 3}),
    "fivefold-mtp": (TRAINER, {"model": "windowed"}, {"model": "one-mtp"}),
    "fivefold-heads-alike": (TRAINER, {"model": "windowed"}, {"model": "two-heads"}),
    "fivefold-kv-heads": (TRAINER | {"model": "six-kv"}, {"tp": 2}, {"tp": 4}),
    "fivefold-uneven-needs-pp": (TRAINER | {"first_stage_layers": 20}, {"pp": 4}, {"pp": 1}),
    "fivefold-uneven-counts": (
        TRAINER | {"model": "windowed", "pp": 4, "global_batch": 6400},
        {"first_stage_layers": 3, "last_stage_layers": 1},
        {"first_stage_layers": 6, "last_stage_layers": 1},
    ),
    "fivefold-account-needs-even": (TRAINER | {"account_for_loss": True}, {"pp": 4}, {"pp": 4, "last_stage_layers": 8}),
    "fivefold-empty-chunk": (TRAINER | {"model": "windowed", "global_batch": 6400}, {"pp": 8}, {"pp": 16}),
    "fivefold-overlap-ep": (TRAINER, {}, {"overlap": EP}),
    "fivefold-grad-dtype": (TRAINER | {"grad_dtype": "bf16"}, {"precision": "bf16"}, {"precision": "fp16"}),
    "fp8-dimensions": ({"precision": "fp8"}, {"tp": 8}, {"model": "odd-hidden"}),
    "nanotron-cp": (NANOTRON | {"model": "plain"}, {}, {"cp": 2}),
    "nanotron-cp-kind": (
        {"runtime": "nanotron@2026.4", "model": "plain", "zero": 1, "cp": 2},
        {"cp_kind": "p2p"},
        {"cp_kind": "a2a"},
    ),
    "nanotron-kv-heads": (NANOTRON | {"model": "six-kv"}, {"tp": 2}, {"tp": 4}),
    "nanotron-ep": (NANOTRON, {}, {"model": "mixtral", "ep": 2}),
    "nanotron-experts": ({"runtime": "nanotron", "zero": 1}, {"model": "windowed"}, {"model": "mixtral"}),
    "deepspeed-cp-kind": ({"runtime": "deepspeed", "cp": 2} | SMALL_MODEL, {"cp_kind": "a2a"}, {"cp_kind": "p2p"}),
    "deepspeed-zero-pp": ({"runtime": "deepspeed-zero", "model": "windowed", "zero": 3}, {}, {"pp": 2}),
    "deepspeed-kv-heads": ({"runtime": "deepspeed", "model": "six-kv", "zero": 1}, {"tp": 2}, {"tp": 4}),
    "deepspeed-autotp-zero3": (
        {"runtime": "deepspeed-zero", "model": "plain", "tp": 2} | NO_SP,
        {"zero": 2},
        {"zero": 3},
    ),
    "deepspeed-autotp-version": (
        {"runtime": "deepspeed-zero", "model": "plain", "tp": 2, "zero": 2} | NO_SP,
        {"version": "0.16"},
        {"version": "0.15"},
    ),
    "deepspeed-autotp-sp": ({"runtime": "deepspeed-zero", "model": "plain", "tp": 2, "zero": 2}, NO_SP, {}),
    "deepspeed-ulysses-zero3": (ULYSSES | {"zero": 3}, {"version": "0.17"}, {"version": "0.15"}),
    "deepspeed-ep": (
        {"runtime": "deepspeed", "model": "mixtral", "zero": 1, "world": 16, "tp": 4},
        {"ep": 4},
        {"ep": 8},
    ),
    "nanotron-model": (NANOTRON, {}, {"model": "sinks"}),
    "deepspeed-model": ({"runtime": "deepspeed", "zero": 1}, {"model": "windowed"}, {"model": "latent"}),
    "torchtitan-model": ({}, {"model": "latent", "runtime": "fsdp"}, {"model": "mamba2", "runtime": "torchtitan"}),
    "deepspeed-recompute-modules": (
        {"runtime": "deepspeed"} | SMALL_MODEL,
        {"recompute": SELECTIVE},
        {"recompute": modules("mlp")},
    ),
    "schedule-runtime": (NANOTRON | {"pp": 4}, {"schedule": "afab"}, {"schedule": "zb-h1"}),
    "fsdp-needs-shards": ({"runtime": "fsdp", "world": 8}, {"tp": 4}, {"tp": 8}),
    "fsdp-recompute-selective": ({"runtime": "fsdp"}, {"recompute": FULL}, {"recompute": SELECTIVE}),
    "overlap-tp-runtime": ({"tp": 8, "overlap": TP, "zero": 1}, {}, {"runtime": "deepspeed"}),
    "overlap-ep-runtime": ({"model": "mixtral", "ep": 8, "overlap": EP, "zero": 1}, {}, {"runtime": "nanotron"}),
    "moe-dispatcher-runtime": ({"moe_dispatcher": "deepep", "model": "mixtral", "ep": 8}, {}, TITAN | {"zero": 3}),
    "moe-dispatcher-experts": ({"moe_dispatcher": "deepep", "model": "mixtral"}, {"ep": 8}, {"ep": 1}),
    "cuda-graphs-runtime": ({"cuda_graphs": True, "model": "plain"}, {}, TITAN),
    "cuda-graphs-dense": ({"cuda_graphs": True}, {}, {"model": "mixtral"}),
    "cuda-graphs-recompute": ({"cuda_graphs": True}, {}, {"recompute": FULL}),
    "documents-runtime": ({"document_length": 1000.0, "model": "plain"}, {}, TRAINER),
    "documents-cp": ({"document_length": 1000.0, "zero": 3} | TITAN, {}, {"cp": 2}),
    "offload-optimizer-runtime": ({"offload": Offload(optimizer=1)}, {}, {"runtime": "nanotron", "zero": 1}),
    "offload-parameters-runtime": (
        {"offload": Offload(optimizer=1, parameters=1), "zero": 3, "model": "plain"},
        {"runtime": "deepspeed-zero"},
        {"runtime": "megatron"},
    ),
    "offload-activations-runtime": ({"offload": Offload(activations=1)}, {}, TITAN),
    "offload-fsdp-together": (
        {"runtime": "fsdp"},
        {"offload": Offload(optimizer=1, parameters=1)},
        {"offload": Offload(optimizer=1)},
    ),
    "offload-parameters-whole": (
        {"runtime": "deepspeed-zero", "model": "plain", "zero": 3},
        {"offload": Offload(optimizer=1, parameters=1)},
        {"offload": Offload(parameters=1)},
    ),
    "offload-parameters-zero": (
        {"runtime": "deepspeed-zero", "model": "plain", "offload": Offload(optimizer=1, parameters=1)},
        {"zero": 3},
        {"zero": 2},
    ),
    "offload-optimizer-zero": ({"offload": Offload(optimizer=1)}, {"zero": 1}, {"zero": 0}),
    "offload-optimizer-adam": ({"offload": Offload(optimizer=1)}, {}, {"optimizer": "sgd"}),
    "offload-activations-pp": ({"offload": Offload(activations=1)}, {}, {"pp": 2}),
    "offload-activations-recompute": ({"offload": Offload(activations=1)}, {}, {"recompute": FULL}),
    "lora-runtime": (LORA, {"runtime": "fsdp"}, {"runtime": "nanotron", "model": "plain", "zero": 1}),
    "lora-targets-attention": (LORA, {}, {"model": "latent"}),
    "lora-optimizer": (LORA, {"optimizer": "sgd"}, {"optimizer": "muon", "zero": 0}),
    "base-precision-runtime": (LORA | {"base_precision": "nf4"}, {"runtime": "fsdp"}, {}),
    "accelerate-sp": ({"runtime": "accelerate", "tp": 8}, NO_SP, {}),
    "accelerate-pp": ({"runtime": "accelerate", "model": "plain"}, {}, {"pp": 2}),
    "accelerate-ep": ({"runtime": "accelerate", "model": "mixtral"}, {}, {"ep": 8}),
    **{
        f"fsdp1-{axis}": ({"runtime": "fsdp1", "model": "mixtral" if axis == "ep" else "plain"}, {}, {axis: 2})
        for axis in ("tp", "cp", "pp", "ep")
    },
    "fsdp1-hybrid": ({"runtime": "fsdp1"}, {"dp_replicate": 8}, {"dp_replicate": 2}),
    "megatron-experts-version": ({"runtime": "megatron@0.3"}, {}, {"model": "mixtral"}),
    "megatron-latent-version": ({"model": "latent"}, {"version": "0.10"}, {"version": "0.9"}),
    "megatron-mtp-version": ({"model": "one-mtp"}, {"version": "0.12"}, {"version": "0.11"}),
    "megatron-cp-version": ({"cp": 2}, {"version": "0.4"}, {"version": "0.3"}),
    "megatron-cp-experts-version": ({"cp": 2, "model": "mixtral"}, {"version": "0.8"}, {"version": "0.7"}),
    "megatron-cp-kind-version": ({"cp": 2, "cp_kind": "a2a"}, {"version": "0.10"}, {"version": "0.9"}),
    "megatron-folding-version": ({"model": "mixtral", "tp": 4, "ep": 8}, {"version": "0.10"}, {"version": "0.9"}),
    "megatron-uneven-version": ({"pp": 4, "first_stage_layers": 20}, {"version": "0.9"}, {"version": "0.8"}),
    "megatron-uneven-chunks-version": (
        {"pp": 4, "vpp": 2, "first_stage_layers": 20},
        {"version": "0.11"},
        {"version": "0.10"},
    ),
    "megatron-account-version": (
        {"model": "seven-blocks", "pp": 4, "account_for_loss": True},
        {"version": "0.11"},
        {"version": "0.10"},
    ),
    "megatron-modules-version": ({"recompute": modules("mlp")}, {"version": "0.13"}, {"version": "0.12"}),
    "megatron-replicas-experts-version": (
        {"model": "mixtral", "dp_replicate": 2},
        {"version": "0.13"},
        {"version": "0.12"},
    ),
    "megatron-overlap-tp-version": ({"tp": 8, "overlap": TP}, {"version": "0.5"}, {"version": "0.4"}),
}


def built(make, models, given_: dict[str, Any]) -> tuple[Layout, Context]:
    given_ = dict(given_)
    if given_.get("model") == "two-mtp":
        given_["model"] = msgspec.structs.replace(models["deepseek-v3"], mtp=2)
    return make(**given_)


@pytest.mark.parametrize("rule_id", CASES)
def test_each_rule_passes_and_fails(make, models, rule_id: str) -> None:
    shared, good, bad = CASES[rule_id]
    layout, context = built(make, models, shared | good)
    assert violations(layout, context) == []
    layout, context = built(make, models, shared | bad)
    found = {violation.id: violation for violation in violations(layout, context)}
    assert rule_id in found
    violation = found[rule_id]
    assert violation.option.startswith("--") or violation.option == "MODEL"
    assert violation.option in violation.message or len(violation.message) > 30
    assert "{" not in violation.message
    assert violation.source
    contract = violation.to_dict()
    assert set(contract) >= {"id", "option", "value", "legal", "message", "source", "runtimes"}


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule.id for rule in RULES)
    assert len({rule.id for rule in RULES}) == len(RULES)
    known = {rule.id for rule in RULES}
    assert all(known.issuperset(rule.moot_after) for rule in RULES)


def test_overlapped_expert_exchange_takes_one_module_of_mtp(make, models) -> None:
    layout, context = built(make, models, {"model": "two-mtp", "ep": 8, "pp": 2, "vpp": 2, "overlap": EP})
    assert "megatron-overlap-ep-mtp" in {each.id for each in violations(layout, context)}


def test_published_llama_3_70b_layout_is_valid(make) -> None:
    """A Megatron-Core guide's example: 64 GPUs, TP4 PP4 CP2, 8,192 tokens, batch 512, sequence parallelism."""
    layout, context = make(tp=4, pp=4, cp=2, sequence_parallel=True)
    assert violations(layout, context) == []


def test_deepseek_v3_layout_is_valid(make) -> None:
    """DeepSeek-V3 (2024), section 3.2: PP16, EP64 on 2,048 GPUs, ZeRO-1, no TP."""
    layout, context = make(
        model="deepseek-v3",
        world=2048,
        pp=16,
        ep=64,
        seq_len=4096,
        global_batch=15360,
        first_stage_layers=4,
        last_stage_layers=1,
    )
    assert violations(layout, context) == []


def test_one_trillion_layout_is_valid(make) -> None:
    """Narayanan et al. 2021: 128 layers, TP8 PP64 DP6 on 3,072 GPUs, batch 3,072, interleaved."""
    block = Block(mixer=Attention(heads=160, kv_heads=160, head_dim=160), feed=FeedForward(ffn=102400, gated=False))
    gpt = ModelSpec(
        name="gpt-1t",
        family="test",
        hidden=25600,
        vocab=51200,
        max_position=2048,
        runs=(BlockRun(128, block),),
        learned_positions=2048,
    )
    layout, context = make(
        model=gpt, world=3072, tp=8, pp=64, vpp=2, seq_len=2048, global_batch=3072, recompute=FULL, zero=0
    )
    assert violations(layout, context) == []


def test_llama_405b_split_with_embedding_and_head_as_blocks(make, models) -> None:
    """126 blocks over PP16 with 8 chunks, as Megatron-Bridge's recipe has it: only with both counted does it divide."""
    deep = msgspec.structs.replace(
        models["llama-3-70b"], runs=(msgspec.structs.replace(models["llama-3-70b"].runs[0], count=126),)
    )
    shared = {"model": deep, "world": 1024, "tp": 4, "pp": 16, "vpp": 8, "seq_len": 8192, "global_batch": 512}
    layout, context = make(**shared, account_for_embedding=True, account_for_loss=True)
    assert violations(layout, context) == []
    layout, context = make(**shared)
    assert "megatron-layers-pp" in {violation.id for violation in violations(layout, context)}


def test_messages_name_the_option_that_can_mend_it(make) -> None:
    layout, context = make(tp=4, cp=2, pp=3)
    first = violations(layout, context)[0]
    assert (first.id, first.option, first.value) == ("world-divides", "--pp", 3)
    assert 4 in first.legal
    layout, context = make(tp=3)
    ids = [violation.id for violation in violations(layout, context)]
    assert "global-batch-divides" not in ids  # follows from the degrees, so it would only distract
    layout, context = make(pp=16, vpp=2)
    (lost,) = violations(layout, context)
    assert lost.silent
    assert "silently" in lost.message


def test_rules_by_version_and_alias(make) -> None:
    """No version means the newest of the profile that the name alone means."""

    def ids(runtime: str) -> set[str]:
        return {rule.id for rule in rules_for(make(runtime=runtime)[1])}

    assert ids("megatron") == ids("megatron@0.17")
    assert "torchtitan-micro-batches" in ids("torchtitan") & ids("torchtitan@2026.7") - ids("torchtitan@2026.8")
    assert "torchtitan-ep-tp" in ids("torchtitan@2026.9") - ids("torchtitan@2026.8")
    assert "accelerate-sp" in ids("accelerate") - ids("fsdp2")
    assert "megatron-kv-heads" in ids("megatron-fsdp")


def test_a_stage_that_another_profile_has_is_named(make) -> None:
    layout, context = make(runtime="deepspeed", model="windowed", zero=3)
    (violation,) = violations(layout, context)
    assert "deepspeed-zero" in violation.message


def test_unknown_runtime_and_version(make) -> None:
    with pytest.raises(FivefoldError, match="Unknown runtime"):
        make(runtime="megatorn")
    with pytest.raises(FivefoldError, match="not modelled"):
        make(version="9.9")
    with pytest.raises(FivefoldError, match="--gpus"):
        make(world=0)
    with pytest.raises(FivefoldError, match="--global-batch"):
        make(global_batch=10**30)
    _, context = make()
    with pytest.raises(FivefoldError, match="one layout"):
        violations(Columns.build(64, context.work, tp=np.array([1, 2])), context)


def test_versions_can_be_written_into_the_name(make) -> None:
    _, old = make(runtime="megatron@0.15", zero=1)
    _, new = make()
    old_ids, new_ids = ({rule.id for rule in rules_for(context)} for context in (old, new))
    assert "megatron-kv-heads-exact" in old_ids - new_ids
    assert "megatron-kv-heads" in new_ids - old_ids
    assert not any(name.startswith("torchtitan") for name in new_ids)


SMALL = st.sampled_from([0, 1, 1, 1, 2, 2, 3, 4, 5, 8])
any_layout = st.builds(
    Layout,
    tp=SMALL,
    cp=SMALL,
    cp_kind=st.sampled_from(["p2p", "a2a"]),
    pp=SMALL,
    vpp=st.sampled_from([1, 1, 1, 2, 3]),
    ep=SMALL,
    etp=SMALL,
    dp_replicate=st.sampled_from([1, 1, 1, 2, 3]),
    zero=st.integers(0, 4),
    sequence_parallel=st.none() | st.booleans(),
    micro_batch=SMALL,
    schedule=st.sampled_from([None, None, "afab", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]),
    recompute=st.sampled_from([Recompute(), FULL, SELECTIVE, some_layers(2), some_layers(2, "none"), modules("moe")]),
    overlap=st.sampled_from([Overlap(), Overlap(grad=False), Overlap(param=True), TP, EP]),
    account_for_embedding=st.sampled_from([False, False, True]),
    account_for_loss=st.sampled_from([False, False, True]),
    first_stage_layers=st.sampled_from([None, None, None, 0, 4, 5]),
    last_stage_layers=st.sampled_from([None, None, None, 1, 4, 7]),
)
some_context = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3-70b", "mixtral", "deepseek-v3", "gpt2", "windowed", "odd-ffn"]),
        "world": st.sampled_from([1, 8, 24, 64]),
        "seq_len": st.sampled_from([1000, 1024, 4096]),
        "global_batch": st.sampled_from([1, 60, 512]),
        "runtime": st.sampled_from(
            [
                "megatron",
                "megatron@0.13",
                "megatron@0.3",
                "torchtitan",
                "torchtitan@2026.9",
                "fsdp",
                "accelerate",
                "fsdp1",
                "nanotron",
                "deepspeed",
                "deepspeed-zero",
                "fivefold",
                "fivefold@cpu",
            ]
        ),
        "precision": st.sampled_from(["bf16", "bf16", "fp8", "fp16"]),
    }
)


@settings(deadline=None, max_examples=150)
@given(st.lists(any_layout, min_size=1, max_size=12), some_context)
def test_mask_agrees_with_violations(make, layouts: list[Layout], place: dict[str, Any]) -> None:
    _, context = make(**place)
    columns = Columns.from_layouts(layouts, context.world, context.work)
    mask = valid_mask(columns, context)
    assert mask.tolist() == [violations(layout, context) == [] for layout in layouts]
    # and a row means the same alone, as columns and as the layout it came from
    assert violations(columns.take([0]), context) == violations(layouts[0], context)
    assert valid_mask(columns.take([0]), context)[0] == mask[0]


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan", "fivefold"])
def test_mask_is_the_conjunction_of_all_rules(make, runtime: str) -> None:
    """Row selection on the way must not change the result: every rule on every row, then all of them together."""
    model = "mixtral" if runtime != "fivefold" else "windowed"
    _, context = make(model=model, runtime=runtime, world=64)
    rng = np.random.default_rng(1)
    n = 20_000
    choose = lambda *values: rng.choice(np.array(values), n)  # noqa: E731
    columns = Columns.build(
        64,
        context.work,
        tp=choose(1, 2, 3, 4),
        cp=choose(1, 1, 2, 3),
        cp_kind=choose(0, 1),
        pp=choose(1, 2, 4, 5),
        vpp=choose(1, 1, 2, 3),
        ep=choose(1, 4, 8, 16),
        etp=choose(1, 1, 2, 4),
        zero=choose(0, 1, 2, 3),
        micro_batch=choose(1, 2, 3),
        overlap_tp=choose(0, 1),
        recompute_layers=choose(-1, -1, 2),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        held = [np.broadcast_to(rule.holds(columns, context), (n,)) for rule in rules_for(context)]
    expected = np.logical_and.reduce(held)
    assert 0 < expected.sum() < n // 10
    assert np.array_equal(valid_mask(columns, context), expected)


FIELDS = {
    "--tp": "tp",
    "--cp": "cp",
    "--pp": "pp",
    "--vpp": "vpp",
    "--ep": "ep",
    "--etp": "etp",
    "--zero": "zero",
    "--micro-batch": "micro_batch",
    "--dp-replicate": "dp_replicate",
    "--first-stage-layers": "first_stage_layers",
    "--last-stage-layers": "last_stage_layers",
    "--cp-kind": "cp_kind",
    "--schedule": "schedule",
    "--sequence-parallel": "sequence_parallel",
}


@settings(deadline=None, max_examples=150)
@given(any_layout, some_context)
def test_legal_values_mend_the_rule(make, layout: Layout, place: dict[str, Any]) -> None:
    _, context = make(**place)
    for violation in violations(layout, context):
        assert violation.value not in violation.legal
        if violation.option in ("--global-batch", "--seq-len"):
            name = "global_batch" if violation.option == "--global-batch" else "seq_len"
            for value in violation.legal:
                _, mended = make(**place | {name: value})
                assert violation.id not in {rule.id for rule in violations(layout, mended)}
        elif violation.option in FIELDS:
            for value in violation.legal[:5]:
                mended_layout = msgspec.structs.replace(layout, **{FIELDS[violation.option]: value})
                if violation.option == "--vpp" and layout.schedule is not None:
                    continue  # a pinned schedule does not follow vpp; the rules say so next
                assert violation.id not in {rule.id for rule in violations(mended_layout, context)}


def test_a_million_rows_at_once(make) -> None:
    _, context = make(world=512, global_batch=1024)
    rng = np.random.default_rng(0)
    n = 1_000_000
    choose = lambda *values: rng.choice(np.array(values), n)  # noqa: E731
    columns = Columns.build(
        512,
        context.work,
        tp=choose(1, 2, 4, 8),
        cp=choose(1, 2, 4),
        pp=choose(1, 2, 3, 4, 5, 8),
        vpp=choose(1, 2, 5),
        micro_batch=choose(1, 2, 3, 4),
        recompute_kind=choose(0, 1, 2),
    )
    mask = valid_mask(columns, context)
    for i in rng.integers(0, n, 50):
        assert mask[i] == (violations(columns.take([i]), context) == [])


def test_workload_is_a_value() -> None:
    assert Workload(seq_len=2, global_batch=3).tokens_per_batch == 6
