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
