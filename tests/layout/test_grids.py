from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.layout import AXES, Columns, Layout, Workload, group, group_members, rank_coordinates, resolve
from fivefold.model.spec import Attention, Block, BlockRun, FeedForward, ModelSpec

WORK = Workload(seq_len=4096, global_batch=64)
SIZE = st.sampled_from([1, 2, 3, 4])


def groups_by_reshape(axis: str, tp: int, cp: int, dp: int, pp: int) -> set[tuple[int, ...]]:
    """Dense groups of `axis` by cutting arange(world) into a (pp, dp, cp, tp) box."""
    box = np.arange(tp * cp * dp * pp).reshape(pp, dp, cp, tp)
    place = {"pp": 0, "dp": 1, "cp": 2, "tp": 3}
    if axis == "dp_cp":
        flat = np.moveaxis(box.reshape(pp, dp * cp, tp), 1, -1)
        return {tuple(row) for row in flat.reshape(-1, dp * cp).tolist()}
    moved = np.moveaxis(box, place[axis], -1)
    return {tuple(row) for row in moved.reshape(-1, moved.shape[-1]).tolist()}


@settings(deadline=None)
@given(SIZE, SIZE, SIZE, SIZE)
def test_dense_groups_are_those_of_the_box(tp: int, cp: int, dp: int, pp: int) -> None:
    world = tp * cp * dp * pp
    columns = Columns.build(world, WORK, tp=tp, cp=cp, pp=pp)
    for axis in ("tp", "cp", "dp", "pp", "dp_cp"):
        size, stride = (int(part[0]) for part in group(columns, axis))
        made = {tuple(first + i * stride for i in range(size)) for first in range(world) if first // stride % size == 0}
        assert made == groups_by_reshape(axis, tp, cp, dp, pp)


@settings(deadline=None)
@given(SIZE, SIZE, SIZE, SIZE)
def test_expert_groups_are_those_of_the_box(etp: int, ep: int, edp: int, pp: int) -> None:
    world = etp * ep * edp * pp
    columns = Columns.build(world, WORK, etp=etp, ep=ep, pp=pp)
    box = np.arange(world).reshape(pp, edp, ep, etp)
    for axis, place in (("etp", 3), ("ep", 2), ("edp", 1), ("pp", 0)):
        size, stride = (int(part[0]) for part in group(columns, axis))
        moved = np.moveaxis(box, place, -1).reshape(-1, size)
        assert all(np.array_equal(row, row[0] + stride * np.arange(size)) for row in moved)
        assert len(moved) * size == world


@settings(deadline=None)
@given(SIZE, SIZE, SIZE, SIZE, SIZE, st.integers(1, 3))
def test_shards_inside_replicas(tp: int, shard: int, replicate: int, pp: int, cp: int, zero: int) -> None:
    """HSDP: arange(world) as (pp, replicate, shard, tp), as torchtitan's mesh has it."""
    world = tp * shard * cp * replicate * pp
    columns = Columns.build(world, WORK, tp=tp, cp=cp, pp=pp, dp_replicate=replicate, zero=zero)
    box = np.arange(world).reshape(pp, replicate, shard * cp, tp)
    for axis, place in (("shard", 2), ("replicate", 1)):
        size, stride = (int(part[0]) for part in group(columns, axis))
        assert size == box.shape[place]
        first = np.moveaxis(box, place, -1).reshape(-1, size)[0]
        assert np.array_equal(first, stride * np.arange(size))


def test_expert_shards_divide_edp() -> None:
    columns = Columns.build(64, WORK, ep=4, dp_replicate=np.array([1, 2, 4]))
    assert group(columns, "expert_shard").size.tolist() == [16, 8, 4]
    assert group(columns, "expert_replicate").size.tolist() == [1, 2, 4]
    assert group(columns, "expert_replicate").stride.tolist() == [64, 32, 16]
    unsharded = Columns.build(64, WORK, ep=4, zero=0)
    assert (group(unsharded, "expert_shard").size[0], group(unsharded, "expert_replicate").size[0]) == (1, 16)


@settings(deadline=None)
@given(SIZE, SIZE, SIZE, SIZE)
def test_coordinates_and_members_of_a_rank(tp: int, cp: int, dp: int, pp: int) -> None:
    world = tp * cp * dp * pp
    layout = resolve(Layout(tp=tp, cp=cp, pp=pp), _one_block_model(pp), world, WORK)
    seen = set()
    for rank in range(world):
        where = rank_coordinates(layout, rank)
        assert np.ravel_multi_index((where["pp"], where["dp"], where["cp"], where["tp"]), (pp, dp, cp, tp)) == rank
        assert where["etp"] + layout.etp * (where["ep"] + layout.ep * (where["edp"] + layout.edp * where["pp"])) == rank
        seen.add(tuple(where.values()))
        for axis in ("tp", "cp", "dp", "pp"):
            members = group_members(layout, axis, rank)
            assert rank in members
            others = [rank_coordinates(layout, member) for member in members]
            assert all(
                other[name] == where[name] for other in others for name in ("tp", "cp", "dp", "pp") if name != axis
            )
            assert [other[axis] for other in others] == list(range(len(members)))
    assert len(seen) == world


def _one_block_model(layers: int) -> ModelSpec:
    block = Block(mixer=Attention(heads=4, kv_heads=4, head_dim=8), feed=FeedForward(ffn=64))
    return ModelSpec(name="small", family="test", hidden=32, vocab=64, max_position=64, runs=(BlockRun(layers, block),))


def test_refusals() -> None:
    layout = resolve(Layout(), _one_block_model(1), 4, WORK)
    with pytest.raises(FivefoldError, match="Rank 4"):
        rank_coordinates(layout, 4)
    with pytest.raises(FivefoldError, match="Unknown axis"):
        group_members(layout, "tpcp", 0)
    with pytest.raises(FivefoldError, match="Unknown axis"):
        group(Columns.build(4, WORK), "sequence")
    assert len(AXES) == len(set(AXES))
