"""What the flags mean: pins and sets, other spellings, defaults, the user's own cluster."""

from __future__ import annotations

import dataclasses

import pytest

from fivefold.cli.flags import LayoutFlags
from fivefold.cli.values import layout_text
from fivefold.errors import FivefoldError
from fivefold.search import PIN_NAMES

SMALL = "--gpus 4 --seq 1024 --gbs 16"


def layouts(document: dict) -> list[dict]:
    return [estimate["layout"] for estimate in document["plans"]]


@pytest.mark.parametrize(
    ("flags", "field", "allowed"),
    [
        ("--tp 2", "tp", {2}),
        ("--tp 1,4", "tp", {1, 4}),
        ("--no-tp", "tp", {1}),
        ("--no-pp --no-cp", "pp", {1}),
        ("--pp 2 --micro-batch 1,2", "micro_batch", {1, 2}),
        ("--zero 0", "zero", {0}),
        ("--pp 2 --schedule 1f1b", "schedule", {"1f1b"}),
        ("--cp 2 --cp-kind a2a", "cp_kind", {"a2a"}),
        ("--tp 2 --no-sequence-parallel", "sequence_parallel", {False}),
        ("--pp 2 --vpp 3", "vpp", {3}),
    ],
)
def test_a_pin_holds_in_every_plan(run, flags: str, field: str, allowed: set) -> None:
    document = run(f"plan gpt2 {SMALL} {flags} --json").document
    assert document["plans"]
    assert {layout[field] for layout in layouts(document)} <= allowed


@pytest.mark.parametrize(
    ("flags", "recompute"),
    [
        ("--recompute full", {"kind": "full", "layers": None, "modules": []}),
        ("--recompute full --recompute-layers 4", {"kind": "full", "layers": 4, "modules": []}),
        ("--recompute-layers 4", {"kind": "full", "layers": 4, "modules": []}),
        ("--recompute-modules layernorm,mlp", {"kind": "selective", "layers": None, "modules": ["layernorm", "mlp"]}),
        ("--recompute none", {"kind": "none", "layers": None, "modules": []}),
    ],
)
def test_recomputation(run, flags: str, recompute: dict) -> None:
    layout = run(f"estimate gpt2 {SMALL} {flags} --json").document["inputs"]["layout"]
    assert layout["recompute"] == recompute


def test_a_flag_for_every_option_of_a_layout_that_a_search_pins() -> None:
    flags = {each.name for each in dataclasses.fields(LayoutFlags) if not each.name.startswith("no_")}
    assert flags == set(PIN_NAMES)


def test_overlap_switches(run) -> None:
    overlap = run(f"estimate gpt2 {SMALL} --no-overlap-grad --json").document["layout"]["overlap"]
    assert overlap["grad"] is False
    overlap = run(f"estimate gpt2 {SMALL} --tp 2 --overlap-tp --json").document["layout"]["overlap"]
    assert (overlap["grad"], overlap["tp"]) == (True, True)


@pytest.mark.parametrize(
    "name",
    [each.name for each in dataclasses.fields(LayoutFlags) if each.name[:3] != "no_" and "bool" in str(each.type)],
)
def test_every_switch_is_written_on_or_off_in_a_layout_text(name: str) -> None:
    assert getattr(layout_text("--a", f"{name}=off"), name) is False
    with pytest.raises(FivefoldError, match="maybe"):
        layout_text("--a", f"{name}=maybe")


def test_uneven_stages(run) -> None:
    document = run(f"estimate gpt2 {SMALL} --pp 4 --first-stage-layers 2 --last-stage-layers 2 --json").document
    assert [sum(last - first for first, last in rank) for rank in document["layout"]["stages"]] == [2, 4, 4, 2]


def test_short_and_long_names_are_the_same(run) -> None:
    short = run("estimate gpt2 --gpus 4 --seq 512 --gbs 16 --mbs 2 --json").document
    long = run("estimate gpt2 --gpus 4 --seq-len 512 --global-batch 16 --micro-batch 2 --json").document
    assert short == long


def test_defaults_are_used_and_echoed(run) -> None:
    document = run("estimate llama-3-8b --gpus 8 --tp 8 --json").document
    inputs = document["inputs"]
    work = inputs["workload"]
    assert (work["seq_len"], work["precision"], work["grad_dtype"], work["optimizer"]) == (
        8192,
        "bf16",
        "fp32",
        "adamw",
    )
    assert work["seq_len"] * work["global_batch"] == 4 * 1024 * 1024
    assert document["layout"]["zero"] == 1
    assert document["layout"]["sequence_parallel"] is True
    given = {
        "--runtime",
        "--gpu",
        "--seq-len",
        "--global-batch",
        "--precision",
        "--optimizer",
        "--grad-dtype",
        "--zero",
        "--sequence-parallel",
    }
    assert given == set(inputs["defaults"])


def test_a_runtime_without_zero_1_shards_what_it_can(run) -> None:
    document = run(f"estimate gpt2 {SMALL} --runtime torchtitan --json").document
    assert (document["layout"]["zero"], document["inputs"]["defaults"]["--zero"]) == (3, "3")
    assert document["valid"] is True
    assert run(f"estimate gpt2 {SMALL} --runtime torchtitan --zero 1").code == 1


def test_a_short_model_has_its_own_length(run) -> None:
    assert run("estimate gpt2 --gpus 4 --json").document["inputs"]["workload"]["seq_len"] == 1024


@pytest.mark.parametrize("gpus", [1, 4, 24, 96, 1000, 3072])
def test_the_default_batch_is_one_that_layouts_divide(run, gpus: int) -> None:
    from fivefold.cli.flags import ClusterFlags, ModelFlags, RuntimeFlags, WorkFlags
    from fivefold.cli.problem import plan_question

    question = plan_question("llama-3-8b", ModelFlags(), ClusterFlags(gpus=gpus), WorkFlags(), RuntimeFlags())
    assert 4_000_000 <= question.work.tokens_per_batch <= 12_000_000
    assert question.work.global_batch % (gpus if gpus <= 512 else 8) == 0


def test_sequence_parallelism_by_default_is_among_the_defaults(run) -> None:
    def taken(words: str) -> str | None:
        return run(f"estimate gpt2 {SMALL} {words} --json").document["inputs"]["defaults"].get("--sequence-parallel")

    said = taken("--tp 2")
    assert said is not None and said.startswith("on")
    assert taken("") is taken("--tp 2 --sequence-parallel") is taken("--tp 2 --no-sequence-parallel") is None
    sides = run(f"compare gpt2 {SMALL} --tp 2 --a tp=4 --b tp=1 --json").document["inputs"]
    assert ["--sequence-parallel" in sides[side]["defaults"] for side in "ab"] == [True, False]
    off = run(f"compare gpt2 {SMALL} --tp 2 --a sp=off --b zero=3 --json").document["inputs"]
    assert ["--sequence-parallel" in off[side]["defaults"] for side in "ab"] == [False, True]


def test_the_default_batch_of_degrees_that_divide_nothing_follows_the_gpus(run) -> None:
    document = run("estimate llama-3-70b --gpus 64 --tp 3 --json").document
    assert document["inputs"]["workload"]["global_batch"] == 512
    legal = [rule["legal"] for rule in document["violations"] if rule["id"] == "world-divides"]
    assert legal == [[1, 2, 4, 8, 16, 32, 64]]
    sides = run("compare llama-3-70b --gpus 64 --a tp=3 --b tp=4 --json").document["inputs"]
    assert {sides[side]["workload"]["global_batch"] for side in "ab"} == {512}


def test_a_batch_in_tokens(run) -> None:
    work = run("plan gpt2 --gpus 4 --seq 1024 --tokens-per-batch 1M --json").document["inputs"]["workload"]
    assert work["global_batch"] * 1024 == pytest.approx(1_000_000, rel=0.02)
    assert work["global_batch"] % 4 == 0


def test_a_batch_in_tokens_fits_the_layout(run) -> None:
    document = run("estimate gpt2 --gpus 4 --seq 1024 --pp 2 --vpp 2 --mbs 3 --tokens-per-batch 100K --json").document
    assert document["inputs"]["workload"]["global_batch"] % (3 * 2 * 2) == 0


def test_a_ramp_gives_the_batch_and_its_levels(run) -> None:
    document = run("estimate gpt2 --gpus 4 --seq 1024 --ramp 16:64:1B --json").document
    assert document["inputs"]["workload"]["global_batch"] == 64
    levels = document["ramp"]["steps"]
    assert levels[0]["global_batch"] == 16
    assert all(level["global_batch"] % 4 == 0 for level in levels)


def test_a_ramp_that_the_layout_cannot_have_is_said(run) -> None:
    outcome = run("estimate gpt2 --gpus 4 --seq 1024 --ramp 15:64:1B --json")
    document = outcome.document
    assert outcome.code == 1
    assert document["ramp"] is None
    assert run("plan gpt2 --gpus 4 --seq 1024 --pp 1 --mbs 2 --ramp 15:64:1B").code == 0
    assert any("ramp" in note for note in document["notes"])


def test_budget(run) -> None:
    document = run(f"plan gpt2 {SMALL} --tokens 1B --price 2 --objective cost --json").document
    budget, step = document["budget"], document["plans"][0]["step"]
    assert budget["seconds"] == pytest.approx(1e9 / step["tokens_per_s"])
    assert budget["cost"] == pytest.approx(budget["gpu_hours"] * 2)
    assert budget["gpu_hours"] == pytest.approx(budget["seconds"] / 3600 * 4)


def test_layers_cut_the_model(run) -> None:
    document = run(f"estimate llama-3-8b {SMALL} --layers 2 --json").document
    assert document["inputs"]["model"]["layers"] == 2


def test_mtp_adds_the_module(run) -> None:
    without, with_it = (
        run(f"estimate deepseek-v3 --gpus 64 --ep 8 --pp 8 --gbs 64 --seq 4096 --first-stage-layers 8 {mtp} --json")
        for mtp in ("", "--mtp")
    )
    assert with_it.document["params"]["total"] > without.document["params"]["total"]


def test_imbalance_costs_time(run) -> None:
    """With enough tokens: few of them take less than the host does to launch them."""
    seconds = [
        run(f"estimate mixtral-8x7b --gpus 8 --ep 8 --gbs 8 --seq 8192 --moe-imbalance {value} --json").document[
            "step"
        ]["seconds"]["value"]
        for value in (1.0, 1.5)
    ]
    assert seconds[1] > seconds[0]


CLUSTER = """
base = "h100-sxm"
gpus = 16
[[links]]
name = "infiniband"
bandwidth_per_s = 1e9
"""


def test_the_users_cluster(run, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CLUSTER)
    document = run("estimate", "gpt2", "--cluster", str(path), "--gbs", "16", "--json").document
    cluster = document["inputs"]["cluster"]
    assert cluster["gpus"] == 16
    assert cluster["links"][-1]["bandwidth_per_s"] == 1e9
    larger = run("estimate", "gpt2", "--cluster", str(path), "--gpus", "32", "--gbs", "32", "--json").document
    assert larger["inputs"]["cluster"]["gpus"] == 32


def test_the_number_of_gpus_is_asked_for(run, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100-sxm"\n')
    for words in (["plan", "gpt2"], ["plan", "gpt2", "--cluster", str(path)], ["explain", "dp-limit"]):
        outcome = run(*words, "--json")
        assert outcome.code == 2
        assert outcome.document["error"]["option"] == "--gpus"


def test_a_plan_is_saved_and_priced_again(run, tmp_path) -> None:
    path = str(tmp_path / "plan.toml")
    found = run("plan", "gpt2-medium", *SMALL.split(), "--save", path, "--json").document
    again = run("estimate", path, "--json")
    assert again.code == 0
    assert again.document["layout"] == found["plans"][0]["layout"]
    assert again.document["step"] == found["plans"][0]["step"]
    assert again.document["memory"] == found["plans"][0]["memory"]


def test_flags_replace_what_a_plan_file_says(run, tmp_path) -> None:
    path = str(tmp_path / "plan.toml")
    run("estimate", "gpt2", *SMALL.split(), "--tp", "2", "--mbs", "2", "--save", path)
    document = run("estimate", path, "--tp", "1", "--gpus", "8", "--optimizer", "sgd", "--json").document
    assert (document["layout"]["tp"], document["layout"]["micro_batch"], document["layout"]["dp"]) == (1, 2, 8)
    assert document["inputs"]["workload"]["optimizer"] == "sgd"
    assert document["inputs"]["workload"]["global_batch"] == 16
    other = run("estimate", path, "--gpu", "b200", "--json").document
    assert (other["inputs"]["cluster"]["gpu"]["name"], other["inputs"]["cluster"]["gpus"]) == ("b200", 4)


def test_two_plan_files_are_compared(run, tmp_path) -> None:
    paths = [str(tmp_path / f"{name}.toml") for name in "ab"]
    for path, tp in zip(paths, ("1", "2"), strict=True):
        run("estimate", "gpt2", *SMALL.split(), "--tp", tp, "--save", path)
    outcome = run("compare", *paths, "--json")
    assert outcome.code == 0
    assert [outcome.document[side]["layout"]["tp"] for side in "ab"] == [1, 2]
    assert outcome.document["same_question"] is True


def test_simple_view_beside_the_exact_one(run) -> None:
    rows = run(f"estimate gpt2 {SMALL} --simple --json").document["simple"]
    by_name = {row["quantity"]: row for row in rows}
    h, layers, vocab = 768, 12, 50257
    assert by_name["parameters"]["simple"] == h * vocab + layers * (12 * h * h + 13 * h) + 2 * h
    assert run(f"estimate gpt2 {SMALL} --json").document["simple"] is None
