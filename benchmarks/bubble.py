"""The bubble that the trainer measures beside the one that the simulator predicts, for every schedule.

    python benchmarks/bubble.py                 a Markdown table
    python benchmarks/bubble.py --only 1f1b     some schedules
    python benchmarks/bubble.py --stage-ms 20   shorter stages: the executor's own time weighs more
    python benchmarks/bubble.py --write docs/bubble.md

A tiny model trains on forked ranks of this machine, with stages that sleep in forward and in backward, so that two
cores are as good as many. The numbers are those of `train --measure`: span and busy seconds of each rank. The simulator
gets the mean seconds of each stage in the same step, and the seconds of one transfer between two idle ranks, timed in
the same run. Steps count from the second. Looked at by people; no test, because a busy machine fails it: where others
work on it, `chrt -f 1 python benchmarks/bubble.py` lets the sleepers wake in time (Linux, as root).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fivefold.layout import Layout, ResolvedLayout, Workload, resolve
from fivefold.layout.layout import SPLIT_BACKWARD
from fivefold.model import Attention, Block, BlockRun, FeedForward, ModelSpec
from fivefold.schedule import Action, ActionKind, actions, placement, simulate
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.measured import Measured
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Recipe
from fivefold.train.trainer import Trainer
from fivefold.train.verify.forked import run_forked

SEQ, HIDDEN, VOCAB = 16, 32, 67
UNEQUAL = (1.0, 0.6, 1.3, 0.9)  # of the stage time, in turn
GOAL = 0.05
_BACKWARD = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


class Case(NamedTuple):
    schedule: str
    p: int
    m: int
    v: int = 1
    shape: tuple[float, ...] = (1.0,)


CASES = (
    Case("1f1b", 2, 8),
    Case("1f1b", 4, 8),
    Case("1f1b", 4, 16),
    Case("1f1b", 4, 8, shape=UNEQUAL),
    Case("interleaved", 2, 8, 2),
    Case("interleaved", 4, 8, 2),
    Case("interleaved", 4, 16, 2),
    Case("interleaved", 4, 8, 2, UNEQUAL),
    Case("afab", 4, 8),
    Case("afab", 4, 8, shape=UNEQUAL),
    Case("zb-h1", 4, 8),
    Case("zb-h1", 4, 8, shape=UNEQUAL),
    Case("zbv", 4, 8, 2),
    Case("zbv", 4, 8, 2, UNEQUAL),
    Case("dualpipev", 4, 8, 2),
    Case("dualpipev", 4, 8, 2, UNEQUAL),
)


class RankStep(NamedTuple):
    """bubble, pipeline_s: as measured. compute: (action, start, seconds)."""

    bubble: float
    pipeline_s: float
    compute: list[tuple[Action, float, float]]


class Compared(NamedTuple):
    """Seconds and mean bubble of the ranks, measured and simulated."""

    measured_s: float
    simulated_s: float
    measured_bubble: float
    simulated_bubble: float


class _Sleep(torch.autograd.Function):
    """Its argument, some seconds later; and its gradient, some others later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


def stage_seconds(case: Case, stage_s: float) -> list[float]:
    """Of each virtual stage's forward; its backward takes twice that, half of it for the weights."""
    count = case.p * case.v
    return [stage_s / case.v * case.shape[i % len(case.shape)] for i in range(count)]


def make_slow(trainer: Trainer, forward_s: list[float], split: bool) -> None:
    """Let every stage sleep. Where the backward is split, half of its sleep hangs on a parameter of no use."""
    for stage in trainer.stages:
        seconds = forward_s[stage.virtual]
        weight = torch.ones((), requires_grad=True)

        def later(_module: Any, _inputs: Any, out: torch.Tensor, seconds=seconds, weight=weight) -> torch.Tensor:
            out = _Sleep.apply(out, seconds, seconds if split else 2 * seconds)
            return out * _Sleep.apply(weight, 0.0, seconds) if split else out

        stage.module.register_forward_hook(later)


def transfer_seconds(mesh: Mesh, repeats: int = 20) -> float | None:
    """Seconds from the post of a send to the arrival, where the receiver waits and both have slept before; on the
    first two ranks, None elsewhere. One machine: the ranks share a clock."""
    rank, group = mesh.index("pp"), mesh.group("pp")
    seconds = []
    for tag in range(repeats if rank < 2 else 0):
        moment = torch.zeros(SEQ * HIDDEN, dtype=torch.float64)
        if rank == 0:
            time.sleep(0.02)
            moment[0] = time.perf_counter()
        call = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(call, moment, group=group, group_peer=1 - rank, tag=tag)]):
            work.wait()
        seconds.append(time.perf_counter() - moment[0].item())
    return median(seconds) if rank == 1 else None


def run(case: Case, stage_s: float, steps: int) -> tuple[ResolvedLayout, list[list[RankStep]], float]:
    """(layout, the steps of each rank, seconds of a transfer)."""
    block = Block(mixer=Attention(heads=2, kv_heads=2, head_dim=16), feed=FeedForward(ffn=32))
    spec = ModelSpec(
        name="tiny", family="llama", hidden=HIDDEN, vocab=VOCAB, max_position=SEQ,
        runs=(BlockRun(case.p * case.v, block),),
    )  # fmt: skip
    plan: Any = case.schedule
    layout = resolve(
        Layout(pp=case.p, vpp=case.v, schedule=plan, micro_batch=1), spec, case.p,
        Workload(seq_len=SEQ, global_batch=case.m),
    )  # fmt: skip

    def rank_steps(_: int) -> tuple[list[RankStep], float | None]:
        trainer = Trainer(spec, layout, Mesh(layout), Setup(precision="fp32", recipe=Recipe(rate=1e-3)))
        make_slow(trainer, stage_seconds(case, stage_s), case.schedule in SPLIT_BACKWARD)
        source, found = Synthetic(VOCAB, SEQ), []
        with Measured(trainer) as measured:
            for step in range(steps + 1):
                trainer.step(step, source.micro_batches(step, layout, 0))
                mine = measured.take(0.0, 0)[trainer.mesh.rank]
                if measured.times is not None and step:
                    found.append(RankStep(mine.bubble or 0.0, mine.pipeline_s or 0.0, measured.times.compute_s()))
        return found, transfer_seconds(trainer.mesh)

    results = run_forked(case.p, rank_steps, 60 + 10 * steps * case.m * stage_s * 3)
    return layout, [steps for steps, _ in results], next(c for _, c in results if c is not None)


def compare(layout: ResolvedLayout, ranks: list[RankStep], transfer_s: float) -> Compared:
    """One step beside the simulation with its own stage seconds."""
    p, v, where = layout.pp, layout.vpp, placement(layout.schedule)
    seconds: defaultdict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for rank, step in enumerate(ranks):
        for action, _, taken in step.compute:
            seconds[action.kind, where.stage(rank, action.chunk or 0, p)].append(taken)

    def of_kind(kind: ActionKind) -> list[float]:
        return [mean(seconds[kind, stage]) for stage in range(p * v)]

    def backward_of(stage: int) -> float:
        """Of one micro-batch, whole or in two: schedules that split the backward run some of them whole."""
        return sum(sum(seconds[kind, stage]) for kind in _BACKWARD) / layout.num_micro_batches

    split = layout.schedule in SPLIT_BACKWARD
    backward = [backward_of(stage) for stage in range(p * v)]
    simulated = simulate(
        actions(layout.schedule, p, layout.num_micro_batches, v), of_kind(ActionKind.FORWARD), backward, transfer_s,
        weight_grad_s=of_kind(ActionKind.WEIGHT_GRAD) if split else None, placement=where,
    )  # fmt: skip
    return Compared(
        max(step.pipeline_s for step in ranks),
        simulated.makespan_s,
        mean(step.bubble for step in ranks),
        float(simulated.bubble_s.mean()) / simulated.makespan_s,
    )


def row(case: Case, stage_s: float, steps: int) -> tuple[str, bool]:
    layout, ranks, transfer_s = run(case, stage_s, steps)
    found = [compare(layout, [rank[step] for rank in ranks], transfer_s) for step in range(steps)]
    typical = sorted(found, key=lambda c: c.measured_bubble / c.simulated_bubble)[len(found) // 2]
    off_s = typical.measured_s / typical.simulated_s - 1
    off_bubble = typical.measured_bubble / typical.simulated_bubble - 1
    within = abs(off_bubble) <= GOAL
    cells = (
        case.schedule, case.p, case.m, case.v, "equal" if len(case.shape) == 1 else "unequal",
        f"{transfer_s * 1e3:.2f}", f"{typical.simulated_s:.3f}", f"{typical.measured_s:.3f}", f"{off_s:+.1%}",
        f"{typical.simulated_bubble:.1%}", f"{typical.measured_bubble:.1%}", f"{off_bubble:+.1%}",
        "yes" if within else "NO",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |", within


HEAD = (
    "| schedule | p | m | v | stages | transfer ms | simulated s | measured s | off | simulated bubble "
    "| measured bubble | off | within 5% |"
)


PAGE = """# Bubbles, measured and simulated

Written by benchmarks/bubble.py. A tiny model trains in p processes whose stages sleep: a rank's forward takes
{stage_ms:g} ms, its backward {backward_ms:g} ms, over its v chunks (unequal: times 1, 0.6, 1.3, 0.9 in turn), for m
micro-batches. Measured is what `train --measure` says, from the second step on; simulated is the event simulator with
the mean seconds of each stage in the same step and the seconds of one transfer in the same run. The bubble is the mean
share of the pipeline's time in which its ranks do not compute. What is left of a difference is mostly the time to post
transfers, about 0.2 ms each, which the simulator does not have: it weighs most where the bubble is small.
"""


def report(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage-ms", type=float, default=200.0, help="forward of a rank's stages; backward is twice it"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps after the first; the middle one is shown")
    parser.add_argument("--only", nargs="*", help="schedules")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [HEAD, "|" + " --- |" * HEAD.count(" | ") + " --- |"]
    report("\n".join(lines))
    cases = [case for case in CASES if not arguments.only or case.schedule in arguments.only]
    within = 0
    for case in cases:
        line, close = row(case, arguments.stage_ms / 1e3, arguments.steps)
        report(line)
        lines.append(line)
        within += close
    verdict = f"{within} of {len(cases)} bubbles within {GOAL:.0%} of the simulator's."
    report(f"\n{verdict}")
    if arguments.write is not None:
        where = f"{os.cpu_count()} cores, PyTorch {torch.__version__}, gloo."
        how = PAGE.format(stage_ms=arguments.stage_ms, backward_ms=2 * arguments.stage_ms)
        arguments.write.write_text(f"{how}\n{where} {verdict}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
