"""What the schedules that split the backward share: when tensors travel, and how much a rank holds.

Each such schedule is an order of compute steps per rank; the transfers follow from it by one rule.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from fivefold.schedule.actions import Action, ActionKind, Boundary, RankActions, exchange
from fivefold.schedule.schedule import Ints

_HELD = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRAD: -1}
_WAITING = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUT_GRAD: -1}
_OWED = {ActionKind.INPUT_GRAD: 1, ActionKind.WEIGHT_GRAD: -1}


def with_exchanges(order: list[Action], edge: Boundary, m: int) -> RankActions:
    """The compute steps of one rank with the transfers between them, none of which stops the rank.

    A step's result leaves right after it, and the next micro-batch's input of the same direction and chunk is asked
    for then. The first gradient of a chunk is asked for after its first forward. Within a chunk micro-batches run in
    ascending order.
    """
    chunks = sorted({action.chunk for action in order if action.chunk is not None})
    steps = exchange(*(edge.recv_activation(0, chunk) for chunk in chunks), blocking=False)
    for action in order:
        steps.append(action)
        i, chunk = action.micro_batch, action.chunk
        if i is None or chunk is None:
            continue
        is_last = i == m - 1
        if action.kind is ActionKind.FORWARD:
            next_input = None if is_last else edge.recv_activation(i + 1, chunk)
            first_gradient = edge.recv_gradient(0, chunk) if i == 0 else None
            steps += exchange(edge.send_activation(i, chunk), next_input, first_gradient, blocking=False)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
            next_gradient = None if is_last else edge.recv_gradient(i + 1, chunk)
            steps += exchange(edge.send_gradient(i, chunk), next_gradient, blocking=False)
    return steps


def whole_backward(order: RankActions) -> RankActions:
    """The same actions with every backward whole at its INPUT_GRAD, and nothing left for its WEIGHT_GRAD.

    What a rank does that cannot split its backward, because its activations exist only while it runs (recomputation).
    """
    return [
        replace(action, kind=ActionKind.BACKWARD) if action.kind is ActionKind.INPUT_GRAD else action
        for action in order
        if action.kind is not ActionKind.WEIGHT_GRAD
    ]


def peaks(ranks: list[RankActions], v: int) -> Ints:
    """[K, p, v] micro-batches of each chunk held by each rank, by counting: what `Schedule.held` gives at K steps.

    Row 0 is the first moment at which a rank holds the most. The others are the moments that no other moment dominates,
    that is, holds as many or more of every chunk: whatever bytes the chunks have, one of these rows is the peak.
    """
    per_rank = [_peaks_of(actions, v) for actions in ranks]
    length = max(map(len, per_rank))
    # A rank with fewer moments repeats its first, which changes no maximum.
    return np.array([[rows[k] if k < len(rows) else rows[0] for rows in per_rank] for k in range(length)])


def _peaks_of(actions: RankActions, v: int) -> list[tuple[int, ...]]:
    held, seen = [0] * v, {}
    for action in actions:
        if action.kind in _HELD and action.chunk is not None:
            held[action.chunk] += _HELD[action.kind]
            seen.setdefault(tuple(held))
    first = max(seen, key=sum)  # the first of several
    largest = [a for a in seen if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in seen)]
    return [first, *(held for held in largest if held != first)]


def backward_moments(ranks: list[RankActions], v: int) -> tuple[Ints, Ints, Ints]:
    """(waiting, owed, apart) at the starts of backward steps: micro-batches of each chunk of each rank, [K, p, v], that
    wait for their backward, and that have the gradient of their input and owe those of the weights; and whether the
    step that starts is an INPUT_GRAD, [K, p].

    The rows are the moments that no other one dominates, by having as many or more of both kinds of every chunk.
    """
    per_rank = [_backward_moments_of(actions, v) for actions in ranks]
    length = max(map(len, per_rank))
    rows = np.array([[rows[k] if k < len(rows) else rows[0] for rows in per_rank] for k in range(length)])
    return rows[..., :v], rows[..., v : 2 * v], rows[..., 2 * v]


def _backward_moments_of(actions: RankActions, v: int) -> list[tuple[int, ...]]:
    waiting, owed = [0] * v, [0] * v
    seen: dict[tuple[int, ...], None] = {}
    for action in actions:
        if action.chunk is None:
            continue
        if action.kind in (ActionKind.INPUT_GRAD, ActionKind.BACKWARD):
            seen.setdefault((*waiting, *owed, int(action.kind is ActionKind.INPUT_GRAD)))
        waiting[action.chunk] += _WAITING.get(action.kind, 0)
        owed[action.chunk] += _OWED.get(action.kind, 0)
    return [a for a in seen if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in seen)]
