"""Pricing a converted run: the kernel with one layout, and the choices that need a memory estimate to be made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from fivefold.errors import FivefoldError
from fivefold.estimate.doubt import doubt
from fivefold.estimate.interval import around
from fivefold.estimate.kernel import Kernel, Problem
from fivefold.estimate.result import Quantity
from fivefold.layout import Layout, Recompute
from fivefold.layout.columns import Columns
from fivefold.layout.divisors import divisors
from fivefold.measure.convert import Case, Unconvertible
from fivefold.model.spec import Experts
from fivefold.runtime import load_runtime

_LARGEST_MICRO_BATCH = 64  # that is tried where none is stated; a few rows state more


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What the estimate says of one run.

    seconds: of a step. peak_bytes: allocated on the worst rank; last_rank_bytes: on the last. reserved_bytes: what the
    device needs, outside_bytes of it beside the allocator.
    """

    seconds: Quantity
    peak_bytes: int
    last_rank_bytes: int
    reserved_bytes: int
    outside_bytes: int


def choose(case: Case) -> Case:
    """The case with its open choices made, one after the other, each as it fits the memory: the expert-parallel ranks
    that are predicted to be fastest (fully sharded, the fewest), the most groups that share parameters, the optimizer's
    states replicated if possible and else sharded, the micro-batch that is predicted to be fastest, the least
    recomputation. Nothing measured is looked at."""
    _check_batch(case)
    makes = {
        "ep": _expert_ranks,
        "shard_groups": _most_groups,
        "zero": _sharded_to_fit,
        "micro_batch": _best_micro_batch,
        "local_batch": _local_batch,
        "recompute": _least_recompute,
    }
    for name in case.open:
        case = makes[name](case)
    return case


def _with_layout(case: Case, layout: Layout) -> Case:
    return msgspec.structs.replace(case, layout=layout)


def _under_policy(case: Case, keeps: tuple[str, ...]) -> Case:
    """The case with every block checkpointed under a policy that keeps these operations' outputs."""
    layout = msgspec.structs.replace(case.layout, recompute=Recompute(kind="full"))
    return msgspec.structs.replace(case, layout=layout, changes={**case.changes, "checkpoint_keeps": keeps})


def _until_settled(case: Case, which: int) -> Case:
    """The case under one of its framework's policies, where its recomputation is still to be settled between them."""
    return _under_policy(case, case.policies[which]) if case.policies and "recompute" in case.open else case


def _most_groups(case: Case) -> Case:
    """The case with as many groups that share parameters as leave each enough memory, recomputing most."""
    case = _until_settled(case, -1)
    layouts = [msgspec.structs.replace(case.layout, dp_replicate=groups) for groups in case.shard_groups]
    tried = layouts
    if "recompute" in case.open and not case.policies:
        tried = [msgspec.structs.replace(one, recompute=Recompute(kind="full")) for one in layouts]
    fitting = (one for one, fits in zip(layouts, _fits(case, tried), strict=True) if fits)
    return _with_layout(case, next(fitting, layouts[-1]))


def _least_recompute(case: Case) -> Case:
    """The case under the first of its framework's policies that fits; without policies, with as few whole blocks
    recomputed per pipeline rank as fit, or all where a framework knows no less, and with none where it fits so."""
    if case.policies:
        under = [_under_policy(case, keeps) for keeps in case.policies]
        return next((one for one in under if _fits(one, [one.layout])[0]), under[-1])
    return _with_layout(case, _fewest_blocks(case))


def _expert_ranks(case: Case) -> Case:
    """The case with as many expert-parallel ranks as are predicted to be fastest of those that fit, because who ran it
    tuned them; where parameters are fully sharded with as few as fit, because gathers need no ranks of experts there.
    As many as there may be where none fit."""
    by_ranks = [_with_layout(case, layout) for layout in _divided_experts(case)]
    if not by_ranks:
        return case
    fits = _fits(case, [_recomputing_most(one).layout for one in by_ranks])
    fitting = [one for one, fit in zip(by_ranks, fits, strict=True) if fit] or by_ranks[-1:]
    if load_runtime(case.runtime).sharding == "fully_sharded":
        return fitting[0]
    return min(fitting, key=_seconds_once_settled) if len(fitting) > 1 else fitting[0]


def _divided_experts(case: Case) -> list[Layout]:
    """The case's layout with every number of expert-parallel ranks that its ranks and experts allow, in their order."""
    layout, ranks = case.layout, case.cluster.gpus // case.layout.pp
    experts = max(block.feed.num_experts for block in case.model.kinds if isinstance(block.feed, Experts))
    whole = layout.etp if case.run.etp is not None else 1  # each expert's ranks, of several groups
    shared = whole * layout.dp_replicate
    sizes = [size for size in divisors(experts) if ranks % (size * shared) == 0]
    return [msgspec.structs.replace(layout, ep=size, etp=layout.etp if size == 1 else whole) for size in sizes]


def _seconds_once_settled(case: Case) -> float:
    """Seconds of a step after the choices that come after the experts' ranks."""
    later = choose(msgspec.structs.replace(case, open=tuple(name for name in case.open if name != "ep")))
    return predict(later).seconds.value


def _fewest_blocks(case: Case) -> Layout:
    layout, every = case.layout, msgspec.structs.replace(case.layout, recompute=Recompute(kind="full"))
    if _fits(case, [layout])[0]:
        return layout
    if not case.recomputes_in_part:
        return every
    found = [one for one in map(partial(_fewest_of_chunks, case), _chunks(case)) if one is not None]
    if len(found) < 2:
        return found[0] if found else every
    return found[int(kernel_of(case, found).step_seconds(np.arange(len(found))).argmin())]


def _chunks(case: Case) -> list[int]:
    """How many chunks a rank may have: as many as the row states or its schedule has; else also fewer, because blocks
    are recomputed by the same number in every chunk, and fewer chunks make finer steps."""
    vpp = case.layout.vpp
    if case.run.vpp is not None or case.layout.schedule is not None or vpp == 1:
        return [vpp]
    return [chunks for chunks in range(vpp, 1, -1) if vpp % chunks == 0]


def _fewest_of_chunks(case: Case, vpp: int) -> Layout | None:
    """The layout with so many chunks and as few blocks recomputed as fit, None where not even all do."""
    per_rank = -(-case.model.layers // case.layout.pp)
    some = [Recompute(kind="full", layers=count) for count in range(vpp, per_rank + 1, vpp)]
    layouts = [
        msgspec.structs.replace(case.layout, vpp=vpp, recompute=recompute)
        for recompute in (Recompute(), *some, Recompute(kind="full"))
    ]
    return next((one for one, fits in zip(layouts, _fits(case, layouts), strict=True) if fits), None)


def _best_micro_batch(case: Case) -> Case:
    """The case with the micro-batch that is predicted to be fastest among those that divide the batch and fit: whoever
    ran it will have tuned it. Where recomputation is open too, each size is tried with the least that fits. One
    sequence where no size fits."""
    layout = case.layout
    share = case.work.global_batch // (case.cluster.gpus // (layout.tp * layout.cp * layout.pp))
    sizes = [size for size in range(1, _LARGEST_MICRO_BATCH + 1) if share % size == 0]
    if layout.vpp > 1:  # micro-batches go in groups of pp
        sizes = [size for size in sizes if share // size % layout.pp == 0]
    settled = [_until_settled(case, which) for which in range(len(case.policies) or 1)]
    found = [each for one in settled for each in _timed(one, sizes)]
    return _with_layout(case, msgspec.structs.replace(layout, micro_batch=min(found)[1])) if found else case


def _timed(case: Case, sizes: list[int]) -> list[tuple[float, int]]:
    """(seconds of a step, micro-batch) of those of `sizes` that fit."""
    layouts = [msgspec.structs.replace(case.layout, micro_batch=size) for size in sizes]
    if "recompute" in case.open and not case.policies:
        layouts = [_fewest_blocks(_with_layout(case, one)) for one in layouts]
    fitting = [one for one, fits in zip(layouts, _fits(case, layouts), strict=True) if fits]
    if not fitting:
        return []
    seconds = kernel_of(case, fitting).step_seconds(np.arange(len(fitting)))
    return [(float(s), one.micro_batch) for s, one in zip(seconds, fitting, strict=True)]


def _recomputing_most(case: Case) -> Case:
    """The case with all blocks recomputed, where that is still to be settled."""
    if "recompute" not in case.open:
        return case
    return _with_layout(case, msgspec.structs.replace(case.layout, recompute=Recompute(kind="full")))


def _sharded_to_fit(case: Case) -> Case:
    """The case with its optimizer's states sharded where replicas of them do not fit and their shards do."""
    sharded = _with_layout(case, msgspec.structs.replace(case.layout, zero=1))
    fits = _fits(case, [_recomputing_most(one).layout for one in (case, sharded)])
    return sharded if fits == [False, True] else case


def _local_batch(case: Case) -> Case:
    """The case with the local batch as one micro-batch per stage, as its framework would cut it, if that fits with all
    blocks recomputed; else with the micro-batch chosen as for other frameworks."""
    if _fits(case, [_recomputing_most(case).layout])[0]:
        return case
    return _best_micro_batch(_with_layout(case, msgspec.structs.replace(case.layout, micro_batch=1)))


def _fits(case: Case, layouts: list[Layout]) -> list[bool]:
    """Whether each layout's allocations and what lies outside the allocator fit. Fragmentation is left out: these runs
    ran, and an allocator that is short of memory fragments less."""
    kernel = kernel_of(case, layouts)
    rows = np.arange(len(layouts))
    needed = kernel.peak_memory(rows) + sum(kernel.outside_allocator(rows).values())
    return (needed <= case.cluster.gpu.memory_bytes).tolist()


def _check_batch(case: Case) -> None:
    if case.work.global_batch % _sequences(case):
        raise Unconvertible(
            f"the batch of {case.work.global_batch} is no multiple of micro-batch x dp, {_sequences(case)}"
        )


def kernel_of(case: Case, layouts: list[Layout] | None = None) -> Kernel:
    """The kernel of a case, for its own layout or for others. Raises Unconvertible for what cannot be priced."""
    layouts = [case.layout] if layouts is None else layouts
    try:
        columns = Columns.from_layouts(layouts, case.cluster.gpus, case.work)
        runtime = msgspec.structs.replace(load_runtime(case.runtime), **case.changes)
        return Kernel(Problem(case.model, case.cluster, case.work, runtime), columns)
    except FivefoldError as error:
        raise Unconvertible(error.message) from error


def _sequences(case: Case) -> int:
    layout = case.layout
    return layout.micro_batch * (case.cluster.gpus // (layout.tp * layout.cp * layout.pp))


def predict(case: Case) -> Predicted:
    """Price a case whose choices are made. Raises Unconvertible with the reason for what cannot be priced."""
    return _price(case, [case.layout])[0]


def predict_all(cases: Sequence[Case]) -> list[Predicted | Unconvertible]:
    """Price cases in their order, those of one problem together; a reason stands where one cannot be priced."""
    found: list[Predicted | Unconvertible] = [Unconvertible("not priced")] * len(cases)
    groups: dict[bytes, list[int]] = {}
    for at, case in enumerate(cases):
        question = msgspec.msgpack.encode((case.model, case.cluster, case.work, case.runtime, case.changes))
        groups.setdefault(question, []).append(at)
    for members in groups.values():
        try:
            together = _price(cases[members[0]], [cases[at].layout for at in members])
        except Unconvertible:
            together = [_or_reason(cases[at]) for at in members]
        for at, one in zip(members, together, strict=True):
            found[at] = one
    return found


def _or_reason(case: Case) -> Predicted | Unconvertible:
    try:
        return predict(case)
    except Unconvertible as reason:
        return reason


def _price(case: Case, layouts: list[Layout]) -> list[Predicted]:
    """Layouts of one problem priced together."""
    for layout in layouts:
        _check_batch(_with_layout(case, layout))
    kernel, rows = kernel_of(case, layouts), np.arange(len(layouts))
    try:
        seconds = kernel.step_seconds(rows)
        peak = kernel.peak(rows)
        last_rank = np.where(kernel.table.last[kernel.plan], peak.by_rank, 0).max(axis=1)
        outside = np.sum([*kernel.outside_allocator(rows).values()], axis=0)
        unsure = doubt(kernel, rows, seconds)
    except FivefoldError as error:
        raise Unconvertible(error.message) from error
    return [
        Predicted(
            seconds=around(float(seconds[i]), kernel.problem, float(unsure[i])),
            peak_bytes=int(peak.allocated[i]),
            last_rank_bytes=int(last_rank[i]),
            reserved_bytes=int(peak.reserved[i]),
            outside_bytes=int(outside[i]),
        )
        for i in rows.tolist()
    ]
