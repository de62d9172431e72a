"""The view of a search: the best layouts, the first one in detail, and why it is first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.cli.problem import Question
from fivefold.cli.render.estimate import bullet, closing, detail, header, interval
from fivefold.cli.render.layouts import degrees_words, options_words, recompute_words, schedule_words, zero_words
from fivefold.cli.render.text import gigabytes, heading, percent, plain_table, seconds
from fivefold.cluster import Cluster
from fivefold.estimate import Estimate
from fivefold.layout import RampPlan
from fivefold.search import Plan
from fivefold.search.result import DimensionEffect, Limit, Neighbour, PlaybookPath, Why

_OBJECTIVES = {
    "tokens_per_s": "most tokens per second; ties go to fewer axes",
    "gpus": "fewest GPUs that fit, then fastest",
    "memory": "least memory, then fastest",
    "time": "shortest run",
    "cost": "cheapest run",
}
_DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp")
_ALWAYS = ("tp", "pp", "dp")
_REASON_STYLES = {"slower": "yellow", "memory": "red", "rule": "magenta"}


def plan_view(
    question: Question,
    found: Plan,
    top: int,
    ramp: RampPlan | None,
    notes: Sequence[str],
    saved: str | None,
) -> Group:
    """Everything that `fivefold plan` prints."""
    best = found.plans[0] if found.plans else found.nearest
    if found.gpus != question.cluster.gpus:  # the objective was the number of GPUs
        cluster = msgspec.convert(found.inputs["cluster"], Cluster)
        question = dataclasses.replace(question, cluster=cluster)
    parts: list[RenderableType] = []
    if best is not None:
        parts.append(header(question, best))
    parts.append(counts_line(found))
    if found.plans:
        parts += _answer(found, top)
    else:
        parts += _no_answer(found)
    parts += closing(question, ramp, found.budget, (*found.notes, *notes), saved)
    return Group(*parts)


def _answer(found: Plan, top: int) -> list[RenderableType]:
    best = found.plans[0]
    on = f" on {found.gpus:,} GPUs" if found.objective == "gpus" else ""
    title = Text("\nBest layout  ", style="bold")
    title.append(degrees_words(best.layout), style="bold green")
    title.append(on)
    title.append(f"\n{options_words(best.layout)}", style="not bold dim")
    shown = min(top, len(found.plans))
    parts: list[RenderableType] = [
        heading("Layouts", _OBJECTIVES[found.objective]),
        layouts_table(found, found.plans[:shown]),
        title,
        *detail(best),
    ]
    if found.why is not None:
        parts += reasons(found.why)
    if len(found.pareto) > 1:
        parts += [
            heading("Memory against time", "no other layout is better in both"),
            layouts_table(found, [found.plans[index] for index in found.pareto]),
        ]
    return parts


def _no_answer(found: Plan) -> list[RenderableType]:
    parts: list[RenderableType] = [Text("\nNo layout fits.", style="bold red")]
    parts += [bullet(sentence) for sentence in found.advice]
    if found.nearest is not None:
        parts.append(heading("The layout that misses by least", degrees_words(found.nearest.layout)))
        parts.append(Text(options_words(found.nearest.layout), style="dim"))
        parts += detail(found.nearest)
    return parts


def counts_line(found: Plan) -> Text:
    """How the search went."""
    line = Text(style="dim")
    line.append(
        f"{found.searched:,} layouts searched in {found.seconds_used:.2f} s: {found.valid:,} valid, "
        f"{found.fitting:,} fit, {found.priced:,} priced, {found.bounded:,} ruled out by bounds"
    )
    return line


def layouts_table(found: Plan, plans: Iterable[Estimate]) -> Table:
    """One row per layout: degrees, options, memory, time."""
    rows = list(plans)
    fastest = found.plans[found.fastest] if found.fastest else None  # said only where it is not the first
    degrees = [name for name in _DEGREES if name in _ALWAYS or any(getattr(each.layout, name) > 1 for each in rows)]
    table = plain_table(
        *((name.upper(), ">") for name in degrees),
        ("ZeRO", "<"),
        ("recompute", "<"),
        ("sched.", "<"),
        ("mbs x m", ">"),
        ("GB", ">"),
        ("step (80%)", ">"),
        ("MFU", ">"),
        ("tok/s/GPU", ">"),
    )
    table.padding = (0, 1, 0, 0)
    for each in rows:
        if each.memory is None or each.step is None:
            continue
        layout = each.layout
        numbers = [getattr(layout, name) for name in degrees]
        table.add_row(
            *(str(number) if number > 1 else "·" for number in numbers),
            zero_words(layout),
            recompute_words(layout.recompute, short=True),
            schedule_words(layout).replace("interleaved", "1f1b"),
            f"{layout.micro_batch} x {layout.num_micro_batches}",
            gigabytes(each.memory.reserved_bytes),
            interval(each.step) + ("*" if each is fastest else ""),
            percent(each.step.mfu.causal),
            f"{each.step.tokens_per_s_per_gpu:,.0f}",
            style="bold" if each is found.plans[0] else None,
        )
    capacity = rows[0].memory.capacity_bytes if rows and rows[0].memory else 0
    table.caption = f"GB: needed of {gigabytes(capacity)}, driver and buffers included. MFU: causal."
    if fastest in rows:
        table.caption += " *: the fastest."
    table.caption_justify = "left"
    return table


# ---------------------------------------------------------------- why


def reasons(why: Why) -> list[RenderableType]:
    parts: list[RenderableType] = [heading("Why"), bullet(why.summary, "")]
    if why.dimensions:
        parts += [
            heading("What each part of it buys", "against the best layout without it"),
            dimensions_table(why.dimensions),
        ]
    if why.neighbours:
        parts += [heading("Why not its neighbours"), neighbours_table(why.neighbours)]
    if why.limits:
        parts += [heading("What would do better"), *(bullet(_limit_words(limit)) for limit in why.limits)]
    if why.playbook is not None:
        parts += [heading("The playbook's path", "rules of thumb, priced step by step"), *playbook(why.playbook)]
    return parts


def dimensions_table(effects: Iterable[DimensionEffect]) -> Table:
    table = plain_table(("part", "<"), ("saves GB", ">"), ("costs", ">"), ("over", "<"), ("instead", "<"))
    for effect in effects:
        if effect.saves_bytes is None or effect.costs_s is None:
            table.add_row(f"{effect.axis}={effect.value}", "-", "-", effect.level, Text(effect.message, style="dim"))
            continue
        table.add_row(
            f"{effect.axis}={effect.value}",
            gigabytes(effect.saves_bytes),
            seconds(effect.costs_s),
            effect.level,
            effect.instead,
        )
    return table


def neighbours_table(neighbours: Iterable[Neighbour]) -> Table:
    table = plain_table(("change", "<"), ("", "<"), ("why it loses", "<"))
    for each in neighbours:
        table.add_row(each.change, Text(each.reason, style=_REASON_STYLES[each.reason]), each.message)
    return table


def playbook(path: PlaybookPath) -> list[RenderableType]:
    table = plain_table(("step", "<"), ("decision", "<"), ("GB", ">"), ("time", ">"))
    for step in path.path:
        table.add_row(
            step.step,
            step.decision,
            "-" if step.reserved_bytes is None else gigabytes(step.reserved_bytes),
            "-" if step.seconds is None else seconds(step.seconds),
        )
    parts: list[RenderableType] = [table]
    if path.estimate is not None and path.gap_s is not None and path.estimate.step is not None:
        share = path.gap_s / (path.estimate.step.seconds.value - path.gap_s)
        end = f"It ends at {degrees_words(path.estimate.layout)}, "
        parts.append(
            Text(
                end
                + (
                    f"{seconds(path.gap_s)} a step slower than the best ({share:+.1%})."
                    if path.gap_s > 0
                    else f"{seconds(-path.gap_s)} a step from the best ({share:+.1%})."
                )
            )
        )
    else:
        parts.append(Text("It ends without a layout that fits."))
    return parts


def _limit_words(limit: Limit) -> str:
    gain = "" if limit.gain_s is None else f" ({seconds(limit.gain_s)} a step)"
    return limit.message if limit.message else limit.change + gain
