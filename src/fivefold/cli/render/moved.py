"""The view of a plan that was moved to another cluster."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from fivefold.cli.render.layouts import degrees_words, options_words
from fivefold.cli.render.text import gigabytes, heading, percent, plain_table, seconds
from fivefold.estimate import Estimate
from fivefold.search import Plan
from fivefold.search.moving import Moved


def moved_parts(moved: Moved, found: Plan) -> list[RenderableType]:
    """Before, after and best side by side, then every change with its reason."""
    parts: list[RenderableType] = [heading("The plan, moved", "as few options changed as possible")]
    table = plain_table(
        ("", "<"), ("GPUs", ">"), ("layout", "<"), ("GB", ">"), ("step", ">"), ("MFU", ">"), ("tok/s/GPU", ">")
    )
    rows = [("before", moved.before), ("after", moved.after), ("best here", found.plans[0] if found.plans else None)]
    for name, each in rows:
        table.add_row(name, *_cells(each), style="bold" if name == "after" else None)
    parts += [table, Text(f"  {moved.unchanged}")]
    if moved.after is None:
        free = ": plan without --like to take the best free one" if found.plans else ", and none at all"
        parts.append(Text(f"  No layout within three changes runs here{free}.", style="bold red"))
        return parts
    parts.append(Text(f"  {options_words(moved.after.layout)}", style="dim"))
    if moved.changes:
        changes = plain_table(("changed", "<"), ("from", "<"), ("to", "<"), ("why", "<"))
        for each in moved.changes:
            changes.add_row(each.option, str(each.old), str(each.new), each.message)
        parts.append(changes)
    if moved.kept:
        parts.append(Text(f"  Kept: {', '.join(moved.kept)}.", style="dim"))
    if moved.best_gain_s is not None:
        gain = moved.best_gain_s
        words = f"saves {seconds(gain)} a step" if gain > 0 else f"is {seconds(-gain)} a step slower: a tie"
        parts.append(Text(f"  The best free layout {words}; --save writes the moved plan."))
    return parts


def _cells(each: Estimate | None) -> tuple[str, ...]:
    if each is None or each.step is None or each.memory is None:
        return ("-", "-", "-", "-", "-", "-")
    cluster = each.inputs["cluster"]
    return (
        f"{cluster['gpus']:,} {cluster['gpu']['name']}",
        degrees_words(each.layout) + f" mbs{each.layout.micro_batch} x {each.layout.num_micro_batches}",
        f"{gigabytes(each.memory.reserved_bytes)} of {gigabytes(each.memory.capacity_bytes)}",
        seconds(each.step.seconds.value),
        percent(each.step.mfu.causal),
        f"{each.step.tokens_per_s_per_gpu:,.0f}",
    )
