"""Reading the rotary embedding's numbers: base, share of the head that turns, and llama3's stretching.

Configurations spell them in two ways: rope_theta, rope_scaling and partial_rotary_factor at the top, or all of them in
rope_parameters (transformers 5.24, modeling_rope_utils.py, which also gives the default of original_positions).
Other kinds of stretching are kept by name: they change what a trainer computes and nothing that is planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fivefold.model.spec import Rotary

if TYPE_CHECKING:
    from fivefold.model.families.reader import Reader

LLAMA3 = "llama3"
_MAX_KIND = 32
_MAX_THETA = 1e12


# Kinds of blocks that configurations with two rotary embeddings key them by; the one of full attention is the model's.
_FULL, _WINDOWED = "full_attention", "sliding_attention"


def read_rotary(reader: Reader, default_theta: float, max_position: int, default_share: float = 1.0) -> Rotary:
    """Rotary of the configuration. A theta inside rope_parameters wins over the one at the top, as in transformers."""
    inner = _inner(reader)
    top = reader.config
    theta = _number(
        reader, "rope_theta", inner.get("rope_theta"), top.get("rope_theta"), default_theta, high=_MAX_THETA
    )
    share = _number(
        reader, "partial_rotary_factor", inner.get("partial_rotary_factor"), top.get("partial_rotary_factor"),
        default_share, high=1.0,
    )  # fmt: skip
    kind = inner.get("rope_type", inner.get("type", "default"))
    if not isinstance(kind, str) or not 1 <= len(kind) <= _MAX_KIND or not kind.isidentifier():
        raise reader.error("rope_scaling", "its rope_type must be a word such as default, llama3 or yarn")
    if kind != LLAMA3:
        return Rotary(theta=theta, share=share, scaling=kind)
    numbers = {
        name: _number(reader, f"rope_scaling.{name}", inner.get(name), None, None)
        for name in ("factor", "low_freq_factor", "high_freq_factor")
    }
    original = _number(
        reader, "original_max_position_embeddings", inner.get("original_max_position_embeddings"), None, max_position,
        high=float(1 << 31),
    )  # fmt: skip
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise reader.error("rope_scaling", "high_freq_factor must be greater than low_freq_factor")
    return Rotary(theta=theta, share=share, scaling=kind, original_positions=int(original), **numbers)


def _inner(reader: Reader) -> Mapping[str, Any]:
    """The table of either spelling, empty where there is none."""
    for key in ("rope_parameters", "rope_scaling"):
        value = reader.config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise reader.error(key, "must be a table of rotary parameters, or null")
        if _FULL not in value and _WINDOWED not in value:
            return value
        full = value.get(_FULL) or {}
        if not isinstance(full, dict):
            raise reader.error(key, f"its {_FULL} must be a table of rotary parameters, or null")
        return full
    return {}


def _number(reader: Reader, key: str, inner: Any, outer: Any, default: float | None, *, high: float = 1e6) -> float:
    """The first of the three that is there, a positive number up to `high`."""
    value = next((each for each in (inner, outer, default) if each is not None), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= high or math.isnan(value):
        where = (
            key if key in reader.config else "rope_scaling" if "rope_scaling" in reader.config else "rope_parameters"
        )
        raise reader.error(where, f"{key.split('.')[-1]} must be a number above 0 and up to {high:g}", f"0..{high:g}")
    return float(value)
