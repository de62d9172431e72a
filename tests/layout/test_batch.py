from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.layout import (
    Layout,
    RampUp,
    Workload,
    dp_headroom,
    global_batch_from_tokens,
    parse_count,
    parse_ramp_up,
    plan_ramp_up,
    resolve,
    unusual,
)
from fivefold.model.spec import Attention, Block, BlockRun, FeedForward, ModelSpec


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("469B", 469 * 10**9),
        ("4M", 4_000_000),
        ("4m", 4_000_000),
        ("1.5e9", 1_500_000_000),
        ("3_072", 3072),
        ("15,360", 15360),
        (3072, 3072),
        (4e6, 4_000_000),
        ("14.8T", 14_800_000_000_000),
        ("123456789012345678", 123456789012345678),
    ],
)
def test_counts(text, value) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "B", "-3", "0", "1e99", "4MB", "nan", "1" * 400, "0x10", float("1e30")])
def test_bad_counts(text) -> None:
    with pytest.raises(FivefoldError, match="count"):
        parse_count(text)


def test_tokens_per_batch() -> None:
    assert global_batch_from_tokens("4M", 2048) == 1953
    assert global_batch_from_tokens("4M", 2048, multiple=64) == 1984
    assert global_batch_from_tokens(4096 * 15360, 4096) == 15360
    assert global_batch_from_tokens(1, 8192, multiple=8) == 8


@settings(deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**5), st.integers(1, 5000))
def test_tokens_per_batch_is_the_nearest_multiple(tokens: int, seq_len: int, multiple: int) -> None:
    batch = global_batch_from_tokens(tokens, seq_len, multiple)
    assert batch % multiple == 0
    assert batch >= multiple
    miss = abs(batch * seq_len - tokens)
    for other in (batch - multiple, batch + multiple):
        if other > 0:
            assert miss <= abs(other * seq_len - tokens)


def test_headroom() -> None:
    assert dp_headroom(512, 2, 16) == 16.0
    assert dp_headroom(512, 1, 512) == 1.0


def test_unusual_is_said(models) -> None:
    assert unusual(Workload(seq_len=8192, global_batch=512)) == []
    assert len(unusual(Workload(seq_len=512, global_batch=8))) == 2
    assert "over" in unusual(Workload(seq_len=8192, global_batch=8192))[0]
    assert "1024 positions" in unusual(Workload(seq_len=2048, global_batch=2048), models["gpt2"])[0]


def deepseek(models, **more):
    work = Workload(seq_len=4096, global_batch=15360)
    layout = Layout(pp=16, ep=64, first_stage_layers=4, last_stage_layers=1, **more)
    return work, resolve(layout, models["deepseek-v3"], 2048, work)


def test_deepseek_v3_ramp(models) -> None:
    """3,072 to 15,360 sequences over the first 469B tokens, on 2,048 GPUs with PP16 (dp 128)."""
    work, layout = deepseek(models)
    plan = plan_ramp_up("3072:15360:469B", work, layout)
    assert plan.increment == 384
    assert [step.global_batch for step in plan.steps] == list(range(3072, 15360, 384))
    assert sum(step.asked_tokens for step in plan.steps) == 469 * 10**9
    assert abs(plan.tokens - 469 * 10**9) < 15360 * 4096
    assert all(step.num_micro_batches * layout.micro_batch * layout.dp == step.global_batch for step in plan.steps)
    assert plan.megatron_rampup == (3072, 384, 114501953)


def megatron_levels(start: int, increment: int, samples: int, end: int) -> list[tuple[int, int]]:
    """(batch, iterations) by replaying Megatron's rule: the level is int(consumed / samples per increment)."""
    per_increment = samples / ((end - start) // increment)
    consumed, levels = 0, {}
    while consumed <= samples:
        batch = start + int(consumed / per_increment) * increment
        if batch >= end:
            break
        levels[batch] = levels.get(batch, 0) + 1
        consumed += batch
    return list(levels.items())


@settings(deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.integers(1, 20), st.integers(1, 3000), st.booleans()
)
def test_ramp_is_legal_and_megatrons(
    mbs: int, dp: int, start: int, growth: int, shares: int, interleaved: bool
) -> None:
    block = Block(mixer=Attention(heads=4, kv_heads=4, head_dim=8), feed=FeedForward(ffn=64))
    model = ModelSpec(name="small", family="test", hidden=32, vocab=64, max_position=64, runs=(BlockRun(8, block),))
    pp = 2
    unit = mbs * dp * (pp if interleaved else 1)
    work = Workload(seq_len=16, global_batch=unit * (start + growth))
    layout = resolve(Layout(pp=pp, vpp=2 if interleaved else 1, micro_batch=mbs), model, pp * dp, work)
    ramp = RampUp(start=unit * start, end=work.global_batch, tokens=shares * work.seq_len * growth * unit)
    plan = plan_ramp_up(ramp, work, layout, increment=unit)
    assert sum(step.asked_tokens for step in plan.steps) == ramp.tokens
    assert 0 <= plan.tokens - ramp.tokens < ramp.end * work.seq_len
    for step in plan.steps:
        assert step.global_batch % (mbs * dp) == 0
        assert not interleaved or step.num_micro_batches % pp == 0
        assert step.tokens == step.iterations * step.global_batch * work.seq_len
    made = [(step.global_batch, step.iterations) for step in plan.steps if step.iterations]
    assert made == megatron_levels(*plan.megatron_rampup, ramp.end)


@pytest.mark.parametrize("text", ["3072:15360", "a:b:c", "15360:3072:1B", "3072:15360:469X", "1:2:3:4"])
def test_bad_ramps(text: str) -> None:
    with pytest.raises(FivefoldError, match="--ramp-up"):
        parse_ramp_up(text)


def test_ramps_that_do_not_fit_the_layout(models) -> None:
    work, layout = deepseek(models)
    with pytest.raises(FivefoldError) as caught:
        plan_ramp_up("3000:15360:469B", work, layout)
    assert caught.value.legal == [2944, 3072]
    with pytest.raises(FivefoldError, match="agree"):
        plan_ramp_up("3072:7680:469B", work, layout)
    with pytest.raises(FivefoldError, match="increment"):
        plan_ramp_up("3072:15360:469B", work, layout, increment=100)
    assert plan_ramp_up("3072:15360:1M", work, layout).notes
