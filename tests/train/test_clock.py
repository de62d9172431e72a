"""What a measured step tells: bytes against the counted ones, waits against the moments of the ranks."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from proofs import BATCH, SEQ, VOCAB, layout_of, llama
from ranks import run_ranks

from fivefold.errors import FivefoldError
from fivefold.train.build import Setup
from fivefold.train.clock import DeviceClock, HostClock, clock_of
from fivefold.train.data import Synthetic
from fivefold.train.loop import JsonLines, train
from fivefold.train.mesh import Mesh, all_reduce
from fivefold.train.traffic import Traffic
from fivefold.train.trainer import Trainer
from fivefold.train.waits import Waits

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "micro_batch": 4}),
    (2, {"tp": 2, "sequence_parallel": False, "micro_batch": 4}),
    (2, {"cp": 2, "micro_batch": 4}),
    (4, {"cp": 2, "cp_kind": "a2a", "zero": 3, "micro_batch": 2}),
    (4, {"pp": 2, "vpp": 2, "micro_batch": 2}),
    (4, {"zero": 2, "dp_replicate": 2, "micro_batch": 2}),
]


@pytest.mark.parametrize(("ranks", "degrees"), LAYOUTS, ids=str)
def test_bytes_are_those_that_a_dispatch_mode_counts(ranks: int, degrees: dict[str, Any]) -> None:
    spec = llama(4 if "vpp" in degrees else 2)
    layout = layout_of(spec, ranks, **degrees)

    def run(rank: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        mesh = Mesh(layout)
        trainer = Trainer(spec, layout, mesh, Setup(precision="fp32"))
        with Traffic(mesh) as traffic, Waits(mesh, HostClock()) as waits:
            trainer.step(0, Synthetic(VOCAB, SEQ).micro_batches(0, layout, mesh.index("dp")))
        found = waits.take()
        sent = {axis: waited.sent_bytes for axis, waited in found.items() if waited.sent_bytes}
        counted: dict[str, float] = Counter()
        for key, volume in traffic.volumes.items():
            counted[key.axis] += volume.sent_bytes
        return sent, counted, {axis: waited.wait_s for axis, waited in found.items()}

    for sent, counted, seconds in run_ranks(ranks, run):
        assert sent == counted
        assert all(seconds[axis] > 0 for axis in sent)


def test_a_late_rank_makes_the_other_wait() -> None:
    layout = layout_of(llama(1), 2)

    def run(rank: int) -> tuple[float, float, dict[str, Any]]:
        mesh, total = Mesh(layout), torch.ones(1)
        with Waits(mesh, HostClock()) as waits:
            all_reduce(total, mesh.group("dp"))
            waits.take()
            time.sleep(0.2 * rank)
            before = time.perf_counter()
            all_reduce(total, mesh.group("dp"))
            return before, time.perf_counter(), waits.take()

    (early, end, first), (late, _, second) = run_ranks(2, run)
    assert first.keys() == second.keys() == {"dp"}
    assert late - early <= first["dp"].wait_s <= end - early


def test_everything_is_put_back() -> None:
    def run(rank: int) -> float:
        mesh = Mesh(layout_of(llama(1), 2))
        before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
        with Waits(mesh, HostClock()), pytest.raises(FivefoldError, match="already"):
            Waits(mesh, HostClock()).__enter__()
        assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before
        x = torch.full((1,), float(rank))
        (dist.send if rank else dist.recv)(x, 1 - rank)
        return x.item()

    assert run_ranks(2, run) == [1.0, 1.0]


def test_the_log_has_every_rank(tmp_path: Any) -> None:
    spec, path = llama(2), tmp_path / "log.jsonl"
    layout = layout_of(spec, 2, pp=2, micro_batch=2)

    def run(rank: int) -> None:
        trainer = Trainer(spec, layout, Mesh(layout), Setup(precision="fp32"))
        with JsonLines(path if rank == 0 else tmp_path / "other") as lines:
            train(trainer, Synthetic(VOCAB, SEQ), range(2), measure=True, tell=lines)
        with JsonLines(tmp_path / f"plain{rank}") as lines:
            train(trainer, Synthetic(VOCAB, SEQ), range(2, 3), tell=lines)

    run_ranks(2, run)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [[rank["rank"] for rank in line["ranks"]] for line in lines] == [[0, 1]] * 2
    boundary = 2 * SEQ * spec.hidden * 4
    for rank in lines[1]["ranks"]:
        # Four micro-batches one way, and the scalars of the world, which has the same ranks: loss and norm.
        assert rank["sent_bytes"]["pp"] == BATCH // 2 * boundary + 2 * 8
        assert 0 < rank["wait_s"]["pp"] < rank["step_s"]
        assert 0 < rank["bubble"] < 1
        assert rank["peak_memory_bytes"] > 0
    assert json.loads((tmp_path / "plain0").read_text())["ranks"] is None


def test_clocks() -> None:
    clock = clock_of("cpu")
    start = clock.now()
    clock.settle()
    assert clock.seconds(start, clock.now()) >= 0
    assert isinstance(clock_of("cuda:0"), DeviceClock)
