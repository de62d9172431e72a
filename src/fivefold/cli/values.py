"""From the text of a flag to its values: sets, counts, words, and layouts written as tp=4,pp=2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from math import isfinite
from typing import Any

from fivefold.cli.flags import WHOLE, LayoutFlags
from fivefold.cli.output import CONTROL
from fivefold.errors import FivefoldError, option_of
from fivefold.layout.columns import SWITCHES
from fivefold.layout.layout import RECOMPUTE_MODULES
from fivefold.layout.workload import Offload

MAX_VALUES = 64  # in one set; more is a mistake

_INTEGERS = ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "zero", "dp_replicate")
_STAGES = ("first_stage_layers", "last_stage_layers")
_WORDS = ("cp_kind", "schedule", "recompute")
_SHORT = {"mbs": "micro_batch", "sp": "sequence_parallel"}
_SWITCHES = tuple(_SHORT.get(name, name) for name in SWITCHES)
_ON_OFF = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def word(option: str, value: str, legal: Sequence[str]) -> Any:
    """`value` if it is one of the legal words."""
    if value in legal:
        return value
    near = get_close_matches(value.lower(), legal, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise FivefoldError(
        f"{option} {value[:60]} is not known.{hint} Legal: {', '.join(legal)}.",
        code="unknown-value",
        option=option,
        value=value[:60],
        legal=list(legal),
    )


def positive(option: str, value: float | None) -> float | None:
    """A finite number above zero, or None."""
    if value is not None and not (isfinite(value) and value > 0):
        raise FivefoldError(
            f"{option} {value} is not possible: it has to be a number above zero.",
            code="bad-value",
            option=option,
            value=str(value),
            legal="above zero",
        )
    return value


def fraction(option: str, value: float) -> float:
    """A number above 0 and up to 1."""
    if not 0 < value <= 1:
        raise FivefoldError(
            f"{option} {value} is not possible: it is a share, above 0 and up to 1, as in {option} 0.4.",
            code="bad-value",
            option=option,
            value=str(value),
            legal="above 0, up to 1",
        )
    return value


def whole(option: str, text: str) -> int:
    """A whole number of 1 or more; 8K is refused, since it could be 8,000 or 8,192."""
    digits = text.replace("_", "").replace(",", "")
    if not (WHOLE.fullmatch(text) and int(digits) >= 1):
        raise FivefoldError(
            f"{option} {text[:60]} is not a whole number of 1 or more. Write it out, as in {option} 8192.",
            code="bad-number",
            option=option,
            value=text[:60],
            legal="1 or more",
        )
    return int(digits)


def offload_of(option: str, text: str) -> Offload:
    """none, or parts with their shares: optimizer,activations:0.5."""
    if text.strip() == "none":
        return Offload()
    shares: dict[str, float] = {}
    for part in names(option, text):
        name, _, share = part.partition(":")
        name = word(option, name.strip(), Offload.__struct_fields__)
        if name in shares:
            raise FivefoldError(
                f"{option} {text[:60]!r} names {name} twice. Give it one share.",
                code="bad-set",
                option=option,
                value=text[:60],
            )
        try:
            shares[name] = float(share) if share else 1.0
        except ValueError:
            shares[name] = 0.0
        if not 0 < shares[name] <= 1:
            raise FivefoldError(
                f"{option} {part[:60]!r}: {share[:40]!r} is not a share, above 0 and up to 1. Write for example "
                f"{name}:0.5.",
                code="bad-number",
                option=option,
                value=text[:60],
                legal="above 0, up to 1",
            )
    return Offload(**shares)


def documents_of(option: str, text: str) -> dict[str, Any]:
    """2000, or 2000:equal: the mean length of documents and how lengths are distributed; "none" for one document."""
    if text == "none":
        return {"document_length": None}
    length, _, kind = text.partition(":")
    out: dict[str, Any] = {"document_length": float(whole(option, length))}
    return {**out, "document_lengths": word(option, kind or "exponential", ("exponential", "equal"))}


def runtime_name(text: str) -> str:
    """`megatron` or `megatron@0.16`; an @ without a version is refused."""
    if text.endswith("@"):
        raise FivefoldError(
            f"--runtime {text[:60]} has an empty version. Write a version after the @, as in megatron@0.16, or leave "
            "the @ out.",
            code="unknown-runtime-version",
            option="--runtime",
            value=text[:60],
            legal="NAME or NAME@VERSION",
        )
    return text


def refuse_control(value: Any, whose: str, option: str) -> None:
    """Texts from files are printed, so none in `value` may hold characters that steer a terminal."""
    if isinstance(value, str) and CONTROL.search(value):
        raise FivefoldError(
            f"{whose} has a control character in {value[:60]!r}. Names and sources are printed, so take it out.",
            code="control-character",
            option=option,
            value=value[:60],
        )
    for item in (*value.keys(), *value.values()) if isinstance(value, dict) else ():
        refuse_control(item, whose, option)
    for item in value if isinstance(value, (list, tuple)) else ():
        refuse_control(item, whose, option)


def pins_of(flags: LayoutFlags) -> dict[str, tuple[Any, ...]]:
    """The layout options that were given, by the library's names, each as a tuple of values."""
    from fivefold.search.pins import checked_pins

    pins: dict[str, Any] = {}
    for name, read in _READERS.items():
        text = getattr(flags, name)
        if text is not None:
            pins[name] = read(option_of(name), text)
    for axis in ("tp", "cp", "pp", "ep"):
        if getattr(flags, f"no_{axis}"):
            if pins.get(axis, (1,)) != (1,):
                raise FivefoldError(
                    f"--no-{axis} and --{axis} {getattr(flags, axis)} contradict each other; give one of them.",
                    code="contradiction",
                    option=f"--no-{axis}",
                    value=getattr(flags, axis),
                    legal=[1],
                )
            pins[axis] = (1,)
    return checked_pins(pins)


def layout_text(option: str, text: str) -> LayoutFlags:
    """'tp=4,pp=4,recompute=full' as flags. Several values of recompute_modules are joined with +."""
    fields: dict[str, Any] = {}
    for part in text.split(","):
        key, separator, value = part.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        name = _SHORT.get(name, name)
        if not separator or name not in _READERS or not value.strip():
            near = get_close_matches(name, _READERS, n=1)
            hint = f" Did you mean {near[0]}=...?" if near else ""
            raise FivefoldError(
                f"{option} {text[:100]!r}: {part[:40]!r} is not a layout option with its value.{hint} "
                f"Write for example tp=4,pp=2. Known: {', '.join(_READERS)}.",
                code="bad-layout-text",
                option=option,
                value=text[:100],
                legal=list(_READERS),
            )
        if name in fields:
            raise FivefoldError(
                f"{option} names {name} twice; give it once.", code="bad-layout-text", option=option, value=text[:100]
            )
        fields[name] = _switch(option, value.strip()) if name in _SWITCHES else value.strip().replace("+", ",")
    return LayoutFlags(**fields)


def _integers(option: str, text: str) -> tuple[int, ...]:
    return tuple(_integer(option, part) for part in names(option, text))


def _integer(option: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise FivefoldError(
            f"{option} {text[:60]} is not a whole number, nor a set of them such as 2,4,8.",
            code="bad-number",
            option=option,
            value=text[:60],
            legal="whole numbers, separated by commas",
        )
    return int(text)


def _layer_counts(option: str, text: str) -> tuple[int | None, ...]:
    """Counts of blocks, or `all`."""
    return tuple(None if part == "all" else _count(option, part) for part in names(option, text))


def _count(option: str, text: str) -> int:
    value = _integer(option, text)
    if value < 1:
        raise FivefoldError(
            f"{option} {value} is not possible: it has to be 1 or more blocks.",
            code="bad-number",
            option=option,
            value=value,
            legal="1 or more",
        )
    return value


def _counts(option: str, text: str) -> tuple[int, ...]:
    return tuple(_count(option, part) for part in names(option, text))


def _modules(option: str, text: str) -> tuple[tuple[str, ...], ...]:
    """layernorm,mlp/moe is two alternatives, the first with two modules."""
    alternatives = [names(option, part) for part in text.split("/")]
    return tuple(tuple(word(option, name, RECOMPUTE_MODULES) for name in names) for names in alternatives)


def names(option: str, text: str) -> tuple[str, ...]:
    """The words between commas, each once."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(parts) or len(parts) > MAX_VALUES:
        raise FivefoldError(
            f"{option} {text[:60]!r} has an empty place, or more than {MAX_VALUES} values. Separate values by single "
            "commas.",
            code="bad-set",
            option=option,
            value=text[:60],
        )
    return parts


def _switch(option: str, text: str) -> bool:
    return _ON_OFF[word(option, text.lower(), list(_ON_OFF))]


def _given(option: str, value: bool) -> tuple[bool]:
    return (value,)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_INTEGERS, _integers),
    **dict.fromkeys(_STAGES, _counts),
    **dict.fromkeys(_WORDS, names),
    "recompute_modules": _modules,
    "recompute_layers": _layer_counts,
    **dict.fromkeys(_SWITCHES, _given),
}
