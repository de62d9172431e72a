from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.layout import (
    COLUMN_NAMES,
    CP_KINDS,
    RECOMPUTE_KINDS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    Columns,
    Layout,
    Overlap,
    Recompute,
    Workload,
)
from fivefold.layout.columns import SWITCHES

WORK = Workload(seq_len=4096, global_batch=96)
DEGREE = st.integers(1, 9)

layouts = st.builds(
    Layout,
    tp=DEGREE,
    cp=DEGREE,
    cp_kind=st.sampled_from(CP_KINDS),
    pp=DEGREE,
    vpp=DEGREE,
    ep=DEGREE,
    etp=DEGREE,
    dp_replicate=DEGREE,
    zero=st.integers(0, 3),
    sequence_parallel=st.none() | st.booleans(),
    micro_batch=DEGREE,
    schedule=st.none() | st.sampled_from(SCHEDULES),
    recompute=st.builds(
        Recompute,
        kind=st.sampled_from(RECOMPUTE_KINDS),
        layers=st.none() | st.integers(1, 9),
        modules=st.lists(st.sampled_from(RECOMPUTE_MODULES), unique=True).map(tuple),
    ),
    overlap=st.builds(Overlap, grad=st.booleans(), param=st.none() | st.booleans(), tp=st.booleans(), ep=st.booleans()),
    account_for_embedding=st.booleans(),
    account_for_loss=st.booleans(),
    first_stage_layers=st.none() | st.integers(0, 9),
    last_stage_layers=st.none() | st.integers(0, 9),
)


def same(a: Columns, b: Columns) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMN_NAMES)


@settings(deadline=None)
@given(st.lists(layouts, min_size=1, max_size=5), st.integers(1, 200))
def test_round_trip(some: list[Layout], world: int) -> None:
    columns = Columns.from_layouts(some, world, WORK)
    rows = [columns.row(i) for i in range(len(columns))]
    assert same(Columns.from_layouts(rows, world, WORK), columns)
    # a written-out row is a fixed point, and keeps everything that was asked for
    assert [Columns.from_layouts([row], world, WORK).row(0) for row in rows] == rows
    for asked, row in zip(some, rows, strict=True):
        for name in ("tp", "cp", "cp_kind", "pp", "vpp", "ep", "etp", "zero", "micro_batch"):
            assert getattr(asked, name) == getattr(row, name)
        assert row.sequence_parallel == (asked.tp > 1 if asked.sequence_parallel is None else asked.sequence_parallel)
        assert row.first_stage_layers == asked.first_stage_layers
        assert row.recompute.layers == asked.recompute.layers
        wanted = asked.recompute.modules or (("core_attn",) if asked.recompute.kind == "selective" else ())
        assert set(row.recompute.modules) == set(wanted)


@settings(deadline=None)
@given(layouts, st.integers(1, 4096))
def test_derived_degrees(layout: Layout, world: int) -> None:
    """The quotients by plain Python arithmetic."""
    c = Columns.from_layouts([layout], world, WORK)
    dp = world // (layout.tp * layout.cp * layout.pp)
    assert c.dp[0] == dp
    assert c.edp[0] == world // (layout.etp * layout.ep * layout.pp)
    assert c.num_micro_batches[0] == WORK.global_batch // max(layout.micro_batch * dp, 1)
    if layout.zero == 0:
        assert c.dp_shard[0] == 1
    else:
        assert c.dp_shard[0] == dp * layout.cp // layout.dp_replicate
        assert c.dp_replicate[0] == layout.dp_replicate


def test_defaults() -> None:
    c = Columns.from_layouts([Layout(tp=2), Layout(zero=0, cp=2), Layout(pp=2, vpp=2)], 16, WORK)
    assert c.sp.tolist() == [True, False, False]
    assert c.overlap_param.tolist() == [True, False, True]
    assert [SCHEDULES[i] for i in c.schedule] == ["1f1b", "1f1b", "interleaved"]
    assert (c.dp_shard.tolist(), c.dp_replicate.tolist()) == ([8, 1, 8], [1, 16, 1])


def test_take_and_types() -> None:
    c = Columns.build(64, WORK, tp=np.array([1, 2, 4]), micro_batch=np.array([3, 2, 1]))
    assert len(c) == 3
    taken = c.take(np.array([True, False, True]))
    assert same(taken, c.take([0, 2]))
    assert taken.tp.tolist() == [1, 4]
    assert taken.micro_batch.tolist() == [3, 1]
    assert all(getattr(c, name).dtype in (np.int64, np.bool_) for name in COLUMN_NAMES)
    assert len(Columns.from_layouts([], 8, WORK)) == 0


def test_unknown_words_and_huge_numbers_are_refused() -> None:
    with pytest.raises(FivefoldError, match="--cp-kind ring"):
        Columns.from_layouts([Layout(cp_kind="ring")], 8, WORK)  # type: ignore[arg-type]
    with pytest.raises(FivefoldError, match="--recompute-modules"):
        Columns.from_layouts([Layout(recompute=Recompute(modules=("attn",)))], 8, WORK)  # type: ignore[arg-type]
    with pytest.raises(FivefoldError, match="--tp"):
        Columns.from_layouts([Layout(tp=10**30)], 8, WORK)


def test_a_million_rows_at_once() -> None:
    n = 1_000_000
    tp = np.tile(np.array([1, 2, 4, 8]), n // 4)
    columns = Columns.build(512, WORK, tp=tp, pp=np.roll(tp, 1), micro_batch=np.roll(tp, 2))
    assert len(columns) == n


def test_switches_are_the_columns_of_booleans() -> None:
    columns = Columns.from_layouts([Layout()], 8, WORK)
    assert {name for name in COLUMN_NAMES if getattr(columns, name).dtype == np.bool_} == set(SWITCHES)
