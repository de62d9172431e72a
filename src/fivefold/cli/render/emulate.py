"""The view of `fivefold emulate`: what one rank holds, keeps for backward, computes and sends in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.cli.render.layouts import degrees_words, options_words
from fivefold.cli.render.text import bar, giga, heading, mega, percent, plain_table, seconds

if TYPE_CHECKING:
    from fivefold.train.emulate import Emulation
    from fivefold.train.emulate.result import SavedUnit

_BAR = 40
_MOST_TENSORS = 8


def emulate_view(found: Emulation) -> Group:
    """Everything that `fivefold emulate` prints."""
    memory = found.memory
    where = " ".join(f"{axis} {index}" for axis, index in found.coordinates.items() if axis in ("tp", "cp", "dp", "pp"))
    parts: list[RenderableType] = [
        Text(f"{found.model}  rank {found.rank:,} of {found.world:,}: {where}", style="bold"),
        Text(degrees_words(found.layout), style="bold"),
        Text(options_words(found.layout), style="dim"),
        Text(
            f"One step of {found.seq_len:,} tokens a sequence, {found.precision}, {found.grad_dtype} gradients, "
            f"{found.optimizer}; the trainer on tensors without values.",
            style="dim",
        ),
        Text(
            f"Took {seconds(found.seconds_s)} ({seconds(found.cpu_s)} of CPU time) and "
            f"{giga(found.host_peak_bytes)} GB of this machine's memory."
        ),
        heading(
            "Memory",
            f"peak {giga(memory.peak_bytes)} GB in {memory.peak_phase}, activations of {memory.in_flight} forward "
            f"{'pass' if memory.in_flight == 1 else 'passes'} held; between steps {giga(memory.resting_bytes)} GB",
        ),
        _categories(found),
        heading("By phase", "GB at the most; building the trainer is before the step"),
        _phases(found),
        heading("Kept for backward", "by one forward pass, in each unit; parameters not counted"),
        _saved(found),
        heading("FLOPs", f"as executed: {found.flops.convention}"),
        _flops(found),
    ]
    if found.collectives:
        parts += [heading("Collectives", "of the step; bytes of one, and what the rank sends in all"), _sent(found)]
    if found.notes:
        parts += [heading("Notes"), *(Text(note) for note in found.notes)]
    return Group(*parts)


def _categories(found: Emulation) -> Table:
    memory = found.memory
    table = plain_table(("category", "<"), ("GB at peak", ">"), ("share", ">"), ("between steps", ">"), ("", "<"))
    for name, size in memory.breakdown.items():
        if size or memory.resting[name]:
            share = size / memory.peak_bytes
            row = (name, giga(size), percent(share), giga(memory.resting[name]), bar(share, _BAR, "cyan"))
            table.add_row(*row)
    return table


def _phases(found: Emulation) -> Table:
    names = [name for name in found.memory.breakdown if any((p.breakdown or {}).get(name) for p in found.memory.phases)]
    short = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "buffers": "buf", "working": "work"}
    table = plain_table(("phase", "<"), *((short.get(name, name), ">") for name in names), ("peak", ">"), ("held", ">"))
    for phase in found.memory.phases:
        if phase.breakdown is None or phase.peak_bytes is None:
            continue
        row = [_cell(phase.breakdown[name]) for name in names]
        style = "bold" if phase.phase == found.memory.peak_phase else None
        table.add_row(phase.phase, *row, _cell(phase.peak_bytes), str(phase.in_flight), style=style)
    return table


def _cell(size: float) -> str:
    """GB in five places at most, as many columns of them have to stand side by side."""
    return f"{size / 1e9:.3f}" if 0 < size < 1e9 else giga(size)


def _saved(found: Emulation) -> Table:
    table = plain_table(("unit", "<"), ("times", ">"), ("MB each", ">"), ("largest tensors, MB", "<"))
    for unit in found.saved:
        table.add_row(_unit_words(unit), str(len(unit.layers) or 1), mega(unit.bytes), _tensor_words(unit))
    return table


def _unit_words(unit: SavedUnit) -> str:
    if unit.unit != "block":
        return unit.unit.replace("_", " ")
    kind = f", kind {unit.kind}" if unit.kind else ""
    return f"block{kind} ({unit.layers[0]}{'...' if len(unit.layers) > 1 else ''})"


def _tensor_words(unit: SavedUnit) -> str:
    largest = sorted(unit.tensors, key=lambda tensor: -tensor.bytes)[:_MOST_TENSORS]
    words = [f"{tensor.name} {mega(tensor.bytes)}" for tensor in largest]
    return ", ".join(words) + (", ..." if len(unit.tensors) > len(largest) else "")


def _flops(found: Emulation) -> Table:
    flops = found.flops
    table = plain_table(("", "<"), ("TFLOP", ">"), ("share", ">"))
    for name, value in (("forward", flops.forward), ("backward", flops.backward), ("recompute", flops.recompute)):
        table.add_row(name, f"{value / 1e12:,.4g}", percent(value / flops.total if flops.total else 0.0))
    return table


def _sent(found: Emulation) -> Table:
    table = plain_table(
        ("axis", "<"), ("collective", "<"), ("ranks", ">"), ("phase", "<"), ("calls", ">"), ("MB each", ">"),
        ("GB sent", ">"),
    )  # fmt: skip
    for each in found.collectives:
        table.add_row(
            each.axis, each.collective, f"{each.ranks:,}", each.phase, f"{each.count:,}", mega(each.payload_bytes),
            giga(each.count * each.bytes_sent_per_rank),
        )  # fmt: skip
    return table
