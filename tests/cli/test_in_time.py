"""The fewest GPUs that finish in time: no smaller count does, by plans asked for one by one."""

from __future__ import annotations

import pytest

from fivefold.search.gpu_counts import close_counts, usual_counts

SMALL = "--seq 1024 --gbs 96 --tokens 20B"


def test_counts_are_whole_nodes_by_quarters_of_a_doubling() -> None:
    assert list(close_counts(8, 128)) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    assert list(close_counts(8, 4)) == [1, 2, 4]


def test_usual_counts_are_those_that_batches_divide_by() -> None:
    assert usual_counts(8, 130) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert usual_counts(6, 40) == [1, 2, 4, 6, 12, 18, 24, 36]


def test_the_fewest_gpus_and_none_below(run) -> None:
    document = run(f"plan gpt2 {SMALL} --days 2 --json").document
    rows = document["counts"]
    first = next(row for row in rows if row["in_time"])
    assert document["gpus"] == first["gpus"] and document["inputs"]["cluster"]["gpus"] == first["gpus"]
    assert all(row["gpus"] < first["gpus"] for row in rows if not row["in_time"])
    for gpus in close_counts(8, first["gpus"]):
        one = run(f"plan gpt2 {SMALL} --gpus {gpus} --json").document
        late = one["budget"]["reliability"]["seconds"] > 2 * 86_400
        assert late == (gpus < first["gpus"])


def test_a_time_that_nothing_keeps_is_an_answer_of_no(run) -> None:
    for flags in ("--days 0.001 --gpus 2", "--days 0.2 --gpus 2"):  # the first is beyond the peak
        outcome = run(f"plan gpt2 {SMALL} {flags} --json")
        assert outcome.code == 1
        document = outcome.document
        assert not document["plans"] and "days" in document["advice"][0] and document["counts"]
        assert "come nearest" in run(f"plan gpt2 {SMALL} {flags}").out


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        ("--days 3 --seq 1024 --gbs 96", "--tokens"),
        (f"--days -1 {SMALL}", "--days"),
        (f"--days 3 --objective memory {SMALL}", "--objective"),
        ("--gpus 8 --restart-minutes 5", "--tokens"),
        (f"--gpus 8 --gpu-mtbf-hours 0 {SMALL}", "--gpu-mtbf-hours"),
    ],
)
def test_what_is_missing_or_impossible_is_named(run, flags: str, option: str) -> None:
    outcome = run(f"plan gpt2 {flags} --json")
    assert outcome.code == 2 and outcome.document["error"]["option"] == option


def test_the_table_names_every_count(run) -> None:
    out = run(f"plan gpt2 {SMALL} --days 2 --price 2").out
    assert "How many GPUs" in out and "goodput" in out and "cost" in out
