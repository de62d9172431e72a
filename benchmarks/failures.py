"""Kills one rank of a job at a random moment, and looks at what becomes of the others.

    python benchmarks/failures.py              20 jobs of 4 ranks under torchrun
    python benchmarks/failures.py --seed 3     other moments

A moment is during start-up (imports, rendezvous, set-up of groups and model) or, at a random instant of some seconds,
while the job trains: inside a step or between two. The way is SIGKILL, SIGTERM, or an exception raised in the rank.
Wanted: every process of the job gone within 10 s, torchrun's exit code not zero, and the cause printed. Then SIGINT and
SIGTERM to the job itself. Exit code 1 when something else happens.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

RANKS = 4
GOAL_S = 10.0
PLAN = "estimate gpt2 --gpus 4 --seq 512 --gbs 64 --tp 2 --pp 2 --save"
# A rank of `fivefold train` that also tells its process id, and raises when it gets SIGUSR1.
WORKER = """
import os, signal, sys
from pathlib import Path
class Injected(BaseException): pass  # torch's import takes a RuntimeError or an Exception for an answer of its own
def fail(*_):
    raise Injected("injected failure")
signal.signal(signal.SIGUSR1, fail)
folder = Path(sys.argv[1])
(folder / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
from fivefold.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
WAYS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "exception": signal.SIGUSR1}
# What tells a reader why the job ended, by way: torchrun's words for a signal, ours for an exception.
CAUSES = {
    "SIGKILL": r"Signal 9 \(SIGKILL\)",
    "SIGTERM": r"Signal 15 \(SIGTERM\)|exitcode *: 143|stopped by SIGTERM",
    "exception": r"injected failure|Signal 10 \(SIGUSR1\)",  # the latter before the handler is there
}


class Trial(NamedTuple):
    when: str
    way: str
    rank: int
    after_s: float


class Outcome(NamedTuple):
    """gone_s: until no rank was left. ended_s: until torchrun had ended too. steps: done before."""

    gone_s: float
    ended_s: float
    code: int | None
    cause: str
    steps: int

    def good(self) -> bool:
        return self.gone_s < GOAL_S and self.code not in (0, None) and bool(self.cause)


def start(folder: Path, plan: Path) -> subprocess.Popen[str]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), str(script),
        str(folder), "train", str(plan), "--smoke", "--steps", "1000000", "--log-file", str(folder / "log.jsonl"),
    ]  # fmt: skip
    output = (folder / "output").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)


def pids(folder: Path) -> list[int]:
    return [int(text) for rank in range(RANKS) if (text := read(folder / f"rank{rank}"))]


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def steps_done(folder: Path) -> int:
    return read(folder / "log.jsonl").count("\n")


def wait_for(what: str, condition, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def watch_end(job: subprocess.Popen[str], folder: Path, cause: str) -> Outcome:
    """From now on."""
    begin = time.monotonic()
    steps, ranks = steps_done(folder), pids(folder)
    gone_s = ended_s = float("inf")
    while ended_s == float("inf") and time.monotonic() - begin < 3 * GOAL_S:
        time.sleep(0.02)
        elapsed = time.monotonic() - begin
        if gone_s == float("inf") and not any(alive(pid) for pid in ranks):
            gone_s = elapsed
        if job.poll() is not None and gone_s < float("inf"):
            ended_s = elapsed
    found = re.search(cause, read(folder / "output"))
    return Outcome(gone_s, ended_s, job.returncode, found.group(0) if found else "", steps)


def end(job: subprocess.Popen[str], folder: Path) -> None:
    """Whatever happened, nothing stays behind."""
    for pid in [*pids(folder), job.pid]:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    job.wait()


def run(trial: Trial, plan: Path, keep: Path | None) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = start(folder, plan)
        try:
            if trial.when == "start-up":
                wait_for("the ranks", lambda: len(pids(folder)) == RANKS, 120)
            else:
                wait_for("the first steps", lambda: steps_done(folder) >= 2, 240)
            time.sleep(trial.after_s)
            os.kill(pids(folder)[trial.rank], WAYS[trial.way])
            outcome = watch_end(job, folder, CAUSES[trial.way])
            if keep is not None and not outcome.good():
                keep.write_text(f"{trial}\n{outcome}\n{read(folder / 'output')}")
            return outcome
        finally:
            end(job, folder)


def whole_job(number: signal.Signals, plan: Path) -> Outcome:
    """The signal to torchrun, and to the ranks too where a terminal sends it to all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = start(folder, plan)
        try:
            wait_for("the first steps", lambda: steps_done(folder) >= 2, 240)
            for pid in [*(pids(folder) if number is signal.SIGINT else []), job.pid]:
                os.kill(pid, number)
            outcome = watch_end(job, folder, f"stopped by {number.name}")
            lines = read(folder / "log.jsonl")
            torn = bool(lines) and not lines.endswith("\n")
            return outcome._replace(cause="torn log" if torn else outcome.cause)
        finally:
            end(job, folder)


def row(when: str, way: str, rank: str, later: str, outcome: Outcome) -> str:
    cells = (
        when, way, rank, later, str(outcome.steps), f"{outcome.gone_s:.1f}", f"{outcome.ended_s:.1f}",
        str(outcome.code), outcome.cause or "-", "yes" if outcome.good() else "NO",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEAD = "| when | way | rank | s later | steps done | ranks gone s | torchrun gone s | exit code | cause | good |"


def report(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one each time, which is printed")
    parser.add_argument("--keep", type=Path, help="file for the output of a trial that went wrong")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**31)
    chance = random.Random(seed)
    report(f"seed {seed}\n\n{HEAD}\n|{' --- |' * 10}")
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        plan = Path(name) / "plan.toml"
        words = [sys.executable, "-m", "fivefold", *PLAN.split(), str(plan)]
        subprocess.run(words, check=True, capture_output=True)
        for _ in range(arguments.trials):
            when = chance.choice(("start-up", "steps", "steps"))
            longest_s = 8 if when == "start-up" else 3
            trial = Trial(when, chance.choice(list(WAYS)), chance.randrange(RANKS), chance.random() * longest_s)
            outcome = run(trial, plan, arguments.keep)
            bad += not outcome.good()
            report(row(when, trial.way, str(trial.rank), f"{trial.after_s:.2f}", outcome))
        for number in (signal.SIGINT, signal.SIGTERM):
            outcome = whole_job(number, plan)
            bad += not outcome.good()
            report(row("steps", f"{number.name} to the job", "all", "0", outcome))
    report(f"\n{'All' if not bad else f'{bad} NOT'} as wanted.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
