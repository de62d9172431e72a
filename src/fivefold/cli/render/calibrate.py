"""The view of `fivefold calibrate`: errors before and after, the factors and their uncertainty, what was skipped."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.cli.render.estimate import bullet
from fivefold.cli.render.text import heading, plain_table, seconds
from fivefold.measure import Calibrated, FitReport

_MOST_SKIPPED = 8


def calibrate_view(found: Calibrated, *, every_row: bool, saved: str | None) -> Group:
    """Everything that `fivefold calibrate` prints."""
    parts: list[RenderableType] = [
        Text(f"{found.runs_used:,} of {found.runs_total:,} runs fitted, {len(found.skipped):,} skipped", style="bold")
    ]
    for report in found.fits:
        parts += _fit(report)
        if every_row:
            parts.append(_rows(report))
    if found.skipped:
        parts.append(heading("Skipped"))
        parts += [bullet(f"{each.id}: {each.reason}") for each in found.skipped[:_MOST_SKIPPED]]
        if len(found.skipped) > _MOST_SKIPPED:
            parts.append(bullet(f"and {len(found.skipped) - _MOST_SKIPPED} more, in --json"))
    if saved is None:
        parts.append(Text("Add --save FILE to keep the factors for --calibration.", style="dim"))
    else:
        parts.append(Text(f"Saved to {saved}. Use it: fivefold estimate MODEL ... --calibration {saved}"))
    return Group(*parts)


def _fit(report: FitReport) -> list[RenderableType]:
    words = "1 run" if report.runs == 1 else f"{report.runs:,} runs"
    left_out = report.left_out.median_ape
    alone = "one run alone cannot be left out" if left_out is None else f"{left_out:.1%} when it is left out of the fit"
    return [
        heading(f"{report.runtime} on {report.gpu}, {words}"),
        Text(
            f"Median error {_share(report.before.median_ape)} before, {_share(report.after.median_ape)} after; {alone}."
        ),
        Text(f"80% interval of a step time: +-{report.spread_before:.0%} before, +-{report.spread:.0%} after."),
        _factors(report),
        Text(
            "A factor multiplies the seconds of its part; below 1 is faster than predicted. The runs tell nothing of "
            "those marked with a dash.",
            style="dim",
        ),
    ]


def _factors(report: FitReport) -> Table:
    table = plain_table(("constant", "<"), ("of", "<"), ("factor", ">"), ("one sigma", ">"), ("before", ">"))
    for each in report.factors:
        low, high = each.value / (1 + each.uncertainty), each.value * (1 + each.uncertainty)
        told = (f"{each.value:.3f}", f"{low:.2f} to {high:.2f}") if each.told else ("-", "-")
        table.add_row(each.constant, each.meaning, *told, f"x/ {1 + each.prior:.2f}")
    return table


def _rows(report: FitReport) -> Table:
    table = plain_table(
        ("run", "<"),
        ("measured", ">"),
        ("before", ">"),
        ("error", ">"),
        ("after", ">"),
        ("error", ">"),
        ("left out", ">"),
        ("assumed", "<"),
    )
    for row in report.rows:
        table.add_row(
            row.id,
            seconds(row.measured_s),
            seconds(row.before_s),
            _signed(row.before_error),
            seconds(row.after_s),
            _signed(row.after_error),
            _signed(row.left_out_error),
            ", ".join(row.assumed),
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
