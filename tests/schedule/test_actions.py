"""The action lists: the published order, every step once, no deadlock, memory as the closed forms say."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from fivefold.errors import FivefoldError
from fivefold.schedule import (
    SCHEDULES,
    ActionKind,
    Direction,
    actions,
    illegal_reason,
    in_flight,
    in_flight_by_chunk,
    in_flight_moments,
    legal,
    simulate,
)

KINDS = ("afab", "1f1b", "interleaved")
LEGAL = [
    (kind, p, m, v) for kind, p, m, v in product(KINDS, range(1, 9), range(1, 33), range(1, 5)) if legal(kind, p, m, v)
]


def compute_order(steps) -> str:
    """Compute steps as text: F<micro-batch>.<chunk> and B<micro-batch>.<chunk>."""
    letters = {ActionKind.FORWARD: "F", ActionKind.BACKWARD: "B"}
    return " ".join(f"{letters[a.kind]}{a.micro_batch}.{a.chunk}" for a in steps if a.kind in letters)


def held_by_chunk(steps, v: int) -> list[tuple[int, ...]]:
    """Micro-batches held of each chunk after every compute step, counted one by one."""
    held, seen = [0] * v, []
    for action in steps:
        if action.kind is ActionKind.FORWARD:
            held[action.chunk] += 1
        elif action.kind is ActionKind.BACKWARD:
            held[action.chunk] -= 1
        else:
            continue
        seen.append(tuple(held))
    return seen


def test_number_of_legal_combinations_is_not_small():
    assert len(LEGAL) == 8 * 32 * 2 + 3 * sum(32 // p for p in range(2, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_every_legal_schedule_runs_each_step_once_without_deadlock_and_holds_what_the_closed_form_says(kind):
    for _, p, m, v in (case for case in LEGAL if case[0] == kind):
        ranks = actions(kind, p, m, v)
        # simulate refuses a deadlock, a missing input, a repeated step, a forward without its backward.
        timeline = simulate(ranks, [1.0] * (p * v), [2.0] * (p * v), 0.1)
        for rank, steps in enumerate(ranks):
            expected = {(i, c) for i in range(m) for c in range(v)}
            for step_kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                done = [(a.micro_batch, a.chunk) for a in steps if a.kind is step_kind]
                assert len(done) == m * v and set(done) == expected, (p, m, v, rank, step_kind)
        assert timeline.in_flight.tolist() == in_flight(kind, p, m, v).tolist(), (p, m, v)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_the_moments_of_most_activations(kind):
    for _, p, m, v in (case for case in LEGAL if case[0] == kind and case[2] % 3 == 0):
        moments = in_flight_moments(kind, p, m, v)
        for rank, steps in enumerate(actions(kind, p, m, v)):
            seen = held_by_chunk(steps, v)
            most = max(map(sum, seen))
            peaks = [held for held in seen if sum(held) == most]
            assert tuple(in_flight_by_chunk(kind, p, m, v)[rank]) == peaks[0]
            assert set(map(tuple, moments[:, rank].tolist())) == set(peaks)
            # What is held at any other moment is part of what is held at one of these.
            assert all(any(all(a <= b for a, b in zip(held, peak, strict=True)) for peak in peaks) for held in seen)


def test_published_in_flight_counts():
    assert in_flight("1f1b", 4, 16).tolist() == [4, 3, 2, 1]
    assert in_flight("1f1b", 4, 2).tolist() == [2, 2, 2, 1]
    assert in_flight("afab", 4, 16).tolist() == [16] * 4
    # Korthikanti et al. 2022, section 4.2.3: interleaving multiplies the first stage's activations by 1 + (p-1)/(p v).
    for p, v in product((2, 4, 8, 64), (2, 3, 4)):
        chunks = in_flight("interleaved", p, 8 * p, v)[0]
        assert chunks / v / p == pytest.approx(1 + (p - 1) / (p * v), rel=1e-12)


def test_1f1b_order_of_the_megatron_paper():
    # Narayanan et al. 2021, figure 4, bottom: 4 ranks, 8 micro-batches.
    order = [compute_order(steps) for steps in actions("1f1b", 4, 8)]
    assert order[0].replace(".0", "") == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert order[3].replace(".0", "") == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_interleaved_order_of_megatron():
    # Worked by hand from get_schedule_table and get_pp_rank_microbatches: warm-up of 4 and 2 forwards.
    first, last = (compute_order(steps) for steps in actions("interleaved", 2, 4, 2))
    assert first == "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    assert last == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"


def test_interleaved_with_as_many_micro_batches_as_ranks_still_alternates_on_the_last_rank():
    last = compute_order(actions("interleaved", 4, 4, 2)[3])
    assert last.startswith("F0.0 F1.0 F2.0 F3.0 F0.1 B0.1 F1.1 B1.1")


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (2, 8, 3), (4, 8, 2), (4, 16, 3), (8, 16, 2), (4, 4, 2)])
def test_interleaved_compute_order_agrees_with_pytorch(p, m, v):
    """torch.distributed.pipelining computes its Interleaved1F1B on its own; stage = chunk * p + rank there as well."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    order_of = getattr(schedules.ScheduleInterleaved1F1B, "_calculate_single_rank_operations", None)
    if order_of is None:
        pytest.skip("this PyTorch computes the order elsewhere")
    # The method reads these attributes alone, so no process group is needed.
    shape = SimpleNamespace(n_local_stages=v, microbatches_per_round=p, pp_group_size=p, _n_microbatches=m)
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    for rank, steps in enumerate(actions("interleaved", p, m, v)):
        expected = [
            f"{letters[step.computation_type.name]}{step.microbatch_index}.{step.stage_index // p}"
            for step in order_of(shape, rank)
            if step is not None
        ]
        assert compute_order(steps).split() == expected


def test_steady_1f1b_groups_activation_and_gradient_and_interleaved_does_not_block():
    middle = actions("1f1b", 4, 8)[1]
    grouped = [a for a in middle if len(a.transfers) == 2]
    assert grouped and all(a.blocking for a in grouped)
    assert all({t.direction for t in a.transfers} == {Direction.SEND, Direction.RECV} for a in grouped)
    assert all(len({t.peer for t in a.transfers}) == 1 for a in grouped)
    overlapped = [a for a in actions("interleaved", 4, 8, 2)[1] if a.kind is ActionKind.EXCHANGE]
    assert overlapped and not any(a.blocking for a in overlapped)


def test_interleaving_moves_v_times_the_boundary_tensors():
    def sends(kind, v):
        return sum(t.direction is Direction.SEND for s in actions(kind, 4, 8, v) for a in s for t in a.transfers)

    assert sends("1f1b", 1) == 2 * 8 * 3
    assert sends("interleaved", 3) == 2 * 8 * (4 * 3 - 1)


@pytest.mark.parametrize(
    ("kind", "p", "m", "v", "words"),
    [
        ("interleaved", 1, 4, 2, "at least 2 pipeline ranks"),
        ("interleaved", 2, 4, 1, "at least 2 chunks"),
        ("interleaved", 4, 6, 2, "multiple of the 4"),
        ("interleaved", 6, 3, 2, "multiple of the 6"),  # NVIDIA-NeMo/Speech issue 14288
        ("1f1b", 2, 4, 2, "use interleaved"),
        ("afab", 2, 4, 2, "use interleaved"),
        ("1f1b", 2, 0, 1, "m has to be at least 1"),
    ],
)
def test_illegal_combinations_say_why(kind, p, m, v, words):
    assert not legal(kind, p, m, v)
    assert words in (illegal_reason(kind, p, m, v) or "")
    with pytest.raises(FivefoldError, match=words):
        actions(kind, p, m, v)
    with pytest.raises(FivefoldError, match=words):
        in_flight(kind, p, m, v)


def test_unknown_schedule_names_the_known_ones():
    with pytest.raises(FivefoldError) as caught:
        legal("2f2b", 2, 4)
    assert caught.value.legal == list(SCHEDULES)


def test_in_flight_is_fast_enough_for_large_pipelines():
    assert in_flight_moments("interleaved", 64, 512, 4).shape == (256, 64, 4)
    assert np.all(in_flight_moments("interleaved", 64, 512, 4).sum(-1) == in_flight("interleaved", 64, 512, 4))
