"""The views of a sweep: what was written, and what was measured."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.cli.render.layouts import degrees_words, recompute_words, schedule_words
from fivefold.cli.render.text import giga, heading, percent, plain_table, seconds
from fivefold.cli.sweep import Written
from fivefold.measure.sweep import Sweep


def written_view(done: Written) -> Group:
    """The candidates, as predicted, and how to start them."""
    if not done.files:
        return Group(Text("Nothing fits, so there is nothing to measure: fivefold plan says what is missing."))
    table = plain_table(("#", ">"), ("layout", "<"), ("sched.", "<"), ("recompute", "<"), ("GB", ">"), ("step", ">"))
    for at, each in enumerate(done.plan.plans[: sum(path.endswith(("rank.sh", "run.sh")) for path in done.files)]):
        if each.step is None or each.memory is None:
            continue
        table.add_row(
            str(at), degrees_words(each.layout), schedule_words(each.layout),
            recompute_words(each.layout.recompute, short=True), giga(each.memory.reserved_bytes),
            seconds(each.step.seconds.value),
        )  # fmt: skip
    parts: list[RenderableType] = [heading("Candidates", "as predicted"), table]
    parts.append(Text(f"\nStart them: {done.start}", style="bold"))
    return Group(*parts)


def collected_view(found: Sweep) -> Group:
    """The candidates by what they took."""
    table = plain_table(
        ("#", ">"), ("layout", "<"), ("recompute", "<"), ("outcome", "<"), ("step", ">"), ("predicted", ">"),
        ("ratio", ">"), ("GB", ">"), ("predicted", ">"),
    )  # fmt: skip
    for each in found.candidates:
        layout = each.estimate.layout
        table.add_row(
            str(each.number), degrees_words(layout), recompute_words(layout.recompute, short=True), each.outcome,
            "-" if each.step_s is None else seconds(each.step_s),
            "-" if each.predicted_s is None else seconds(each.predicted_s),
            "-" if each.ratio is None else f"{each.ratio:.2f}",
            "-" if each.peak_bytes is None else giga(each.peak_bytes),
            "-" if each.predicted_bytes is None else giga(each.predicted_bytes),
        )  # fmt: skip
    parts: list[RenderableType] = [heading("Sweep", "the fastest first"), table]
    if found.bias is not None:
        parts.append(Text(f"\nMeasured times are {percent(abs(found.bias))} {_side(found.bias)} than predicted."))
    if found.spearman is not None:
        parts.append(Text(f"Rank correlation of prediction and measurement: {found.spearman:.2f}."))
    best = found.candidates[0]
    if best.step_s is not None:
        parts.append(Text(f"Best: {best.plan}", style="bold"))
    return Group(*parts)


def _side(bias: float) -> str:
    return "longer" if bias > 0 else "shorter"
