"""The view of a check: what was read, the verdict, memory and step, what is wasted, and changes as differences."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.advise.result import Change, Check
from fivefold.cli.render.estimate import bullet, detail, memory_table, step_table, violation
from fivefold.cli.render.layouts import degrees_words, options_words, work_words
from fivefold.cli.render.text import count, gigabytes, heading, percent, seconds
from fivefold.interop.megatron.read import Reading

_MOST_ASSUMED = 12


def check_view(found: Check, reading: Reading) -> Group:
    """Everything that `fivefold check` prints."""
    parts: list[RenderableType] = [_header(found, reading), _verdict(found)]
    estimate = found.estimate
    if estimate.violations:
        parts += [heading("Rules that it breaks"), *(violation(each) for each in estimate.violations)]
    if estimate.memory is not None and estimate.step is not None:
        if estimate.violations:
            parts += [heading("Memory", "if these were mended"), memory_table(estimate.memory)]
            parts += [heading("Step", "if these were mended"), step_table(estimate.step)]
        else:
            parts += detail(estimate)
    if found.waste:
        parts += [heading("What it wastes"), *(_waste(row) for row in found.waste)]
    parts += _changes(found)
    if found.unknown_options:
        parts += [heading("Unknown options"), *(bullet(row["message"]) for row in found.unknown)]
    parts += _assumed(found)
    known = {row["message"] for row in found.unknown}
    notes = [note for note in found.notes if note not in known]
    if notes:
        parts += [heading("Notes"), *(bullet(note) for note in notes)]
    return Group(*parts)


def _header(found: Check, reading: Reading) -> Text:
    model, work, params = reading.model, reading.work, found.estimate.params
    active = f", {count(params.active)} active" if params.active != params.total else ""
    line = Text()
    line.append(reading.source, style="bold")
    launch = found.understood["launch"]
    line.append(f"  {launch['program']} at {launch['place']}; {found.runtime}")
    line.append(f"\nmodel  {count(params.total)} parameters{active}, {model.layers} layers, hidden {model.hidden:,}, ")
    line.append(f"vocabulary {model.vocab:,} padded to {reading.padded_vocab:,}")
    line.append("\nwork  ")
    return line.append(work_words(work, params.trained))


def _verdict(found: Check) -> Text:
    layout = found.estimate.layout
    line = Text("\n")
    line.append(degrees_words(layout), style="bold")
    words, style = ("fits", "bold green") if found.good else ("does not fit", "bold red")
    if not found.starts:
        words, style = "would not start", "bold red"
    line.append(f"  {words}", style=style)
    line.append(f"\n{options_words(layout)}", style="dim")
    line.append(f"\n\n{found.summary}")
    return line


def _waste(row: dict[str, object]) -> RenderableType:
    share, spent = row["share"], row["seconds"]
    amount = percent(float(str(share)))
    if spent is not None:
        amount += f" ({seconds(float(str(spent)))})"
    return bullet(f"{row['owner']} {amount}: {row['message']}")


def _changes(found: Check) -> list[RenderableType]:
    if not found.changes:
        if found.good or (not found.starts and found.estimate.memory is not None):
            return [heading("Changes"), Text("  No single change on these GPUs is faster.")]
        return [heading("Changes"), Text("  No change on these GPUs helps; fivefold plan says what is missing.")]
    note = "one at a time, on the same GPUs, by gain"
    if found.estimate.memory is None or found.estimate.fits is False:
        note = "that start and fit on the same GPUs"
    elif not found.starts:
        note += "; the broken rules have to be mended as well"
    parts: list[RenderableType] = [heading("Changes", note)]
    for at, change in enumerate(found.changes, start=1):
        parts.append(_change(at, change))
    return parts


def _change(at: int, change: Change) -> Text:
    line = Text(f"{at}. ")
    line.append(change.kind, style="bold")
    step, memory = change.estimate.step, change.estimate.memory
    if step is not None and memory is not None:
        line.append(f"  {seconds(step.seconds.value)} per step, MFU {percent(step.mfu.causal)}")
        line.append(f", {gigabytes(memory.reserved_bytes)} GB")
    if change.gain_s is not None and change.delta_bytes is not None and step is not None:
        share = abs(change.gain_s) / (step.seconds.value + change.gain_s)
        verb = "saves" if change.gain_s >= 0 else "costs"
        line.append(f"  ({verb} {seconds(abs(change.gain_s))}, {share:.1%}; {_moved(change.delta_bytes)})", style="dim")
    old, new = change.options["old"], change.options["new"]
    for name, value in old.items():
        if value is not None:
            line.append(f"\n   - {_spelled(name, value)}", style="red")
    for name, value in new.items():
        if value is not None:
            line.append(f"\n   + {_spelled(name, value)}", style="green")
    return line


def _moved(size: int) -> str:
    if size == 0:
        return "the same memory"
    return f"{gigabytes(abs(size))} GB {'more' if size > 0 else 'less'}"


def _spelled(name: str, value: object) -> str:
    if not name.startswith("-"):
        return f"{name}={'true' if value is True else value}"
    return name if value is True else f"{name} {value}"


def _assumed(found: Check) -> list[RenderableType]:
    rows = found.understood["assumed"]
    if not rows:
        return []
    lines: list[RenderableType] = [heading("Assumed", "what the file does not say")]
    for row in rows[:_MOST_ASSUMED]:
        value = "" if row["value"] is None else f" {row['value']}"
        lines.append(bullet(f"{row['field']}{value}: {row['source']}"))
    if len(rows) > _MOST_ASSUMED:
        lines.append(Text(f"  and {len(rows) - _MOST_ASSUMED} more, in --json", style="dim"))
    return lines
