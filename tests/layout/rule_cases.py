"""For each rule a layout that keeps it and one that breaks it: the cases of test_rules.py."""

from __future__ import annotations

from typing import Any

from fivefold.layout import Overlap, Recompute
from fivefold.layout.workload import Lora, Offload

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
    "dropout-runtime": ({"dropout": True, "model": "plain"}, {}, TITAN),
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
