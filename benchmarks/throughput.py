"""Tokens per second of the trainer on CPUs, layout by layout, each beside other engines that train the same.

    python benchmarks/throughput.py --engine deepspeed=/path/to/python --engine torch=/path/to/python
        [--repeats 7] [--only 'NAME;NAME'] [--write docs/throughput.md]

A small Llama (the shape of `engines/worker.py`), fp32, 4,096 tokens a step, one thread per rank. Both engines of a
pair start from the same weights, see the same tokens, clip by the same norm and use PyTorch's fused AdamW; their losses
are compared. Both stay alive and take turns (ours, theirs, theirs, ours, ...): a ratio is one of neighbours in time. An
engine without an interpreter is listed as not run. Run it on a quiet machine with a core per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ENGINES = Path(__file__).parent / "engines"
sys.path.insert(0, str(ENGINES))

from worker import GLOBAL_BATCH, SEQ, VOCAB  # noqa: E402

DATA_STEPS = 24
TOKENS = GLOBAL_BATCH * SEQ
TIMEOUT_S = 300
AGREE = 2e-3  # of two engines' losses, step by step, in fp32
# DeepSpeed 0.19's pipeline takes the norm of the first stage's gradients for that of the model
# (`clip_grad_norm_`, deepspeed/runtime/utils.py: other stages' parameters count if marked as tensor-parallel), so it
# clips less and its losses part from everybody's when clipping begins.
AGREE_UNLESS_CLIPPED = 1e-2


class Rival(NamedTuple):
    """interpreter: the name that --engine gives one. module, kind: in engines/, which of its set-ups."""

    label: str
    interpreter: str
    module: str
    kind: str
    agree: float = AGREE


class Effort(NamedTuple):
    """repeats: turns of each engine, `steps` each, after `warm_up` steps."""

    repeats: int
    steps: int
    warm_up: int


class Case(NamedTuple):
    name: str
    ranks: int
    degrees: dict[str, Any]
    rivals: tuple[Rival, ...] = ()


def _deepspeed(what: str, kind: str = "zero") -> Rival:
    return Rival(f"DeepSpeed {what}", "deepspeed", "deepspeed_engine", kind)


def _torch(what: str, kind: str) -> Rival:
    return Rival(f"PyTorch {what}", "torch", "torch_engine", kind)


# Micro-batches of 4 sequences, for fivefold and transformers' Llama on one rank the fastest of 1, 2 and 4; of 2 where a
# pipeline wants many.
CASES = (
    Case("one rank", 1, {"micro_batch": 4, "zero": 0}, (_deepspeed("one rank"), _torch("training loop", "loop"))),
    Case("DP2", 2, {"micro_batch": 4, "zero": 0}, (_deepspeed("DP"), _torch("DDP", "ddp"))),
    Case("ZeRO-1", 2, {"micro_batch": 4, "zero": 1}, (_deepspeed("ZeRO-1"),)),
    Case("ZeRO-2", 2, {"micro_batch": 4, "zero": 2}, (_deepspeed("ZeRO-2"), _torch("fully_shard, kept", "fsdp"))),
    Case("ZeRO-3", 2, {"micro_batch": 4, "zero": 3}, (_deepspeed("ZeRO-3"), _torch("fully_shard", "fsdp"))),
    Case(
        "TP2", 2, {"micro_batch": 4, "zero": 0, "tp": 2, "sequence_parallel": False}, (_torch("DTensor TP", "tp"),)
    ),
    Case("TP2 + SP", 2, {"micro_batch": 4, "zero": 0, "tp": 2, "sequence_parallel": True}),
    Case("CP2, ring", 2, {"micro_batch": 4, "zero": 0, "cp": 2}),
    Case("CP2, all-to-all", 2, {"micro_batch": 4, "zero": 0, "cp": 2, "cp_kind": "a2a"}),
    Case(
        "PP2, 1F1B", 2, {"micro_batch": 2, "zero": 0, "pp": 2, "schedule": "1f1b"},
        (_deepspeed("pipeline", "pipeline")._replace(agree=AGREE_UNLESS_CLIPPED),
         _torch("pipelining, 1F1B", "pipeline")),
    ),
    Case(
        "PP2, interleaved", 2, {"micro_batch": 2, "zero": 0, "pp": 2, "vpp": 2, "schedule": "interleaved"},
        (_torch("pipelining, interleaved", "pipeline"),),
    ),
)  # fmt: skip

# Tokens/s that others measured for the same model on some 2-core machine (± 40%): engines that do not run here.
PUBLISHED = (
    ("picotron", {"one rank": 2810, "DP2": 4830, "TP2": 3100, "PP2, 1F1B": 3950, "CP2, ring": 3590}),
    ("torchtitan 0.2.2", {"one rank": 2905, "ZeRO-3": 3300, "TP2": 2800, "PP2, 1F1B": 3824}),
    ("DeepSpeed", {"one rank": 2970, "ZeRO-1": 4350, "ZeRO-2": 3230, "ZeRO-3": 3000}),
)

NOT_HERE = (
    "picotron: not on PyPI.",
    'torchtitan 0.3.0 (PyPI): takes the device "cuda" where there is no accelerator (torchtitan/tools/utils.py).',
    'nanotron 0.4 (PyPI): makes tensors on "cuda" when a model is built (nanotron/trainer.py).',
    "megatron-core 0.16.1 (PyPI): its gradient buffers and vocabulary-parallel layers ask for the current CUDA device.",
)


class NotRunError(RuntimeError):
    """An engine did not start, or failed; the message is its own."""


class Team:
    """The ranks of one engine, alive and waiting."""

    def __init__(self, interpreter: str, module: str, kind: str, case: Case, folder: Path) -> None:
        task = {"engine": module, "kind": kind, "folder": str(folder), "ranks": case.ranks, "degrees": case.degrees}
        port = _free_port()
        self.log = folder / f"{module}-{kind}-{case.name.replace(' ', '_')}.log"
        self._ranks = [
            subprocess.Popen(
                [interpreter, str(ENGINES / "worker.py"), json.dumps(task)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("a"), text=True, bufsize=1,
                env=_environment(rank, case.ranks, port),
            )
            for rank in range(case.ranks)
        ]  # fmt: skip
        self.about = self._answers()[0]

    def run(self, first: int, steps: int) -> tuple[float, list[float]]:
        """(seconds of the slowest rank, the losses)."""
        for rank in self._ranks:
            if rank.stdin is not None:
                rank.stdin.write(f"{first} {steps}\n")
        answers = self._answers()
        losses = next(answer["losses"] for answer in answers if None not in answer["losses"])
        return max(answer["seconds"] for answer in answers), losses

    def _answers(self) -> list[dict[str, Any]]:
        answers = [json.loads(_line_of(rank)) for rank in self._ranks]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise NotRunError(errors[0])
        return answers

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def _line_of(rank: subprocess.Popen[str]) -> str:
    if rank.stdout is None or not select.select([rank.stdout], [], [], TIMEOUT_S)[0]:
        return json.dumps({"error": f"no answer in {TIMEOUT_S} s"})
    return rank.stdout.readline() or json.dumps({"error": "it died"})


class Sample(NamedTuple):
    """Tokens/s of one turn of each of a pair."""

    ours: float
    theirs: float


class Result(NamedTuple):
    case: Case
    rival: Rival | None
    samples: list[Sample]
    ours_about: str = ""
    theirs_about: str = ""
    losses: tuple[float, float] = (0.0, 0.0)
    apart: float = 0.0
    failure: str = ""


def measure(case: Case, rival: Rival | None, interpreters: dict[str, str], folder: Path, effort: Effort) -> Result:
    """One pair, or ours alone."""
    if rival is not None and rival.interpreter not in interpreters:
        return Result(case, rival, [], failure=f"no interpreter: --engine {rival.interpreter}=PYTHON")
    teams: list[Team] = []
    try:
        teams.append(Team(sys.executable, "ours", "", case, folder))
        if rival is not None:
            teams.append(Team(interpreters[rival.interpreter], rival.module, rival.kind, case, folder))
        return _take_turns(case, rival, teams, effort)
    except NotRunError as error:
        if rival is None or not teams:
            raise
        return Result(case, rival, [], failure=str(error))
    finally:
        for team in teams:
            team.end()


def _take_turns(case: Case, rival: Rival | None, teams: list[Team], effort: Effort) -> Result:
    losses = [team.run(0, effort.warm_up)[1] for team in teams]
    samples = []
    for repeat in range(effort.repeats):
        first = effort.warm_up + repeat * effort.steps
        speeds = [0.0] * len(teams)
        for i in range(len(teams)) if repeat % 2 == 0 else reversed(range(len(teams))):
            seconds, more = teams[i].run(first, effort.steps)
            speeds[i] = effort.steps * TOKENS / seconds
            losses[i] += more
        samples.append(Sample(speeds[0], speeds[-1]))
    apart = max(abs(a - b) / abs(a) for a, b in zip(losses[0], losses[-1], strict=True))
    if not all(each[-1] < each[0] for each in losses):
        raise RuntimeError(f"{case.name}: a loss did not fall: {[(each[0], each[-1]) for each in losses]}")
    if rival is not None and apart > rival.agree:
        raise RuntimeError(f"{case.name}: the losses of the two engines part by {apart:.1e}: {losses}")
    about = [str(team.about["version"]) + ", torch " + str(team.about["torch"]) for team in teams]
    return Result(case, rival, samples, about[0], about[-1], (losses[0][0], losses[0][-1]), apart)


def prepare(folder: Path) -> None:
    """The tokens of all steps and the initial weights, for every engine."""
    from ours import spec

    from fivefold.train.data import Synthetic
    from fivefold.train.init import initialise
    from fivefold.train.model import Decoder

    data = Synthetic(VOCAB, SEQ)
    rows = [data.samples(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)) for step in range(DATA_STEPS)]
    whole = [torch.cat((tokens, labels[:, -1:]), dim=1) for tokens, labels in rows]
    np.save(folder / "tokens.npy", torch.stack(whole).numpy())
    model = Decoder(spec(), dtype=torch.float32)
    initialise(model, spec(), 0)
    named = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in model.named_parameters()}
    torch.save({name: p.detach().clone() for name, p in named.items()}, folder / "weights.pt")


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    source = str(Path(__file__).parents[1] / "src")
    return {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ENGINES), source)), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def line(result: Result) -> str:
    """One row of the table."""
    name, label = result.case.name, result.rival.label if result.rival is not None else "–"
    if result.failure:
        return f"| {name} | {label} | | | not run: {result.failure} |"
    ours = statistics.median(s.ours for s in result.samples)
    if result.rival is None:
        return f"| {name} | – | {ours:,.0f} | | |"
    ratios = sorted(s.ours / s.theirs for s in result.samples)
    theirs = statistics.median(s.theirs for s in result.samples)
    middle = f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"| {name} | {label} | {ours:,.0f} | {theirs:,.0f} | {middle} |"


def page(results: list[Result], effort: Effort) -> str:
    versions = sorted({about for r in results for about in (r.ours_about, r.theirs_about) if about})
    ran = [r for r in results if not r.failure]
    apart = max((r.apart for r in ran if r.rival is None or r.rival.agree == AGREE), default=0.0)
    parted = max((r.apart for r in ran), default=0.0)
    first, last = max(r.losses[0] for r in ran), max(r.losses[1] for r in ran)
    return f"""# Throughput on CPUs

Generated by `python benchmarks/throughput.py`, {date.today().isoformat()}, {os.cpu_count()} cores ({_processor()}).

A 4-layer Llama (hidden 256, 8 heads, 4 KV heads, ffn 688, vocabulary 2,048), sequences of {SEQ}, fp32, {TOKENS:,}
tokens a step in micro-batches of 4 sequences (2 in pipelines), one thread per rank. Same initial weights, tokens,
clipping and AdamW (PyTorch's fused one): the losses of a pair part by at most {apart:.0e} of themselves while they
fall from {first:.2f} to {last:.2f}. Medians of {effort.repeats} turns of {effort.steps} steps, after {effort.warm_up}
of warm-up; the ratio is that of neighbours in time, with its smallest and largest. DeepSpeed's pipeline takes the norm
of the first stage's gradients for the model's, so from the first clipped step its losses part, by up to {parted:.0e}.

| layout | beside | fivefold, tokens/s | theirs, tokens/s | ratio |
|---|---|---|---|---|
{chr(10).join(line(r) for r in results)}

Versions: {"; ".join(versions)}.

## Engines that were not run here

{chr(10).join(f"- {reason}" for reason in NOT_HERE)}

What others measured on some 2-core machine, ± 40%, same model; not comparable with the numbers above beyond that.

| engine | {" | ".join(c.name for c in CASES if any(c.name in row for _, row in PUBLISHED))} |
|---|{"---|" * sum(any(c.name in row for _, row in PUBLISHED) for c in CASES)}
{chr(10).join(_published(name, row) for name, row in PUBLISHED)}
"""


def _published(name: str, row: dict[str, int]) -> str:
    shown = [c.name for c in CASES if any(c.name in other for _, other in PUBLISHED)]
    return f"| {name} | " + " | ".join(f"{row[case]:,}" if case in row else "" for case in shown) + " |"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(text.partition(":")[2].strip() for text in lines if text.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--only", default="", help="names of layouts, separated by semicolons")
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    effort = Effort(chosen.repeats, chosen.steps, chosen.warm_up)
    interpreters = dict(each.split("=", 1) for each in chosen.engine)
    only = [name.strip() for name in chosen.only.split(";") if name.strip()]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for case in (c for c in CASES if not only or c.name in only):
            for rival in case.rivals or (None,):
                result = measure(case, rival, interpreters, Path(folder), effort)
                sys.stdout.write(line(result) + "\n")
                sys.stdout.flush()
                results.append(result)
    if chosen.write is not None:
        chosen.write.write_text(page(results, effort), encoding="utf-8")


if __name__ == "__main__":
    main()
