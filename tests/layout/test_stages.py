from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.layout import (
    CHUNKS,
    SCHEDULES,
    SPLIT_BACKWARD,
    V_SHAPED,
    Layout,
    Recompute,
    Workload,
    blocks_per_stage,
    resolve,
    split_policy,
    stage_ranges,
)
from fivefold.schedule import SCHEDULES as ALL_SCHEDULES
from fivefold.schedule import Placement, legal, placement

WORK = Workload(seq_len=8192, global_batch=512)


@settings(deadline=None)
@given(
    st.integers(1, 130),
    st.integers(1, 17),
    st.integers(1, 5),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 20),
    st.sampled_from(["even", "weighted", "by_parameters"]),
    st.booleans(),
    st.booleans(),
    st.tuples(st.integers(1, 9), st.integers(0, 99)),
)
def test_stages_cover_every_block_once_in_order(
    layers: int,
    pp: int,
    vpp: int,
    first: int | None,
    last: int | None,
    policy: str,
    embedding: bool,
    head: bool,
    weights: tuple[int, int],
) -> None:
    ranges = stage_ranges(layers, pp, vpp, first, last, policy, embedding, head, weights=weights)  # type: ignore[arg-type]
    assert len(ranges) == pp
    assert all(len(chunks) == vpp for chunks in ranges)
    in_order = [ranges[stage % pp][stage // pp] for stage in range(pp * vpp)]
    assert [block for low, high in in_order for block in range(low, high)] == list(range(layers))


def megatron_offset(layers: int, pp: int, vpp: int, first: int, last: int, rank: int, chunk: int) -> tuple[int, int]:
    """First block and number of blocks of a chunk by the rank's own arithmetic: chunks of the ends, then the middle."""
    middle_ranks = pp - (first > 0) - (last > 0)
    middle = (layers - first - last) // middle_ranks if middle_ranks else 0
    per_rank = [middle // vpp] * pp
    if first:
        per_rank[0] = first // vpp
    if last:
        per_rank[-1] = last // vpp
    return chunk * sum(per_rank) + sum(per_rank[:rank]), per_rank[rank]


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "first", "last"),
    [(80, 4, 1, 0, 0), (80, 4, 5, 0, 0), (61, 16, 1, 4, 1), (62, 8, 2, 4, 10), (126, 8, 1, 0, 14), (24, 2, 3, 6, 18)],
)
def test_even_split_is_megatrons(layers: int, pp: int, vpp: int, first: int, last: int) -> None:
    ranges = stage_ranges(layers, pp, vpp, first or None, last or None)
    for rank in range(pp):
        for chunk in range(vpp):
            offset, count = megatron_offset(layers, pp, vpp, first, last, rank, chunk)
            assert ranges[rank][chunk] == (offset, offset + count)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 1), (3, 2)])
def test_stages_lie_where_the_schedule_places_them(schedule: str, pp: int, vpp: int) -> None:
    """layout knows no schedules, so that it has its own word for the V: the same stages as the schedules' placement."""
    where = placement(schedule)
    counts = blocks_per_stage(13, pp, vpp)
    for rank, chunks in enumerate(stage_ranges(13, pp, vpp, schedule=schedule)):
        for chunk, (first, last) in enumerate(chunks):
            stage = where.stage(rank, chunk, pp)
            assert (first, last) == (sum(counts[:stage]), sum(counts[: stage + 1]))


def test_closed_sets_are_the_schedules() -> None:
    assert set(SCHEDULES) == set(ALL_SCHEDULES)
    for name, schedule in ALL_SCHEDULES.items():
        assert (name in V_SHAPED) == (schedule.placement is Placement.V)
        assert (name in SPLIT_BACKWARD) == schedule.splits_backward
        fewest, most = CHUNKS[name]  # type: ignore[index]
        legal_chunks = [v for v in (1, 2, 3) if legal(name, 4, 8, v)]
        assert set(legal_chunks) - {1} == {v for v in (2, 3) if fewest <= v <= (most or v)}


def test_embedding_and_head_as_blocks() -> None:
    """Llama-3.1-405B's 126 blocks over 16 ranks: 7, 14 times 8, 7 without chunks; with 8 chunks the ends are empty."""
    assert blocks_per_stage(126, 16, account_for_embedding=True, account_for_loss=True) == (7, *[8] * 14, 7)
    chunked = blocks_per_stage(126, 16, 8, account_for_embedding=True, account_for_loss=True)
    assert chunked == (0, *[1] * 126, 0)


@settings(deadline=None)
@given(st.integers(1, 130), st.integers(2, 40))
def test_weighted_split_by_dealing_items(layers: int, stages: int) -> None:
    """Embedding, blocks and head dealt out in a row, the first stages getting the extra item."""
    items = ["embedding", *range(layers), "head"]
    if stages > len(items):
        return
    share, extra = divmod(len(items), stages)
    dealt = []
    for stage in range(stages):
        take = share + (stage < extra)
        dealt.append([item for item in items[:take] if isinstance(item, int)])
        items = items[take:]
    assert blocks_per_stage(layers, stages, policy="weighted") == tuple(len(blocks) for blocks in dealt)


@settings(deadline=None)
@given(st.integers(1, 130), st.integers(2, 17), st.tuples(st.integers(1, 99), st.integers(0, 999)))
def test_split_by_parameters_block_by_block(layers: int, stages: int, weights: tuple[int, int]) -> None:
    """A stage is left after the first block with which the sum passes its share, as nanotron's build_model does."""
    block, head = weights
    counts, done = [0], 0
    for _ in range(layers):
        counts[-1] += 1
        done += block
        if len(counts) < stages and done * stages > (layers * block + head) * len(counts):
            counts.append(0)
    counts += [0] * (stages - len(counts))
    assert blocks_per_stage(layers, stages, policy="by_parameters", weights=weights) == tuple(counts)


def test_a_head_worth_four_blocks() -> None:
    """16 blocks and a head of four: half of 20 is not passed by the tenth block, so that the first stage has 11."""
    assert blocks_per_stage(16, 2, policy="by_parameters", weights=(1, 4)) == (11, 5)
    assert blocks_per_stage(16, 2, policy="by_parameters") == (9, 7)


def test_resolve_writes_out_every_default(models) -> None:
    resolved = resolve(Layout(tp=4, pp=4, cp=2, vpp=2), models["llama-3-70b"], 64, WORK)
    assert (resolved.dp, resolved.edp, resolved.dp_shard, resolved.dp_replicate) == (2, 16, 4, 1)
    assert resolved.sequence_parallel is True
    assert resolved.schedule == "interleaved"
    assert resolved.num_micro_batches == 256
    assert resolved.stages[0] == ((0, 10), (40, 50))
    assert resolved.overlap.param is True
    assert resolved.recompute == Recompute()
    assert set(resolved.to_dict()) >= {"tp", "dp", "stages", "recompute", "overlap", "sequence_parallel"}


def test_runtimes_split_differently(models) -> None:
    sizes = {}
    for runtime in ("megatron", "torchtitan", "fsdp", "nanotron"):
        stages = resolve(Layout(pp=4), models["llama-3-70b"], 64, WORK, runtime).stages
        sizes[runtime] = [high - low for ((low, high),) in stages]
    assert sizes["megatron"] == [20, 20, 20, 20]
    assert sizes["torchtitan"] == sizes["fsdp"] == [20, 21, 20, 19]
    # 80 blocks of 973 million parameters in matrices (all heads counted for keys too) and a head of 1,051 million.
    assert sizes["nanotron"] == [21, 20, 20, 19]
    assert split_policy("mcore") == "even"


@pytest.mark.parametrize("layout", [Layout(tp=0), Layout(pp=10**9), Layout(vpp=10**9), Layout(micro_batch=-1)])
def test_impossible_degrees_are_refused_at_once(models, layout: Layout) -> None:
    with pytest.raises(FivefoldError, match="has to be"):
        resolve(layout, models["llama-3-70b"], 64, WORK)


def test_a_layout_that_breaks_rules_is_still_shown(models) -> None:
    resolved = resolve(Layout(pp=16, vpp=2), models["llama-3-70b"], 64, WORK)
    assert sum(high - low for rank in resolved.stages for low, high in rank) == 80
