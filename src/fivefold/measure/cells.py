"""One cell of a table of runs: its type by its column, the words and numbers that it may hold, and the mistake where
it holds others."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable
from typing import Any, Union, get_args, get_origin, get_type_hints

from fivefold.errors import FivefoldError

CLOSED: dict[str, tuple[str, ...]] = {
    "precision_kind": ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32", "unknown"),
    "recompute_kind": ("none", "selective", "full", "unknown"),
    "mem_kind": ("allocated", "reserved", "nvidia-smi", "unknown"),
}
_FLAGS = ("gated_mlp", "tied_embeddings", "sp", "dist_opt")
_SWITCHES = {"true": "1", "false": "0", "yes": "1", "no": "0"}
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
_MAY_BE_ZERO = (*_FLAGS, "zero", "shared_experts", "experts", "topk", "moe_ffn")
# The most that a column may hold, far beyond any run, so that a mistyped number fails at once instead of taking the
# machine's memory: layouts and groups are counted out rank by rank and block by block.
_MOST: dict[type, float] = {int: 1e9, float: 1e15}
_MOST_OF: dict[str, float] = {
    "layers": 10_000, "pp": 10_000, "vpp": 10_000, "experts": 1e6, "topk": 1e6, "mbs": 1e6, "gpus": 1 << 20,
    "hidden": 1e7, "ffn": 1e8, "moe_ffn": 1e8, "heads": 1e6, "kv_heads": 1e6, "head_dim": 1e6, "params_b": 1e9,
}  # fmt: skip
_LEAST = 1e-9  # of numbers that are not counts: seconds, gigabytes, rates


def kinds(row: type) -> dict[str, type]:
    """int, float or str of every field of a struct whose fields may be None."""
    out: dict[str, type] = {}
    for name, hint in get_type_hints(row).items():
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        out[name] = next(option for option in options if option is not type(None))
    return out


def value(cell: str, name: str, kind: type, place: str) -> Any:
    """What a cell of the column `name` says. Raises FivefoldError, naming the place, for what it may not hold."""
    if kind is str:
        return _word(cell, name, place)
    number = _number(cell, name, place)
    if name in _FLAGS and number not in (0, 1):
        raise mistake(place, f"{cell[:80]} has to be 0 or 1", "correct it", (0, 1))
    if kind is int and number != int(number):
        raise mistake(place, f"{cell[:80]} has to be a whole number", "correct it")
    least, most = 0 if name in _MAY_BE_ZERO else _LEAST, _MOST_OF.get(name, _MOST[kind])
    if number < least:
        raise mistake(place, f"{cell[:80]} has to be {'above 0' if least else '0 or more'}", "correct it")
    if number > most:
        raise mistake(place, f"{cell[:80]} is more than {most:,.0f}", "correct it")
    return kind(number)


def _word(cell: str, name: str, place: str) -> str:
    if name not in CLOSED:
        return cell
    word = cell.lower()
    if word not in CLOSED[name]:
        raise mistake(place, f"{word[:80]!r} is unknown", f"use one of {', '.join(CLOSED[name])}", CLOSED[name])
    return word


def _number(cell: str, name: str, place: str) -> float:
    if name in _FLAGS:
        cell = _SWITCHES.get(cell.lower(), cell)
    elif _THOUSANDS.fullmatch(cell):
        cell = cell.replace(",", "")
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise mistake(place, f"{cell[:80]!r} is not a finite number", "give a number, or nothing where not stated")
    return number


def mistake(where: str, problem: str, remedy: str, legal: Iterable[Any] | None = None) -> FivefoldError:
    """The error of a table of runs at `where`: its file, line and column."""
    return FivefoldError(
        f"Measured runs, {where}: {problem}. To go on, {remedy}.",
        code="bad-measured-runs",
        option="--runs",
        value=where,
        legal=None if legal is None else list(legal),
    )
