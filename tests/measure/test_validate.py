"""Validation: the contract's object, its statistics against scipy, and its rows against the runs themselves."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.estimate import estimate
from fivefold.measure import RunTable, convert, shipped_runs, validate
from fivefold.measure.predict import choose, predict
from fivefold.measure.validate import errors, spearman, within_spread
from fivefold.runtime import load_runtime

stats = pytest.importorskip("scipy.stats")
RUNS = {run.id: run for run in shipped_runs().runs}


@pytest.fixture(scope="module")
def report():
    return validate()


def test_the_json_is_the_contracts(report):
    out = json.loads(json.dumps(report.to_dict()))
    assert (out["schema"], out["kind"]) == ("fivefold/1", "validate")
    assert {"version", "inputs", "rows_total", "rows_used", "skipped", "by_source", "rows"} <= set(out)
    for group in out["by_source"]:
        assert {"source", "gpu", "runtime", "n", "time", "memory", "spearman", "coverage80"} <= set(group)
        assert {"median_ape", "p90_ape", "bias"} <= set(group["time"])
        assert {"median_ape", "p90_ape", "bias"} <= set(group["memory"])
    for row in out["rows"]:
        assert {
            "id", "predicted_s", "low_s", "high_s", "measured_s", "error", "predicted_bytes", "measured_bytes",
            "memory_kind", "assumed", "recompute_stated",
        } <= set(row)  # fmt: skip


def test_every_row_is_used_or_skipped_with_a_reason(report):
    assert report.rows_total == len(RUNS)
    assert report.rows_used == len(report.rows)
    assert report.rows_total == report.rows_used + len(report.skipped)
    assert sorted([row.id for row in report.rows] + [row.id for row in report.skipped]) == sorted(RUNS)
    assert all(row.reason for row in report.skipped)
    assert sum(group.n for group in report.by_source) == report.rows_used


def test_rows_compare_what_was_measured(report):
    for row in report.rows:
        run = RUNS[row.id]
        assert row.low_s <= row.predicted_s <= row.high_s
        assert row.measured_s == run.measured_s
        assert row.error == pytest.approx(row.predicted_s / run.measured_s - 1)
        assert row.measured_bytes == run.measured_bytes
        assert (row.memory_kind is None) == (run.measured_bytes is None)
        assert row.recompute_stated == (run.recompute_kind != "unknown")


def test_statistics_are_those_of_the_rows(report):
    for group in report.by_source:
        own = [r for r in report.rows if r.id.startswith(f"{group.source}-")]
        if len(own) != group.n:
            continue  # a source on two GPUs is two groups
        relative = np.array([row.error for row in own])
        assert group.time.n == len(own)
        assert group.time.median_ape == pytest.approx(np.median(np.abs(relative)))
        assert group.time.bias == pytest.approx(np.mean(relative))
        inside = [row.low_s <= row.measured_s <= row.high_s for row in own]
        assert group.coverage80 == pytest.approx(np.mean(inside))


def test_simumax_memory_is_close_on_every_row(report):
    """Allocator peaks of published Megatron-LM runs, which the runtime's constants were checked against."""
    off = {row.id: row.memory_error for row in report.rows if row.id.startswith("simumax")}
    assert max(abs(value) for value in off.values() if value is not None) < 0.03


def test_memory_kinds_pick_their_numbers():
    base = RUNS["simumax-0001"]
    kinds = ("allocated", "reserved", "nvidia-smi")
    rows = [msgspec.structs.replace(base, id=f"x-{at}", mem_kind=kind) for at, kind in enumerate(kinds)]
    peak, reserved, device = (row.predicted_bytes for row in validate(rows).rows)
    assert peak < reserved < device
    last = msgspec.structs.replace(base, peak_mem_kind="max_memory_allocated of the last rank")
    assert validate([last]).rows[0].predicted_bytes < peak  # the last pipeline rank holds fewer micro-batches


def test_a_batch_that_replicas_cannot_share_is_as_long_as_the_fullest_ones():
    base = RUNS["simumax-0001"]
    odd, even = (msgspec.structs.replace(base, id=f"x-{gbs}", gbs=gbs) for gbs in (13, 16))
    first, second = validate([odd, even]).rows
    assert first.predicted_s == second.predicted_s
    assert "gbs" in first.assumed
    assert "gbs" not in second.assumed


def test_a_row_without_a_measurement_is_predicted_alike():
    run = RUNS["simumax-0001"]
    blank = msgspec.structs.replace(run, step_time_s=None, d_step_time_s=None, peak_mem_gb=None)
    with_it, without = validate([run]).rows[0], validate([blank]).rows[0]
    assert (with_it.predicted_s, with_it.predicted_bytes) == (without.predicted_s, without.predicted_bytes)
    assert (without.measured_s, without.error, without.memory_error) == (None, None, None)


_PERFORMANCE = (
    "step_time_s", "d_step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_mem_gb", "max_allocated_mib",
    "max_reserved_mib",
)  # fmt: skip


def test_what_is_not_stated_is_chosen_without_looking_at_the_performance():
    """Every open choice there is, with the performance columns of the rows shuffled between them."""
    runs = [
        msgspec.structs.replace(RUNS[name], recompute_kind="unknown", mbs=None, vocab=None, precision_kind=None)
        for name in ("simumax-0001", "nanotron-0001", "llmfoundry-0096", "nanotron-0017", "llmfoundry-0150")
    ]
    shuffled = [
        msgspec.structs.replace(run, **{name: getattr(other, name) for name in _PERFORMANCE})
        for run, other in zip(runs, [*runs[2:], *runs[:2]], strict=True)
    ]
    plain, moved = validate(runs).rows, validate(shuffled).rows
    assert len(plain) == len(runs)
    for a, b in zip(plain, moved, strict=True):
        assert (a.predicted_s, a.low_s, a.high_s) == (b.predicted_s, b.low_s, b.high_s)
        assert (a.predicted_bytes, a.assumed) == (b.predicted_bytes, b.assumed)
        assert a.measured_s != b.measured_s


def test_memory_alone_is_enough():
    only = msgspec.structs.replace(RUNS["simumax-0001"], step_time_s=None, d_step_time_s=None)
    report = validate([only])
    assert report.rows[0].error is None
    assert report.by_source[0].time.median_ape is None
    assert report.by_source[0].coverage80 is None
    assert report.by_source[0].memory.n == 1


def test_sources_and_runtime_are_chosen():
    assert {row.id.split("-")[0] for row in validate(sources=["nanotron"]).rows} == {"nanotron"}
    with pytest.raises(FivefoldError) as caught:
        validate(sources=["nanotrn"])
    assert "nanotron" in caught.value.legal
    other = validate([RUNS["llmfoundry-0096"]], runtime="fsdp2")
    assert other.by_source[0].runtime == "fsdp"
    with pytest.raises(FivefoldError, match="Unknown runtime"):
        validate([RUNS["simumax-0001"]], runtime="nosuch")


def test_no_rows_is_an_answer():
    report = validate(RunTable(runs=(), where="empty"))
    assert (report.rows_total, report.rows_used, report.by_source) == (0, 0, ())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=30))
def test_rank_correlation_is_scipys(pairs):
    a, b = np.array(pairs, dtype=float).T
    found = spearman(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


@given(st.lists(st.floats(-0.9, 5), min_size=1, max_size=50))
def test_errors_keep_their_order(values):
    found = errors([*values, None])
    assert found.n == len(values)
    assert found.median_ape is not None
    assert found.p90_ape is not None
    assert found.bias is not None
    assert 0 <= found.median_ape <= found.p90_ape + 1e-12
    assert abs(found.bias) <= max(map(abs, values)) + 1e-12


def test_spread_within_models_ignores_their_level():
    logs = np.array([0.1, 0.3, -5.0, -4.8, 7.0])
    assert within_spread(logs, ["a", "a", "b", "b", "c"]) == pytest.approx((0.04 / 2) ** 0.5)
    assert within_spread(logs, list("abcde")) is None


def test_importing_the_room_needs_no_torch():
    code = "import sys, fivefold.measure; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_row_has_the_interval_that_an_estimate_has():
    case = choose(convert(RUNS["simumax-0001"]))
    assert not case.changes
    told = estimate(case.model, case.cluster, case.work, case.layout, runtime=case.runtime).step
    found = predict(case).seconds
    assert told is not None
    assert (found.low, found.value, found.high) == pytest.approx(
        (told.seconds.low, told.seconds.value, told.seconds.high), rel=1e-9
    )


def test_layouts_of_one_question_differ_by_less_than_a_tie(report):
    """Of pairs of shipped runs that differ in their layouts alone, half have a ratio that is predicted better."""
    logs: dict[tuple[object, ...], list[float]] = {}
    for row in (row for row in report.rows if row.measured_s):
        run = RUNS[row.id]
        question = (run.group, run.model, run.gpu, run.gpus, run.seq, run.layers, run.hidden)
        logs.setdefault(question, []).append(math.log(row.predicted_s / row.measured_s))
    off = [abs(a - b) for members in logs.values() for a, b in itertools.combinations(members, 2)]
    assert len(off) > 100
    assert np.median(off) < load_runtime("megatron").tie_spread
