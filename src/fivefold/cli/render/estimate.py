"""The view of one estimate: header, broken rules, memory per stage, step by owner, traffic, the simple view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import isfinite

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.cli.problem import Question
from fivefold.cli.render.layouts import degrees_words, options_words, work_words
from fivefold.cli.render.stages import balance_parts
from fivefold.cli.render.text import (
    OWNER_STYLES,
    bar,
    count,
    gigabytes,
    heading,
    percent,
    plain_table,
    seconds,
    seconds_interval,
)
from fivefold.estimate import Estimate
from fivefold.estimate.result import Memory, RuleViolation, StageMemory, Step, Traffic
from fivefold.estimate.simple_view import SimpleRow
from fivefold.layout import RampPlan
from fivefold.runtime import load_runtime
from fivefold.search.budget import Budget, Reliability
from fivefold.search.stages import Balance

_BAR = 48
_MOST_STAGES = 10
_RAMP_ENDS = 4  # levels shown at each end of a ramp


def estimate_view(
    question: Question,
    found: Estimate,
    simple: Sequence[SimpleRow],
    ramp: RampPlan | None,
    budget: Budget | None,
    notes: Sequence[str],
    saved: str | None,
    balance: Balance | None = None,
) -> Group:
    """Everything that `fivefold estimate` prints."""
    parts: list[RenderableType] = [header(question, found), verdict(found)]
    parts += detail(found)
    if balance is not None:
        parts += balance_parts(balance)
    if found.traffic:
        parts += [heading("Traffic", "per step and GPU, on the slowest stage"), traffic_table(found.traffic)]
    if simple:
        parts += [
            heading("Simple view", "formulas of the literature beside the ledger's figures"),
            simple_table(simple),
        ]
    parts += closing(question, ramp, budget, notes, saved)
    return Group(*parts)


def detail(found: Estimate) -> list[RenderableType]:
    """Broken rules, or memory and step."""
    if not found.valid:
        return [heading("Rules that it breaks"), *(violation(each) for each in found.violations)]
    parts: list[RenderableType] = []
    if found.memory is not None:
        parts += [heading("Memory", _peak_words(found.memory)), memory_table(found.memory)]
        if len(_stage_classes(found.memory.stages)) > _MOST_STAGES:
            parts.append(Text("Some stages in the middle are left out; --json has all.", style="dim"))
    if found.step is not None:
        parts += [heading("Step", _step_words(found.step)), step_table(found.step)]
    return parts


def header(question: Question, found: Estimate) -> Text:
    """Model, cluster and work, one line each."""
    model, cluster, work = question.model, question.cluster, question.work
    params = found.params
    active = f", {count(params.active)} active" if params.active != params.total else ""
    line = Text()
    line.append(model.name, style="bold")
    line.append(f"  {count(params.total)} parameters{active}, {model.layers} layers, hidden {model.hidden:,}")
    if model.mtp:
        line.append(f", {model.mtp} MTP")
    line.append("\non ")
    line.append(f"{cluster.gpus:,} x {cluster.gpu.name}", style="bold")
    shape = f"{cluster.nodes:,} nodes of {cluster.gpus_per_node}" if cluster.nodes > 1 else "one node"
    line.append(f"  {shape}, {', '.join(link.name for link in cluster.links)}; {question.runtime}{_fitted(question)}")
    line.append("\nwork  ")
    return line.append(work_words(work, params.trained))


def _fitted(question: Question) -> str:
    """How many of the user's runs the cluster's calibration is fitted to."""
    calibration = question.cluster.calibration
    if calibration is None:
        return ""
    fit = calibration.fit_of(question.cluster.gpu.name, load_runtime(question.runtime).name)
    return f", {fit.provenance}"


def verdict(found: Estimate) -> Text:
    """The layout, and whether it would run."""
    line = Text("\n")
    line.append(degrees_words(found.layout), style="bold")
    if not found.valid:
        line.append("  would not start", style="bold red")
    elif not found.fits:
        host = found.memory is not None and found.memory.reserved_bytes <= found.memory.capacity_bytes
        line.append(f"  does not fit{' the host memory' if host else ''}", style="bold red")
    else:
        line.append("  fits", style="bold green")
    line.append(f"\n{options_words(found.layout)}", style="dim")
    return line


def violation(broken: RuleViolation) -> Text:
    line = Text("  x ", style="red")
    line.append(f"{broken.option} ", style="bold not red")
    line.append(broken.message.removeprefix(f"{broken.option} "), style="default")
    line.append(f"  [{broken.id}; {broken.source}]", style="dim")
    return line


# ---------------------------------------------------------------- memory


def _peak_words(memory: Memory) -> str:
    share = memory.reserved_bytes / memory.capacity_bytes
    host = ""
    if memory.host_bytes is not None:
        host = f"; host {gigabytes(memory.host_bytes)} of {gigabytes(memory.host_capacity_bytes or 0)} GB a node"
    return (
        f"{gigabytes(memory.reserved_bytes)} of {gigabytes(memory.capacity_bytes)} GB ({share:.0%}) with "
        f"{gigabytes(memory.reserved_bytes - memory.peak_bytes)} of fragmentation, driver and communicators\n"
        f"peak on stage {memory.peak_stage}, {memory.peak_phase.replace('_', ' ')}{host}"
    )


def memory_table(memory: Memory) -> Table:
    """One row per class of equal stages, GB by category."""
    classes = _stage_classes(memory.stages)
    names = [name for name in memory.stages[0].breakdown if any(stage.breakdown.get(name) for stage in memory.stages)]
    table = plain_table(
        ("stage", "<"), *((_SHORT.get(name, name), ">") for name in names), ("peak", ">"), ("held", ">")
    )
    for label, stage in _shown(classes):
        style = "bold" if stage.peak_bytes == memory.peak_bytes else None
        row = [gigabytes(stage.breakdown.get(name, 0)) for name in names]
        table.add_row(label, *row, gigabytes(stage.peak_bytes), f"{stage.in_flight:.3g}", style=style)
    return table


def _shown(classes: list[tuple[str, StageMemory]]) -> list[tuple[str, StageMemory]]:
    """All rows, or of many the first, the last and the fullest; --json has the rest."""
    if len(classes) <= _MOST_STAGES:
        return classes
    fullest = max(range(len(classes)), key=lambda at: classes[at][1].peak_bytes)
    last = range(len(classes) - _MOST_STAGES // 3, len(classes))
    return [classes[at] for at in sorted({*range(_MOST_STAGES // 2), fullest, *last})]


_SHORT = {
    "gradients": "grads", "optimizer": "optim", "activations": "activ", "gathered": "gather", "buffers": "buf",
}  # fmt: skip


def _stage_classes(stages: Sequence[StageMemory]) -> list[tuple[str, StageMemory]]:
    """Neighbouring stages that print the same are one row: '1-14'."""

    def shown(stage: StageMemory) -> tuple[str, ...]:
        return (*(gigabytes(value) for value in stage.breakdown.values()), f"{stage.in_flight:.3g}")

    rows: list[tuple[str, StageMemory]] = []
    for _, same in groupby(stages, shown):
        group = list(same)
        first, last = group[0].stage, group[-1].stage
        label = str(first) if first == last else f"{first}-{last}"
        rows.append((label, max(group, key=lambda stage: stage.peak_bytes)))
    return rows


# ---------------------------------------------------------------- time


def _step_words(step: Step) -> str:
    mfu = step.mfu
    return (
        f"{interval(step)}, 80% interval; {step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU\n"
        f"MFU {percent(mfu.causal)} causal, {percent(mfu.noncausal)} noncausal, {percent(mfu.hardware)} hardware"
    )


def interval(step: Step) -> str:
    """The step time with its 80% interval."""
    return seconds_interval(step.seconds.value, step.seconds.low, step.seconds.high)


def step_table(step: Step) -> Table:
    """Owners of the slowest stage's critical path, with a bar each."""
    table = plain_table(("owner", "<"), ("time", ">"), ("share", ">"), ("", "<"))
    total = step.seconds.value
    for name, value in step.breakdown_s.items():
        if abs(value) < total * 5e-5:
            continue
        style = OWNER_STYLES.get(name, "default")
        table.add_row(name, seconds(value), percent(value / total), bar(value / total, _BAR, style))
    return table


def traffic_table(rows: Iterable[Traffic]) -> Table:
    table = plain_table(
        ("axis", "<"),
        ("grid", "<"),
        ("collective", "<"),
        ("calls", ">"),
        ("GB sent", ">"),
        ("over", "<"),
        ("exposed", ">"),
    )
    for row in rows:
        table.add_row(
            row.axis,
            row.grid,
            row.collective,
            f"{row.count:,}",
            gigabytes(row.bytes_sent_per_rank),
            row.level,
            seconds(row.exposed_s),
        )
    return table


# ---------------------------------------------------------------- the rest


def simple_table(rows: Iterable[SimpleRow]) -> Table:
    table = plain_table(
        ("quantity", "<"), ("simple", ">"), ("exact", ">"), ("off", ">"), ("formula; where they part", "<")
    )
    for row in rows:
        off = f"{row.simple / row.exact - 1:+.0%}" if row.exact else "-"
        formula = Text(row.formula)
        formula.append(f"\n{row.parting}", style="dim")
        table.add_row(row.quantity, _with_unit(row.simple, row.unit), _with_unit(row.exact, row.unit), off, formula)
    return table


def _with_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e9:,.3g} GB" if value >= 1e8 else f"{value / 1e6:,.3g} MB"
    if unit == "flops":
        return f"{value / 1e15:,.4g} PFLOP"
    if unit == "ratio":
        return percent(value)
    return count(value) if unit == "parameters" else f"{value:,.0f}"


def closing(
    question: Question,
    ramp: RampPlan | None,
    budget: Budget | None,
    notes: Sequence[str],
    saved: str | None,
) -> list[RenderableType]:
    """Budget, ramp, notes, defaults and where the assumptions are."""
    parts: list[RenderableType] = []
    if budget is not None:
        parts += [heading("Budget"), Text(f"  {_budget_words(budget)}")]
        if budget.reliability is not None:
            parts.append(Text(f"  {_reliability_words(budget.reliability)}"))
    if ramp is not None:
        parts += [heading("Ramp-up", f"{len(ramp.steps)} levels of {ramp.increment} sequences"), _ramp_table(ramp)]
        start, increment, samples = ramp.megatron_rampup
        parts.append(
            Text(f"then {ramp.end:,}. Megatron: --rampup-batch-size {start} {increment} {samples}", style="dim")
        )
    if notes:
        parts += [heading("Notes"), *(bullet(note) for note in notes)]
    if question.defaults:
        taken = ", ".join(f"{option} {value}" for option, value in question.defaults.items())
        parts.append(Text(f"\nDefaults taken: {taken}.", style="dim"))
    if saved is not None:
        parts.append(Text(f"Saved to {saved}; price it again with fivefold estimate {saved}.", style="dim"))
    parts.append(Text("What the numbers assume, with sources: fivefold explain assumptions, or --json.", style="dim"))
    return parts


def bullet(text: str | Text, mark: str = "-") -> Table:
    """A paragraph whose wrapped lines stay behind its mark."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=len(mark) + 1, justify="right", style="dim")
    table.add_column(overflow="fold")
    table.add_row(mark, text)
    return table


def _budget_words(budget: Budget) -> str:
    cost = "" if budget.cost is None else f", costing {budget.cost:,.0f}"
    return f"{count(budget.tokens)} tokens take {seconds(budget.seconds)} and {budget.gpu_hours:,.0f} GPU hours{cost}."


def _reliability_words(wall: Reliability) -> str:
    cost = "" if wall.cost is None else f", costing {wall.cost:,.0f}"
    assumed = f" Assumed: {'; '.join(wall.sources.values())}." if wall.sources else ""
    if not isfinite(wall.seconds):
        return (
            f"On the wall clock it never ends: one failure in {seconds(wall.mtbf_s)}, {seconds(wall.restart_s)} to "
            f"restart, and a checkpoint takes {seconds(wall.checkpoint_s)} to write.{assumed}"
        )
    return (
        f"On the wall clock {seconds(wall.seconds)} and {wall.gpu_hours:,.0f} GPU hours{cost}, goodput "
        f"{percent(wall.goodput)}: {wall.failures:,.3g} failures, one in {seconds(wall.mtbf_s)}, each with "
        f"{seconds(wall.restart_s)} to restart; a checkpoint of {gigabytes(wall.checkpoint_bytes)} GB every "
        f"{seconds(wall.interval_s)}, written in {seconds(wall.checkpoint_s)}.{assumed}"
    )


def _ramp_table(ramp: RampPlan) -> Table:
    table = plain_table(("batch", ">"), ("micro-batches", ">"), ("iterations", ">"), ("tokens", ">"))
    left_out = max(len(ramp.steps) - 2 * _RAMP_ENDS, 0)
    for at, step in enumerate(ramp.steps):
        if left_out and at == _RAMP_ENDS:
            table.add_row(f"... {left_out} more", "", "", "", style="dim")
        if left_out and _RAMP_ENDS <= at < _RAMP_ENDS + left_out:
            continue
        table.add_row(
            f"{step.global_batch:,}", f"{step.num_micro_batches:,}", f"{step.iterations:,}", count(step.tokens)
        )
    return table
