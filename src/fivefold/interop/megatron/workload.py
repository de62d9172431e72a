"""The workload of a launch: sequence, batch, precision, optimizer. Defaults as in options.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fivefold.interop.megatron.given import Given
from fivefold.layout import Offload, Workload
from fivefold.layout.workload import Optimizer, Precision

_OPTIMIZERS: dict[str, Optimizer] = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}


@dataclass(slots=True)
class WorkParts:
    """A workload, None where something is missing; what was assumed; what the figures simplify."""

    work: Workload | None = None
    assumed: list[tuple[str, object, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_workload(given: Given, micro_batch: int, dp: int, style: str) -> WorkParts:
    """The workload. dp: data-parallel ranks, 0 where the degrees do not divide the GPUs."""
    parts = WorkParts()
    seq = given.integer("--seq-length", needed="Megatron-LM has no default for it")
    batch = given.integer("--global-batch-size")
    if "--global-batch-size" not in given and style != "bridge":
        batch = micro_batch * max(dp, 1)
        parts.assumed.append(
            ("--global-batch-size", batch, "Megatron-LM's default: micro-batch-size x data-parallel size")
        )
    precision = _precision(given, parts, style)
    optimizer = given.word("--optimizer") or "adam"
    if optimizer == "dist_muon":
        parts.notes.append("--optimizer dist_muon is priced as muon, whose states are not sharded.")
    if seq is None or batch is None or precision is None:
        return parts
    if "--rampup-batch-size" in given:
        parts.notes.append("--rampup-batch-size: the figures are those of the full global batch.")
    parts.work = Workload(
        seq_len=seq,
        global_batch=batch,
        precision=precision,
        optimizer=_OPTIMIZERS.get(optimizer, "adamw"),
        grad_dtype=_gradients(given, parts, precision),
        attention="unfused" if given.word("--attention-backend") == "unfused" else "flash",
        dropout=_dropout(given, style),
        tokens=_tokens(given, seq, batch),
        offload=_offload(given, parts),
        moe_dispatcher="deepep" if given.flag("--moe-enable-deepep") and _expert_parallel(given) else "alltoall",
        cuda_graphs=given.flag("--enable-cuda-graph") and given.integer("--num-experts") is None,
    )
    return parts


def _dropout(given: Given, style: str) -> bool:
    """Megatron-LM's default is 0.1, that of the recipes of Megatron-Bridge and NeMo 0."""
    hidden = given.number("--hidden-dropout")
    return style != "bridge" if hidden is None else hidden > 0


def _expert_parallel(given: Given) -> bool:
    return (given.integer("--expert-model-parallel-size") or 1) > 1 and given.integer("--num-experts") is not None


def _offload(given: Given, parts: WorkParts) -> Offload:
    """States and saved tensors in host memory; the latter of so many of the blocks."""
    share = 0.0
    if given.flag("--optimizer-cpu-offload"):
        fraction = given.number("--optimizer-offload-fraction")
        share = 1.0 if fraction is None else min(max(fraction, 0.0), 1.0)
        if not given.flag("--overlap-cpu-optimizer-d2h-h2d"):
            parts.notes.append(
                "Without --overlap-cpu-optimizer-d2h-h2d the copies of an offloaded optimizer come before and after "
                "its update; they are priced beside it, so that the step is underestimated."
            )
    blocks, layers = given.integer("--cpu-offloading-num-layers", low=0) or 0, given.integer("--num-layers") or 0
    return Offload(optimizer=share, activations=min(blocks / layers, 1.0) if layers else 0.0)


def _precision(given: Given, parts: WorkParts, style: str) -> Precision | None:
    if "--fp4-format" in given and given.word("--fp4-format") is not None:
        return "nvfp4"
    if "--fp8-format" in given and given.word("--fp8-format") is not None:
        recipe = given.word("--fp8-recipe")
        if recipe in ("blockwise", "custom"):
            parts.notes.append(f"--fp8-recipe {recipe} is priced as scaling by tensor.")
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    if given.flag("--bf16"):
        return "bf16"
    if given.flag("--fp16"):
        return "fp16"
    if style == "bridge":
        parts.assumed.append(("mixed_precision", "bf16", "the usual precision of Megatron-Bridge's recipes"))
        return "bf16"
    given.missing["--bf16"] = "neither --bf16 nor --fp16 is given, which trains in fp32, and that is not modelled"
    return None


def _gradients(given: Given, parts: WorkParts, precision: Precision) -> Literal["fp32", "bf16"]:
    if given.flag("--grad-reduce-in-bf16") and precision != "fp16":
        return "bf16"
    if precision == "fp16" and not given.flag("--accumulate-allreduce-grads-in-fp32"):
        parts.notes.append(
            "Under --fp16 without --accumulate-allreduce-grads-in-fp32 gradients are kept in 16 bits; they are priced "
            "in fp32, 2 bytes per parameter more."
        )
    return "fp32"


def _tokens(given: Given, seq: int, batch: int) -> float | None:
    """The token budget of the whole run; None where it is set from outside the file, since only the budget rests on
    it."""
    for option, tokens in (("--train-samples", seq), ("--train-iters", batch * seq)):
        if option in given and not given.is_unknown(option):
            count = given.integer(option)
            return None if count is None else float(count * tokens)
    return None
