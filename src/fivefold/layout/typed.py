"""Structs that a caller built by hand, held to their annotations: msgspec checks types when decoding, not on calls."""

from __future__ import annotations

from math import isfinite
from typing import TypeVar

import msgspec

from fivefold.errors import FivefoldError, option_of
from fivefold.layout.layout import Layout, Overlap, Recompute
from fivefold.layout.workload import LORA_TARGETS, Lora, Offload, Workload

_POSITIVE = (
    "seq_len",
    "global_batch",
    "tokens",
    "price",
    "moe_imbalance",
    "gpu_mtbf_hours",
    "checkpoint_bytes_per_s",
    "restart_s",
    "document_length",
)

S = TypeVar("S", bound=msgspec.Struct)


def check_layout(layout: Layout) -> None:
    """FivefoldError where a field has another type or word than Layout says, e.g. a fractional degree."""
    _check_types(layout, Layout, "Layout")
    _check_types(layout.recompute, Recompute, "Recompute")
    _check_types(layout.overlap, Overlap, "Overlap")


def check_workload(work: Workload) -> None:
    """FivefoldError for fields of another type, unknown words, and numbers that are not positive and finite."""
    _check_types(work, Workload, "Workload")
    _check_adapters(work)
    _check_types(work.offload, Offload, "Offload")
    for name in Offload.__struct_fields__:
        share = getattr(work.offload, name)
        if not 0 <= share <= 1:
            raise FivefoldError(
                f"--offload {name}:{share} is not a share: it has to be 0 to 1.",
                code="bad-number",
                option="--offload",
                value=share,
                legal="0 to 1",
            )
    for name in _POSITIVE:
        value = getattr(work, name)
        if value is not None and not (value > 0 and isfinite(value)):
            option = option_of(name)
            raise FivefoldError(
                f"{option} {value} is not possible: it has to be a positive, finite number.",
                code="bad-number",
                option=option,
                value=value,
                legal="above 0",
            )


def _check_adapters(work: Workload) -> None:
    lora = work.lora
    if lora is not None:
        _check_types(lora, Lora, "Lora")
    unknown = sorted(set(lora.targets) - set(LORA_TARGETS)) if lora else []
    for wrong, message, option, value in (
        (
            lora is not None and work.trained != "adapters",
            'Adapters go with trained="adapters": the rest of the model is frozen.',
            "--lora-rank",
            lora and lora.rank,
        ),
        (
            lora is not None and not 1 <= lora.rank <= 1 << 16,
            "The rank of an adapter has to be 1 to 65,536.",
            "--lora-rank",
            lora and lora.rank,
        ),
        (
            bool(lora) and (not lora.targets or bool(unknown)),
            f"Adapters sit beside {', '.join(LORA_TARGETS)}, not {', '.join(unknown) or 'nothing'}.",
            "--lora-targets",
            lora and ",".join(lora.targets),
        ),
        (
            work.base_precision != "compute" and work.trained != "adapters",
            "Weights in 4 bits are frozen: --base-precision nf4 needs adapters, such as --lora-rank 16.",
            "--base-precision",
            work.base_precision,
        ),
    ):
        if wrong:
            raise FivefoldError(message, code="bad-adapters", option=option, value=value, legal=list(LORA_TARGETS))


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
