"""Blocks per pipeline stage: the split that makes a step shortest, counting embedding, MTP modules and head.

Two answers: the best split that two counts (first and last rank) or the accounting flags express, and the best of any
splits, which Megatron-LM takes as a layout text. Both are priced by the kernel, whose pipelines are simulated. Splits
are compared by their pipelines first; where there are few, all of them are, else blocks are moved one at a time from
several starts until no move helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from fivefold.errors import FivefoldError
from fivefold.estimate import Kernel, Problem
from fivefold.estimate.estimate import rule_context
from fivefold.estimate.plans import Partition, Plan, kind_runs, partition_of
from fivefold.layout import Columns, Layout, valid_mask
from fivefold.layout.layout import RECOMPUTE_KINDS, SPLIT_BACKWARD, V_SHAPED
from fivefold.layout.stages import blocks_of
from fivefold.schedule import pipeline_seconds
from fivefold.search.splits import Counts, every_split, filled, layout_text, moves, number_of_splits

_EXACT = 4096  # splits that are all compared
_PRICED, _PRICED_AT_MOST = 64, 2048  # of them, and of those that a search visits, priced whole
_EQUAL = 1e-9  # times that differ by rounding alone
_ROUNDS = 200


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One split. blocks: of each virtual stage, chunk by chunk. layout: None where no counts express it.

    text: as --pipeline-model-parallel-layout has it. seconds: of a step. reserved_bytes: of the fullest GPU.
    """

    blocks: Counts
    layout: Layout | None
    text: str
    seconds: float
    reserved_bytes: int
    fits: bool


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The split as given, the best one that counts express, and the best of any. exact: whether every split was
    compared. compared: how many."""

    given: Split
    counted: Split
    free: Split
    exact: bool
    compared: int


def balance(problem: Problem, layout: Layout, runtime: str, exact: int = _EXACT) -> Balance:
    """The best blocks per stage for a layout that is legal, everything else of it fixed.

    exact: compare all splits where there are at most so many. Raises FivefoldError without a pipeline, for V-shaped
    schedules, whose first rank holds both ends, and for fewer blocks than stages.
    """
    _refuse(problem, layout)
    start = _Start(problem, layout)
    visited, whole = start.candidates(exact)
    counted = _counted(problem, layout, runtime)
    given = start.price([start.given])[0]
    best_counted = _best([given, *start.price([counts for counts, _ in counted], [own for _, own in counted])])
    best_counted = _named(best_counted, dict(counted) | {start.given: layout})
    free = _best([best_counted, *_first_that_fit(start, visited)])
    return Balance(
        given=_named(given, {start.given: layout}),
        counted=best_counted,
        free=free,
        exact=whole,
        compared=len(visited),
    )


def price_splits(problem: Problem, layout: Layout, splits: list[Counts]) -> list[Split]:
    """Step and memory of a layout with other blocks per stage."""
    return _Start(problem, layout).price(splits)


def _refuse(problem: Problem, layout: Layout) -> None:
    stages = layout.pp * layout.vpp
    for broken, message, option in (
        (layout.pp == 1, "There is one stage, and nothing to balance. Give --pp 2 or more.", "--pp"),
        (
            layout.schedule in V_SHAPED,
            f"In the V of --schedule {layout.schedule} the first rank holds both ends of the model, so that its blocks "
            "are not balanced by counts.",
            "--schedule",
        ),
        (
            problem.model.layers < stages,
            f"{problem.model.layers} blocks do not fill {stages} stages.",
            "--pp",
        ),
    ):
        if broken:
            raise FivefoldError(message, code="nothing-to-balance", option=option, value=stages)


def _best(splits: list[Split]) -> Split:
    """The fastest that fits, of equals the first; where none fits the smallest."""
    best, *others = splits
    for each in others:
        if each.fits != best.fits:
            better = each.fits
        elif each.fits:
            better = each.seconds < best.seconds * (1 - _EQUAL)
        else:
            better = each.reserved_bytes < best.reserved_bytes
        best = each if better else best
    return best


def _first_that_fit(start: _Start, visited: list[Counts]) -> list[Split]:
    """The splits with the shortest pipelines, priced in chunks until one of them fits."""
    priced: list[Split] = []
    for at in range(0, min(len(visited), _PRICED_AT_MOST), _PRICED):
        priced += start.price(visited[at : at + _PRICED])
        if any(each.fits for each in priced):
            break
    return priced


def _named(split: Split, layouts: dict[Counts, Layout]) -> Split:
    return msgspec.structs.replace(split, layout=layouts.get(split.blocks, split.layout))


# ---------------------------------------------------------------- pricing


class _Splits(Kernel):
    """A kernel whose layouts are one layout with other partitions."""

    def __init__(self, problem: Problem, columns: Columns, partitions: list[Partition], plan: Plan) -> None:
        self._own = [plan._replace(part=part) for part in partitions]
        super().__init__(problem, columns)

    def _plans(self) -> tuple[np.ndarray, list[Plan]]:
        return np.arange(len(self._own)), self._own


@dataclass(slots=True)
class _Start:
    """What all splits of one layout share."""

    problem: Problem
    layout: Layout
    given: Counts
    plan: Plan
    recomputed: int
    kernel: Kernel
    forward: np.ndarray
    backward: np.ndarray
    again: np.ndarray
    transfer: float

    def __init__(self, problem: Problem, layout: Layout) -> None:
        self.problem, self.layout = problem, layout
        columns = Columns.from_layouts([layout], problem.cluster.gpus, problem.work)
        self.kernel = Kernel(problem, columns)
        (self.plan,) = self.kernel.plans
        kind = RECOMPUTE_KINDS[int(columns.recompute_kind[0])]
        self.recomputed = 0 if kind == "none" else int(columns.recompute_layers[0])
        self.given = blocks_of(layout, problem.model, problem.runtime.name)
        self.transfer = float(self.kernel.exchange_seconds(np.arange(1))[0])

    def partition(self, counts: Counts) -> Partition:
        model, layout = self.problem.model, self.layout
        return partition_of(kind_runs(model), model.mtp, layout.pp, layout.vpp, counts, self.recomputed)

    def price(self, splits: list[Counts], layouts: list[Layout] | None = None) -> list[Split]:
        """Step and memory of each split, by the kernel."""
        if not splits:
            return []
        layouts_ = layouts or [self.layout] * len(splits)
        columns = Columns.from_layouts(layouts_, self.problem.cluster.gpus, self.problem.work)
        kernel = _Splits(self.problem, columns, [self.partition(counts) for counts in splits], self.plan)
        rows = np.arange(len(splits))
        seconds = kernel.step_seconds(rows)
        reserved = kernel.peak(rows).reserved
        fits = kernel.fits(rows, reserved)
        return [
            Split(
                blocks=counts,
                layout=None,
                text=layout_text(counts, self.problem.model.mtp),
                seconds=float(seconds[at]),
                reserved_bytes=int(reserved[at]),
                fits=bool(fits[at]),
            )
            for at, counts in enumerate(splits)
        ]

    def pipeline(self, splits: list[Counts]) -> np.ndarray:
        """Seconds of each split's pipeline, [n]."""
        parts = [self.partition(counts) for counts in splits]
        times = [self.kernel.stage_seconds(part, np.zeros(1, dtype=np.int64)) for part in parts]
        forward, backward, weight = (np.concatenate(column) for column in zip(*times, strict=True))
        apart = {"weight_grad_s": weight} if self.plan.schedule in SPLIT_BACKWARD else {}
        shape = (self.plan.schedule, self.layout.pp, self.plan.micro_batches, self.layout.vpp)
        return pipeline_seconds(*shape, forward, backward, self.transfer, **apart)

    # ------------------------------------------------------------ which splits

    def candidates(self, exact: int) -> tuple[list[Counts], bool]:
        """(splits by the seconds of their pipelines, whether they are all)."""
        layers, stages = self.problem.model.layers, self.layout.pp * self.layout.vpp
        if number_of_splits(layers, stages) <= exact:
            every = list(every_split(layers, stages))
            return self._by_time(dict(zip(every, self.pipeline(every).tolist(), strict=True))), True
        seen: dict[Counts, float] = {}
        for counts in dict.fromkeys((self.given, self._even_times(), self._light_ends())):
            self._descend(counts, seen)
        return self._by_time(seen), False

    @staticmethod
    def _by_time(seconds: dict[Counts, float]) -> list[Counts]:
        return sorted(seconds, key=lambda counts: (seconds[counts], counts))

    def _descend(self, counts: Counts, seen: dict[Counts, float]) -> None:
        """Moves one block at a time while that makes the pipeline shorter."""
        self._time([counts], seen)
        for _ in range(_ROUNDS):
            near = list(moves(counts))
            self._time(near, seen)
            better = min(near, key=lambda move: (seen[move], move), default=counts)
            if seen[better] >= seen[counts] * (1 - 1e-12):
                return
            counts = better

    def _time(self, splits: list[Counts], seen: dict[Counts, float]) -> None:
        new = [counts for counts in splits if counts not in seen]
        if new:
            seen.update(zip(new, self.pipeline(new).tolist(), strict=True))

    def _even_times(self) -> Counts:
        """The least longest stage: by bisection of the time that a stage may take."""
        times = self._block_seconds()
        ends = self._end_seconds()
        stages = self.layout.pp * self.layout.vpp
        low, high = 0.0, float(times.sum() + sum(ends))
        best = self.given
        for _ in range(50):
            middle = (low + high) / 2
            found = filled(times, ends, stages, middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def _light_ends(self) -> Counts:
        """Equal stages, and on the ends as many blocks less as their items weigh."""
        times, ends = self._block_seconds(), self._end_seconds()
        stages, layers = self.layout.pp * self.layout.vpp, self.problem.model.layers
        less = [round(end / float(times.mean())) for end in ends]
        share, rest = divmod(layers + sum(less), stages)
        counts = [share + (at < rest) for at in range(stages)]
        counts[0], counts[-1] = counts[0] - less[0], counts[-1] - less[1]
        return tuple(counts) if min(counts[0], counts[-1], 0) == 0 and min(counts[1:-1], default=1) > 0 else self.given

    def _block_seconds(self) -> np.ndarray:
        """[layers] forward and backward of each block."""
        v, runs = self.kernel.variants, kind_runs(self.problem.model)
        each = v.forward_s[0] + v.backward_s[0] + (v.again_s[0] if self.recomputed else 0)
        return np.concatenate([np.full(count, each[kind]) for kind, count in runs])

    def _end_seconds(self) -> tuple[float, float]:
        v, model = self.kernel.variants, self.problem.model
        each, kinds = v.forward_s[0] + v.backward_s[0], len(model.kinds)
        return float(each[kinds]), float(each[kinds + 1] + model.mtp * each[kinds + 2])


def _counted(problem: Problem, layout: Layout, runtime: str) -> list[tuple[Counts, Layout]]:
    """Every legal split that counts of the first and last rank, or the accounting flags, express."""
    layers = problem.model.layers
    plain = msgspec.structs.replace(
        layout, first_stage_layers=None, last_stage_layers=None, account_for_embedding=False, account_for_loss=False
    )
    layouts = [
        msgspec.structs.replace(plain, account_for_embedding=embedding, account_for_loss=loss)
        for embedding in (False, True)
        for loss in (False, True)
    ]
    layouts += [
        msgspec.structs.replace(plain, first_stage_layers=first, last_stage_layers=last)
        for first in (None, *range(1, layers))
        for last in (None, *range(1, layers - (first or 0) + 1))
        if (first, last) != (None, None)
    ]
    columns = Columns.from_layouts(layouts, problem.cluster.gpus, problem.work)
    legal = valid_mask(columns, rule_context(problem.model, problem.cluster, problem.work, runtime))
    found: dict[Counts, Layout] = {}
    for at in np.flatnonzero(legal).tolist():
        counts = blocks_of(layouts[at], problem.model, problem.runtime.name)
        found.setdefault(counts, layouts[at])
    return list(found.items())
