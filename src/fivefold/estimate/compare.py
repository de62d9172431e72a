"""Where two estimates differ, by owner of seconds and of bytes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fivefold.estimate.result import Estimate, envelope
from fivefold.runtime import load_runtime

_QUESTION = ("model", "cluster", "workload", "runtime")
_ROUNDING = 1e-9  # of seconds, which are differences of sums; bytes are counted


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One field or owner that is not the same on both sides. delta: b - a for numbers, None for other values."""

    field: str
    a: Any
    b: Any
    delta: float | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two estimates and their differences.

    same_question: whether model, cluster, workload and runtime are equal, so that errors that both share cancel.
    faster: by tokens per second; "tie" when nearer than predictions can tell apart, None when a side has no step time.
    seconds: owners of the step. memory: categories of bytes, each at its own fullest stage. layout, question: fields.
    """

    a: Estimate
    b: Estimate
    same_question: bool
    faster: Literal["a", "b", "tie"] | None
    tie_spread: float
    speedup: float | None
    layout: tuple[Difference, ...]
    question: tuple[Difference, ...]
    seconds: tuple[Difference, ...]
    memory: tuple[Difference, ...]

    def to_dict(self) -> dict[str, Any]:
        fields = msgspec.to_builtins(self)
        for side in ("a", "b"):
            fields[side].pop("inputs")
        return {**envelope("compare", {"a": self.a.resolved_inputs(), "b": self.b.resolved_inputs()}), **fields}


def compare(a: Estimate, b: Estimate) -> Comparison:
    """Compare two estimates, of the same question or of different ones. speedup: tokens per second of b over a's."""
    same = all(a.inputs[name] == b.inputs[name] for name in _QUESTION)
    spread = _tie_spread(a, b, same)
    speedup = b.step.tokens_per_s / a.step.tokens_per_s if a.step and b.step else None
    return Comparison(
        a=a,
        b=b,
        same_question=same,
        faster=None if speedup is None else _verdict(speedup, spread),
        tie_spread=spread,
        speedup=speedup,
        layout=_differences(_flat(msgspec.to_builtins(a.layout)), _flat(msgspec.to_builtins(b.layout))),
        question=_differences(_question(a), _question(b)),
        seconds=_owners(a.step.breakdown_s if a.step else {}, b.step.breakdown_s if b.step else {}),
        memory=_owners(_peak(a), _peak(b)),
    )


def _verdict(speedup: float, spread: float) -> Literal["a", "b", "tie"]:
    if 1 / (1 + spread) <= speedup <= 1 + spread:
        return "tie"
    return "b" if speedup > 1 else "a"


def _tie_spread(a: Estimate, b: Estimate, same: bool) -> float:
    """On one question the runtime's tie interval; else the wider of the two intervals of the step time."""
    if same:
        return load_runtime(a.inputs["runtime"]["asked"]).tie_spread
    widths = [each.step.seconds.high / each.step.seconds.value - 1 for each in (a, b) if each.step]
    return max(widths, default=0.0)


def _question(estimate: Estimate) -> dict[str, Any]:
    """The inputs that a person chooses, flat."""
    given = estimate.inputs
    return {
        "model": given["model"]["name"],
        "layers": given["model"]["layers"],
        "cluster": given["cluster"]["name"],
        "gpus": given["cluster"]["gpus"],
        **given["workload"],
        "runtime": given["runtime"]["asked"],
    }


def _peak(estimate: Estimate) -> dict[str, int]:
    """Bytes by category on the fullest stage, and what the device needs beyond that peak."""
    memory = estimate.memory
    if memory is None:
        return {}
    inside = memory.stages[memory.peak_stage].breakdown
    return {**inside, "beyond_peak": memory.reserved_bytes - memory.peak_bytes}


def _flat(layout: dict[str, Any]) -> dict[str, Any]:
    """recompute and overlap opened; stages as blocks per stage."""
    flat: dict[str, Any] = {}
    for name, value in layout.items():
        if name == "stages":
            flat["blocks_per_stage"] = [sum(last - first for first, last in rank) for rank in value]
        elif isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def _differences(a: dict[str, Any], b: dict[str, Any]) -> tuple[Difference, ...]:
    names = list(dict.fromkeys([*a, *b]))
    return tuple(_difference(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))


def _owners(a: dict[str, Any], b: dict[str, Any]) -> tuple[Difference, ...]:
    """Every owner that either side has, the largest difference first; empty when a side has none."""
    if not a or not b:
        return ()
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name, 0) or b.get(name, 0)]
    rows = [_difference(name, a.get(name, 0), b.get(name, 0)) for name in names]
    return tuple(sorted(rows, key=lambda row: -abs(row.delta or 0)))


def _difference(name: str, a: Any, b: Any) -> Difference:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    if not numbers:
        return Difference(field=name, a=a, b=b, delta=None)
    rounding = isinstance(b - a, float) and abs(b - a) <= _ROUNDING * max(abs(a), abs(b))
    return Difference(field=name, a=a, b=b, delta=0.0 if rounding else b - a)
