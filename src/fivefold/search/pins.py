"""Pins: options that the user fixes for a search, as names with one or several values."""

from __future__ import annotations

from typing import Any

from fivefold.errors import FivefoldError, option_of
from fivefold.layout.columns import DEGREES
from fivefold.layout.divisors import divisors
from fivefold.layout.layout import CHUNKS, CP_KINDS, RECOMPUTE_KINDS, SCHEDULES, ScheduleKind
from fivefold.layout.rules import OPTIONS

PIN_NAMES = tuple(option.removeprefix("--").replace("-", "_") for option in OPTIONS.values())


def checked_pins(pins: dict[str, Any] | None) -> dict[str, tuple[Any, ...]]:
    """Pins as tuples of values. FivefoldError for an option that cannot be pinned or has no value."""
    out: dict[str, tuple[Any, ...]] = {}
    for name, value in (pins or {}).items():
        if name not in PIN_NAMES:
            raise FivefoldError(
                f"There is no option '{name}' to pin. Legal: {', '.join(PIN_NAMES)}.",
                code="unknown-pin",
                option=name,
                value=value,
                legal=list(PIN_NAMES),
            )
        values = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
        if name == "recompute_modules" and values and isinstance(values[0], str):
            values = (values,)
        if not values:
            raise FivefoldError(f"{name} is pinned to no value at all.", code="empty-pin", option=name)
        _check_values(name, values)
        out[name] = values
    _check_together(out)
    return out


def divides_nothing(pins: dict[str, tuple[Any, ...]], gpus: int, global_batch: int) -> FivefoldError | None:
    """The refusal of the first pinned option none of whose values divides what it has to, whatever the others are."""
    for name, whole, words in (
        *((axis, gpus, f"the {gpus:,} GPUs") for axis in ("tp", "cp", "pp", "ep", "etp")),
        ("micro_batch", global_batch, f"the global batch of {global_batch:,} sequences"),
    ):
        values = pins.get(name, ())
        if values and not any(whole % int(value) == 0 for value in values):
            option, given = option_of(name), ",".join(map(str, values))
            legal = divisors(whole)
            return FivefoldError(
                f"{option} {given} does not divide {words}. Legal for {option} here: {', '.join(map(str, legal))}.",
                code="empty-space",
                option=option,
                value=given,
                legal=legal,
            )
    return None


# What a pin needs another one to allow.
_NEEDS = (("recompute_layers", "recompute", "full"), ("recompute_modules", "recompute", "selective"))


def _check_together(pins: dict[str, tuple[Any, ...]]) -> None:
    for name, other, word in _NEEDS:
        asked = any(value not in (None, -1) for value in pins.get(name, ()))
        if asked and word not in pins.get(other, (word,)):
            option, needed = option_of(name), "--" + other
            raise FivefoldError(
                f"{option} only means something with {needed} {word}, which the pins rule out. Add {word} to {needed}, "
                f"or leave out {option}.",
                code="contradictory-pins",
                option=option,
                value=list(pins[name]),
                legal=f"with {needed} {word}",
            )
    schedules, chunks = pins.get("schedule", ()), pins.get("vpp", ())
    if schedules and chunks and not any(runs_chunks(name, each) for name in schedules for each in chunks):
        legal = [name for name in SCHEDULES if any(runs_chunks(name, each) for each in chunks)]
        raise FivefoldError(
            f"--schedule {','.join(schedules)} does not run --vpp {','.join(map(str, chunks))}. Legal for --schedule "
            f"with so many chunks a rank: {', '.join(legal)}. Leave out one of the two, or give those that agree.",
            code="contradictory-pins",
            option="--schedule",
            value=list(schedules),
            legal=legal,
        )


def runs_chunks(schedule: ScheduleKind, chunks: int) -> bool:
    """Whether the schedule runs so many chunks on each pipeline rank."""
    fewest, most = CHUNKS[schedule]
    return fewest <= chunks <= (most or chunks)


_WORDS = {"cp_kind": CP_KINDS, "schedule": SCHEDULES, "recompute": RECOMPUTE_KINDS}


def _check_values(name: str, values: tuple[Any, ...]) -> None:
    option = option_of(name)
    for value in values:
        if name in _WORDS and value not in _WORDS[name]:
            legal = list(_WORDS[name])
            raise FivefoldError(
                f"{option} {value} is not known. Legal: {', '.join(legal)}.",
                code="unknown-value",
                option=option,
                value=value,
                legal=legal,
            )
        if name in DEGREES and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20):
            raise FivefoldError(
                f"{option} {value} is not a degree: it has to be a whole number of 1 or more.",
                code="bad-degree",
                option=option,
                value=value,
                legal="1 or more",
            )
        if name == "zero" and value not in (0, 1, 2, 3):
            raise FivefoldError(
                f"--zero {value} is not a ZeRO stage. Legal: 0, 1, 2, 3.",
                code="bad-zero",
                option="--zero",
                value=value,
                legal=[0, 1, 2, 3],
            )
