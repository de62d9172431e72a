"""The view of an export: what was written, and what it still asks for."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.cli.export import Exported
from fivefold.cli.problem import Question
from fivefold.cli.render.estimate import bullet, header, verdict, violation
from fivefold.cli.render.text import heading


def export_view(question: Question, done: Exported, moved: str = "") -> Group:
    """Everything that `fivefold export` prints. moved: a sentence on a plan of another framework."""
    found = done.found
    parts: list[RenderableType] = [header(question, found), *([Text(moved)] if moved else []), verdict(found)]
    if not done.written:
        parts += [heading("Nothing is written"), Text(done.reason)]
        parts += [violation(each) for each in found.violations]
        return Group(*parts)
    parts += [heading("Written"), *(Text(f"  {path}") for path in done.written)]
    if done.needs:
        parts += [heading("To be set before it starts"), *(bullet(f"{name}: {why}") for name, why in done.needs)]
    return Group(*parts)
