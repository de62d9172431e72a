"""`fivefold explain TOPIC`: one file per topic beside this one, and one row here."""

from __future__ import annotations

from cyclopts import App

# Name, module and function, one line for the list.
TOPICS = (
    ("dp-limit", "dp_limit:dp_limit", "From how many tokens per GPU pure data parallelism pays on a cluster."),
    ("axes", "axes:axes", "What each axis cuts, moves and is bounded by, and which go together."),
    ("rules", "rules:rules", "The rules that decide whether a layout would start, with their sources."),
    ("assumptions", "assumptions:assumptions", "The numbers that estimates take for granted, with their sources."),
)

app = App(
    name="explain",
    help="Axes, rules, limits and assumptions in words.\n\nFor example: fivefold explain dp-limit --gpus 64",
    help_epilogue="",
    help_format="plaintext",
    result_action="return_value",
)
for _name, _place, _line in TOPICS:
    app.command(f"{__name__}.{_place}", name=_name, help=_line)
