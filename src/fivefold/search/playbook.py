"""The playbook: the rules of thumb of the field, followed step by step and priced beside the searched optimum.

Sources: the Ultra-Scale Playbook (Hugging Face, 2025) and Megatron-Core's parallelism guide. The order is data
parallelism first, then tensor parallelism inside the fast domain, then pipeline stages; context parallelism for long
sequences and expert parallelism for MoE. The rules never narrow the search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from fivefold.estimate import Estimate, Problem, estimate
from fivefold.layout.layout import Layout, Recompute
from fivefold.layout.stages import split_policy
from fivefold.search.price import Outcome, Priced, Refused, price_all, usable
from fivefold.search.result import PathStep, PlaybookPath
from fivefold.search.values import fewest_experts
from fivefold.search.words import duration

replace = msgspec.structs.replace

WIDE_ENOUGH_FOR_TP = 4096  # hidden size from which tensor parallelism pays
DEEP_ENOUGH_FOR_PP = 50  # blocks from which pipeline parallelism pays
LONG_SEQUENCE = 65536  # tokens from which context parallelism is needed for certain
TOKENS_PER_CP_RANK = 32768
FSDP_RANKS = 512  # ranks beyond which fully sharded data parallelism alone stops scaling
_LARGEST_MICRO_BATCH = 8


class State(NamedTuple):
    """Where the path stands: the layout so far and what comes of it."""

    layout: Layout
    outcome: Outcome

    @property
    def starts(self) -> bool:
        return isinstance(self.outcome, Priced)

    @property
    def usable(self) -> bool:
        """Whether it starts and fits."""
        return usable(self.outcome)

    def beats(self, other: State) -> bool:
        """Whether both are usable and this one is faster."""
        return usable(self.outcome) and usable(other.outcome) and self.outcome.seconds < other.outcome.seconds


def follow_playbook(problem: Problem, runtime: str, best: Estimate) -> PlaybookPath:
    """The path for this problem, and how far behind the searched optimum it ends."""
    walk = _Walk(problem, runtime)
    for move in (
        walk.data_parallel,
        walk.expert_parallel,
        walk.long_sequence,
        walk.tensor_parallel,
        walk.pipeline_parallel,
        walk.fill_batch,
        walk.recompute,
        walk.more_experts,
        walk.interleave,
        walk.micro_batch,
    ):
        move()
    state = walk.state
    final = None
    gap = None
    if state.starts:
        final = estimate(problem.model, problem.cluster, problem.work, state.layout, runtime)
        if final.fits and final.step and best.step:
            gap = final.step.seconds.value - best.step.seconds.value
    return PlaybookPath(path=tuple(walk.path), estimate=final, gap_s=gap)


class _Walk:
    """One walk down the path; every move looks at the state, decides, and notes the decision with its price."""

    def __init__(self, problem: Problem, runtime: str) -> None:
        self.problem = problem
        self.runtime = runtime
        self.path: list[PathStep] = []
        zero = max(problem.runtime.zero_stages)
        self.state = self._price(Layout(zero=zero))

    # ---------------------------------------------------------------- moves

    def data_parallel(self) -> None:
        zero = self.state.layout.zero
        name = {1: "ZeRO-1, the distributed optimizer", 3: "ZeRO-3, fully sharded"}.get(zero, f"ZeRO-{zero}")
        self._note("start with data parallelism", "dp-first", f"dp over all GPUs with {name}: {self._verdict()}")

    def expert_parallel(self) -> None:
        if not self.problem.model.is_moe:
            return
        domain, experts = self.problem.cluster.spans[0], fewest_experts(self.problem.model)
        for ep in [n for n in reversed(_powers(domain)) if experts % n == 0]:
            spread = self._price(replace(self.state.layout, ep=ep))
            if spread.starts or ep == 1:
                self.state = spread
                break
        chosen = self.state.layout.ep
        decision = f"{_taken('ep', chosen, f'ep={chosen}, orthogonal to dp')}: {self._verdict()}"
        self._note("mixture of experts", "ep-for-moe", decision)

    def more_experts(self) -> None:
        """Only when everything inside the domain was not enough do experts spread over the network."""
        if not self.problem.model.is_moe or self.state.usable:
            return
        experts = fewest_experts(self.problem.model)
        values = [n for n in _powers(experts) if experts % n == 0 and n > self.state.layout.ep]
        chosen = self._first_usable("ep", values, self._with_ep)
        decision = f"{_taken('ep', chosen, f'ep={chosen}, over the network')}: {self._verdict()}"
        self._note("still does not fit: experts", "ep-across-nodes", decision)

    def long_sequence(self) -> None:
        seq = self.problem.work.seq_len
        if seq < LONG_SEQUENCE:
            return
        cp = 1
        while seq // cp > TOKENS_PER_CP_RANK:
            cp *= 2
        self._move(replace(self.state.layout, cp=cp))
        self._note("long sequence", "cp-for-long-sequences", f"{seq} tokens: cp={cp}: {self._verdict()}")

    def tensor_parallel(self) -> None:
        if self.state.usable or not self._sharded_too_wide():
            return
        domain = self.problem.cluster.spans[0]
        chosen = self._first_usable("tp", _powers(domain), self._with_tp)
        hidden = self.problem.model.hidden
        wide = (
            "" if hidden >= WIDE_ENOUGH_FOR_TP else f" (hidden {hidden} is below {WIDE_ENOUGH_FOR_TP}, where it pays)"
        )
        words = f"tp={chosen} inside the {domain}-GPU domain, sequence parallelism with it{wide}"
        decision = f"{_taken('tp', chosen, words)}: {self._verdict()}"
        self._note("does not fit: tensor parallelism", "tp-inside-domain", decision)

    def pipeline_parallel(self) -> None:
        if self.state.usable or 1 not in self.problem.runtime.zero_stages:
            return
        layers = self.problem.model.layers
        depth = [n for n in _powers(layers) if self._room_for(pp=n)]
        chosen = self._first_usable("pp", depth, self._with_pp)
        deep = (
            ""
            if layers >= DEEP_ENOUGH_FOR_PP
            else f" ({layers} blocks are fewer than {DEEP_ENOUGH_FOR_PP}, where it pays)"
        )
        decision = f"{_taken('pp', chosen, f'pp={chosen}{deep}')}: {self._verdict()}"
        self._note("still does not fit: pipeline", "pp-across-nodes", decision)

    def fill_batch(self) -> None:
        """More replicas than sequences: give ranks to tensor, then to context parallelism."""
        if self.state.starts:
            return
        for tp in _powers(self.problem.cluster.spans[0]):
            for cp in _powers(64):
                layout = replace(
                    self.state.layout,
                    tp=max(tp, self.state.layout.tp),
                    cp=max(cp, self.state.layout.cp),
                    sequence_parallel=None,
                )
                there = self._price(layout)
                if there.starts:
                    self.state = there
                    decision = f"tp={layout.tp} cp={layout.cp} so that the batch divides: {self._verdict()}"
                    self._note("fewer sequences than replicas", "batch-bounds-dp", decision)
                    return

    def recompute(self) -> None:
        if self.state.usable or not self.state.starts:
            return
        self._move(replace(self.state.layout, recompute=Recompute(kind="full")))
        self._note(
            "still does not fit: recompute", "full-recompute-when-poor", f"full recomputation: {self._verdict()}"
        )

    def interleave(self) -> None:
        layout, layers = self.state.layout, self.problem.model.layers
        if layout.pp == 1 or not self.state.usable or layers % (2 * layout.pp):
            return
        better = self._price(replace(layout, vpp=2, schedule=None))
        if better.beats(self.state):
            self.state = better
            self._note("shrink the bubble", "interleave", f"two chunks per stage: {self._verdict()}")

    def micro_batch(self) -> None:
        size = self.state.layout.micro_batch
        start = size
        while size < _LARGEST_MICRO_BATCH and self.state.usable:
            bigger = self._price(replace(self.state.layout, micro_batch=size * 2))
            if not bigger.beats(self.state):
                break
            self.state, size = bigger, size * 2
        if size > start:
            self._note("raise throughput", "larger-micro-batch", f"micro-batch {size}: {self._verdict()}")

    # ---------------------------------------------------------------- helpers

    def _sharded_too_wide(self) -> bool:
        """Fully sharded plans first try recomputation instead; from 512 GPUs they need tensor parallelism as well."""
        if 1 in self.problem.runtime.zero_stages:
            return True
        if self.problem.cluster.gpus >= FSDP_RANKS:
            return True
        again = self._price(replace(self.state.layout, recompute=Recompute(kind="full")))
        return not again.usable

    def _with_tp(self, layout: Layout, tp: int) -> list[Layout]:
        return [replace(layout, tp=tp, sequence_parallel=None)]

    def _with_ep(self, layout: Layout, ep: int) -> list[Layout]:
        return [replace(layout, ep=ep)]

    def _with_pp(self, layout: Layout, pp: int) -> list[Layout]:
        """Even stages; where blocks do not divide, the ways to make them nearly even."""
        layers = self.problem.model.layers
        even = replace(layout, pp=pp)
        if layers % pp == 0 or pp < 3 or split_policy(self.problem.runtime.name) != "even":
            return [even]
        counted = [
            replace(even, account_for_embedding=embedding, account_for_loss=loss)
            for embedding, loss in ((True, True), (False, True), (True, False))
        ]
        width = -(-layers // pp)
        spare = layers - width * (pp - 2)
        ends = [(spare // 2, spare - spare // 2), (spare - 1, 1)]
        apart = [replace(even, first_stage_layers=first, last_stage_layers=last) for first, last in ends if first > 0]
        return [*counted, *apart]

    def _room_for(self, *, pp: int) -> bool:
        layout = self.state.layout
        return self.problem.cluster.gpus % (layout.tp * layout.cp * pp) == 0

    def _first_usable(self, axis: str, values: list[int], build: Callable[[Layout, int], list[Layout]]) -> int:
        """The smallest value that fits, else the largest that obeys the rules; moves there."""
        layouts = [(value, layout) for value in values for layout in build(self.state.layout, value)]
        outcomes = price_all(self.problem, self.runtime, [layout for _, layout in layouts])
        legal = [(value, out) for (value, _), out in zip(layouts, outcomes, strict=True) if isinstance(out, Priced)]
        chosen = next(((value, out) for value, out in legal if out.fits), legal[-1] if legal else None)
        if chosen is None:
            return getattr(self.state.layout, axis)
        self.state = State(chosen[1].layout, chosen[1])
        return chosen[0]

    def _move(self, layout: Layout) -> None:
        self.state = self._price(layout)

    def _price(self, layout: Layout) -> State:
        return State(layout, price_all(self.problem, self.runtime, [layout])[0])

    def _verdict(self) -> str:
        priced = self.state.outcome
        if isinstance(priced, Refused):
            return f"not legal yet ({priced.message})"
        needs = priced.reserved_bytes / 1e9
        capacity = self.problem.cluster.gpu.memory_bytes / 1e9
        return f"{needs:.1f} of {capacity:.1f} GB, " + (duration(priced.seconds) if priced.fits else "does not fit")

    def _note(self, step: str, rule_id: str, decision: str) -> None:
        step_now = PathStep(step=step, rule_id=rule_id, decision=decision)
        if isinstance(self.state.outcome, Priced):
            seconds, reserved = self.state.outcome.seconds, self.state.outcome.reserved_bytes
            step_now = replace(step_now, seconds=seconds, reserved_bytes=reserved)
        self.path.append(step_now)


def _taken(axis: str, chosen: int, words: str) -> str:
    """`words` on a degree, which is 1 where the rule finds none."""
    return words if chosen > 1 else f"no power of two above 1 is legal for {axis} here, it stays 1"


def _powers(limit: int) -> list[int]:
    """Powers of two up to `limit`, ascending."""
    return [1 << power for power in range(limit.bit_length())]
