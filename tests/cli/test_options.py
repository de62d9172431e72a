"""Options of the workload on the command line: what they reach in the JSON, and what is refused by name."""

from __future__ import annotations

import pytest

BASE = "estimate llama-3-8b --gpus 8 --tp 2 --gbs 64"


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (
            "--offload optimizer,activations:0.5",
            ("workload", "offload"),
            {"optimizer": 1.0, "parameters": 0.0, "activations": 0.5},
        ),
        ("--lora-rank 8 --lora-targets v,q", ("workload", "lora"), {"rank": 8, "targets": ["q", "v"]}),
        ("--lora-rank 8 --lora-targets all", ("workload", "trained"), "adapters"),
        ("--document-length 2,000", ("workload", "document_length"), 2000.0),
        ("--document-length 2000:equal", ("workload", "document_lengths"), "equal"),
        ("--cuda-graphs", ("workload", "cuda_graphs"), True),
        ("--dropout", ("workload", "dropout"), True),
        ("--mtp-modules 2", ("model", "mtp"), 2),
        ("--tokens 1T --gpu-mtbf-hours 8000", ("workload", "gpu_mtbf_hours"), 8000.0),
        ("--tokens 1T --checkpoint-gb-per-s 20", ("workload", "checkpoint_bytes_per_s"), 20e9),
        ("--tokens 1T --restart-minutes 5", ("workload", "restart_s"), 300.0),
    ],
)  # fmt: skip
def test_an_option_is_echoed(run, flags: str, path: tuple[str, str], value: object) -> None:
    document = run(f"{BASE} {flags} --json").document
    assert document["inputs"][path[0]][path[1]] == value


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        ("--offload everything", "--offload"),
        ("--offload optimizer:2", "--offload"),
        ("--offload optimizer:x", "--offload"),
        ("--lora-targets q", "--lora-rank"),
        ("--base-precision nf4", "--lora-rank"),
        ("--lora-rank 0", "--lora-rank"),
        ("--lora-rank 8 --lora-targets w", "--lora-targets"),
        ("--document-length 0", "--document-length"),
        ("--document-length 100:normal", "--document-length"),
        ("--mtp-modules 99", "--mtp-modules"),
        ("--mtp-modules 1 --mtp", "--mtp-modules"),
    ],
)
def test_what_cannot_be_is_named(run, flags: str, option: str) -> None:
    outcome = run(f"{BASE} {flags} --json")
    assert outcome.code == 2 and outcome.document["error"]["option"] == option


def test_graphs_save_what_launches_cost(run) -> None:
    """A small model at short sequences waits for launches; with graphs it takes what its operations take."""
    plain, graphs = (
        run(f"estimate gpt2 --gpus 1 --seq 512 --gbs 8 {flags} --json").document["step"]["seconds"]["value"]
        for flags in ("", "--cuda-graphs")
    )
    assert graphs < 0.7 * plain


def test_deepep_sends_less_and_permutes_less(run) -> None:
    """Eight experts over eight ranks and two a token: chances are 1.875 ranks a token, of two copies."""
    base = "mixtral-8x7b --gpus 8 --tp 1 --ep 8 --gbs 64"
    plain, deepep = (run(f"estimate {base} {flags} --json").document for flags in ("", "--moe-dispatcher deepep"))
    sent = [
        sum(row["bytes_sent_per_rank"] for row in each["traffic"] if row["axis"] == "ep") for each in (plain, deepep)
    ]
    assert sent[1] / sent[0] == pytest.approx(8 * (1 - (7 / 8) ** 2) / 2, rel=1e-6)
    assert deepep["step"]["breakdown_s"]["compute"] < plain["step"]["breakdown_s"]["compute"]


def test_more_mtp_modules_cost_more(run) -> None:
    times = [run(f"{BASE} --mtp-modules {n} --json").document for n in (0, 1, 2)]
    seconds = [each["step"]["seconds"]["value"] for each in times]
    assert seconds == sorted(seconds) and seconds[0] < seconds[2]
    sizes = [each["params"]["total"] for each in times]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 200_000_000


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--offload optimizer:0.5", "--optimizer-offload-fraction 0.5"),
        ("--offload activations:0.25", "--cpu-offloading-num-layers 8"),
        ("--mtp-modules 1", "--mtp-num-layers 1"),
        ("--cuda-graphs", "--enable-cuda-graph"),
    ],
)
def test_megatron_s_flags(run, tmp_path, flags: str, word: str) -> None:
    outcome = run(f"export llama-3-8b --gpus 8 --tp 2 --gbs 64 {flags} --to megatron --out {tmp_path}")
    assert outcome.code == 0
    assert word in " ".join((tmp_path / "llama-3-8b.sh").read_text().split())


def test_megatron_s_deepep(run, tmp_path) -> None:
    base = "export mixtral-8x7b --gpus 64 --ep 8 --tp 2 --gbs 64 --moe-dispatcher deepep"
    assert run(f"{base} --force --to megatron --out {tmp_path}").code in (0, 1)
    script = " ".join((tmp_path / "mixtral-8x7b.sh").read_text().split())
    assert "--moe-token-dispatcher-type flex" in script and "--moe-enable-deepep" in script
    assert script.count("--moe-token-dispatcher-type") == 1


@pytest.mark.parametrize("flags", ["--lora-rank 8", "--document-length 500", "--offload activations:0.03"])
def test_what_megatron_s_command_line_cannot_say_is_refused(run, tmp_path, flags: str) -> None:
    outcome = run(f"export llama-3-8b --gpus 8 --tp 2 --gbs 64 {flags} --to megatron --out {tmp_path} --json")
    assert outcome.code == 2 and outcome.document["error"]["code"] == "megatron-cannot-express"


@pytest.mark.parametrize("text", ["optimizer:2", "optimizer:nan", "activations:0", "activations:x"])
def test_a_share_is_explained_as_it_is_written(run, text: str) -> None:
    outcome = run(f"{BASE} --offload {text} --json")
    assert f"{text.partition(':')[0]}:0.5" in outcome.document["error"]["message"]


def test_a_token_budget_writes_down_what_it_assumes_of_failures(run) -> None:
    names = ("--gpu-mtbf-hours", "--checkpoint-gb-per-s", "--restart-minutes")
    plain, budget, given = (
        run(f"{BASE} {flags} --json").document["inputs"]["defaults"]
        for flags in ("", "--tokens 1T", "--tokens 1T --restart-minutes 5")
    )
    assert [name in plain for name in names] == [False] * 3
    assert [budget[name] for name in names] == ["50000", "1 per node", "10"]
    assert [name in given for name in names] == [True, True, False]


def test_a_run_that_never_ends_is_called_so(run) -> None:
    text = run(f"{BASE} --tokens 1T --gpu-mtbf-hours 0.0001").out
    assert "never ends" in text and "inf days" not in text


def test_only_what_refuses_every_layout_is_its_reason(run) -> None:
    """Rules that refuse a part of the candidates have nothing to do with a switch that refuses all of them."""
    outcome = run("plan llama-3-8b --gpus 8 --gbs 64 --moe-dispatcher deepep --json")
    reasons = outcome.document["advice"]
    assert outcome.code == 1 and len(reasons) == 1 and "moe-dispatcher-experts" in reasons[0]


def test_a_long_interval_has_no_power_of_ten() -> None:
    from fivefold.cli.render.text import seconds_interval

    assert seconds_interval(0.869, 0.754, 1.0021) == "869 ms (754-1,002)"


def test_check_says_what_a_plan_file_is_for(run, tmp_path) -> None:
    outcome = run(f"check {tmp_path / 'plan.toml'} --json")
    assert outcome.code == 2 and outcome.document["error"]["code"] == "plan-file"


def test_check_names_the_options_of_the_step(run, tmp_path) -> None:
    assert run(f"export llama-3-8b --gpus 8 --tp 2 --gbs 64 --offload optimizer:0.5 --out {tmp_path}").code == 0
    text = run(f"check {tmp_path / 'llama-3-8b.sh'} --gpu h100-sxm").out
    assert "offloading optimizer:0.5" in " ".join(text.split())


@pytest.mark.parametrize("runtime", ["torchtitan", "fsdp", "accelerate", "deepspeed", "deepspeed-zero", "nanotron"])
def test_frameworks_without_mtp_refuse_it(run, runtime: str) -> None:
    outcome = run(f"estimate llama-3-8b --gpus 8 --gbs 64 --mtp-modules 1 --runtime {runtime} --json")
    assert outcome.code == 1
    assert "--mtp" in [broken["option"] for broken in outcome.document["violations"]]


@pytest.mark.parametrize("flags", ["accelerate", "accelerate --zero 2", "deepspeed-zero --zero 2"])
def test_tensor_parallelism_starts_by_default_where_sequences_cannot_be_sharded(run, flags: str) -> None:
    document = run(f"estimate llama-3-8b --gpus 8 --tp 2 --gbs 64 --runtime {flags} --json").document
    assert document["valid"] and document["layout"]["sequence_parallel"] is False
    assert "--sequence-parallel" in document["inputs"]["defaults"]
    asked = run(f"estimate llama-3-8b --gpus 8 --tp 2 --gbs 64 --sequence-parallel --runtime {flags} --json")
    assert asked.code == 1 and asked.document["violations"][0]["option"] == "--sequence-parallel"


@pytest.mark.parametrize("command", ["export", "sweep"])
def test_another_framework_is_not_put_aside(run, tmp_path, command: str) -> None:
    base = f"{command} llama-3-8b --gpus 8 --gbs 64 --out {tmp_path / 'out'}"
    outcome = run(f"{base} --runtime fsdp --json")
    assert outcome.code == 2 and outcome.document["error"]["option"] == "--runtime"
    assert not (tmp_path / "out").exists()


def test_a_part_is_offloaded_once(run) -> None:
    outcome = run(f"{BASE} --offload optimizer,optimizer:0.5 --json")
    assert outcome.code == 2 and "twice" in outcome.document["error"]["message"]


def test_what_a_search_was_asked_for_is_among_its_inputs(run, tmp_path) -> None:
    base = "plan llama-3-8b --gpus 8 --gbs 64 --seq 2048 --tp 2 --no-cp --no-pp"
    plain = run(f"{base} --save {tmp_path / 'plan.toml'} --json").document["inputs"]
    assert plain["days"] is None and plain["like"] is None
    within = run("plan gpt2 --gpus 8 --tokens 1B --days 100 --tp 1 --no-cp --no-pp --json").document["inputs"]
    assert within["days"] == 100
    moved = run(f"plan --like {tmp_path / 'plan.toml'} --gpus 16 --json").document["inputs"]
    assert moved["like"] == str(tmp_path / "plan.toml")


def test_megatron_fsdp_has_no_muon(run) -> None:
    """Megatron-LM's validate_args refuses the pair in every revision that was read."""
    document = run("estimate llama-3-8b --gpus 8 --runtime megatron-fsdp --zero 3 --optimizer muon --json").document
    [broken] = [rule for rule in document["violations"] if rule["id"] == "optimizer-runtime"]
    assert (broken["option"], broken["legal"]) == ("--optimizer", ["adamw", "sgd"])
