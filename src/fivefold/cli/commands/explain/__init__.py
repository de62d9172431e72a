"""`fivefold explain TOPIC`: one file per topic beside this one, and one row here."""

from __future__ import annotations

from cyclopts import App

# Name, module and function, one line for the list, flags of an example.
TOPICS = (
    (
        "dp-limit",
        "dp_limit:dp_limit",
        "From how many tokens per GPU pure data parallelism pays on a cluster.",
        "--gpu b200 --gpus 64",
    ),
    (
        "axes",
        "axes:axes",
        "What each axis cuts, moves and is bounded by, and which go together.",
        "--gbs 512 --mbs 2 --dp 4",
    ),
    (
        "rules",
        "rules:rules",
        "The rules that decide whether a layout would start, with their sources.",
        "--runtime megatron@0.16",
    ),
    (
        "assumptions",
        "assumptions:assumptions",
        "The numbers that estimates take for granted, with their sources.",
        "mixtral-8x7b --gpu h200-sxm",
    ),
)

app = App(
    name="explain",
    help="Axes, rules, limits and assumptions in words.\n\nFor example: fivefold explain dp-limit --gpus 64",
    help_epilogue="",
    help_format="plaintext",
    result_action="return_value",
)
for _name, _place, _line, _flags in TOPICS:
    _example = f"For example: fivefold explain {_name} {_flags}"
    app.command(f"{__name__}.{_place}", name=_name, help=f"{_line}\n\n{_example}")
