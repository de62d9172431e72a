"""The views of `fivefold explain`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.cli.problem import Question
from fivefold.cli.render.estimate import bullet
from fivefold.cli.render.text import count, heading, plain_table
from fivefold.cluster import AxesTable, Cluster, DpLimit
from fivefold.estimate.result import Assumption
from fivefold.layout.rules import Rule

_PLACEHOLDER = re.compile(r"\{(\w+)[^}]*\}")


def dp_limit_view(cluster: Cluster, limit: DpLimit) -> Group:
    """Both orders of the limit, and what they mean for the batch."""
    title = Text("Pure data parallelism pays from\n", style="bold")
    table = plain_table(("", "<"), ("tokens per GPU and step", ">"), ("tokens per batch", ">"))
    for name, tokens in (
        ("first order: achieved FLOP/s / link bytes/s", limit.tokens_first_order),
        (f"of {limit.dp:,} ranks: (n - 1) / n of the bytes", limit.tokens_finite),
        ("with the ring's latency", limit.tokens_with_latency),
        ("with one network card per ring", limit.tokens_one_card),
    ):
        table.add_row(name, f"{tokens:,.0f}", count(tokens * limit.dp))
    achieved = f"{limit.achieved_flops_per_s / 1e12:,.0f} TFLOP/s achieved per GPU"
    title.append(f"on {cluster.gpus:,} x {cluster.gpu.name}, {achieved}", style="not bold dim")
    return Group(title, table, *(bullet(sentence) for sentence in limit.sentences))


def axes_view(table: AxesTable) -> Group:
    """The axes, how the world is counted, and the pairs."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for axis in table.rows:
        facts = (("cuts", axis.cuts), ("moves", axis.moves), ("when", axis.when), ("bound", axis.bound))
        for at, (name, value) in enumerate(facts):
            rows.add_row(axis.axis.upper() if at == 0 else "", name, value)
        rows.add_row("", "grid", axis.grid)
        rows.add_row("", "", "")
    pairs = Table.grid(padding=(0, 2))
    pairs.add_column(style="bold", no_wrap=True)
    pairs.add_column(overflow="fold")
    for name, words in table.pairs.items():
        pairs.add_row(name, words)
    parts: list[RenderableType] = [
        rows,
        heading("How the world is counted"),
        *(bullet(line) for line in table.readings),
    ]
    parts += [heading("Which go together"), pairs, heading("What limits data parallelism"), bullet(table.headroom)]
    return Group(*parts)


def rules_view(rules: Sequence[Rule]) -> Group:
    """One rule per paragraph."""
    parts: list[RenderableType] = [Text(f"{len(rules)} rules", style="bold")]
    for rule in rules:
        head = Text(f"\n{rule.id}", style="bold")
        head.append(
            f"  {rule.option}  {', '.join(rule.runtimes).replace('*', 'all runtimes')}{_versions(rule)}",
            "not bold cyan",
        )
        if rule.silent:
            head.append("  silent", "not bold red")
        parts += [head, bullet(_PLACEHOLDER.sub(r"<\1>", rule.message), ""), bullet(Text(rule.source, style="dim"), "")]
    return Group(*parts)


def _versions(rule: Rule) -> str:
    words = [
        f"{name} {'.'.join(map(str, version))}"
        for name, version in (("since", rule.since), ("before", rule.before))
        if version is not None
    ]
    return f" {' '.join(words)}" if words else ""


def assumptions_view(question: Question, rows: Iterable[Assumption]) -> Group:
    """Field, value and source of each."""
    where = Text(f"{question.runtime} on {question.cluster.gpu.name}, for {question.model.name}", style="bold")
    table = plain_table(("field", "<"), ("value", ">"), ("source", "<"))
    for row in rows:
        table.add_row(row.field, _value_words(row.value), row.source)
    return Group(where, table)


def _value_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return "\n".join(f"{key} {_value_words(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value_words, value))
    return "-" if value is None else str(value)
