"""Event simulator of action lists: when every action starts and ends, and whether the lists can run at all.

Transfers rendezvous: one starts when both sides have posted it and takes a given time. Transfers do not share
bandwidth and compute does not slow down beside them. Ranks are independent otherwise, so the order in which the
simulator visits them cannot change a result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import FivefoldError
from fivefold.schedule.actions import Action, ActionKind, Direction, Placement, RankActions, Tensor, Transfer

_Key = tuple[Tensor, int, int]  # tensor, micro-batch, consuming virtual stage

# By how much a compute step changes the number of activations held.
_HELD_BY = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: -1,
    ActionKind.INPUT_GRAD: 0,
    ActionKind.WEIGHT_GRAD: -1,
}


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened, in seconds from the start.

    start_s, end_s: per rank one array, an entry per action. An EXCHANGE starts when posted and ends when its last
                    transfer has arrived, whether or not the rank waited for it.
    busy_s:         [p] seconds of compute; bubble_s = makespan_s - busy_s.
    in_flight:      [p] most micro-batch x chunk activations held at once, from forward to the end of backward, or
                    of the weight gradient where backward is split.
    """

    start_s: tuple[NDArray[np.float64], ...]
    end_s: tuple[NDArray[np.float64], ...]
    makespan_s: float
    busy_s: NDArray[np.float64]
    bubble_s: NDArray[np.float64]
    in_flight: NDArray[np.int64]


def simulate(
    ranks: Sequence[RankActions],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    exchange_s: float = 0.0,
    *,
    weight_grad_s: Sequence[float] | None = None,
    placement: Placement = Placement.LOOP,
) -> Timeline:
    """Run one action list per rank.

    forward_s, backward_s: [p*v] seconds of one micro-batch on each virtual stage; backward_s is the whole backward.
    exchange_s:            seconds of one transfer.
    weight_grad_s:         [p*v] the part of backward_s that a WEIGHT_GRAD takes; INPUT_GRAD takes the rest. Needed
                           by lists that split the backward.
    placement:             which rank holds which virtual stage.
    Raises FivefoldError if the lists deadlock (saying who waits for whom), use a tensor that does not exist, run a
    step twice or not at all, send what nobody receives, or hold an action that has no time here.
    """
    p = len(ranks)
    if p == 0 or len(forward_s) != len(backward_s) or len(forward_s) == 0 or len(forward_s) % p:
        raise FivefoldError(
            f"Stage times have to come as {p} ranks times a whole number of chunks; "
            f"forward_s has {len(forward_s)} and backward_s {len(backward_s)}.",
            code="bad-stage-times",
        )
    seconds = {ActionKind.FORWARD: [float(t) for t in forward_s], ActionKind.BACKWARD: [float(t) for t in backward_s]}
    if weight_grad_s is not None:
        weights, whole = [float(t) for t in weight_grad_s], seconds[ActionKind.BACKWARD]
        if len(weights) != len(whole) or any(not 0 <= w <= b for w, b in zip(weights, whole, strict=False)):
            raise FivefoldError(
                f"weight_grad_s needs {len(whole)} times between 0 and the stage's backward_s; it has {weights}.",
                code="bad-stage-times",
                option="weight_grad_s",
            )
        seconds[ActionKind.WEIGHT_GRAD] = weights
        seconds[ActionKind.INPUT_GRAD] = [b - w for b, w in zip(whole, weights, strict=True)]
    return _Simulation(ranks, seconds, exchange_s, placement).run()


@dataclass(slots=True)
class _Rank:
    actions: RankActions
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    clock_s: float = 0.0
    busy_s: float = 0.0
    next_action: int = 0
    posted: bool = False  # whether the EXCHANGE at next_action is posted already
    held: int = 0
    most_held: int = 0
    forwards: set[tuple[int, int]] = field(default_factory=set)  # (micro-batch, virtual stage) done
    backwards: set[tuple[int, int]] = field(default_factory=set)  # the input's gradient is there
    weights: set[tuple[int, int]] = field(default_factory=set)  # the weights' gradients are there
    waits_for: _Key | None = None

    def done_by(self, kind: ActionKind) -> tuple[set[tuple[int, int]], ...]:
        """What a compute step of this kind finishes."""
        if kind is ActionKind.FORWARD:
            return (self.forwards,)
        if kind is ActionKind.BACKWARD:
            return self.backwards, self.weights
        return (self.backwards,) if kind is ActionKind.INPUT_GRAD else (self.weights,)


class _Simulation:
    def __init__(
        self, ranks: Sequence[RankActions], seconds: dict[ActionKind, list[float]], c: float, placement: Placement
    ) -> None:
        self._ranks = [_Rank(actions) for actions in ranks]
        self._p, self._last_stage = len(ranks), len(seconds[ActionKind.FORWARD]) - 1
        self._seconds, self._c, self._placement = seconds, c, placement
        self._post_s: dict[tuple[_Key, Direction], float] = {}
        self._ranks_of: dict[tuple[_Key, Direction], tuple[int, int]] = {}  # (posting rank, its peer)
        self._arrival_s: dict[_Key, float] = {}
        self._waiting: dict[_Key, list[int]] = {}
        self._ready = deque(range(self._p))
        # Exchanges that did not block: their end is known only when all transfers are.
        self._open: list[tuple[int, int, Action]] = []

    def run(self) -> Timeline:
        while self._ready:
            self._run_until_blocked(self._ready.popleft())
        self._refuse_deadlock()
        self._refuse_unfinished()
        for rank, index, action in self._open:
            self._ranks[rank].end_s[index] = self._complete_s(action)
        starts = tuple(np.array(r.start_s) for r in self._ranks)
        ends = tuple(np.array(r.end_s) for r in self._ranks)
        makespan = max((float(e.max()) for e in ends if len(e)), default=0.0)
        busy = np.array([r.busy_s for r in self._ranks])
        return Timeline(starts, ends, makespan, busy, makespan - busy, np.array([r.most_held for r in self._ranks]))

    def _run_until_blocked(self, index: int) -> None:
        rank = self._ranks[index]
        while rank.next_action < len(rank.actions):
            action = rank.actions[rank.next_action]
            done = self._exchange(index, action) if action.kind is ActionKind.EXCHANGE else self._compute(index, action)
            if not done:
                return
            rank.next_action += 1
            rank.posted = False

    def _wait(self, index: int, key: _Key) -> bool:
        """Whether the transfer has not arrived; if so the rank will be woken by it."""
        if key in self._arrival_s:
            return False
        self._ranks[index].waits_for = key
        self._waiting.setdefault(key, []).append(index)
        return True

    # Exchanges

    def _exchange(self, index: int, action: Action) -> bool:
        rank = self._ranks[index]
        if not rank.posted:
            rank.posted = True
            for transfer in action.transfers:
                self._post(index, transfer)
        if not action.blocking:
            self._open.append((index, rank.next_action, action))
            rank.start_s.append(rank.clock_s)
            rank.end_s.append(rank.clock_s)
            return True
        if any(self._wait(index, _key(t)) for t in action.transfers):
            return False
        rank.start_s.append(rank.clock_s)
        rank.clock_s = max(rank.clock_s, self._complete_s(action))
        rank.end_s.append(rank.clock_s)
        return True

    def _post(self, index: int, transfer: Transfer) -> None:
        rank, key = self._ranks[index], _key(transfer)
        if transfer.direction is Direction.SEND:
            self._refuse_sending_what_is_not_there(index, transfer)
        if (key, transfer.direction) in self._post_s:
            raise _broken(f"{_tensor(key)} is posted twice as {transfer.direction.value}", index)
        self._post_s[key, transfer.direction] = rank.clock_s
        self._ranks_of[key, transfer.direction] = (index, transfer.peer)
        other = Direction.RECV if transfer.direction is Direction.SEND else Direction.SEND
        if (key, other) not in self._post_s:
            return
        if self._ranks_of[key, other] != (transfer.peer, index):
            raise _broken(f"the two sides of {_tensor(key)} do not name each other", index)
        self._arrival_s[key] = max(rank.clock_s, self._post_s[key, other]) + self._c
        self._ready.extend(self._waiting.pop(key, ()))

    def _refuse_sending_what_is_not_there(self, index: int, transfer: Transfer) -> None:
        rank = self._ranks[index]
        if transfer.tensor is Tensor.ACTIVATION:
            made = (transfer.micro_batch, transfer.virtual_stage - 1) in rank.forwards
        else:
            made = (transfer.micro_batch, transfer.virtual_stage + 1) in rank.backwards
        if not made:
            raise _broken(f"{_tensor(_key(transfer))} is sent before it is made", index)

    def _complete_s(self, action: Action) -> float:
        return max(self._arrival_s[_key(t)] for t in action.transfers)

    # Compute

    def _compute(self, index: int, action: Action) -> bool:
        rank, kind, micro_batch, chunk = self._ranks[index], action.kind, action.micro_batch, action.chunk
        if kind not in self._seconds:
            known = ", ".join(k.value for k in self._seconds)
            raise _broken(f"the simulator has no time for {kind.value}; it was given those of {known}", index)
        if micro_batch is None or chunk is None or not 0 <= chunk * self._p <= self._last_stage:
            raise _broken(f"{kind.value} names no micro-batch and chunk of this rank", index)
        step = (micro_batch, self._placement.stage(index, chunk, self._p))
        self._refuse_wrong_order(index, kind, step)
        needed = self._input_of(index, kind, step)
        if needed is not None and self._wait(index, needed):
            return False
        start_s = max(rank.clock_s, self._arrival_s[needed] if needed is not None else 0.0)
        seconds = self._seconds[kind][step[1]]
        rank.start_s.append(start_s)
        rank.clock_s = start_s + seconds
        rank.end_s.append(rank.clock_s)
        rank.busy_s += seconds
        for done in rank.done_by(kind):
            done.add(step)
        rank.held += _HELD_BY[kind]
        rank.most_held = max(rank.most_held, rank.held)
        return True

    def _refuse_wrong_order(self, index: int, kind: ActionKind, step: tuple[int, int]) -> None:
        rank, (micro_batch, stage) = self._ranks[index], step
        for done in rank.done_by(kind):
            if step in done:
                raise _broken(f"micro-batch {micro_batch} runs twice through stage {stage}", index)
        if kind is ActionKind.WEIGHT_GRAD and step not in rank.backwards:
            raise _broken(f"micro-batch {micro_batch} has no gradients for the weights of stage {stage} yet", index)
        if kind is not ActionKind.FORWARD and step not in rank.forwards:
            raise _broken(f"micro-batch {micro_batch} runs backward through stage {stage} before forward", index)

    def _input_of(self, index: int, kind: ActionKind, step: tuple[int, int]) -> _Key | None:
        """The transfer that a compute step waits for, None where its input is made on this rank; refuses it missing."""
        micro_batch, stage = step
        is_forward = kind is ActionKind.FORWARD
        if kind is ActionKind.WEIGHT_GRAD or stage == (0 if is_forward else self._last_stage):
            return None
        maker = stage - 1 if is_forward else stage + 1
        key = (Tensor.ACTIVATION if is_forward else Tensor.GRADIENT, micro_batch, stage)
        if self._placement.home(maker, self._p)[0] == index:
            made = self._ranks[index].forwards if is_forward else self._ranks[index].backwards
            if (micro_batch, maker) not in made:
                raise _broken(f"{_tensor(key)} is used before this rank has made it", index)
            return None
        if (key, Direction.RECV) not in self._post_s or self._ranks_of[key, Direction.RECV][0] != index:
            raise _broken(f"{_tensor(key)} is used and was never asked for", index)
        return key

    # What the lists must not do

    def _refuse_deadlock(self) -> None:
        stuck = [i for i, r in enumerate(self._ranks) if r.next_action < len(r.actions)]
        if not stuck:
            return
        waits = "; ".join(self._waits(i) for i in stuck)
        raise FivefoldError(f"The pipeline deadlocks: {waits}.", code="schedule-deadlock", value=stuck)

    def _waits(self, index: int) -> str:
        rank = self._ranks[index]
        key = rank.waits_for
        if key is None:  # a rank stops only in _wait
            return f"rank {index} stopped at action {rank.next_action}"
        side = Direction.RECV if (key, Direction.RECV) in self._post_s else Direction.SEND
        peer = self._ranks_of[key, side][0 if self._ranks_of[key, side][0] != index else 1]
        return f"rank {index} waits at action {rank.next_action} for rank {peer} to exchange {_tensor(key)}"

    def _refuse_unfinished(self) -> None:
        for key, direction in self._post_s:
            if key not in self._arrival_s:
                raise _broken(
                    f"{_tensor(key)} is posted as {direction.value} and the other side never does",
                    self._ranks_of[key, direction][0],
                )
        for index, rank in enumerate(self._ranks):
            if rank.forwards != rank.backwards:
                micro_batch, stage = min(rank.forwards - rank.backwards)
                raise _broken(f"micro-batch {micro_batch} never runs backward through stage {stage}", index)
            if rank.forwards != rank.weights:
                micro_batch, stage = min(rank.forwards - rank.weights)
                raise _broken(f"micro-batch {micro_batch} never gives the weights of stage {stage} their part", index)


def _key(transfer: Transfer) -> _Key:
    return transfer.tensor, transfer.micro_batch, transfer.virtual_stage


def _tensor(key: _Key) -> str:
    tensor, micro_batch, stage = key
    return f"the {tensor.value} of micro-batch {micro_batch} for stage {stage}"


def _broken(what: str, rank: int) -> FivefoldError:
    return FivefoldError(f"The action list of rank {rank} cannot run: {what}.", code="broken-schedule", value=rank)
