"""The view of a search: the best layouts, the first one in detail, and why it is first."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fivefold.cli.output import encodes_unicode
from fivefold.cli.problem import Question
from fivefold.cli.render.estimate import bullet, closing, detail, header, interval
from fivefold.cli.render.layouts import (
    blocks_words,
    degrees_words,
    options_words,
    recompute_words,
    schedule_words,
    zero_words,
)
from fivefold.cli.render.moved import moved_parts
from fivefold.cli.render.text import gigabytes, heading, percent, plain_table, seconds
from fivefold.cluster import Cluster
from fivefold.estimate import Estimate
from fivefold.layout import RampPlan
from fivefold.layout.layout import ResolvedLayout
from fivefold.search import Plan
from fivefold.search.moving import Moved
from fivefold.search.result import DimensionEffect, Limit, Neighbour, PlaybookPath, Why

_SAME_S = 5e-5  # differences of a step that are none
_OBJECTIVES = {
    "tokens_per_s": "most tokens per second; ties go to fewer axes",
    "gpus": "fewest GPUs that fit, then fastest",
    "memory": "least memory, then fastest",
    "time": "shortest run",
    "cost": "cheapest run",
}
_DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp")
_ALWAYS = ("tp", "pp", "dp")
_IN_WORDS = ("ZeRO", "recompute", "sched.")
_REASON_STYLES = {"slower": "yellow", "memory": "red", "rule": "magenta"}


def plan_view(
    question: Question,
    found: Plan,
    top: int,
    ramp: RampPlan | None,
    notes: Sequence[str],
    saved: str | None,
    moved: Moved | None = None,
) -> Group:
    """Everything that `fivefold plan` prints."""
    best = found.plans[0] if found.plans else found.nearest
    if found.gpus != question.cluster.gpus:  # the objective was the number of GPUs
        cluster = msgspec.convert(found.inputs["cluster"], Cluster)
        question = dataclasses.replace(question, cluster=cluster)
    parts: list[RenderableType] = []
    if best is not None:
        parts.append(header(question, best))
    if moved is not None:
        parts += moved_parts(moved, found)
    parts.append(counts_line(found))
    if found.counts:
        parts += [heading("How many GPUs", "the best layout of each count, failures included"), counts_table(found)]
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
        LayoutsTable(found, found.plans[:shown]),
        title,
        *detail(best),
    ]
    if found.why is not None:
        parts += reasons(found.why)
    if len(found.pareto) > 1:
        parts += [
            heading("Memory against time", "no other layout is better in both"),
            LayoutsTable(found, sorted((found.plans[index] for index in found.pareto), key=_step_seconds)),
        ]
    return parts


def _step_seconds(plan: Estimate) -> float:
    return plan.step.seconds.value if plan.step is not None else inf


def _no_answer(found: Plan) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"\n{_no(found)}", style="bold red")]
    parts += [bullet(sentence) for sentence in found.advice]
    if found.nearest is not None:
        parts.append(heading("The layout that misses by least", degrees_words(found.nearest.layout)))
        parts.append(Text(options_words(found.nearest.layout), style="dim"))
        parts += detail(found.nearest)
    return parts


def _no(found: Plan) -> str:
    if found.counts and found.fitting:
        return "Not in time."
    return "No layout fits." if found.valid else "No layout would start."


def counts_line(found: Plan) -> Text:
    """How the search went."""
    line = Text(style="dim")
    line.append(
        f"{found.searched:,} layouts searched in {found.seconds_used:.2f} s: {found.valid:,} valid, "
        f"{found.fitting:,} fit, {found.priced:,} priced, {found.bounded:,} ruled out by bounds"
    )
    return line


def counts_table(found: Plan) -> Table:
    """Every number of GPUs that was tried, against days and cost."""
    priced = any(row.cost is not None for row in found.counts)
    heads = (("GPUs", ">"), ("batch", ">"), ("layout", "<"), ("step", ">"), ("MFU", ">"), ("goodput", ">"))
    heads += (("days", ">"), ("GPU hours", ">"), *((("cost", ">"),) if priced else ()))
    table = plain_table(*heads)
    for row in found.counts:
        mine = bool(found.plans) and row.gpus == found.gpus
        if row.seconds is None:
            cells = (row.reason, "-", "-", "-", "-", "-", *(("-",) if priced else ()))
        else:
            cells = (
                row.layout,
                seconds(row.step_s or 0.0),
                percent(row.mfu or 0.0),
                percent(row.goodput or 0.0),
                f"{row.seconds / 86400:,.1f}",
                f"{row.gpu_hours:,.0f}",
                *((f"{row.cost:,.0f}",) if priced else ()),
            )
        table.add_row(f"{row.gpus:,}", f"{row.global_batch:,}", *cells, style="bold" if mine else None)
    return table


class LayoutsTable:
    """One row per layout, with as many columns as the console has room for."""

    def __init__(self, found: Plan, plans: Iterable[Estimate]) -> None:
        self.found, self.plans = found, list(plans)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tables = [[layouts_table(self.found, self.plans, without, gap) for gap in _GAPS] for without in _LEFT_OUT]
        # Closer columns before folded words, and folded words before fewer columns.
        tries = ((table, word) for group in tables for word in (options.max_width, _WORD) for table in group)
        yield next((table for table, word in tries if _needed(table, word) <= options.max_width), tables[-1][-1])


def _needed(table: Table, word: int) -> int:
    """The least width at which only columns of words are folded, and those not below their heads or `word` cells."""
    widths = 0
    for column in table.columns:
        cells = max(len(str(cell)) for cell in column.cells)
        widths += max(len(str(column.header)), cells if column.no_wrap else min(cells, word))
    _, right, _, left = Padding.unpack(table.padding)
    return widths + (left + right + 1) * len(table.columns) + 1  # padding and divider of each, and the edge


_WORD = 9
_GAPS = (1, 0)  # cells between columns beside the divider: room is made there before columns are left out
# Columns to leave out, the first time that everything fits; "interval" stands for that of the step.
_LEFT_OUT = ((), ("interval", "MFU"), ("interval", "MFU", "tok/s/GPU", "mbs x m"))


def layouts_table(found: Plan, rows: Sequence[Estimate], without: Sequence[str] = (), gap: int = 1) -> Table:
    """One row per layout: degrees, options, memory, time, but for the columns named in `without`."""
    fastest = found.plans[found.fastest] if found.fastest else None  # said only where it is not the first
    degrees = [name for name in _DEGREES if name in _ALWAYS or any(getattr(each.layout, name) > 1 for each in rows)]
    step_time = (lambda step: seconds(step.seconds.value)) if "interval" in without else interval
    alike = Counter(_shown(each.layout) for each in rows)
    one = "·" if encodes_unicode() else "."
    lines: list[dict[str, str]] = []
    for each in rows:
        if each.memory is None or each.step is None:
            continue
        layout = each.layout
        line = {name.upper(): str(getattr(layout, name)) for name in degrees}
        line = {name: one if number == "1" else number for name, number in line.items()}
        line |= {
            "ZeRO": zero_words(layout),
            "recompute": recompute_words(layout.recompute, short=True),
            "sched.": _schedule(layout, with_split=alike[_shown(layout)] > 1),
            "mbs x m": f"{layout.micro_batch} x {layout.num_micro_batches}",
            "GB": gigabytes(each.memory.reserved_bytes),
            "step" if "interval" in without else "step (80%)": step_time(each.step) + "*" * (each is fastest),
            "MFU": percent(each.step.mfu.causal),
            "tok/s/GPU": f"{each.step.tokens_per_s_per_gpu:,.0f}",
        }
        lines.append({name: cell for name, cell in line.items() if name not in without})
    heads = list(lines[0]) if lines else []
    table = plain_table(*((name, "<" if name in _IN_WORDS else ">") for name in heads))
    table.padding = (0, gap, 0, 0)
    for name, column in zip(heads, table.columns, strict=True):
        if name not in _IN_WORDS:  # a number in two lines reads as two numbers
            column.no_wrap, column.min_width = True, max(len(line[name]) for line in lines)
    for line, each in zip(lines, rows, strict=False):
        table.add_row(*line.values(), style="bold" if each is found.plans[0] else None)
    capacity = rows[0].memory.capacity_bytes if rows and rows[0].memory else 0
    table.caption = f"GB: needed of {gigabytes(capacity)}, driver and buffers included."
    table.caption += "" if "MFU" in without else " MFU: causal."
    if fastest in rows:
        table.caption += " *: the fastest."
    table.caption_justify = "left"
    return table


def _shown(layout: ResolvedLayout) -> tuple[object, ...]:
    """What the table shows of a layout, but for the split into stages."""
    degrees = tuple(getattr(layout, name) for name in _DEGREES)
    return (*degrees, zero_words(layout), layout.recompute, schedule_words(layout), layout.micro_batch)


def _schedule(layout: ResolvedLayout, *, with_split: bool) -> str:
    """1f1b v2, and the blocks per stage where rows would otherwise look the same."""
    split = f" {blocks_words(layout)}" if with_split and layout.pp > 1 else ""
    return schedule_words(layout).replace("interleaved", "1f1b") + split


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
    better = [limit for limit in why.limits if limit.gain_s is None or limit.gain_s > _SAME_S]
    if better:
        parts += [heading("What would do better"), *(bullet(_limit_words(limit)) for limit in better)]
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
        way = "slower" if path.gap_s > 0 else "faster"
        gap = f"{seconds(abs(path.gap_s))} a step {way} than the best ({share:+.1%})."
        end = gap if abs(path.gap_s) > _SAME_S else "as fast as the best."
        parts.append(Text(f"It ends at {degrees_words(path.estimate.layout)}, {end}"))
    else:
        parts.append(Text("It ends without a layout that fits."))
    return parts


def _limit_words(limit: Limit) -> str:
    gain = "" if limit.gain_s is None else f" ({seconds(limit.gain_s)} a step)"
    return limit.message if limit.message else limit.change + gain
