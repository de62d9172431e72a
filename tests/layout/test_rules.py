from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import CASES, EP, FULL, SELECTIVE, TP, modules, some_layers

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
from fivefold.model.spec import Attention, Block, BlockRun, FeedForward, ModelSpec


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
