"""What `fivefold sweep` does: search, write every candidate, or read what the candidates left."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path, PurePath
from shlex import quote

from msgspec import convert

from fivefold.cli.export import PLAN, Wanted, export_of, for_target
from fivefold.cli.flags import ClusterFlags, LayoutFlags, ModelFlags, RuntimeFlags, WorkFlags
from fivefold.cli.launch_flags import SlurmFlags, slurm_options
from fivefold.cli.problem import Question, plan_question
from fivefold.cli.values import pins_of, word
from fivefold.errors import FivefoldError
from fivefold.interop.export import TARGETS, Data, Export, export, job_of, write_files
from fivefold.interop.launch.sweep import LOG, STEPS, candidate, slurm_sweep, torchrun_sweep
from fivefold.layout import Layout
from fivefold.measure.sweep import Sweep, collect
from fivefold.search import Plan, plan

Flags = tuple[ModelFlags, ClusterFlags, WorkFlags, RuntimeFlags]
_LAUNCHERS = ("slurm", "torchrun")
_FEWEST_STEPS = 5


@dataclass(frozen=True, slots=True)
class Written:
    """A sweep's files, none where nothing fits. start: the command that runs it."""

    question: Question
    plan: Plan
    files: tuple[str, ...]
    start: str


def collected(folder: str, out: str | None) -> Sweep:
    if out is not None:
        raise FivefoldError(
            "--collect reads a sweep's folder, the first argument, and writes nothing. Leave out --out.",
            code="contradiction",
            option="--out",
            value=out[:100],
        )
    return collect(folder)


def written(
    model: str,
    out: str | None,
    top: int,
    to: str,
    launcher: str,
    steps: int,
    name: str | None,
    slurm: SlurmFlags,
    flags: Flags,
    layout: LayoutFlags,
) -> Written:
    """Searches, and writes the array of the best `top` layouts."""
    target, start = word("--to", to, TARGETS), word("--launcher", launcher, _LAUNCHERS)
    if out is None:
        raise FivefoldError(
            "Where to? Add --out FOLDER, which every node of the job sees.", code="missing-option", option="--out"
        )
    if steps < _FEWEST_STEPS:
        raise FivefoldError(
            f"--steps {steps} leaves too little after the three steps that are not counted; give 5 or more.",
            code="bad-value",
            option="--steps",
            value=steps,
            legal="5 or more",
        )
    root = Path(out).absolute()
    _unused(root, out)
    question = for_target(plan_question(model, *flags), target, flags[3].runtime)
    if question.ramp is not None:
        raise FivefoldError("A sweep measures the full batch. Leave out --ramp.", code="not-here", option="--ramp")
    found = plan(
        question.model, question.cluster, question.work, question.runtime, top=top, pins=dict(pins_of(layout)),
        explain=False,
    )  # fmt: skip
    wanted = Wanted(out=out, to=to, launcher=start, name=name, data=Data(mock=target == "megatron", steps=steps))
    made = [_export(question, found, at, wanted, root) for at in range(min(top, len(found.plans)))]
    if not made:
        return Written(question, found, (), "")
    for what in made:
        export(what, ("torchrun",))  # checks it, and that it reads back as what was planned
    jobs = [job_of(what) for what in made]
    site = slurm_options(slurm)
    files = slurm_sweep(jobs, str(root), site) if start == "slurm" else torchrun_sweep(jobs, str(root))
    paths = write_files(files, root)
    for at in range(len(made)):
        found.plans[at].save(root / candidate(at) / PLAN)
    shown = PurePath(out)  # as it was given, without a slash at its end
    command = f"sbatch {quote(f'{shown}/sweep.sbatch')}" if start == "slurm" else f"bash {quote(f'{shown}/sweep.sh')}"
    return Written(question, found, tuple(paths), command)


def _unused(root: Path, out: str) -> None:
    """Candidates and logs of an older sweep would be collected as this one's."""
    try:
        used = (root / candidate(0)).parent.exists()
    except (OSError, ValueError):  # which writing the files says
        return
    if used:
        raise FivefoldError(
            f"--out {out[:100]} holds a sweep already, whose candidates and logs would be taken for this one's. Choose "
            "another folder, or remove it.",
            code="output-exists",
            option="--out",
            value=out[:100],
        )


def _export(question: Question, found: Plan, at: int, wanted: Wanted, root: Path) -> Export:
    estimate = found.plans[at]
    layout = convert(estimate.inputs["layout"], Layout)
    one = dataclasses.replace(question, layout=layout)
    mine = root / candidate(at)
    return export_of(
        one, estimate, wanted, plan=str(mine / PLAN), log=str(mine / STEPS) if wanted.to == "fivefold" else None
    )


__all__ = ["LOG", "Written", "collected", "written"]
