"""Laws that hold whatever the model, the GPUs and the framework: a machine that is better in one number is no slower,
a larger question takes no less, and what is hidden hides behind something.

Every case prices all valid layouts of a grid of degrees at once, and again with one number changed.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.cluster import Cluster, load_cluster
from fivefold.estimate import Kernel, Problem
from fivefold.estimate.by_operation import redone
from fivefold.estimate.estimate import rule_context
from fivefold.estimate.kernels import flash_seconds
from fivefold.layout import Columns, Layout, Recompute, Workload
from fivefold.layout.rules import valid_mask
from fivefold.model import model_tensors
from fivefold.model.spec import BlockRun, ModelSpec
from fivefold.runtime import load_runtime

ONE = np.arange(1)
FAMILIES = ("llama", "mixtral", "deepseek", "gpt2")
RUNTIMES = ("megatron", "torchtitan", "fsdp", "deepspeed-zero", "megatron-fsdp", "fivefold")
SYSTEMS = ("h100-sxm", "b200", "a100-80g-pcie", "mi300x", "gb200-nvl72", "aws-p4d", "l40s", "gaudi3")
# Faster compute lets a rank that nobody waits for hide a little less of its reduction.
SLACK = 1e-6
# The same grids everywhere: new draws say nothing of a change.
quick = settings(
    derandomize=True, max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclasses.dataclass(frozen=True)
class Grid:
    """All layouts of a grid that the rules let pass for a problem."""

    problem: Problem
    runtime: str
    columns: Columns

    def seconds(self, **changes) -> np.ndarray:
        """Of a step of every layout, with another model, cluster or workload."""
        return self.kernel(**changes).step_seconds(np.arange(len(self.columns)))

    def reserved(self, **changes) -> np.ndarray:
        return self.kernel(**changes).peak(np.arange(len(self.columns))).reserved

    def overfilled_bytes(self) -> np.ndarray:
        """By how much a larger model may need less, [n]: nothing but where fivefold's trainer has ZeRO-2.

        It holds the whole gradients of two buckets at a time and a received part of one. A bucket is closed by the
        tensor that fills it (fivefold.train.parallel.data), so it has as much as its 25 MiB to as much and a tensor:
        which tensor closes it depends on the shapes, and a larger model's may fill theirs exactly.
        """
        runtime, columns = self.problem.runtime, self.columns
        if runtime.sharding != "buckets":
            return np.zeros(len(columns))
        tensor = max(prod(each.shape) for each in model_tensors(self.problem.model) if each.name.startswith("layers"))
        whole = 4 * (2 + 1 / columns.dp_shard) * tensor / columns.tp
        return np.where(columns.zero == 2, (1 + runtime.fragmentation) * whole, 0.0)

    def kernel(self, **changes) -> Kernel:
        problem = dataclasses.replace(self.problem, **changes)
        names = ("tp", "cp", "cp_kind", "pp", "ep", "zero", "sp", "micro_batch", "recompute_kind")
        given = {name: getattr(self.columns, name) for name in (*names, "overlap_tp", "overlap_ep")}
        return Kernel(problem, Columns.build(problem.cluster.gpus, problem.work, **given))


def grid_of(model: ModelSpec, cluster: Cluster, runtime: str, seq_len: int) -> Grid | None:
    profile = load_runtime(runtime)
    load = Workload(seq_len=seq_len, global_batch=4 * cluster.gpus)
    values = product(
        (1, 2, 8), (1, 2), (0, 1), (1, 2, 4), (1, 4), profile.zero_stages, (1, 2), (0, 1, 2), (False, True)
    )
    tp, cp, kind, pp, ep, zero, micro_batch, recompute, overlap = np.array([*values]).T
    columns = Columns.build(
        cluster.gpus, load, tp=tp, cp=cp, cp_kind=np.where(cp > 1, kind, 0), pp=pp, ep=ep, zero=zero,
        micro_batch=micro_batch, recompute_kind=recompute,
        overlap_tp=(overlap > 0) & (tp > 1), overlap_ep=(overlap > 0) & (ep > 1),
    )  # fmt: skip
    legal = np.flatnonzero(valid_mask(columns, rule_context(model, cluster, load, runtime)))
    if not len(legal):
        return None
    return Grid(Problem(model, cluster, load, profile), runtime, columns.take(legal[:: max(len(legal) // 150, 1)]))


@st.composite
def grids(draw):
    """(family, system, runtime, nodes, tokens): what a grid is made of."""
    seq_len = draw(st.sampled_from([256, 2048, 16_384]))
    pick = st.sampled_from
    return draw(pick(FAMILIES)), draw(pick(SYSTEMS)), draw(pick(RUNTIMES)), draw(pick([1, 2, 4])), seq_len


def drawn_grid(small, question) -> Grid | None:
    family, system, runtime, nodes, seq_len = question
    gpus = nodes * min(load_cluster(system).gpus_per_node, 8)
    return grid_of(small[family], load_cluster(system, gpus=gpus), runtime, seq_len)


def better_machines(cluster: Cluster):
    """(what, the cluster with that one number better)."""
    for at, link in enumerate(cluster.links):
        for name, better in (("bandwidth_per_s", 1.3 * link.bandwidth_per_s), ("latency_s", 0.5 * link.latency_s)):
            links = [*cluster.links]
            links[at] = replace(link, **{name: better})
            yield f"{link.name} {name}", replace(cluster, links=tuple(links))
    gpu = cluster.gpu
    peaks = {name: 1.2 * peak for name, peak in gpu.peak_flops_per_s.items()}
    yield "peak", replace(cluster, gpu=replace(gpu, peak_flops_per_s=peaks))
    yield "memory", replace(cluster, gpu=replace(gpu, memory_bandwidth_per_s=1.2 * gpu.memory_bandwidth_per_s))
    yield "launch_s", replace(cluster, launch_s=0.5 * cluster.launch_s)
    yield "host", replace(cluster, host_work_ratio=0.5 * cluster.host_work_ratio)


@quick
@given(question=grids())
def test_no_better_machine_is_slower(small, question):
    grid = drawn_grid(small, question)
    if grid is None:
        return
    before = grid.seconds()
    for what, cluster in better_machines(grid.problem.cluster):
        after = grid.seconds(cluster=cluster)
        assert (after <= before * (1 + SLACK)).all(), (what, float((after / before).max()))


@quick
@given(question=grids())
def test_nothing_larger_takes_less(small, question):
    """Of time and memory, except where the batch alone grows: then no more than twice the time. Memory that buckets of
    whole tensors take beyond what they have to hold may be less (overfilled_bytes)."""
    grid = drawn_grid(small, question)
    if grid is None:
        return
    model, work = grid.problem.model, grid.problem.work
    wider = replace(model, hidden=model.hidden + 64)
    larger = {
        "hidden": {"model": wider},
        "vocabulary": {"model": replace(model, vocab=model.vocab + 1024)},
        "sequence": {"work": replace(work, seq_len=2 * work.seq_len)},
        "batch": {"work": replace(work, global_batch=2 * work.global_batch)},
    }
    before, reserved = grid.seconds(), grid.reserved()
    for what, changes in larger.items():
        after = grid.seconds(**changes)
        assert (after >= before * (1 - SLACK)).all(), (what, float((after / before).min()))
        assert (grid.reserved(**changes) >= reserved - grid.overfilled_bytes()).all(), what
    assert (grid.seconds(**larger["batch"]) <= 2 * before).all()


def test_more_words_take_no_less_beside_experts(small):
    """Nor by less than SLACK: experts lie in buckets of their own, which a larger vocabulary leaves as they are."""
    grid = drawn_grid(small, ("mixtral", "a100-80g-pcie", "megatron", 4, 256))
    assert grid is not None
    model = grid.problem.model
    assert (grid.seconds(model=replace(model, vocab=model.vocab + 1024)) >= grid.seconds()).all()


def test_a_wider_model_may_be_cut_into_smaller_buckets_and_needs_less_by_no_more(small):
    """fivefold's trainer under ZeRO-2, over four pipeline ranks: the narrower model's buckets of 25 MiB are closed 28%
    more than full, the wider one's 2% (tests/train/test_agreement.py has the bytes of the trainer itself)."""
    grid = drawn_grid(small, ("gpt2", "h100-sxm", "fivefold", 4, 256))
    assert grid is not None
    model, before = grid.problem.model, grid.reserved()
    after = grid.reserved(model=replace(model, hidden=model.hidden + 64))
    assert (after >= before - grid.overfilled_bytes()).all()
    less = after < before
    assert less.any() and (grid.columns.zero[less] == 2).all()


@quick
@given(question=grids())
def test_overlap_hides_no_more_than_there_is_beside_it(small, question):
    """A pass lasts no less than its collectives of tensor parallelism do one after the other, and two passes no less
    than those of experts: also where the network is slow beside the GPUs."""
    grid = drawn_grid(small, question)
    if grid is None:
        return
    cluster = grid.problem.cluster
    slow = replace(
        cluster, links=tuple(replace(link, bandwidth_per_s=link.bandwidth_per_s / 8) for link in cluster.links)
    )
    kernel = grid.kernel(cluster=slow)
    shard = kernel.shard
    for ledger, cost in zip(kernel.ledgers, kernel.costs, strict=True):
        alone = kernel.pricer.exchanges.alone(ledger)

        def of(axis: str, *passes: str, rows=alone) -> np.ndarray:
            return sum((s for row, s in rows if row.axis == axis and row.when in passes), np.zeros(len(shard)))

        forward, backward = cost.forward.sum(axis=0), cost.backward.sum(axis=0)
        for own, moved, on in (
            (forward, of("tp", "forward"), shard.overlap_tp),
            (backward, of("tp", "backward"), shard.overlap_tp),
            (forward + backward, of("ep", "forward", "backward"), shard.overlap_ep),
        ):
            assert (own >= np.where(on, moved, 0) * (1 - 1e-12)).all()


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan", "fsdp", "nanotron@2026.12", "fivefold"])
@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_hides_behind_no_more_than_attention(small, runtime, cp):
    """Of what it moves in a pass, whatever in how many collectives."""
    profile = load_runtime(runtime)
    layout = Layout(cp=cp, zero=profile.zero_stages[-1])
    cluster, work = load_cluster("h100-pcie", gpus=8), Workload(seq_len=4096, global_batch=64)
    kernel = Kernel(Problem(small["gpt2"], cluster, work, profile), Columns.from_layouts([layout], 8, work))
    ledger, cost, pricer = kernel.ledgers[0], kernel.costs[0], kernel.pricer
    (row,) = ledger.attends
    seconds = flash_seconds(
        pricer.curve, pricer.gpu, row, np.asarray(row.flops, float), pricer.sixteen_bit, pricer.attention_kernel
    )
    copies = profile.ring_gathers
    for when, attend in zip(("forward", "backward"), seconds, strict=True):
        alone = sum(s[0] for each, s in pricer.exchanges.alone(ledger) if each.axis == "cp" and each.when == when)
        exposed = sum(s[0] for each, s in cost.exchanges if each.axis == "cp" and each.when == when)
        assert alone > 0
        assert alone - exposed <= pricer.curve.in_step * float(attend[0]) * (1 + 1e-12)
        assert exposed < alone or copies


@pytest.mark.parametrize("runtime", ["fsdp", "torchtitan"])
def test_a_host_that_launches_late_is_no_slower_beside_a_faster_gpu(small, runtime):
    """So few tokens that the GPU waits for launches; what recomputation leaves out nobody launches again."""
    cluster, layout = load_cluster("h100-sxm", gpus=8), Layout(zero=3, recompute=Recompute(kind="full"))
    work, profile = Workload(seq_len=256, global_batch=64), load_runtime(runtime)
    peaks = {name: 1.2 * peak for name, peak in cluster.gpu.peak_flops_per_s.items()}
    faster = replace(cluster, gpu=replace(cluster.gpu, peak_flops_per_s=peaks))
    columns = Columns.from_layouts([layout], 8, work)
    slow, fast = (Kernel(Problem(small["llama"], each, work, profile), columns) for each in (cluster, faster))
    assert slow.variants.again[0, 0, -1] > 0  # the host's share
    assert fast.step_seconds(ONE)[0] <= slow.step_seconds(ONE)[0]
    again = slow.variants.again[0, 0].sum()
    assert again < slow.variants.forward[0, 0].sum()
    assert again == pytest.approx(fast.variants.again[0, 0].sum(), rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_some_operations_takes_no_longer_than_all(family, kernel_of):
    """torchtitan's checkpoint of single operations ends where that of whole blocks does."""
    some, every = (
        kernel_of(family, [Layout(zero=3, recompute=Recompute(kind=kind))], runtime="torchtitan", seq_len=16_384)
        for kind in ("selective", "full")
    )
    assert (some.variants.again[0, : some.blocks] <= every.variants.again[0, : every.blocks] * (1 + 1e-12)).all()
    for ledger in some.ledgers[: some.blocks]:
        ends = [share for row, share in zip(ledger.gemms, redone(ledger), strict=True) if row.ends_block]
        assert ends and not any(ends)


def test_what_a_norm_after_the_block_needs_is_run_again(small, price):
    """Before a norm of its own the last product's output is needed, so that all of the block runs twice."""
    block = small["llama"].runs[0].block
    layout = Layout(zero=3, recompute=Recompute(kind="full"))
    flops = {}
    for norms in ("pre", "post"):
        model = replace(small["llama"], runs=(BlockRun(16, replace(block, norms=norms)),))
        found = price(model, layout, runtime="fsdp").flops_per_token
        flops[norms] = found.hardware - price(model, Layout(zero=3), runtime="fsdp").flops_per_token.hardware
    assert flops["post"] - flops["pre"] == pytest.approx(16 * 2 * 1024 * 4096)


def test_the_embedding_waits_for_the_end_whatever_experts_there_are(small, kernel_of):
    """Experts that nobody shares are not reduced: the more of them, the smaller is the embedding's part of a rank, and
    the seconds in which it is reduced are the same."""
    feed = small["mixtral"].runs[0].block.feed
    exposed = []
    for experts in (8, 64):
        block = replace(small["mixtral"].runs[0].block, feed=replace(feed, num_experts=experts))
        model = replace(small["mixtral"], vocab=131_072, runs=(BlockRun(2, block),))
        exposed.append(kernel_of(model, [Layout(ep=8)], gpus=8, seq_len=4096).exposed_reduction_seconds(ONE)[0])
    assert exposed[1] >= exposed[0] * (1 - 1e-9)


def test_the_most_reserved_is_not_always_where_the_most_is_allocated(small):
    """nanotron's states lie in segments of their own: the last stage, with logits, fragments more than the first."""
    model = replace(small["llama"], vocab=16_384, runs=(BlockRun(4, small["llama"].runs[0].block),))
    runtime, work = load_runtime("nanotron"), Workload(seq_len=2048, global_batch=64)
    layout = Layout(pp=2, zero=0, micro_batch=4, recompute=Recompute(kind="full"))
    problem = Problem(model, load_cluster("h100-sxm", gpus=2), work, runtime)
    kernel = Kernel(problem, Columns.from_layouts([layout], 2, work), every_rank=True)
    parts = kernel.rank_memory(ONE)
    allocated = np.sum([*parts.values()], axis=0)[0]
    needed = allocated + runtime.fragmentation * (parts["activations"] + parts["logits"])[0]
    assert (allocated.argmax(), needed.argmax()) == (0, 1)
    outside = sum(each[0] for each in kernel.outside_allocator(ONE).values())
    assert kernel.peak(ONE).reserved[0] == pytest.approx(needed.max() + outside, abs=8)
