"""Who may start, who is refused, and that nobody survives a rank that dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.errors import FivefoldError
from fivefold.layout import Layout, Overlap, Workload
from fivefold.model import load_model
from fivefold.train.job import Job
from fivefold.train.launch import Place, place, require_world
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
    (job_of("mixtral-8x7b", ep=2), "model-not-trainable", "experts"),
    (job_of(tp=3, gpus=12), "heads-tp", "would not start"),
    (job_of(tp=2, overlap=Overlap(tp=True)), "layout-not-trainable", "no-overlap-tp"),
    (job_of(optimizer="muon", zero=0), "optimizer-not-trainable", "muon"),
    (
        replace(job_of(), model=replace(load_model("llama-3-8b"), mtp=1)),
        "model-not-trainable",
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


# A job of two ranks that never ends by itself: it trains, or one of its ranks raises while the other waits for it.
SCRIPT = """
import sys
import torch
from fivefold.layout import Layout, Workload
from fivefold.model import load_model
from fivefold.train.job import Job
from fivefold.train.launch import Run, launch, or_die, place
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
