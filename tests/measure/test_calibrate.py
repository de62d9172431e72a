"""Calibration: known factors are found, few runs do not bend them, and estimates, plans and files carry them."""

from __future__ import annotations

import json
import os
from math import exp, hypot, log
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import fivefold as ff
from fivefold.cluster.calibration import CONSTANTS, Calibration, Constant, Fit, load_calibration
from fivefold.errors import FivefoldError
from fivefold.estimate import interval
from fivefold.estimate.calibrated import apply, calibrated
from fivefold.estimate.problem import Problem
from fivefold.measure import fitting, shipped_runs, validate
from fivefold.measure.calibrate import calibrate
from fivefold.measure.convert import convert
from fivefold.measure.factors import WIDTHS, as_factors, fit, log_seconds, with_calibration, with_factors
from fivefold.measure.fitting import kept, left_out, solve
from fivefold.measure.predict import choose, predict_all
from fivefold.runtime import load_runtime

RUNS = {run.id: run for run in shipped_runs().runs}
SIMUMAX = [run for run in RUNS.values() if run.group == "simumax"][::4]
MODEL, WORK = ff.load_model("llama-3-8b"), ff.Workload(seq_len=8192, global_batch=64)
LAYOUT = ff.Layout(tp=2, micro_batch=1)


def measured_with(runs, factors, noise=()):
    """The runs with the seconds that the factors would give, times exp(noise)."""
    cases = [with_factors(choose(convert(run)), factors) for run in runs]
    seconds = [found.seconds.value for found in predict_all(cases)]
    off = [*noise, *[0.0] * (len(runs) - len(noise))]
    return [
        replace(run, step_time_s=value * exp(extra), d_step_time_s=None)
        for run, value, extra in zip(runs, seconds, off, strict=True)
    ]


def b200(factors, runs=3, spread=0.05):
    return Calibration(fits=(Fit(gpu="b200", runtime="megatron", runs=runs, factors=factors, spread=spread),))


# ---------------------------------------------------------------- the numbers


def test_known_factors_are_found_and_help_runs_that_were_not_fitted():
    truth = {"products": 1.05, "memory": 1.25}
    runs = measured_with(SIMUMAX, truth)
    found = calibrate(runs[:4]).fits[0]
    factors = {each.constant: each.value for each in found.factors}
    assert found.before.median_ape > 0.05
    assert found.after.median_ape < 0.3 * found.before.median_ape
    assert factors["products"] > 1.01
    assert factors["memory"] > 1.05
    plain = [row.error for row in validate(runs[4:]).rows]
    after = [row.error for row in validate(runs[4:], calibration=calibrate(runs[:4]).calibration).rows]
    assert max(np.abs(after)) < 0.025 < min(np.abs(plain))


def test_exact_runs_leave_every_factor_at_one():
    found = calibrate(measured_with(SIMUMAX[:3], {}))
    assert all(each.value == pytest.approx(1, abs=1e-6) for each in found.fits[0].factors)
    assert found.fits[0].after.median_ape == pytest.approx(0, abs=1e-9)


def test_one_run_moves_others_its_own_way_and_less():
    slow = measured_with(SIMUMAX[:2], {}, noise=(log(1.1), log(1.1)))
    found = calibrate(slow[:1])
    error = validate(slow[1:], calibration=found.calibration).rows[0].error
    assert -0.0909 < error < -0.01  # it was 1/1.1 - 1, and is nearer to the truth without passing it
    for each in found.fits[0].factors:
        assert abs(log(each.value)) < 2 * WIDTHS[each.constant]
    assert found.fits[0].left_out.n == 0


def test_one_odd_run_does_not_steer():
    runs = measured_with(SIMUMAX, {}, noise=(log(3),))
    found = calibrate(runs).fits[0]
    assert abs(found.after.bias - found.before.bias) < 0.03
    assert all(abs(log(each.value)) < 0.5 * WIDTHS[each.constant] for each in found.factors if each.constant != "step")


def test_runs_that_agree_narrow_the_interval_and_runs_that_do_not_widen_it():
    alike = calibrate(measured_with(SIMUMAX, {"products": 1.04})).fits[0]
    apart = calibrate(measured_with(SIMUMAX, {}, noise=(0.25, -0.25, 0.3, -0.3, 0.2, -0.2))).fits[0]
    assert alike.spread < alike.spread_before < apart.spread


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4))
def test_the_fit_is_ridge_regression_of_its_own_weights(seed, runs, factors):
    rng = np.random.default_rng(seed)
    slopes, logs, widths = rng.normal(size=(runs, factors)), rng.normal(0, 0.1, runs), rng.uniform(0.02, 0.5, factors)
    # The last solution has the weights of the round before: equal to the returned ones once the rounds have settled.
    with mock.patch.object(fitting, "_ROUNDS", 300):
        found = solve(slopes, logs, widths)
    scale = np.sqrt(found.weights) / found.residual
    rows = np.vstack([slopes * scale[:, None], np.diag(1 / widths)])
    by_hand = np.linalg.lstsq(rows, np.concatenate([logs * scale, np.zeros(factors)]), rcond=None)[0]
    np.testing.assert_allclose(found.logs, by_hand, atol=1e-3)


def test_what_is_left_out_is_what_refitting_the_others_leaves():
    rng = np.random.default_rng(3)
    slopes, logs, widths = rng.uniform(0, 1, (5, 3)), rng.normal(0, 0.1, 5), np.full(3, 0.1)
    apart = left_out(slopes, logs, widths)
    keep = np.array([0, 1, 3, 4])
    assert apart[2] == pytest.approx(logs[2] - slopes[2] @ solve(slopes[keep], logs[keep], widths).logs)


def test_factors_that_make_left_out_runs_worse_are_given_up():
    logs = np.array([0.05, -0.04, 0.06])
    assert kept(logs, 0.5 * logs) == 1.0
    assert kept(logs, logs) == 1.0
    assert 0.5 < kept(logs, 1.1 * logs) < 0.8
    assert kept(logs, 1.5 * logs) < 0.1
    assert kept(np.zeros(3), np.zeros(3)) == 1.0


def test_runs_that_contradict_each_other_move_less_than_runs_that_agree():
    """The first is as slow in both; the others bear it out or deny it."""
    alike = calibrate(measured_with(SIMUMAX[:3], {}, noise=(0.1, 0.1, 0.1))).fits[0]
    apart = calibrate(measured_with(SIMUMAX[:3], {}, noise=(0.1, -0.1, -0.1))).fits[0]
    moved = [sum(abs(log(each.value)) for each in found.factors) for found in (alike, apart)]
    assert moved[1] < 0.5 * moved[0]
    assert all(abs(row.after_error - row.before_error) < 0.03 for row in apart.rows)


def test_a_run_that_is_less_sure_cold_tells_less():
    """The same residual on a run of a wider interval moves the factors less."""
    cases = [choose(convert(run)) for run in measured_with(SIMUMAX[:1], {}, noise=(0.1,))]
    plain = np.abs(fit(cases).solution.logs).sum()
    wider = replace(cases[0], changes={**cases[0].changes, "time_spread": 0.3})
    assert np.abs(fit([wider]).solution.logs).sum() < 0.3 * plain


def test_the_interval_with_runs_is_a_share_of_the_one_without():
    """Errors as large as the intervals expect leave them, smaller ones narrow them, and one run says nothing."""
    alike = calibrate(measured_with(SIMUMAX, {"products": 1.04})).fits[0]
    apart = calibrate(measured_with(SIMUMAX, {}, noise=(0.25, -0.25, 0.3, -0.3, 0.2, -0.2))).fits[0]
    assert alike.scale < 0.8 < 1.2 < apart.scale
    assert calibrate(SIMUMAX[:1]).fits[0].scale == 1.0
    calibration = calibrate(measured_with(SIMUMAX, {"products": 1.04})).calibration
    cluster = ff.load_cluster("b200", gpus=8)
    for layout in (ff.Layout(micro_batch=1), ff.Layout(tp=8, micro_batch=1)):
        cold = ff.estimate(MODEL, cluster, WORK, layout).step.seconds
        warm = ff.estimate(MODEL, cluster, WORK, layout, calibration=calibration).step.seconds
        ratio = (warm.high / warm.value - 1) / (cold.high / cold.value - 1)
        assert ratio == pytest.approx(alike.scale, rel=0.05)


def test_the_left_out_error_is_near_a_true_refit():
    runs = measured_with(SIMUMAX[:5], {"products": 1.06, "memory": 1.1}, noise=(0.02, -0.02, 0.01))
    found = calibrate(runs).fits[0].rows
    again = validate(runs[:1], calibration=calibrate(runs[1:]).calibration).rows[0]
    assert found[0].left_out_error == pytest.approx(again.error, abs=0.004)


def test_slopes_sum_to_the_whole_step():
    """Every second but collective launches belongs to some factor: with all of them 1% slower a step is, or nearly."""
    cases = [choose(convert(run)) for run in SIMUMAX[:3]]
    slopes = fit(cases).slopes
    assert np.all(slopes > -0.01)
    assert np.all(slopes.sum(axis=1) < 1.15)
    assert np.all(slopes.sum(axis=1) > 0.5)


def test_factors_of_zero_logs_change_nothing():
    cases = [choose(convert(run)) for run in (SIMUMAX[0], RUNS["nanotron-0003"], RUNS["llmfoundry-0096"])]
    with_ones = log_seconds(cases, np.zeros(len(CONSTANTS)))
    plain = [found.seconds.value for found in predict_all(cases)]
    np.testing.assert_allclose(np.exp(with_ones), plain, rtol=1e-12)
    assert as_factors(np.zeros(len(CONSTANTS))) == dict.fromkeys(CONSTANTS, 1.0)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_each_factor_slows_some_published_run(constant):
    cases = [choose(convert(RUNS[name])) for name in ("simumax-0028", "nanotron-0007", "llmfoundry-0140")]
    plain = log_seconds(cases, np.zeros(len(CONSTANTS)))
    slower = log_seconds(cases, np.array([log(2) if name == constant else 0.0 for name in CONSTANTS]))
    assert np.all(slower >= plain - 1e-12)
    assert (slower - plain).max() > 1e-3
    assert (slower - plain).max() <= log(2) + 1e-12


# ---------------------------------------------------------------- where it goes


def test_estimate_plan_and_validate_take_it_and_say_so():
    cluster = ff.load_cluster("b200", gpus=8)
    calibration = b200({"products": 1.2, "memory": 1.2, "attention": 1.2})
    plain = ff.estimate(MODEL, cluster, WORK, LAYOUT)
    given = ff.estimate(MODEL, cluster, WORK, LAYOUT, calibration=calibration)
    carried = ff.estimate(MODEL, replace(cluster, calibration=calibration), WORK, LAYOUT)
    assert given.step.seconds == carried.step.seconds
    assert 1.1 < given.step.seconds.value / plain.step.seconds.value < 1.21
    assert given.memory == plain.memory
    assert "calibrated on 3 runs" in given.step.seconds.provenance
    assert given.step.seconds.high == pytest.approx(1.05 * given.step.seconds.value)
    assert {row.field for row in given.assumptions} >= {"calibration.products", "calibration.memory"}
    found = ff.plan(MODEL, cluster, WORK, top=1, calibration=calibration).plans[0]
    assert "calibrated on 3 runs" in found.step.seconds.provenance
    assert found.step.seconds.value > 1.1 * ff.plan(MODEL, cluster, WORK, top=1).plans[0].step.seconds.value
    row = validate([SIMUMAX[0]], calibration=calibration).rows[0]
    case = with_calibration(choose(convert(SIMUMAX[0])), calibration)
    assert row.predicted_s == predict_all([case])[0].seconds.value


def test_runs_of_dense_models_do_not_narrow_a_mixtures_interval():
    cluster, mixture = ff.load_cluster("b200", gpus=8), ff.load_model("mixtral-8x7b")
    dense = b200({"products": 1.1})
    own = Calibration(fits=(replace(dense.fits[0], experts=True),))
    work, layout = ff.Workload(seq_len=4096, global_batch=64), ff.Layout(ep=8, micro_batch=1)
    wide, narrow = (ff.estimate(mixture, cluster, work, layout, calibration=each).step.seconds for each in (dense, own))
    assert wide.value == narrow.value
    assert narrow.high / narrow.value == pytest.approx(1.05)
    assert wide.high / wide.value == pytest.approx(1 + hypot(0.05, interval.EXPERTS_SPREAD))
    assert not calibrate([SIMUMAX[0]]).calibration.fits[0].experts


def test_a_plan_file_keeps_it(tmp_path):
    cluster = replace(ff.load_cluster("b200", gpus=8), calibration=b200({"memory": 1.3}))
    found = ff.estimate(MODEL, cluster, WORK, LAYOUT)
    found.save(tmp_path / "plan.toml")
    saved = ff.load_plan(tmp_path / "plan.toml")
    assert saved.cluster.calibration == cluster.calibration
    assert saved.estimate().step.seconds == found.step.seconds
    assert found.to_dict()["inputs"]["cluster"]["calibration"]["fits"][0]["factors"] == {"memory": 1.3}


def test_it_is_applied_once():
    """The kernel applies it, and a kernel of its problem does not again; the JSON holds the cluster without."""
    factors: dict[Constant, float] = {"network": 2.0, "scale_up": 3.0, "step": 5.0, "launch": 1.5}
    cluster = replace(ff.load_cluster("b200", gpus=16), calibration=b200(factors))
    given = ff.estimate(MODEL, cluster, WORK, LAYOUT).inputs["cluster"]
    assert [link["bandwidth_per_s"] for link in given["links"]] == [link.bandwidth_per_s for link in cluster.links]
    problem = Problem(MODEL, cluster, WORK, load_runtime("megatron"))
    once = calibrated(problem)
    assert calibrated(once) is once
    assert [new.bandwidth_per_s for new in once.cluster.links] == pytest.approx(
        [old.bandwidth_per_s / factor for old, factor in zip(cluster.links, (3.0, 2.0), strict=True)]
    )
    assert once.runtime.step_overhead_s == pytest.approx(5 * problem.runtime.step_overhead_s)
    for name in ("launch_host_s", "group_launch_host_s", "dispatch_host_s"):
        assert getattr(once.runtime, name) == pytest.approx(1.5 * getattr(problem.runtime, name))
        assert getattr(problem.runtime, name) > 0
    profile = replace(load_runtime("nanotron"), unpack_host_s=1.0)
    assert apply(cluster, profile, factors)[1].unpack_host_s == 1.5


def test_another_gpu_or_runtime_is_refused_with_what_there_is():
    with pytest.raises(FivefoldError) as caught:
        ff.estimate(MODEL, ff.load_cluster("h100-sxm", gpus=8), WORK, LAYOUT, calibration=b200({"products": 1.1}))
    assert (caught.value.option, caught.value.legal) == ("--calibration", ["megatron on b200"])
    with pytest.raises(FivefoldError, match="nanotron on b200"):
        ff.plan(MODEL, ff.load_cluster("b200", gpus=8), WORK, runtime="nanotron", calibration=b200({"products": 1.1}))
    report = validate([SIMUMAX[0], RUNS["nanotron-0003"]], calibration=b200({"products": 1.1}))
    assert report.rows_used == 1
    assert "nanotron on h100-sxm" in report.skipped[0].reason


def test_runs_that_cannot_be_used_are_named_and_all_of_them_refused():
    blank = replace(SIMUMAX[0], id="x-1", step_time_s=None, d_step_time_s=None, tokens_per_s_per_gpu=None,
                    tflops_per_gpu=None)  # fmt: skip
    unknown = replace(SIMUMAX[0], id="x-2", gpu="Abacus")
    found = calibrate([SIMUMAX[0], blank, unknown])
    assert (found.runs_total, found.runs_used) == (3, 1)
    assert {each.id: "step time" in each.reason for each in found.skipped} == {"x-1": True, "x-2": False}
    with pytest.raises(FivefoldError, match="Abacus"):
        calibrate([unknown])
    with pytest.raises(FivefoldError, match="holds none"):
        calibrate([])


def test_runs_of_two_gpus_are_two_fits_and_a_cluster_of_the_users_is_used():
    found = calibrate([SIMUMAX[0], RUNS["nanotron-0003"]])
    assert {(fit.gpu, fit.runtime) for fit in found.calibration.fits} == {
        ("b200", "megatron"),
        ("h100-sxm", "nanotron"),
    }
    own = ff.load_cluster("b200", gpus=8)
    slow = replace(own, links=(replace(own.links[0], bandwidth_per_s=own.links[0].bandwidth_per_s / 4), *own.links[1:]))
    run = next(run for run in SIMUMAX if (run.tp or 1) > 1)
    plain, on_own = calibrate([run]).fits[0].rows[0], calibrate([run], cluster=slow).fits[0].rows[0]
    assert on_own.before_s > plain.before_s
    with pytest.raises(FivefoldError, match="b200, and the cluster has h100-sxm"):
        calibrate([run], cluster=ff.load_cluster("h100-sxm", gpus=8))


# ---------------------------------------------------------------- the file


@given(
    st.dictionaries(st.sampled_from(CONSTANTS), st.floats(1e-3, 1e3)), st.integers(1, 999), st.floats(0.001, 3)
)  # fmt: skip
def test_a_file_comes_back_as_it_was(tmp_path_factory, factors, runs, spread):
    path = tmp_path_factory.mktemp("calibration") / "c.toml"
    calibration = b200(factors, runs, spread)
    calibration.save(path)
    assert load_calibration(path) == calibration


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("fivefold-calibration/1", "fivefold-calibration/9"), "schema"),
        (("products = 1.1", "product = 1.1"), "product"),
        (("products = 1.1", "products = nan"), "factors"),
        (("products = 1.1", "products = -1.0"), "factors"),
        (("runs = 3", "runs = 0"), "runs"),
        (("runs = 3", "runs = 3\nrun = 4"), "'run'"),
        (('gpu = "b200"', 'gpu = "b\\u0007"'), "control"),
        (("spread = 0.05", ""), "spread"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path, change, words):
    path = tmp_path / "c.toml"
    b200({"products": 1.1}).save(path)
    text = path.read_text(encoding="utf-8")
    assert change[0] in text
    path.write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(FivefoldError, match=words) as caught:
        load_calibration(path)
    assert caught.value.option == "--calibration"


def test_a_missing_a_large_and_a_doubled_file(tmp_path):
    with pytest.raises(FivefoldError, match="No such file"):
        load_calibration(tmp_path / "none.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (1 << 19))
    with pytest.raises(FivefoldError, match="larger"):
        load_calibration(tmp_path / "large.toml")
    twice = Calibration(fits=b200({}).fits * 2)
    twice.save(tmp_path / "twice.toml")
    with pytest.raises(FivefoldError, match="two fits"):
        load_calibration(tmp_path / "twice.toml")
    with pytest.raises(FivefoldError, match="cannot be written"):
        twice.save(tmp_path / "no" / "such" / "folder.toml")


def test_the_json_has_the_envelope():
    out = json.loads(json.dumps(calibrate([SIMUMAX[0]]).to_dict()))
    assert (out["schema"], out["kind"]) == ("fivefold/1", "calibrate")
    assert {"calibration", "fits", "runs_total", "runs_used", "skipped", "inputs"} <= set(out)
    assert out["inputs"]["widths"] == WIDTHS


def test_a_device_or_a_pipe_is_no_calibration_file():
    """It would be waited for."""
    with pytest.raises(FivefoldError, match="no regular one") as caught:
        load_calibration(os.devnull)
    assert caught.value.code == "bad-calibration-file"
