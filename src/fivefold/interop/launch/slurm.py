"""A Slurm batch script: one task per GPU, started by srun, which hands signals to the ranks themselves.

torchrun would stand between Slurm and the ranks and end them 30 s after a signal (PyTorch 2.13,
torch/distributed/elastic/multiprocessing/api.py), too soon for a checkpoint. Slurm's options: sbatch, srun and scancel
manual pages, 24.05. Every task sees all GPUs of its node (--gpu-bind=none) and takes the one of its LOCAL_RANK: GPUs
that a task does not see cannot be its peers over NVLink.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fivefold.errors import FivefoldError
from fivefold.interop.launch.job import Job, in_shell
from fivefold.interop.launch.script import arrays, command, expanded, head, prologue

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+,:@/-]{0,99}")
_TIME = re.compile(r"\d{1,4}(:[0-5]\d){0,2}|\d{1,3}-\d{1,2}(:[0-5]\d){0,2}")
_RANKS = 'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"; exec "$@"'
PLACE = """\
# The first node answers; the port follows from the job, so that two jobs on one node do not meet.
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="$((15000 + SLURM_JOB_ID % 20000))"
export MASTER_ADDR MASTER_PORT"""
_STOP = """\
# Slurm warns this script before the time limit (or before preemption); the ranks then save and end, and the job
# goes back into the queue, to go on from the checkpoint.
stopping=0
trap 'stopping=1; warned=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1"""
_WAIT = """\
step=$!
# A trapped signal ends wait, with a code of its own, before the step has ended: then its code is asked for again.
warned=1
while ((warned)); do
    warned=0 code=0
    wait "$step" || code=$?
done
if ((stopping)); then
    # Of a job array only this task: the array's own number would requeue all of them.
    job="$SLURM_JOB_ID"
    if [[ -n "${SLURM_ARRAY_JOB_ID:-}" ]]; then job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; fi
    scontrol requeue "$job"
fi
exit "$code\""""

_MOST = 65_535  # of --signal's seconds: sbatch manual page, 24.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What a site asks for; None leaves it to Slurm's defaults. warn_s: seconds between the warning and the limit."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str | None = None
    cpus_per_gpu: int | None = None
    warn_s: int = 300


def slurm(job: Job, site: SlurmOptions | None = None) -> dict[str, str]:
    """File name to text. Raises FivefoldError for a site's word that is none."""
    lines = [
        head(job)[0],
        *directives(job, site or SlurmOptions()),
        *head(job)[1:],
        *prologue(job),
        "",
        PLACE,
        *arrays(job),
        *(["", _STOP] if job.resumes else []),
        "",
        step(job, ["python", "-u", *map(in_shell, job.program), *expanded(job)], site or SlurmOptions()),
    ]
    return {f"{job.name}.sbatch": "\n".join(lines) + "\n"}


def step(job: Job, program: list[str], site: SlurmOptions, log: str | None = None) -> str:
    """srun with one task per GPU. program, log: quoted words. A job that resumes is watched in the background."""
    # Since 22.05 srun no longer takes --cpus-per-task from the batch job.
    cpus = [] if site.cpus_per_gpu is None else ["--cpus-per-task", str(site.cpus_per_gpu)]
    words = [
        "srun", "--nodes", str(job.nodes), "--ntasks-per-node", str(job.gpus_per_node), *cpus, "--gpu-bind=none",
        "--kill-on-bad-exit=1", "bash", "-c", f"'{_RANKS}'", "rank", *program,
        *([] if log is None else ["> " + log, "2>&1"]),
    ]  # fmt: skip
    start = f"# Every task expands these itself.\n# shellcheck disable=SC2016\n{command(words)}"
    return f"{start} &\n{_WAIT}" if job.resumes else start


def directives(job: Job, site: SlurmOptions, array: int | None = None) -> list[str]:
    """The #SBATCH lines. array: number of tasks of a job array, one of which runs at a time."""
    for option, count in (("--cpus-per-gpu", site.cpus_per_gpu), ("--warn", site.warn_s)):
        if count is not None and not 0 < count <= _MOST:
            raise FivefoldError(
                f"{option} {count} cannot stand in an #SBATCH line; it is a whole number from 1 to {_MOST:,}.",
                code="bad-slurm-word",
                option=option,
                value=count,
                legal=f"1 to {_MOST}",
            )
    values: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.gpus_per_node),
        "gpus-per-node": str(job.gpus_per_node),
        "cpus-per-task": None if site.cpus_per_gpu is None else str(site.cpus_per_gpu),
        "partition": word("--partition", site.partition),
        "account": word("--account", site.account),
        "qos": word("--qos", site.qos),
        "constraint": word("--constraint", site.constraint),
        "reservation": word("--reservation", site.reservation),
        "time": word("--time", site.time, _TIME, "minutes, HH:MM:SS or D-HH:MM:SS"),
        "array": None if array is None else f"0-{array - 1}%1",
        "output": "%x-%j.out" if array is None else "%x-%a.out",
        "open-mode": "append",
        "signal": f"B:USR1@{site.warn_s}" if job.resumes else None,
    }
    switches = ("exclusive", "requeue" if job.resumes else "no-requeue")
    given = [f"#SBATCH --{name}={value}" for name, value in values.items() if value is not None]
    return [*given, *(f"#SBATCH --{name}" for name in switches)]


def word(
    option: str, value: str | None, form: re.Pattern[str] = _WORD, legal: str = "letters, digits and ._+,:@/-"
) -> str | None:
    """A site's word. Slurm reads directives without a shell, so what it cannot hold is refused and not quoted."""
    if value is not None and not form.fullmatch(value):
        raise FivefoldError(
            f"{option} {value[:60]!r} cannot stand in an #SBATCH line. Legal: {legal}.",
            code="bad-slurm-word",
            option=option,
            value=value[:60],
            legal=legal,
        )
    return value
