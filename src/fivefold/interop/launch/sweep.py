"""Several jobs of one shape, one after the other: a Slurm job array, or a script that starts each with torchrun.

Every candidate has a folder of its own, candidates/N, for its plan, its script and what it prints.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from fivefold.errors import FivefoldError
from fivefold.interop.launch.job import Job, checked, in_shell
from fivefold.interop.launch.script import arrays, command, expanded, head, prologue
from fivefold.interop.launch.slurm import PLACE, SlurmOptions, directives, step
from fivefold.interop.launch.torchrun import ADDRESS, torchrun

LOG, STEPS = "log.txt", "steps.jsonl"


def candidate(number: int) -> str:
    """The folder of a candidate, from 0."""
    return f"candidates/{number}"


def slurm_sweep(jobs: Sequence[Job], folder: str, site: SlurmOptions | None = None) -> dict[str, str]:
    """The array's script and every candidate's. folder: absolute path that all nodes see. One candidate runs at a
    time, so that none disturbs another's network."""
    site = site or SlurmOptions()
    first = _whole(jobs)
    lines = [
        head(first)[0],
        *directives(first, site, array=len(jobs)),
        *head(first)[1:],
        *prologue(first),
        "",
        PLACE,
        "",
        f"SWEEP={shlex.quote(checked('--out', folder))}",
        'CANDIDATE="$SWEEP/candidates/$SLURM_ARRAY_TASK_ID"',
        f'rm -f "$CANDIDATE/{STEPS}"',
        step(first, ["bash", '"$CANDIDATE/rank.sh"'], site, f'"$CANDIDATE/{LOG}"'),
    ]
    ranks = {f"{candidate(at)}/rank.sh": _rank(job) for at, job in enumerate(jobs)}
    return {"sweep.sbatch": "\n".join(lines) + "\n", **ranks}


def torchrun_sweep(jobs: Sequence[Job], folder: str) -> dict[str, str]:
    """A script that runs every candidate on this node, or, started on all of them, on several."""
    first = _whole(jobs)
    needs = (ADDRESS,) if first.nodes > 1 else ()
    exported = [f"export {need.name}" for need in (*first.needs, *needs) if need.default is None]
    lines = [
        *head(first),
        *prologue(first, needs),
        *exported,
        "",
        f"SWEEP={shlex.quote(checked('--out', folder))}",
        f"for number in {' '.join(str(at) for at in range(len(jobs)))}; do",
        '    candidate="$SWEEP/candidates/$number"',
        f'    rm -f "$candidate/{STEPS}"',
        f'    echo "candidate $number of {len(jobs)}"',
        f'    bash "$candidate/run.sh" > "$candidate/{LOG}" 2>&1 || echo "candidate $number failed: $candidate/{LOG}"',
        "done",
    ]
    runs = {f"{candidate(at)}/run.sh": text for at, job in enumerate(jobs) for text in torchrun(job).values()}
    return {"sweep.sh": "\n".join(lines) + "\n", **runs}


def _rank(job: Job) -> str:
    """One rank's program, whose place srun gives."""
    words = ["exec", "python", "-u", *map(in_shell, job.program), *expanded(job)]
    return "\n".join([*head(job), *prologue(job), *arrays(job), "", command(words)]) + "\n"


def _whole(jobs: Sequence[Job]) -> Job:
    """What all candidates share, as the head of the script that starts them."""
    if not jobs or len({(job.nodes, job.gpus_per_node) for job in jobs}) > 1:
        raise FivefoldError(
            "The candidates of a sweep need the same nodes, since one job runs them all.",
            code="several-shapes",
            option="--top",
            value=len(jobs),
        )
    first = jobs[0]
    required = tuple(need for need in first.needs if need.default is None)
    about = (f"Runs {len(jobs)} layouts one after the other, to measure them. Then: fivefold sweep FOLDER --collect",)
    return replace(first, about=about, needs=required, environment={})
