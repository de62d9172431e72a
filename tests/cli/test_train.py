"""`fivefold train` and `fivefold verify` from the command line."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fivefold.train import refuse

PLAN = "estimate gpt2 --gpus {gpus} --seq 512 --gbs 64 {flags} --save"
VERIFY = "verify gpt2 --gpus 2 --seq 512 --gbs 16 --micro-batch 4 --tp 2"


@pytest.fixture
def plan(run, tmp_path: Path):
    def save(flags: str = "", gpus: int = 4) -> str:
        path = str(tmp_path / "plan.toml")
        assert run(*PLAN.format(flags=flags, gpus=gpus).split(), path).code == 0
        return path

    return save


def test_verify_passes_and_keeps_the_contract(run) -> None:
    outcome = run(*VERIFY.split(), "--json")
    assert outcome.code == 0, outcome.out
    document = outcome.document
    assert (document["schema"], document["kind"], document["passed"]) == ("fivefold/1", "verify", True)
    assert {"layout", "parameters", "losses", "grad_norm", "inputs"} <= set(document)
    assert {"name", "error", "bound"} <= set(document["parameters"][0])
    assert document["layout"]["tp"] == 2
    assert document["inputs"]["model"]["hidden"] == 768


def test_verify_prints_a_table(run) -> None:
    outcome = run(VERIFY)
    assert outcome.code == 0
    assert "PASSED" in outcome.out
    assert "layers.0." in outcome.out
    assert "Model shrunk" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100


def test_verify_fails_where_a_sum_is_dropped(run, monkeypatch) -> None:
    from fivefold.train.verify import prove
    from fivefold.train.verify.controls import Site, Spoiled

    honest = prove.observe

    def spoiled(*arguments: Any) -> Any:
        with Spoiled(Site("parallel.vocabulary", "VocabEmbedding.forward", "all_reduce"), "double"):
            return honest(*arguments)

    monkeypatch.setattr(prove, "observe", spoiled)
    outcome = run(*VERIFY.split(), "--no-sequence-parallel")
    assert outcome.code == 1
    assert "FAILED" in outcome.out
    assert "out of bounds" in outcome.out


def test_verify_tells_a_rank_that_fails(run, monkeypatch) -> None:
    from fivefold.train.verify import prove

    def broken(*arguments: Any) -> Any:
        raise ValueError("the cause")

    monkeypatch.setattr(prove, "observe", broken)
    outcome = run(*VERIFY.split(), "--json")
    assert outcome.code == 1
    assert outcome.document["passed"] is False
    assert "the cause" in outcome.document["failure"]
    late = run(*VERIFY.split())
    assert late.code == 1
    assert "the cause" in late.out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("verify llama-3-70b --gpus 32 --tp 8 --pp 4", "--max-ranks 32"),
        ("verify gpt2 --gpus 2 --timeout 0", "--timeout"),
        ("verify gpt2 --gpus 2 --max-ranks 0", "--max-ranks"),
        ("train gpt2", "plan file"),
        ("train nowhere.toml", "no such file"),
    ],
)
def test_bad_input(run, words: str, part: str) -> None:
    outcome = run(words)
    assert outcome.code == 2
    assert part in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("verify gpt2 --gpus 2 --tp 5", "would not start"),
        ("verify mixtral-8x7b --gpus 8 --ep 2", "experts"),
    ],
)
def test_a_layout_that_would_not_start_is_an_answer(run, words: str, part: str) -> None:
    outcome = run(f"{words} --json")
    assert (outcome.code, outcome.err) == (1, "")
    document = outcome.document
    assert (document["kind"], document["passed"], document["parameters"]) == ("verify", False, [])
    assert document["grad_norm"] == {"reference": None, "layout": None}
    assert part in document["failure"]
    assert (document["tolerance"], document["seconds_s"]) == (None, None)
    said = run(words)
    assert (said.code, part in " ".join(said.out.split())) == (1, True)


def test_train_answers_one_where_the_plan_would_not_start(run, plan) -> None:
    path = Path(plan("--tp 2"))
    path.write_text(path.read_text().replace("\ntp = 2\n", "\ntp = 3\n", 1))
    outcome = run("train", str(path), "--smoke")
    assert (outcome.code, outcome.out) == (1, "")
    assert "would not start" in outcome.err and outcome.err.count("\n") == 1


def test_train_refuses_before_it_starts(run, plan) -> None:
    path = plan("--tp 2 --pp 2")
    for words, part in (
        ((), "4 GPUs and 1 process is running"),
        (("--smoke",), "--nproc-per-node 4"),
        (("--precision", "fp8"), "fp8"),
        (("--steps", "0"), "--steps"),
        (("--learning-rate", "-1"), "--learning-rate"),
        (("--peak-tflops", "0"), "--peak-tflops"),
        (("--dropout", "1"), "--dropout"),
    ):
        outcome = run("train", path, *words)
        assert outcome.code == 2
        assert part in outcome.err


def test_train_refuses_a_log_that_cannot_be_written(run, plan) -> None:
    outcome = run("train", plan(gpus=1), "--smoke", "--log-file", "/nowhere/log.jsonl")
    assert outcome.code == 2
    assert "/nowhere/log.jsonl" in outcome.err


def test_without_torch_one_sentence(run, plan, monkeypatch) -> None:
    path = plan()
    monkeypatch.setattr(refuse, "find_spec", lambda name: None)
    for words in (("train", path), ("verify", path)):
        outcome = run(*words)
        assert outcome.code == 2
        assert "pip install 'torch>=2.9'" in outcome.err


def test_one_process_trains(run, plan, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    outcome = run(
        "train", plan(gpus=1), "--smoke", "--steps", "12", "--precision", "fp32", "--log-file", str(log), "--json"
    )
    assert outcome.code == 0, outcome.err
    steps = outcome.document["steps"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert [json.loads(line)["loss"] for line in log.read_text().splitlines()] == [step["loss"] for step in steps]
    assert "Model shrunk" in outcome.document["notes"][0]


def test_torchrun_trains_a_plan(plan, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fivefold"]
    done = subprocess.run(
        [sys.executable, *words, "train", plan("--tp 2"), "--smoke", "--steps", "10", "--log-file", str(log)],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert done.stdout.count("step ") == 10
    assert "TP2" in done.stdout
    assert "Data parallelism reduced from 2 replicas to 1" in done.stdout


SHOWN = [
    ("--tp 2 --pp 2", {"tp", "pp", "world"}, True),
    ("--cp 2", {"cp", "dp_cp"}, False),
    ("--zero 3 --runtime torchtitan", {"dp"}, False),
    ("--pp 2 --vpp 2 --zero 1", {"dp", "pp", "world"}, True),
]


@pytest.mark.parametrize(("flags", "axes", "piped"), SHOWN, ids=lambda x: x if isinstance(x, str) else "")
def test_a_measured_job_of_four_ranks(plan, tmp_path: Path, flags: str, axes: set[str], piped: bool) -> None:
    log = tmp_path / "log.jsonl"
    words = f"--smoke --steps 12 --precision fp32 --measure --peak-tflops 0.01 --log-file {log}"
    codes, out, _ = job(4, "train", plan(flags), *words.split())
    assert codes == [0] * 4, out
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(steps) == out.count("step ") == 12
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert "Communication  per step" in out
    for step in steps:
        assert step["mfu"] > 0 and step["tokens_per_s"] > 0 and step["grad_norm"] > 0
        assert [rank["rank"] for rank in step["ranks"]] == [0, 1, 2, 3]
        for rank in step["ranks"]:
            assert set(rank["wait_s"]) == set(rank["sent_bytes"]) == axes
            assert 0 < sum(rank["wait_s"].values()) < rank["step_s"]
            assert rank["peak_memory_bytes"] > 0
            assert (rank["bubble"] is not None) == piped


def job(ranks: int, *words: str) -> tuple[list[int | None], str, str]:
    """Exit codes of a command's ranks, forked here in torchrun's stead, and what rank 0 printed."""
    import torch

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes = [context.Process(target=one_rank, args=(r, ranks, port, folder, words)) for r in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            process.kill()
            process.join()
        texts = [(Path(folder) / f"0.{stream}").read_text() for stream in ("out", "err")]
    return [process.exitcode for process in processes], texts[0], texts[1]


def one_rank(rank: int, ranks: int, port: int, folder: str, words: tuple[str, ...]) -> None:
    import torch

    from fivefold.cli.main import main

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code = main(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def test_torchrun_takes_no_option_of_ours_for_its_own() -> None:
    """Its parser reads options behind the script too, and takes a prefix of one of its own for that one."""
    from torch.distributed.run import get_args_parser

    from fivefold.cli.main import build_app

    theirs = [name for action in get_args_parser()._actions for name in action.option_strings if name[:2] == "--"]
    app = build_app("train")["train"]
    ours = [name for argument in app.assemble_argument_collection() for name in argument.names if name[:2] == "--"]
    assert "--log-file" in ours
    assert not [(name, other) for name in ours for other in theirs if other.startswith(name)]


def test_a_terminal_has_one_moving_line() -> None:
    import io

    from rich.console import Console

    from fivefold.cli.render.train import Screen
    from fivefold.train.loop import Metrics

    told = [
        Metrics(
            step=i, loss=3.0 - i, grad_norm=1.0, learning_rate=1e-3, step_s=0.5, tokens_per_s=100.0,
            tokens_per_s_per_gpu=100.0, mfu=None, peak_memory_bytes=10**9, valid_tokens=50, loss_scale=1.0,
            skipped=False,
        )
        for i in range(3)
    ]  # fmt: skip
    file = io.StringIO()
    screen = Screen(Console(file=file, force_terminal=True, color_system=None, width=100), 3, moving=True)
    for metrics in told:
        screen.step(metrics)
    screen.end(told)
    text = file.getvalue()
    assert text.count("\n") == 1
    assert text.count("\r") == 3
    assert "step 1/3" in text and "step 3/3" in text and "500 ms left" in text


@pytest.mark.parametrize("words", ["train --help", "verify --help"])
def test_help_fits(run, words: str) -> None:
    outcome = run(words)
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 100
