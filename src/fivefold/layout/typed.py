"""Structs that a caller built by hand, held to their annotations: msgspec checks types when decoding, not on calls."""

from __future__ import annotations

from math import isfinite
from typing import TypeVar

import msgspec

from fivefold.errors import FivefoldError
from fivefold.layout.layout import Layout, Overlap, Recompute
from fivefold.layout.workload import Workload

S = TypeVar("S", bound=msgspec.Struct)


def check_layout(layout: Layout) -> None:
    """FivefoldError where a field has another type or word than Layout says, e.g. a fractional degree."""
    _check_types(layout, Layout, "Layout")
    _check_types(layout.recompute, Recompute, "Recompute")
    _check_types(layout.overlap, Overlap, "Overlap")


def check_workload(work: Workload) -> None:
    """FivefoldError for fields of another type, unknown words, and numbers that are not positive and finite."""
    _check_types(work, Workload, "Workload")
    for name in ("seq_len", "global_batch", "tokens", "price", "moe_imbalance"):
        value = getattr(work, name)
        if value is not None and not (value > 0 and isfinite(value)):
            option = "--" + name.replace("_", "-")
            raise FivefoldError(
                f"{option} {value} is not possible: it has to be a positive, finite number.",
                code="bad-number",
                option=option,
                value=value,
                legal="above 0",
            )


def _check_types(value: S, kind: type[S], name: str) -> None:
    if not isinstance(value, kind):
        raise FivefoldError(
            f"Expected a {name}, got {type(value).__name__}. Build one with fivefold.{name}(...).",
            code="wrong-type",
            option=name,
            value=str(value)[:200],
            legal=name,
        )
    try:
        msgspec.convert(msgspec.to_builtins(value), kind)
    except (msgspec.ValidationError, TypeError) as error:
        # msgspec says "... - at `$.field`"; a user knows the field as an argument of the struct.
        text = str(error).replace("`$.", f"`{name}.")
        raise FivefoldError(f"{text}.", code="wrong-type", option=name, value=str(value)[:200]) from None
