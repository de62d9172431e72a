"""The view of `fivefold validate`: errors by source, and the runs if asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.cli.render.estimate import bullet
from fivefold.cli.render.text import gigabytes, heading, plain_table, seconds
from fivefold.measure import Row, Skipped, SourceErrors, Validation, errors

_MOST_REASONS = 8


def validate_view(found: Validation, *, every_row: bool) -> Group:
    """Everything that `fivefold validate` prints."""
    parts: list[RenderableType] = [
        Text(
            f"{found.rows_used:,} of {found.rows_total:,} runs predicted, {len(found.skipped):,} skipped", style="bold"
        ),
        _sources(found.by_source),
        _by_statement(found.rows),
        Text(
            "Errors are of (predicted - measured) / measured; bias is their mean. order: rank correlation of time per "
            "token; 80%: share of times inside the predicted 80% interval.",
            style="dim",
        ),
    ]
    if found.skipped:
        parts += [heading("Skipped"), *_reasons(found.skipped)]
    if every_row:
        parts += [heading("Runs"), _rows(found.rows)]
    return Group(*parts)


def _by_statement(rows: Iterable[Row]) -> Text:
    """Errors of rows that say everything that moves their time, and of the others."""
    parts = []
    for wanted, words in ((True, "state all that moves their time"), (False, "leave some of it to assumptions")):
        found = errors(row.error for row in rows if row.stated is wanted)
        if found.n:
            parts.append(f"{found.n:,} rows {words}: median {_share(found.median_ape)}, bias {_signed(found.bias)}")
    return Text("; ".join(parts))


def _sources(rows: Iterable[SourceErrors]) -> Table:
    table = plain_table(
        ("source", "<"),
        ("GPU", "<"),
        ("runtime", "<"),
        ("n", ">"),
        ("time:\nmedian", ">"),
        ("\np90", ">"),
        ("\nbias", ">"),
        ("\n80%", ">"),
        ("\norder", ">"),
        ("memory:\nmedian", ">"),
        ("\np90", ">"),
        ("\nbias", ">"),
    )
    table.padding = 0
    for each in rows:
        table.add_row(
            each.source,
            each.gpu,
            each.runtime,
            str(each.n),
            _share(each.time.median_ape),
            _share(each.time.p90_ape),
            _signed(each.time.bias),
            "-" if each.coverage80 is None else f"{each.coverage80:.0%}",
            "-" if each.spearman is None else f"{each.spearman:.2f}",
            _share(each.memory.median_ape),
            _share(each.memory.p90_ape),
            _signed(each.memory.bias),
        )
    return table


def _rows(rows: Iterable[Row]) -> Table:
    table = plain_table(
        ("run", "<"),
        ("predicted", ">"),
        ("measured", ">"),
        ("error", ">"),
        ("GB", ">"),
        ("measured", ">"),
        ("error", ">"),
        ("assumed", "<"),
    )
    for row in rows:
        table.add_row(
            row.id,
            seconds(row.predicted_s),
            "-" if row.measured_s is None else seconds(row.measured_s),
            _signed(row.error),
            gigabytes(row.predicted_bytes),
            "-" if row.measured_bytes is None else gigabytes(row.measured_bytes),
            _signed(row.memory_error),
            ", ".join(row.assumed),
        )
    return table


def _reasons(skipped: Iterable[Skipped]) -> list[RenderableType]:
    counts = Counter(each.reason for each in skipped)
    parts: list[RenderableType] = [bullet(f"{times} x {reason}") for reason, times in counts.most_common(_MOST_REASONS)]
    if len(counts) > _MOST_REASONS:
        parts.append(bullet(f"and {len(counts) - _MOST_REASONS} more reasons, in --json"))
    return parts


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if abs(value) < 0.0995 else f"{value:.0%}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}" if abs(value) < 0.0995 else f"{value:+.0%}"
