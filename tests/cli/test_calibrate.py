"""`fivefold calibrate`, and --calibration in the commands that price and in those that do not."""

from __future__ import annotations

import csv

import pytest

from fivefold.measure import shipped_runs
from fivefold.measure.runs import Run

ESTIMATE = "estimate llama-3-8b --gpu b200 --gpus 8 --tp 2 --gbs 64"


@pytest.fixture
def files(tmp_path):
    """A file of three published runs, and where the calibration goes."""
    rows = [run for run in shipped_runs().runs if run.group == "simumax"][::9]
    with (tmp_path / "runs.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(Run.__struct_fields__)
        for row in rows:
            cells = [getattr(row, name) for name in Run.__struct_fields__]
            writer.writerow(["" if cell is None else cell for cell in cells])
    return tmp_path / "runs.csv", tmp_path / "calibration.toml"


def test_runs_to_factors_to_an_estimate_and_a_plan_file(run, files, tmp_path):
    runs, calibration = map(str, files)
    told = run("calibrate", runs, "--save", calibration, "--rows")
    assert told.code == 0
    for words in (
        "3 of 3 runs fitted",
        "megatron on b200, 3 runs",
        "left out",
        "80% interval",
        "products",
        calibration,
    ):
        assert words in told.out
    plain = run(f"{ESTIMATE} --json").document["step"]["seconds"]
    assert "calibrated on 3 runs" in run(*ESTIMATE.split(), "--calibration", calibration).out
    after = run(*ESTIMATE.split(), "--calibration", calibration, "--json").document
    assert after["step"]["seconds"]["value"] != plain["value"]
    assert "calibrated on 3 runs" in after["step"]["seconds"]["provenance"]
    width = after["step"]["seconds"]["high"] / after["step"]["seconds"]["value"]
    assert width < plain["high"] / plain["value"]
    plan = str(tmp_path / "plan.toml")
    run(*ESTIMATE.split(), "--calibration", calibration, "--save", plan)
    assert run("estimate", plan, "--json").document["step"] == after["step"]
    dropped = run("estimate", plan, "--calibration", "none", "--json").document
    assert dropped["step"]["seconds"] == plain


def test_validate_takes_it(run, files):
    runs, calibration = map(str, files)
    report = run("calibrate", runs, "--save", calibration, "--json").document
    rows = run("validate", "--runs", runs, "--calibration", calibration, "--json").document["rows"]
    predicted = {row["id"]: row["after_s"] for row in report["fits"][0]["rows"]}
    assert {row["id"]: pytest.approx(row["predicted_s"]) for row in rows} == predicted


@pytest.mark.parametrize(
    "words",
    [
        "explain dp-limit --gpus 8",
        "verify llama-3-8b --gpus 8 --gbs 8 --runtime fivefold",
        "emulate llama-3-8b --gpus 8 --gbs 8 --runtime fivefold",
    ],
)
def test_where_nothing_is_priced_it_is_refused(run, words):
    found = run(f"{words} --calibration c.toml --json")
    assert found.code == 2
    assert found.document["error"]["option"] == "--calibration"


def test_what_cannot_be_used_is_said(run, files, tmp_path):
    assert run("calibrate", str(tmp_path / "none.csv")).code == 2
    runs, calibration = map(str, files)
    run("calibrate", runs, "--save", calibration)
    other = run(*ESTIMATE.replace("b200", "h100-sxm").split(), "--calibration", calibration, "--json")
    assert other.code == 2
    assert other.document["error"]["legal"] == ["megatron on b200"]
    missing = run(*ESTIMATE.split(), "--calibration", str(tmp_path / "no.toml"))
    assert (missing.code, "no.toml" in missing.err) == (2, True)
