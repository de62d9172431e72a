"""Who may start, who is refused, and that nobody survives a rank that dies."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.cli.main import main
from fivefold.errors import FivefoldError
from fivefold.layout import Layout, Workload
from fivefold.model import load_model
from fivefold.train.job import Job
from fivefold.train.launch import Place, ending_at_once, place, require_world
from fivefold.train.refuse import refuse


def job_of(
    model: str = "llama-3-8b", gpus: int = 8, runtime: str = "megatron", optimizer: Any = "adamw", **layout: Any
) -> Job:
    spec = load_model(model)
    work = Workload(seq_len=1024, global_batch=64, optimizer=optimizer)
    return Job(
        model=spec, layout=Layout(**layout), work=work, gpus=gpus, gpus_per_node=8, scale_up_size=8, runtime=runtime
    )


def test_place() -> None:
    assert place({}) == Place(0, 1, 0)
    assert place({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}) == Place(9, 16, 1)
    for wrong in ({"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}):
        with pytest.raises(FivefoldError, match="torchrun"):
            place(wrong)


def test_the_world_has_to_be_the_plans() -> None:
    require_world(job_of(gpus=8), 8)
    with pytest.raises(FivefoldError, match=r"16 GPUs and 4 processes.*--nproc-per-node 8 --nnodes 2"):
        require_world(job_of(gpus=16), 4)
    with pytest.raises(FivefoldError, match="torchrun did not start"):
        require_world(job_of(gpus=2), 1)


REFUSED = [
    (job_of("mixtral-8x7b", ep=2), "fivefold-experts", "experts"),
    (job_of(tp=3, gpus=12), "heads-tp", "would not start"),
    (job_of(optimizer="muon", zero=0), "optimizer-runtime", "muon"),
    (
        replace(job_of(), model=replace(load_model("llama-3-8b"), mtp=1)),
        "fivefold-mtp",
        "multi-token-prediction",
    ),
]


@pytest.mark.parametrize(("job", "code", "words"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refused_with_a_sentence(job: Job, code: str, words: str) -> None:
    with pytest.raises(FivefoldError, match=words) as caught:
        refuse(job)
    assert caught.value.code == code


def test_what_is_trainable_is_not_refused() -> None:
    for job in (job_of(tp=2, pp=2), job_of("gpt2", pp=2), job_of("qwen2.5-7b", cp=2), job_of(optimizer="sgd")):
        refuse(job)
        refuse(replace(job, runtime="fivefold@cpu"))
    for schedule, vpp in (("zb-h1", 1), ("zbv", 2), ("dualpipev", 2), ("afab", 1)):
        refuse(job_of(pp=2, vpp=vpp, schedule=schedule, runtime="fivefold", zero=3))


# A job of two ranks that never ends by itself: it trains, or one of its ranks raises or sleeps while the other waits.
SCRIPT = """
import sys
import torch
from fivefold.layout import Layout, Workload
from fivefold.model import load_model
from fivefold.train.job import Job
from fivefold.train.launch import Run, ending_at_once, launch, or_die, place
from fivefold.train.smoke import smoke
torch.set_num_threads(1)
job = Job(model=load_model("llama-3-8b"), layout=Layout(tp=2), work=Workload(seq_len=1024, global_batch=8), gpus=2,
          gpus_per_node=2, scale_up_size=2, runtime="megatron")
where = place()
def tell(metrics):
    sys.stdout.write("step\\n")
    sys.stdout.flush()
run = Run(steps=10**6, precision="fp32", seed=0, rate=1e-3)
if sys.argv[1] == "raise":
    import torch.distributed as dist
    def work():
        dist.init_process_group("gloo")
        dist.barrier()
        if where.rank == 1:
            raise ValueError("the cause")
        dist.barrier()
    or_die(where, work)
if sys.argv[1] == "wait":
    import time
    import torch.distributed as dist
    def work():
        dist.init_process_group("gloo")
        dist.barrier()
        tell(None)
        if where.rank == 1:
            time.sleep(600)
        dist.barrier()
    with ending_at_once(where):
        or_die(where, work)
launch(smoke(job, 2).job, run, where, tell)
"""


def start(how: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = str(Path(__file__).parents[2] / "src")
    common = {
        **os.environ,
        "PYTHONPATH": source,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, how],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other(victim: int) -> None:
    ranks = start("train")
    try:
        first = ranks[0].stdout
        assert first is not None
        for _ in range(3):
            assert first.readline() == "step\n"  # the job is in the middle of its steps
        killed = time.monotonic()
        ranks[victim].kill()
        _, words = ranks[1 - victim].communicate(timeout=10)
        assert time.monotonic() - killed < 10
        assert ranks[1 - victim].returncode == 1
        assert f"rank {1 - victim} stopped: another rank is gone" in words
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_rank_that_raises_says_why_and_ends_the_other() -> None:
    ranks = start("raise")
    try:
        _, words = ranks[1].communicate(timeout=60)
        assert ranks[1].returncode == 1
        assert "rank 1 failed" in words
        assert "ValueError: the cause" in words
        _, others = ranks[0].communicate(timeout=10)
        assert ranks[0].returncode == 1
        assert "the cause" not in others
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_signal_ends_a_rank_that_waits_in_a_collective() -> None:
    ranks = start("wait")
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "step\n"
        time.sleep(0.5)  # rank 0 is in the barrier by now, and rank 1 asleep
        for rank, number in ((0, signal.SIGTERM), (1, signal.SIGINT)):
            ranks[rank].send_signal(number)
            _, words = ranks[rank].communicate(timeout=10)
            assert ranks[rank].returncode == 128 + number
            assert words.startswith("rank 0 stopped by SIGTERM") if rank == 0 else not words
            assert words.count("\n") <= 1
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with ending_at_once(Place()):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1


# One rank of four under torchrun, which tells its process id first and raises when it gets SIGUSR1.
WORKER = """
import os, signal, sys
from pathlib import Path
class Injected(BaseException): pass  # torch's import takes a RuntimeError or an Exception for an answer of its own
def fail(*_):
    raise Injected("injected failure")
signal.signal(signal.SIGUSR1, fail)
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
from fivefold.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
PLAN = "estimate gpt2 --gpus 4 --seq 512 --gbs 64 --tp 2 --save"
CAUSES = {
    signal.SIGKILL: "SIGKILL",
    signal.SIGTERM: "SIGTERM|exitcode *: 143",
    signal.SIGUSR1: "injected failure",
}


def test_a_rank_that_dies_at_any_moment_ends_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another moment, rank and way in every run; benchmarks/failures.py tries twenty."""
    chance = random.Random()
    way, victim, after_s = chance.choice(list(CAUSES)), chance.randrange(4), chance.random() * 8
    story = f"rank {victim}, {way.name}, {after_s:.2f} s after all ranks had started"
    assert main([*PLAN.split(), str(tmp_path / "plan.toml")]) == 0
    (tmp_path / "worker.py").write_text(WORKER)
    words = f"--standalone --nproc-per-node 4 {tmp_path}/worker.py {tmp_path} train {tmp_path}/plan.toml --smoke"
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words.split(), "--steps", "1000000"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    pids: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while len(pids) < 4 and time.monotonic() < deadline:
            pids = [int(text) for rank in range(4) if (text := read(tmp_path / str(rank)))]
            time.sleep(0.05)
        time.sleep(after_s)
        os.kill(pids[victim], way)
        killed = time.monotonic()
        while any(map(alive, pids)) and time.monotonic() - killed < 30:
            time.sleep(0.05)
        gone_s = time.monotonic() - killed
        output, _ = job.communicate(timeout=60)  # torchrun's own end is not ours
        assert gone_s < 10, story
        assert job.returncode != 0, story
        assert re.search(CAUSES[way], output), f"{story}\n{output}"
    finally:
        for pid in [*pids, job.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        job.communicate()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
