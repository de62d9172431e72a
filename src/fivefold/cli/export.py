"""From a question to launch files: what `fivefold export` and `fivefold sweep` share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.cli.answer import balanced_stages, estimated, ramp_of
from fivefold.cli.launch_flags import KubernetesFlags, SlurmFlags, kubernetes_options, slurm_options
from fivefold.cli.problem import Question
from fivefold.cli.values import word
from fivefold.errors import FivefoldError, reason_of
from fivefold.estimate import Estimate
from fivefold.interop.export import (
    LAUNCHERS,
    TARGETS,
    Data,
    Export,
    Launcher,
    export,
    job_of,
    runtime_for,
    slug,
    write_files,
)

PLAN = "plan.toml"
# What stages of any size have to gain over counts, which are read and checked by more tools.
_WORTH_A_TEXT = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An export's own flags, as given."""

    out: str
    to: str = "megatron"
    launcher: str = "torchrun"
    name: str | None = None
    data: Data = field(default_factory=Data)
    balance: bool = False
    force: bool = False
    slurm: SlurmFlags = field(default_factory=SlurmFlags)
    kubernetes: KubernetesFlags = field(default_factory=KubernetesFlags)


@dataclass(frozen=True, slots=True)
class Exported:
    """written: paths, empty where the answer is no. reason: why, then."""

    found: Estimate
    written: tuple[str, ...]
    reason: str = ""
    needs: tuple[tuple[str, str], ...] = ()


def target_of(to: str | None, runtime: str) -> str:
    """Whom to write for. runtime: of the plan, or as asked; only the targets themselves have files."""
    if to is not None:
        return word("--to", to, TARGETS)
    return next((target for target in TARGETS if runtime_for(target, runtime) == runtime), TARGETS[0])


def moved_words(planned: str, runtime: str) -> str:
    """'' where the plan file's runtime is the one that is written, else a sentence."""
    if planned == runtime:
        return ""
    return (
        f"The plan is for {planned}, and what export writes starts {runtime}: layout and numbers are judged as "
        f"{runtime} has them. fivefold plan --like moves a plan with a search."
    )


def for_target(question: Question, to: str, asked: str | None = None) -> Question:
    """The question under the rules of the framework that will run it. asked: the runtime that the user named; a plan
    file's own gives way, a named one is not put aside."""
    target = word("--to", to, TARGETS)
    runtime = runtime_for(target, question.runtime)
    if asked is not None and runtime != asked:
        raise FivefoldError(
            f"--runtime {asked[:60]} and --to {target} name two frameworks, and what is written starts {target}. Leave "
            "one of them out.",
            code="contradiction",
            option="--runtime",
            value=asked[:60],
            legal=target,
        )
    return dataclasses.replace(question, runtime=runtime)


def launchers_of(text: str) -> tuple[Launcher, ...]:
    """--launcher's words, each once."""
    names = [each.strip() for each in text.split(",")]
    return tuple(dict.fromkeys(word("--launcher", name, LAUNCHERS) for name in names))


def exported(question: Question, wanted: Wanted) -> Exported:
    """Prices the layout, and writes its launch files where it would start and fit."""
    launchers = launchers_of(wanted.launcher)
    question = for_target(question, wanted.to)
    found = estimated(question)
    stages, lines = None, ()
    if wanted.balance and found.valid:
        question, stages, lines = balanced(question, found, wanted.to)
        found = estimated(question)
    ramp, notes = ramp_of(question, found if found.valid else None)
    if question.ramp is not None and ramp is None and found.valid:
        return Exported(found, (), " ".join(notes))
    if not found.valid:
        return Exported(found, (), f"{wanted.to} would not start it.")
    if not found.fits and not wanted.force:
        return Exported(found, (), "It is predicted not to fit; --force writes it all the same.")
    what = export_of(question, found, wanted, ramp, stages=stages, about=(*about(question, found), *lines))
    files = export(what, launchers)
    if wanted.to == "fivefold":
        save_plan(found, wanted.out)
        return Exported(found, (str(Path(wanted.out, PLAN)), *write_files(files, wanted.out)))
    needs = tuple((need.name, need.why) for need in job_of(what).needs if need.default is None)
    return Exported(found, tuple(write_files(files, wanted.out)), needs=needs)


def balanced(question: Question, found: Estimate, to: str) -> tuple[Question, str | None, tuple[str, ...]]:
    """(the question with the best counts, a text of stages where that is better still, a sentence for it)."""
    best = balanced_stages(question, found)
    if best.counted.layout is not None:
        question = dataclasses.replace(question, layout=best.counted.layout)
    if to != "megatron" or best.free.seconds > best.counted.seconds * (1 - _WORTH_A_TEXT):
        return question, None, ()
    line = (
        f"With its own stages, {best.free.text}: {best.free.seconds:.3g} s a step, "
        f"{best.free.reserved_bytes / 1e9:.1f} GB."
    )
    return question, best.free.text, (line,)


def export_of(question: Question, found: Estimate, wanted: Wanted, ramp: Any = None, **more: Any) -> Export:
    """What the library exports for a question."""
    plan = str(Path(wanted.out, PLAN).absolute()) if wanted.to == "fivefold" else None
    name = slug(wanted.name or question.model.name)
    kubernetes = "kubernetes" in launchers_of(wanted.launcher)
    values: dict[str, Any] = {
        "model": question.model,
        "cluster": question.cluster,
        "work": question.work,
        "layout": question.layout,
        "to": word("--to", wanted.to, TARGETS),
        "runtime": question.runtime,
        "data": wanted.data,
        "ramp": ramp,
        "name": name,
        "about": about(question, found),
        "plan": None if kubernetes else plan,
        "steps": wanted.data.steps,
        "slurm": slurm_options(wanted.slurm),
        "kubernetes": kubernetes_options(wanted.kubernetes),
    }
    return Export(**{**values, **more})


def save_plan(found: Estimate, folder: str) -> None:
    """The plan file beside its launch files."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise FivefoldError(
            f"--out {folder[:200]!r} cannot be made: {reason_of(error)}.",
            code="cannot-write",
            option="--out",
            value=folder[:200],
        ) from error
    found.save(Path(folder, PLAN))


def about(question: Question, found: Estimate) -> tuple[str, ...]:
    """The head of every file: what it trains, and what is expected of it."""
    from fivefold import __version__
    from fivefold.cli.render.layouts import degrees_words

    cluster, work = question.cluster, question.work
    lines = [
        f"{question.model.name} on {cluster.gpus} x {cluster.gpu.name}: {degrees_words(found.layout)}, "
        f"{work.global_batch} sequences x {work.seq_len} tokens a step, {work.precision}.",
        f"Written by fivefold {__version__} for {question.runtime}.",
    ]
    if found.step is not None and found.memory is not None:
        seconds, memory = found.step.seconds, found.memory
        lines.append(
            f"Predicted: {seconds.value:.3g} s a step (80% interval {seconds.low:.3g} to {seconds.high:.3g}), MFU "
            f"{found.step.mfu.causal:.1%}, {memory.reserved_bytes / 1e9:.1f} of {memory.capacity_bytes / 1e9:.1f} GB."
        )
    return tuple(lines)


__all__ = ["Exported", "Wanted", "about", "export_of", "exported", "for_target", "launchers_of", "save_plan"]
