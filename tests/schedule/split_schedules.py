"""What the tests of the schedules with a split backward share."""

from __future__ import annotations

from collections import Counter
from itertools import product

from fivefold.schedule import ActionKind, actions, in_flight, in_flight_by_chunk, in_flight_moments, legal, placement
from fivefold.schedule import simulate as run_lists

LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "A",
    ActionKind.INPUT_GRAD: "B",
    ActionKind.WEIGHT_GRAD: "W",
}
_PYTORCH = {"FORWARD": "F", "FULL_BACKWARD": "A", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


FEW = ((2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 11, 16, 23, 32))


def cases(kind, v, ranks=FEW[0], micro_batches=FEW[1]):
    return [(p, m) for p, m in product(ranks, micro_batches) if legal(kind, p, m, v)]


def simulate(kind, p, m, v, f, b, w, exchange=0.0):
    """Equal stages, or one time per virtual stage; b and w are the two parts of backward."""
    f, b, w = ([x] * (p * v) if isinstance(x, int | float) else list(x) for x in (f, b, w))
    whole = [x + y for x, y in zip(b, w, strict=True)]
    return run_lists(actions(kind, p, m, v), f, whole, exchange, weight_grad_s=w, placement=placement(kind))


def orders(kind, p, m, v) -> list[list[str]]:
    """Compute steps of every rank, as letter, micro-batch and virtual stage."""
    where = placement(kind)
    return [
        [f"{LETTERS[a.kind]}{a.micro_batch}.{where.stage(rank, a.chunk, p)}" for a in steps if a.kind in LETTERS]
        for rank, steps in enumerate(actions(kind, p, m, v))
    ]


def pytorch_order(steps) -> list[str]:
    """PyTorch's list in the same letters; a forward that it overlaps with a backward comes first there too."""
    flat = [part for step in steps if step is not None for part in (step.sub_actions or (step,))]
    return [f"{_PYTORCH[s.computation_type.name]}{s.microbatch_index}.{s.stage_index}" for s in flat]


def assert_runs_and_holds(kind, v):
    """No deadlock, every input there, each step once, and as many activations as in_flight says, everywhere."""
    for p, m in cases(kind, v, range(2, 9), range(1, 33)):
        # simulate refuses a deadlock, a missing input, a repeated step, a step without the one it follows.
        timeline = simulate(kind, p, m, v, 1.0, 1.0, 1.0, 0.1)
        assert timeline.in_flight.tolist() == in_flight(kind, p, m, v).tolist(), (p, m)
        for steps in actions(kind, p, m, v):
            done = Counter((a.kind, a.micro_batch, a.chunk) for a in steps if a.kind in LETTERS)
            assert set(done.values()) == {1}
            both = [(i, c) for kind_, i, c in done if kind_ in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)]
            assert sorted(both) == [(i, c) for i in range(m) for c in range(v)]


def assert_moments_cover_everything(kind, v):
    """Every moment of every rank is part of one of in_flight_moments, and by_chunk is a moment of most activations."""
    for p, m in cases(kind, v, (2, 3, 5), (3, 6, 13)):
        moments = in_flight_moments(kind, p, m, v)
        for rank, steps in enumerate(actions(kind, p, m, v)):
            held, seen = [0] * v, set()
            for action in steps:
                change = {"F": 1, "A": -1, "W": -1}.get(LETTERS.get(action.kind, ""), 0)
                if change:
                    held[action.chunk] += change
                    seen.add(tuple(held))
            rows = set(map(tuple, moments[:, rank].tolist()))
            assert rows <= seen
            assert all(any(all(a <= b for a, b in zip(x, row, strict=True)) for row in rows) for x in seen)
            assert in_flight_by_chunk(kind, p, m, v)[rank].sum() == max(map(sum, seen))
