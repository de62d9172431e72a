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
    "precision_kind": ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "tf32", "fp32", "unknown"),
    "recompute_kind": ("none", "selective", "full", "unknown"),
    "mem_kind": ("allocated", "reserved", "nvidia-smi", "unknown"),
}
_FLAGS = ("gated_mlp", "tied_embeddings", "sp", "dist_opt")
_SWITCHES = {"true": "1", "false": "0", "yes": "1", "no": "0", "y": "1", "n": "0", "on": "1", "off": "0"}
# What people write in a column of numbers where a source states none.
_NOT_STATED = ("-", "\u2013", "\u2014", "?", "n/a", "na", "none", "null", "tbd", "unknown", "not stated")
# "~4k tokens (fixed)": about, the number, its multiple, its unit, a remark.
_WRITTEN = re.compile(
    r"(?:~|\u2248|about |approx\.? ?|ca\.? ?)?(?P<number>\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)"
    r" ?(?P<multiple>[kmbt](?![a-z]))?"
    r"(?: ?(?P<unit>tokens|tok|sequences|seqs?|samples|params|gpus?|gib|gb|mib|mb|ms|s|sec|seconds|tflops?(?:/s)?))?"
    r"(?: ?\([^()]*\))?",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
# Lengths and batches are powers of two: "4k" is 4,096. Parameters are counted in billions.
_BINARY = {"k": 2.0**10, "m": 2.0**20, "b": 2.0**30}
_DECIMAL = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BILLIONS = {"m": 1e-3, "b": 1.0, "t": 1e3}
_MULTIPLES: dict[str, dict[str, float]] = {
    "seq": _BINARY, "gbs": _BINARY, "hidden": _BINARY, "ffn": _BINARY, "params_b": _BILLIONS,
    "peak_mem_gb": {}, "step_time_s": {}, "d_step_time_s": {},
}  # fmt: skip
_UNITS = {"ms": 1e-3, "mib": 2.0**-10, "mb": 1e-3}
# No published batch has so many sequences; GPT-3's of 3.2 million is in tokens.
MOST_SEQUENCES = 100_000
# Stages by the names of PyTorch's shards.
_SHARDED = (
    (re.compile(r"(?:full|hybrid)_?shard|[fh]sdp", re.IGNORECASE), 3.0),
    (re.compile(r"ddp", re.IGNORECASE), 0.0),
)
_STAGE = re.compile(r"(?:zero|stage)[-_ ]{0,3}(?:stage|dp)?[-_ ]{0,3}([0-3])(?!\d)", re.IGNORECASE)
# Degrees of which 0 means that the axis is off.
_OFF_AT_ZERO = ("cp", "vpp", "ep", "etp")
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


def read_cell(cell: str, name: str, kind: type, place: str) -> Any:
    """What a cell of the column `name` says, None for a number that is said not to be stated. Raises FivefoldError,
    naming the place, for what it may not hold."""
    if kind is str:
        return _word(cell, name, place)
    if cell.lower() in _NOT_STATED:
        return None
    number = _number(cell, name, place)
    if name == "gbs" and number > MOST_SEQUENCES:  # tokens: "8.4M"
        number = float(round(number))
    if name == "sp" and number > 1 and number == int(number):  # a degree, of as many ranks as share sequences
        return int(number)
    if name in _FLAGS and number not in (0, 1):
        raise mistake(place, f"{cell[:80]} has to be 0 or 1", "correct it", (0, 1))
    if kind is int and number != int(number):
        raise mistake(place, f"{cell[:80]} has to be a whole number", "correct it")
    if number == 0 and name in _OFF_AT_ZERO:
        return 1
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
        # "fp8_blockwise", "bf16-mixed", "max_memory_allocated": the one word of the vocabulary among its parts.
        parts = {part for part in re.split(r"[^a-z0-9]+", word) if part in CLOSED[name]}
        if len(parts) == 1:
            return parts.pop()
        raise mistake(place, f"{word[:80]!r} is unknown", f"use one of {', '.join(CLOSED[name])}", CLOSED[name])
    return word


def _number(cell: str, name: str, place: str) -> float:
    if name in _FLAGS:
        cell = _SWITCHES.get(cell.lower(), cell)
    stage = _STAGE.search(cell) if name == "zero" else None
    number = float(stage[1]) if stage else _plain(cell)
    if math.isnan(number) and name == "zero":
        number = next((stage for pattern, stage in _SHARDED if pattern.match(cell)), number)
    if math.isnan(number):
        number = _written(cell, name)
    if not math.isfinite(number):
        raise mistake(place, f"{cell[:80]!r} is not a finite number", "give a number, or nothing where not stated")
    sequences = name == "mbs" or (name == "gbs" and number <= MOST_SEQUENCES)
    if sequences and re.match(r"[^(]*tok", cell, re.IGNORECASE):
        raise mistake(place, f"{cell[:80]!r} counts tokens", "give sequences")
    return number


def _plain(cell: str) -> float:
    try:
        return float(cell.replace(",", "") if _THOUSANDS.fullmatch(cell) else cell)
    except ValueError:
        return math.nan


def _written(cell: str, name: str) -> float:
    """The number of "4k", "~60 GB", "64 (8 nodes)" or "350M", not a number where a cell is none of these."""
    found = _WRITTEN.fullmatch(cell)
    if found is None:
        return math.nan
    multiples, multiple = _MULTIPLES.get(name, _DECIMAL), (found["multiple"] or "").lower()
    if multiple and multiple not in multiples:
        return math.nan
    scale = multiples[multiple] if multiple else 1.0
    return _plain(found["number"]) * scale * _UNITS.get((found["unit"] or "").lower(), 1.0)


def mistake(where: str, problem: str, remedy: str, legal: Iterable[Any] | None = None) -> FivefoldError:
    """The error of a table of runs at `where`: its file, line and column."""
    return FivefoldError(
        f"Measured runs, {where}: {problem}. To go on, {remedy}.",
        code="bad-measured-runs",
        option="--runs",
        value=where,
        legal=None if legal is None else list(legal),
    )
