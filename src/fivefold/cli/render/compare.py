"""The view of two layouts side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.cli.problem import Question
from fivefold.cli.render.estimate import header, verdict, violation
from fivefold.cli.render.text import heading, percent, plain_table, seconds, seconds_interval
from fivefold.estimate import Estimate
from fivefold.estimate.compare import Comparison, Difference

# The difference between what the device needs and the peak of the allocated.
_NAMES = {"beyond_peak": "fragmentation, driver, communicators"}
_STYLES = {True: "green", False: "red"}


def compare_view(questions: tuple[Question, Question], found: Comparison) -> Group:
    """Everything that `fivefold compare` prints."""
    parts: list[RenderableType] = [header(questions[0], found.a)]
    if found.question:
        parts += [heading("The questions differ"), _values(found.question)]
    for name, each in (("a", found.a), ("b", found.b)):
        parts.append(Text(f"\n{name}", style="bold"))
        parts.append(Text.assemble(*_one_line(each)))
        parts += [violation(broken) for broken in each.violations]
    if found.layout:
        parts += [heading("The layouts differ"), _values(found.layout)]
    if found.seconds:
        parts += [
            heading("Seconds", "by owner, on the slowest stage"),
            _numbers(found.seconds, seconds, _totals(found)),
        ]
    if found.memory:
        parts += [
            heading("Gigabytes", "by category, each on its fullest stage"),
            _numbers(found.memory, _gigabytes, _needs(found)),
        ]
    parts.append(Text(f"\n{verdict_words(found)}", style="bold"))
    return Group(*parts)


def _one_line(each: Estimate) -> list[Any]:
    line: list[Any] = [Text(verdict(each).plain.strip())]
    if each.step is not None:
        step = each.step
        interval = seconds_interval(step.seconds.value, step.seconds.low, step.seconds.high)
        line.append(
            f"\n{interval} a step, {step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {percent(step.mfu.causal)}"
        )
    return line


def verdict_words(found: Comparison) -> str:
    """Who is faster, and whether that can be told."""
    if found.faster is None or found.speedup is None:
        sides = [name for name, each in (("a", found.a), ("b", found.b)) if not each.valid]
        return f"{' and '.join(sides)} would not start, so there is nothing to compare."
    basis = "on one question" if found.same_question else "of different questions"
    if found.faster == "tie":
        apart = f"nearer than predictions {basis} tell apart (+-{found.tie_spread:.0%})"
        return f"b is {found.speedup - 1:+.1%} in tokens/s: {apart}."
    share = found.speedup if found.faster == "b" else 1 / found.speedup
    unfit = "" if (found.b if found.faster == "b" else found.a).fits else ", but it does not fit"
    return f"{found.faster} is faster: {share - 1:.1%} more tokens/s{unfit}."


def _values(rows: Iterable[Difference]) -> Table:
    table = plain_table(("", "<"), ("a", "<"), ("b", "<"))
    for row in rows:
        table.add_row(row.field, _word(row.a), _word(row.b))
    return table


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _numbers(rows: Iterable[Difference], words: Callable[[float], str], total: tuple[float, float]) -> Table:
    table = plain_table(("", "<"), ("a", ">"), ("b", ">"), ("b - a", ">"))
    for row in rows:
        table.add_row(_NAMES.get(row.field, row.field), words(row.a), words(row.b), _delta(row.delta or 0.0, words))
    table.add_section()
    table.add_row("total", words(total[0]), words(total[1]), _delta(total[1] - total[0], words), style="bold")
    return table


def _delta(value: float, words: Callable[[float], str]) -> Text:
    if not value:
        return Text("0")
    return Text(("+" if value > 0 else "") + words(value), style=_STYLES[value < 0])


def _totals(found: Comparison) -> tuple[float, float]:
    return tuple(each.step.seconds.value if each.step else 0.0 for each in (found.a, found.b))  # type: ignore[return-value]


def _needs(found: Comparison) -> tuple[float, float]:
    return tuple(each.memory.reserved_bytes if each.memory else 0 for each in (found.a, found.b))  # type: ignore[return-value]


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:,.2f}"
