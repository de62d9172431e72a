"""How a mistake in a cluster file is said: with the file, the place, the legal values and what to do."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from fivefold.errors import FivefoldError


def file_error(path: object, problem: str, remedy: str, option: str = "--cluster") -> FivefoldError:
    message = f"Cluster file {str(path)!r}: {problem}. To go on, {remedy}."
    return FivefoldError(message, code="bad-cluster-file", option=option, value=str(path))


def convert(table: dict[str, Any], kind: Any, label: str, place: str) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$", f"`{place}" if place else "`").replace("`.", "`")
        raise FivefoldError(
            f"Cluster file {label!r}: {text}{f' in {place}' if place and place not in text else ''}. Correct that key."
            + _unit(text)
            + legal_keys(text, kind),
            code="bad-cluster-file",
            option=place or "--cluster",
            value=label,
            legal=list(kind.__struct_fields__),
        ) from error


def _unit(text: str) -> str:
    """What a rate is counted in, where msgspec's `text` finds one too small; '' for other mistakes."""
    if ">= 1000000.0" in text:
        return " It is in bytes per second: 450 GB/s is 450e9."
    return " It is in FLOP per second: 989 TFLOP/s is 989e12." if ">= 1000000000.0" in text else ""


def legal_keys(text: str, kind: Any) -> str:
    """What is legal instead of the key that msgspec's `text` calls unknown; '' for other mistakes, and inside tables
    of the file's own names."""
    unknown = re.search(r"unknown field `([^`]*)`(?! - at `[^`]*\.)", text)
    if unknown is None:
        return ""
    from difflib import get_close_matches  # only an error needs it, and importing it costs time

    fields = list(kind.__struct_fields__)
    near = get_close_matches(unknown[1], fields, n=1)
    return f"{f' Did you mean {near[0]}?' if near else ''} Legal: {', '.join(fields)}."


def refuse_nan(value: Any, label: str, place: str) -> None:
    """NaN passes range checks; every number of a file has to be finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise file_error(label, f"{place} is not a finite number", "give a finite number", option=place)
    if isinstance(value, dict):
        for key, item in value.items():
            refuse_nan(item, label, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            refuse_nan(item, label, f"{place}[{at}]")
