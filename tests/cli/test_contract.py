"""JSON documents and exit codes against the published contract, whose field names are written out here."""

from __future__ import annotations

import json
from typing import Any

import pytest

LAYOUT = [
    "tp",
    "cp",
    "cp_kind",
    "pp",
    "vpp",
    "ep",
    "etp",
    "dp",
    "edp",
    "dp_shard",
    "dp_replicate",
    "zero",
    "sequence_parallel",
    "micro_batch",
    "num_micro_batches",
    "schedule",
    "stages",
    "recompute",
    "overlap",
]
MEMORY = ["peak_bytes", "reserved_bytes", "capacity_bytes", "peak_stage", "peak_phase", "stages", "timeline"]
STAGE = ["stage", "peak_bytes", "in_flight", "breakdown"]
CATEGORIES = ["weights", "gradients", "master", "optimizer", "activations", "logits", "gathered", "buffers", "reserve"]
STEP = ["seconds", "breakdown_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu"]
OWNERS = ["compute", "recompute", "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer", "other"]
ESTIMATE = ["layout", "valid", "violations", "fits", "memory", "step", "params", "flops_per_token", "traffic"]
PLAN = ["searched", "valid", "fitting", "priced", "bounded", "seconds_used", "objective", "plans", "pareto", "why"]
WHY = ["dimensions", "neighbours", "playbook", "limits"]
RULE = ["id", "option", "value", "legal", "message", "source", "runtimes"]
SMALL = "--gpus 4 --seq 1024 --gbs 16"


def has(value: dict[str, Any], names: list[str]) -> None:
    missing = [name for name in names if name not in value]
    assert not missing, f"{missing} missing from {sorted(value)}"


def enveloped(document: dict[str, Any], kind: str) -> None:
    assert document["schema"] == "fivefold/1"
    assert document["kind"] == kind
    assert isinstance(document["version"], str)
    assert isinstance(document["inputs"], dict)


def check_layout(layout: dict[str, Any]) -> None:
    has(layout, LAYOUT)
    has(layout["recompute"], ["kind", "layers", "modules"])
    has(layout["overlap"], ["grad", "param", "tp", "ep"])
    assert all(layout["overlap"][name] in (True, False) for name in ("grad", "param", "tp", "ep"))
    assert layout["sequence_parallel"] in (True, False)


def check_estimate(estimate: dict[str, Any]) -> None:
    has(estimate, ESTIMATE)
    check_layout(estimate["layout"])
    memory, step = estimate["memory"], estimate["step"]
    has(memory, MEMORY)
    for stage in memory["stages"]:
        has(stage, STAGE)
        has(stage["breakdown"], CATEGORIES)
        assert sum(stage["breakdown"].values()) == stage["peak_bytes"]
    has(step, STEP)
    has(step["seconds"], ["value", "low", "high", "provenance"])
    has(step["breakdown_s"], OWNERS)
    assert sum(step["breakdown_s"].values()) == pytest.approx(step["seconds"]["value"], rel=1e-9)
    has(step["mfu"], ["noncausal", "causal", "hardware"])
    for row in estimate["traffic"]:
        has(row, ["axis", "grid", "collective", "count", "bytes_sent_per_rank", "level", "exposed_s"])


def test_plan(run) -> None:
    outcome = run(f"plan gpt2-medium {SMALL} --json")
    assert (outcome.code, outcome.err) == (0, "")
    document = outcome.document
    enveloped(document, "plan")
    has(document, PLAN)
    has(document["why"], WHY)
    has(document["why"]["playbook"], ["path", "estimate", "gap_s"])
    assert document["searched"] >= document["valid"] >= document["fitting"] >= document["priced"] > 0
    for estimate in document["plans"]:
        check_estimate(estimate)
    assert all(0 <= index < len(document["plans"]) for index in document["pareto"])
    assert document["ramp"] is None


def test_estimate(run) -> None:
    outcome = run("estimate llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512 --sequence-parallel --json")
    assert outcome.code == 0
    document = outcome.document
    enveloped(document, "estimate")
    check_estimate(document)
    assert document["layout"]["dp"] == 2
    assert document["inputs"]["workload"]["global_batch"] == 512
    assert document["inputs"]["defaults"]["--gpu"] == "h100-sxm"
    assert document["assumptions"]


def test_an_estimate_is_the_librarys(run) -> None:
    import fivefold as ff

    work = ff.Workload(seq_len=1024, global_batch=16)
    expected = ff.estimate(
        ff.load_model("gpt2"), ff.load_cluster("a100-80g-sxm", gpus=4), work, ff.Layout(tp=2, micro_batch=2)
    )
    document = run(f"estimate gpt2 --gpu a100-80g-sxm {SMALL} --tp 2 --mbs 2 --json").document
    assert document["step"]["seconds"]["value"] == expected.step.seconds.value
    assert document["memory"]["reserved_bytes"] == expected.memory.reserved_bytes


TRAINED = "gpt2 --layers 2 --gpus 2 --seq 64 --gbs 4"


@pytest.mark.parametrize("words", [f"estimate {TRAINED}", f"verify {TRAINED}", f"emulate {TRAINED}"])
def test_inputs_hold_the_layouts_defaults_resolved(run, words: str) -> None:
    document = run(f"{words} --tp 2 --json").document
    given, layout = document["inputs"]["layout"], document["layout"]
    assert (given["zero"], given["sequence_parallel"], given["schedule"]) == (1, True, "1f1b")
    assert given["overlap"] == layout["overlap"]
    assert all(given[name] == layout[name] for name in given if name in layout)


@pytest.mark.parametrize("flags", ["", "--tp 2", "--tp 2 --no-sequence-parallel", "--pp 2 --vpp 3", "--zero 0"])
def test_resolved_inputs_are_the_same_layout(run, flags: str) -> None:
    import msgspec

    import fivefold as ff

    document = run(f"estimate gpt2 {SMALL} --gpu h100-sxm {flags} --json").document
    layout = msgspec.convert(document["inputs"]["layout"], ff.Layout)
    assert None not in (layout.sequence_parallel, layout.schedule, layout.overlap.param)
    work = ff.Workload(seq_len=1024, global_batch=16)
    found = ff.estimate(ff.load_model("gpt2"), ff.load_cluster("h100-sxm", gpus=4), work, layout)
    again = json.loads(json.dumps(found.to_dict()))
    assert all(again[name] == document[name] for name in ("layout", "memory", "step", "violations"))


def test_a_broken_rule_is_answered_with_one(run) -> None:
    outcome = run("estimate llama-3-8b --gpus 8 --tp 3 --gbs 8 --json")
    assert outcome.code == 1
    document = outcome.document
    assert document["valid"] is False
    assert document["memory"] is None
    assert document["step"] is None
    for rule in document["violations"]:
        has(rule, RULE)


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep", "etp", "dp-replicate"])
def test_a_degree_beyond_the_gpus_would_not_start_and_is_no_bad_input(run, axis: str) -> None:
    outcome = run(f"estimate mixtral-8x7b --gpus 8 --{axis} 16 --gbs 8 --json")
    assert outcome.code == 1
    document = outcome.document
    check_layout(document["layout"])
    broken = [(rule["id"], rule["option"], rule["value"]) for rule in document["violations"]]
    assert (document["valid"], broken) == (False, [(f"{axis}-range", f"--{axis}", 16)])


def test_layouts_around_the_best_one_have_every_field_where_they_would_not_start(run) -> None:
    neighbours = run("plan gpt2 --gpus 1 --gbs 8 --json").document["why"]["neighbours"]
    assert "rule" in {each["reason"] for each in neighbours}
    for each in neighbours:
        has(each, ["layout", "reason", "delta_s", "over_bytes", "stage"])
        check_layout(each["layout"])


def test_what_does_not_fit_is_answered_with_one(run) -> None:
    for command in ("estimate llama-3-70b --gpus 1 --gbs 1", "plan llama-3-70b --gpus 1 --gbs 1"):
        outcome = run(f"{command} --json")
        assert outcome.code == 1, command
        document = outcome.document
        assert document.get("fits", False) is False
        if document["kind"] == "plan":
            assert document["plans"] == []
            assert document["why"] is None
            assert document["advice"]


def test_compare(run) -> None:
    outcome = run(f"compare gpt2 {SMALL} --a tp=2 --b pp=2 --json")
    assert outcome.code == 0
    document = outcome.document
    enveloped(document, "compare")
    for side in ("a", "b"):
        check_estimate(document[side])
    total = sum(row["delta"] for row in document["seconds"])
    seconds = [document[side]["step"]["seconds"]["value"] for side in ("a", "b")]
    assert total == pytest.approx(seconds[1] - seconds[0], abs=1e-12)
    needs = [document[side]["memory"]["reserved_bytes"] for side in ("a", "b")]
    assert sum(row["delta"] for row in document["memory"]) == needs[1] - needs[0]


def test_compare_answers_one_when_a_side_would_not_start(run) -> None:
    outcome = run(f"compare gpt2 {SMALL} --a tp=3 --b pp=2")
    assert outcome.code == 1
    assert "would not start" in outcome.out


def test_validate(run) -> None:
    outcome = run("validate --source simumax --json")
    assert outcome.code == 0
    document = outcome.document
    enveloped(document, "validate")
    has(document, ["rows_total", "rows_used", "skipped", "by_source", "rows"])
    has(document["by_source"][0], ["source", "gpu", "runtime", "n", "time", "memory", "spearman", "coverage80"])


@pytest.mark.parametrize(
    ("command", "kind", "field"),
    [
        ("models", "models", "models"),
        ("gpus", "gpus", "gpus"),
        ("explain axes", "explain", "rows"),
        ("explain axes --gbs 512 --mbs 2 --dp 4", "explain", "headroom"),
        ("explain dp-limit --gpus 64", "explain", "tokens_first_order"),
        ("explain rules", "explain", "rules"),
        ("explain rules --runtime megatron@0.16", "explain", "rules"),
        ("explain assumptions", "explain", "assumptions"),
    ],
)
def test_the_other_documents(run, command: str, kind: str, field: str) -> None:
    outcome = run(f"{command} --json")
    assert (outcome.code, outcome.err) == (0, "")
    enveloped(outcome.document, kind)
    assert outcome.document[field]


def test_rules_have_the_fields_of_broken_ones(run) -> None:
    for rule in run("explain rules --json").document["rules"]:
        has(rule, RULE)


def test_every_name_of_a_cluster_file_is_shown_and_taken_back(run, tmp_path) -> None:
    """The constants of [compute] too, which a file may replace one by one."""
    listed = {each["name"]: each for each in run("gpus --json").document["gpus"]}
    mine = listed["h100-sxm"]
    assert {"efficiency", "wave_share", "launch_s"} <= mine["compute"].keys()
    path = tmp_path / "mine.toml"
    path.write_text(f"base = 'h100-sxm'\ngpus = 8\n[compute]\nlaunch_s = {mine['compute']['launch_s']}\n")
    ours = run(f"estimate gpt2 --cluster {path} --json").document
    theirs = run("estimate gpt2 --gpu h100-sxm --gpus 8 --json").document
    assert ours["step"]["seconds"]["value"] == theirs["step"]["seconds"]["value"]


def test_an_error_is_one_document_on_standard_output(run) -> None:
    for command in ("plan no-such-model --gpus 8", "plan gpt2 --gpus 8 --no-such-option", "no-such-command"):
        outcome = run(f"{command} --json")
        assert (outcome.code, outcome.err) == (2, ""), command
        error = outcome.document["error"]
        assert sorted(error) == ["code", "legal", "message", "option", "value"]
        assert error["message"]


def test_an_error_is_one_paragraph_on_standard_error(run) -> None:
    outcome = run("plan no-such-model --gpus 8")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
