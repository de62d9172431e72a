"""A plan as launch files. What is written for Megatron-LM is read back before it is handed out: a file that would not
start, or that says something else than the plan, is never written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from fivefold.cluster import Cluster
from fivefold.errors import FivefoldError, reason_of
from fivefold.interop.launch.job import Job, slug
from fivefold.interop.launch.kubernetes import KubernetesOptions, kubernetes
from fivefold.interop.launch.slurm import SlurmOptions, slurm
from fivefold.interop.launch.torchrun import torchrun
from fivefold.interop.megatron.read import Asked, Reading, read_source
from fivefold.interop.megatron.stage_text import spread
from fivefold.interop.megatron.write import Data, megatron_job
from fivefold.interop.own import trainer_job
from fivefold.layout import Context, Layout, RampPlan, Recompute, ResolvedLayout, Workload, resolve, violations
from fivefold.model.spec import Block, ModelSpec
from fivefold.runtime.accelerators import why_not

Target = Literal["megatron", "fivefold"]
Launcher = Literal["torchrun", "slurm", "kubernetes"]
TARGETS: tuple[Target, ...] = ("megatron", "fivefold")
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "slurm", "kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is exported, and for whom.

    runtime: whose rules hold, the target with or without a version. about: sentences for the head of each file. plan:
    path of the plan file, which fivefold's own trainer needs; steps, log: of that trainer. stages: Megatron-LM's
    --pipeline-model-parallel-layout in place of the layout's own counts of blocks.
    """

    model: ModelSpec
    cluster: Cluster
    work: Workload
    layout: Layout
    to: Target = "megatron"
    runtime: str = "megatron"
    data: Data = field(default_factory=Data)
    ramp: RampPlan | None = None
    stages: str | None = None
    name: str | None = None
    about: tuple[str, ...] = ()
    plan: str | None = None
    steps: int | None = None
    log: str | None = None
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)


def runtime_for(to: str, asked: str) -> str:
    """The runtime whose rules an export obeys: the plan's own where it is the target, with its version."""
    name = asked.partition("@")[0].lower()
    return asked if name == to or (to == "megatron" and name in ("megatron-lm", "megatron-core", "mcore")) else to


def export(what: Export, launchers: tuple[Launcher, ...]) -> dict[str, str]:
    """File name to text, for every launcher. Raises FivefoldError for a layout that would not start, and for what the
    target cannot express."""
    _refuse_foreign(what)
    _refuse_broken(what)
    job = job_of(what)
    write: dict[Launcher, Callable[[], dict[str, str]]] = {
        "torchrun": lambda: torchrun(job),
        "slurm": lambda: slurm(job, what.slurm),
        "kubernetes": lambda: kubernetes(job, what.kubernetes),
    }
    files = {name: text for launcher in launchers for name, text in write[launcher]().items()}
    if what.to == "megatron":
        # Stages that no counts express are no layout, so they are read apart.
        _check_stages(what)
        for name, text in torchrun(job_of(dataclasses.replace(what, stages=None))).items():
            check_read_back(what, read_source(text, name, None, Asked(gpu=what.cluster.gpu.name)))
    return files


def job_of(what: Export) -> Job:
    """The job that every launcher of an export starts."""
    name = what.name or what.model.name
    if what.to == "fivefold":
        return trainer_job(what.cluster, name, plan=what.plan, steps=what.steps, log=what.log, about=what.about)
    return megatron_job(
        what.model,
        what.cluster,
        what.work,
        what.layout,
        data=what.data,
        ramp=what.ramp,
        stages=what.stages,
        name=name,
        about=what.about,
    )


def _refuse_foreign(what: Export) -> None:
    gpu = what.cluster.gpu
    reason = why_not(what.to, gpu.vendor)
    if reason is not None:
        raise FivefoldError(
            f"{what.to} would not start on {gpu.name}: {reason}. Plan for another accelerator, with --gpu.",
            code="runtime-hardware",
            option="--to",
            value=what.to,
        )


def _refuse_broken(what: Export) -> None:
    context = Context(
        model=what.model,
        cluster_gpus=what.cluster.gpus,
        gpus_per_node=what.cluster.gpus_per_node,
        scale_up_size=what.cluster.spans[0],
        work=what.work,
        runtime=what.runtime,
    )
    for broken in violations(what.layout, context):
        raise FivefoldError(
            f"{what.to} would not start this plan. {broken.message}",
            code=broken.id,
            option=broken.option,
            value=broken.value,
            legal=broken.legal,
        )


# ---------------------------------------------------------------- reading back


def check_read_back(what: Export, reading: Reading) -> None:
    """Raises FivefoldError where Megatron-LM would refuse the options, or they say something else than the plan."""
    for broken in reading.violations:
        raise FivefoldError(
            f"Megatron-LM would not start this plan. {broken.message}",
            code=broken.id,
            option=broken.option,
            value=broken.value,
            legal=broken.legal,
        )
    ours, theirs = _said(what.model, what), _said(reading.model, what, reading)
    for key, value in ours.items():
        if theirs[key] != value:
            raise FivefoldError(
                f"The options written for Megatron-LM would be read as {key} = {theirs[key]}, and the plan has "
                f"{value}, so nothing is written. This is a limit of fivefold's export.",
                code="no-round-trip",
                option=key,
                value=str(value)[:200],
                legal=[str(theirs[key])[:200]],
            )


def _check_stages(what: Export) -> None:
    """A text of stages holds every block, the embedding first and the loss last."""
    if what.stages is None:
        return
    whole = spread(what.stages) or ""
    stages = whole.split("|")
    shaped = len(stages) == what.layout.pp * what.layout.vpp and whole.startswith("E") and whole.endswith("L")
    if not shaped or whole.count("t") != what.model.layers or whole.count("m") != what.model.mtp:
        raise FivefoldError(
            f"{what.stages[:100]!r} is no split of {what.model.layers} blocks over {what.layout.pp} ranks of "
            f"{what.layout.vpp} chunks.",
            code="bad-stages",
            option="--balance-stages",
            value=what.stages[:100],
        )


def _said(model: ModelSpec, what: Export, reading: Reading | None = None) -> dict[str, object]:
    """What the plan, or a reading of its files, fixes."""
    layout, work = (what.layout, what.work) if reading is None else (reading.layout, reading.work)
    gpus = what.cluster.gpus if reading is None else reading.gpus
    return {
        "gpus": gpus,
        "model": architecture(model),
        "layout": canonical(layout, model, gpus, work),
        "workload": replace(
            work, moe_imbalance=1.0, price=None, trained="all", tokens=None,
            gpu_mtbf_hours=None, checkpoint_bytes_per_s=None, restart_s=None,
        ),
    }  # fmt: skip


def canonical(layout: Layout, model: ModelSpec, gpus: int, work: Workload) -> ResolvedLayout:
    """A layout as Megatron-LM can say it: resolved, a kind of CP without CP and a count of all blocks left out."""
    full = resolve(layout, model, gpus, work, "megatron")
    again = full.recompute
    if again.kind == "full" and again.layers is not None and again.layers * full.pp >= model.layers:
        again = Recompute(kind="full")
    return replace(full, cp_kind=full.cp_kind if full.cp > 1 else "p2p", recompute=again)


def architecture(model: ModelSpec) -> ModelSpec:
    """What options say of a model: no names, GELU in one form, positions as long as trained."""
    runs = tuple(replace(run, block=_plain_gelu(run.block)) for run in model.runs)
    return replace(
        model, name="", family="", source="", runs=runs, max_position=0, rotary=type(model.rotary)(), norm_eps=1e-5
    )  # fmt: skip


def _plain_gelu(block: Block) -> Block:
    if block.feed is None:
        return block
    return replace(block, feed=replace(block.feed, activation=block.feed.activation.removesuffix("_tanh")))


# ---------------------------------------------------------------- files


def write_files(files: dict[str, str], folder: str | Path) -> list[str]:
    """Writes the files and returns their paths. Scripts can be started. Raises FivefoldError where it cannot."""
    root = Path(folder)
    written = []
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                os.chmod(path, 0o755)
            written.append(str(path))
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise FivefoldError(
            f"The files cannot be written to {str(folder)[:200]!r}: {reason_of(error)}. "
            "Choose another folder with --out.",
            code="cannot-write",
            option="--out",
            value=str(folder)[:200],
        ) from error
    return written


__all__ = [
    "LAUNCHERS", "TARGETS", "Data", "Export", "KubernetesOptions", "SlurmOptions", "canonical", "check_read_back",
    "export", "job_of", "runtime_for", "slug", "write_files",
]  # fmt: skip
