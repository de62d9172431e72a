"""Which attention a published run ran, and what it dropped out, where its row does not say."""

from __future__ import annotations

import re

from fivefold.measure.frameworks import Framework
from fivefold.measure.runs import Run
from fivefold.measure.unstated import dated
from fivefold.measure.words import denied

# The most that Megatron's fused softmax took (fused_softmax.py in 2022, from memory).
_MOST_UNFUSED_KEYS = 4096
# What a row calls attention without a flash kernel, or without a fused one: that it has none.
_WITHOUT = denied(r"(?:flash|fused|fa\b)(?:[ -]?att\w*)?")
_MATERIALISED = re.compile(r"\b(?:eager|naive|math|standard|vanilla)\b|^torch$")
_FUSED = re.compile(
    r"flash|fused|sdpa|triton|xformers|memory[- ]efficient|cudnn|splash|\bfa-?[1-4]\b|flex|pallas|aiter|\bck\b"
)


def is_unfused(run: Run, line: Framework, *, flash: bool = True) -> tuple[bool, bool]:
    """(whether attention materialised its scores, whether that is stated).

    flash: whether the GPU runs Transformer Engine's and the flash-attn package's kernels (Ampere and later); PyTorch's
    own attention has another one for older GPUs. Nobody is taken to have materialised more keys than Megatron's fused
    softmax took.
    """
    words = (run.attention or "").lower()
    if "unfused" in words or _WITHOUT.search(words):
        return True, True
    if _MATERIALISED.search(words):
        return True, True
    if _FUSED.search(words):
        return False, True
    if (run.seq or 0) > _MOST_UNFUSED_KEYS:
        return False, False
    if not flash and not line.pytorch:
        return True, False
    return bool(line.unfused_until) and dated(run) < line.unfused_until, False


def drops_out(run: Run, line: Framework) -> bool:
    """Whether hidden states and scores are taken to be dropped out, which no row says."""
    before_flash = dated(run) < line.unfused_until
    return (before_flash or line.drops_out) and not run.gated_mlp
