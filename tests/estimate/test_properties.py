"""Rules that hold for every layout: what splitting never makes larger, sums, and independence of the batch.

Layouts are drawn over four families (dense, mixture of experts, latent attention with dense first blocks, tied
embeddings) on both runtimes, and each comparison changes one degree with the others and dp fixed (the world grows).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.estimate import Kernel, Problem, estimate
from fivefold.estimate.estimate import rule_context
from fivefold.layout import RECOMPUTE_MODULES, Columns, Layout, Recompute, Workload, violations
from fivefold.runtime import load_runtime

FAMILIES = ("llama", "mixtral", "deepseek", "gpt2")
STATIC = ("weights", "gradients", "master", "optimizer")
POWERS = st.sampled_from([1, 2, 4, 8])
SMALL_POWERS = st.sampled_from([1, 2, 4])
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def splits(draw):
    """(family, runtime, layout, dp): any degrees; the world they need is tp·cp·pp·dp."""
    family = draw(st.sampled_from(FAMILIES))
    runtime = draw(st.sampled_from(["megatron", "torchtitan"]))
    moe = family in ("mixtral", "deepseek")
    layout = Layout(
        tp=draw(SMALL_POWERS),
        cp=draw(st.sampled_from([1, 2])),
        pp=draw(SMALL_POWERS),
        ep=draw(SMALL_POWERS) if moe else 1,
        etp=draw(st.sampled_from([1, 2])) if moe else 1,
        zero=draw(st.sampled_from([0, 1] if runtime == "megatron" else [2, 3])),
        micro_batch=draw(st.sampled_from([1, 2])),
    )
    return family, runtime, layout, draw(st.sampled_from([4, 8]))


def kernel_for(model, runtime: str, layout: Layout, dp: int, **work) -> Kernel:
    """A kernel with every pipeline rank, on the world that the layout and dp need."""
    gpus = layout.tp * layout.cp * layout.pp * dp
    expert_ranks = layout.etp * layout.ep * layout.pp
    assume(gpus % expert_ranks == 0 and gpus // expert_ranks % layout.dp_replicate == 0)
    load = Workload(seq_len=2048, global_batch=16 * dp, **work)
    problem = Problem(model, load_cluster("h100-sxm", gpus=gpus), load, load_runtime(runtime))
    return Kernel(problem, Columns.from_layouts([layout], gpus, load), every_rank=True)


def static_bytes(kernel: Kernel) -> float:
    memory = kernel.rank_memory(np.arange(1))
    return float(sum(memory[name] for name in STATIC).max())


def held_bytes(kernel: Kernel) -> np.ndarray:
    """Saved activations in flight on each rank at its peak, without working sets, [pp]."""
    table, v = kernel.table, kernel.variants
    return (table.held_plain[0] @ v.saved[0]) + (table.held_again[0] @ v.kept[0])


@pytest.mark.parametrize("axis", ["tp", "pp", "ep", "etp", "dp"])
@relaxed
@given(split=splits())
def test_static_bytes_never_grow(axis, split, small):
    family, runtime, layout, dp = split
    model = small[family]
    assume(axis not in ("ep", "etp") or model.is_moe)
    # Behind a pipeline FSDP2 holds gradients whole until a step's last backward.
    assume(axis != "pp" or layout.pp > 1 or not load_runtime(runtime).pipeline_keeps_whole_gradients)
    if axis == "dp":
        before, after = kernel_for(model, runtime, layout, dp), kernel_for(model, runtime, layout, 2 * dp)
    else:
        wider = replace(layout, **{axis: 2 * getattr(layout, axis)})
        before, after = kernel_for(model, runtime, layout, dp), kernel_for(model, runtime, wider, dp)
    assert static_bytes(after) <= static_bytes(before) * (1 + 1e-12)


@relaxed
@given(split=splits(), replicas=st.sampled_from([2, 4]))
def test_static_bytes_grow_with_replicas_of_shards(split, replicas, small):
    family, runtime, layout, dp = split
    assume(layout.zero > 0)
    once = kernel_for(small[family], runtime, layout, dp)
    several = kernel_for(small[family], runtime, replace(layout, dp_replicate=replicas), dp)
    assert static_bytes(several) > static_bytes(once)


@relaxed
@given(split=splits())
def test_static_bytes_never_grow_with_the_zero_stage(split, small):
    family, runtime, layout, dp = split
    low, high = (0, 1) if runtime == "megatron" else (2, 3)
    by_stage = [static_bytes(kernel_for(small[family], runtime, replace(layout, zero=z), dp)) for z in (low, high)]
    assert by_stage[1] <= by_stage[0]


@pytest.mark.parametrize("axis", ["tp", "cp"])
@relaxed
@given(split=splits())
def test_saved_activations_never_grow(axis, split, small):
    """Tensor parallelism here is with sequence parallelism, the default."""
    family, runtime, layout, dp = split
    wider = replace(layout, **{axis: 2 * getattr(layout, axis)})
    before = held_bytes(kernel_for(small[family], runtime, layout, dp))
    after = held_bytes(kernel_for(small[family], runtime, wider, dp))
    assert (after <= before * (1 + 1e-12)).all()
    assert after.sum() < before.sum()


@st.composite
def selections(draw):
    """Modules to recompute, by families that have them."""
    return tuple(sorted(draw(st.sets(st.sampled_from(RECOMPUTE_MODULES), max_size=4))))


@relaxed
@given(split=splits(), modules=selections())
def test_recompute_never_raises_activations(split, modules, small):
    """none >= selective >= full on every rank: of what is held, and of the peak with its working set."""
    family, runtime, layout, dp = split
    options = (Recompute(), Recompute(kind="selective", modules=modules), Recompute(kind="full"))
    kernels = [kernel_for(small[family], runtime, replace(layout, recompute=recompute), dp) for recompute in options]
    for more, less in pairwise(kernels):
        assert (held_bytes(less) <= held_bytes(more) * (1 + 1e-12)).all()
        peaks = [sum(kernel.activation_memory(np.arange(1)))[0] for kernel in (more, less)]
        assert (peaks[1] <= peaks[0] * (1 + 1e-12)).all()


@relaxed
@given(split=splits())
def test_recomputing_more_blocks_never_raises_what_is_held(split, small):
    family, _, layout, dp = split
    held = [
        held_bytes(kernel_for(small[family], "megatron", replace(layout, recompute=recompute), dp))
        for recompute in (Recompute(), *(Recompute(kind="full", layers=n) for n in (1, 2, 4)), Recompute(kind="full"))
    ]
    for more, less in pairwise(held):
        assert (less <= more * (1 + 1e-12)).all()


@relaxed
@given(split=splits(), kind=st.sampled_from(["none", "selective", "full"]))
def test_breakdowns_sum_to_their_totals(split, kind, small):
    family, runtime, layout, dp = split
    layout = replace(layout, recompute=Recompute(kind=kind))
    gpus = layout.tp * layout.cp * layout.pp * dp
    cluster, work = load_cluster("h100-sxm", gpus=gpus), Workload(seq_len=2048, global_batch=16 * dp)
    est = estimate(small[family], cluster, work, layout, runtime=runtime)
    assume(est.valid)
    memory, step = est.memory, est.step
    for stage in memory.stages:
        assert all(type(part) is int and part >= 0 for part in stage.breakdown.values())
        assert sum(stage.breakdown.values()) == stage.peak_bytes
    assert max(stage.peak_bytes for stage in memory.stages) == memory.peak_bytes
    assert max(sum(phase.bytes.values()) for phase in memory.timeline) == memory.peak_bytes
    assert memory.reserved_bytes > memory.peak_bytes
    assert sum(step.breakdown_s.values()) == pytest.approx(step.seconds.value, rel=1e-12)
    assert all(part >= -1e-12 * step.seconds.value for part in step.breakdown_s.values())
    assert step.seconds.low < step.seconds.value < step.seconds.high


@relaxed
@given(split=splits(), kind=st.sampled_from(["none", "selective", "full"]))
def test_traffic_explains_the_exposed_seconds(split, kind, small):
    """What the traffic rows of an axis leave exposed is that owner's part of the step."""
    family, runtime, layout, dp = split
    modules = ("mlp",) if kind == "selective" and runtime == "megatron" and family in ("llama", "gpt2") else ()
    layout = replace(layout, recompute=Recompute(kind=kind, modules=modules))
    gpus = layout.tp * layout.cp * layout.pp * dp
    cluster, work = load_cluster("h100-sxm", gpus=gpus), Workload(seq_len=2048, global_batch=16 * dp)
    est = estimate(small[family], cluster, work, layout, runtime=runtime)
    assume(est.valid)
    owners = {"tp": ("tp",), "cp": ("cp",), "ep": ("ep", "etp"), "pp": ("pp",)}
    for owner, axes in owners.items():
        exposed = sum(row.exposed_s for row in est.traffic if row.axis in axes)
        assert exposed == pytest.approx(est.step.breakdown_s[owner], rel=1e-9, abs=1e-12)


# ---------------------------------------------------------------- one kernel for one layout and for many


@st.composite
def valid_layouts(draw):
    """Layouts on 16 GPUs that may break rules; the test keeps the valid ones."""
    runtime_zero = draw(st.sampled_from([0, 1, 2, 3]))
    kind = draw(st.sampled_from(["none", "selective", "full"]))
    modules = draw(selections()) if kind == "selective" else ()
    layers = draw(st.sampled_from([None, 2])) if kind == "full" else None
    pp = draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    return Layout(
        tp=draw(st.sampled_from([1, 2, 4])),
        cp=draw(st.sampled_from([1, 2])),
        cp_kind=draw(st.sampled_from(["p2p", "a2a"])),
        pp=pp,
        vpp=vpp,
        ep=draw(st.sampled_from([1, 2, 4])),
        etp=draw(st.sampled_from([1, 2])),
        zero=runtime_zero,
        micro_batch=draw(st.sampled_from([1, 2])),
        recompute=Recompute(kind=kind, modules=modules, layers=layers),
        first_stage_layers=draw(st.sampled_from([None, None, 2, 6])) if pp > 1 else None,
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES),
    runtime=st.sampled_from(["megatron", "torchtitan"]),
    layouts=st.lists(valid_layouts(), min_size=25, max_size=60),
    precision=st.sampled_from(["bf16", "fp8"]),
)
def test_a_batch_equals_its_layouts_one_by_one(family, runtime, layouts, precision, small):
    model = small[family]
    cluster = load_cluster("h100-sxm", gpus=16)
    work = Workload(seq_len=2048, global_batch=64, precision=precision)
    context = rule_context(model, cluster, work, runtime)
    if not model.is_moe:
        layouts = [replace(layout, ep=1, etp=1) for layout in layouts]
    layouts = [layout for layout in layouts if not violations(layout, context)]
    assume(len(layouts) >= 2)
    kernel = Kernel(
        Problem(model, cluster, work, load_runtime(runtime)), Columns.from_layouts(layouts, cluster.gpus, work)
    )
    rows = np.arange(len(layouts))
    peaks, seconds, bounds = kernel.peak_memory(rows), kernel.step_seconds(rows), kernel.lower_bound(rows)
    for layout, peak, step, bound in zip(layouts, peaks, seconds, bounds, strict=True):
        est = estimate(model, cluster, work, layout, runtime=runtime)
        assert peak == pytest.approx(est.memory.peak_bytes, rel=1e-12, abs=8)  # abs: floors of sums in another order
        assert step == pytest.approx(est.step.seconds.value, rel=1e-12)
        assert bound <= step * (1 + 1e-12)
    # Any subset, in any order, says the same.
    some = rows[::-2]
    np.testing.assert_allclose(kernel.step_seconds(some), seconds[some], rtol=1e-12)
    np.testing.assert_array_equal(kernel.peak_memory(some), peaks[some])


REPRESENTED = [
    Layout(pp=4),
    Layout(pp=8),
    Layout(pp=4, vpp=2),
    Layout(pp=4, vpp=4),
    Layout(pp=4, first_stage_layers=1),
    Layout(pp=4, last_stage_layers=1),
    Layout(pp=4, first_stage_layers=2, last_stage_layers=6),
    Layout(pp=8, account_for_embedding=True, account_for_loss=True),
    Layout(pp=4, recompute=Recompute(kind="full", layers=2)),
    Layout(pp=4, vpp=2, recompute=Recompute(kind="full", layers=2)),
    Layout(pp=8, zero=0),
]


@pytest.mark.parametrize("layout", REPRESENTED, ids=range(len(REPRESENTED)))
@pytest.mark.parametrize("family", FAMILIES)
def test_representative_ranks_have_the_peak_and_the_pace(family, layout, small, kernel_of):
    classes = kernel_of(family, [layout], gpus=16)
    ranks = kernel_of(family, [layout], gpus=16, every_rank=True)
    one = np.arange(1)
    assert set(classes.table.rank[classes.table.exists]) <= set(ranks.table.rank[ranks.table.exists])
    assert set(ranks.table.rank[ranks.table.exists]) == set(range(layout.pp))
    assert classes.peak_memory(one)[0] == ranks.peak_memory(one)[0]
    assert classes.step_seconds(one)[0] == pytest.approx(ranks.step_seconds(one)[0], rel=1e-12)
    # The first rank of a class waits for fewer ranks than the others, so that classes bound a little less.
    bounds = classes.lower_bound(one)[0], ranks.lower_bound(one)[0]
    assert bounds[0] <= bounds[1] * (1 + 1e-12) <= ranks.step_seconds(one)[0] * (1 + 2e-12)
