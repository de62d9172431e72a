"""Precision policies: which dtype computes, which holds the master weights, which accumulates gradients.

bf16 and fp16 compute with fp32 master weights and fp32 gradient accumulation (Micikevicius et al. 2018, arXiv
1710.03740; the fp32 accumulation is Megatron-LM's default for bf16); fp16 adds dynamic loss scaling. fp32 and fp64
are one dtype throughout, the latter for tests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fivefold.errors import FivefoldError


class Precision(NamedTuple):
    """compute: parameters and activations. master: what the optimizer updates. gradient: accumulation and reduction.
    scaled: whether the loss is scaled dynamically."""

    name: str
    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype
    scaled: bool = False


PRECISIONS: dict[str, Precision] = {
    "fp64": Precision("fp64", torch.float64, torch.float64, torch.float64),
    "fp32": Precision("fp32", torch.float32, torch.float32, torch.float32),
    "bf16": Precision("bf16", torch.bfloat16, torch.float32, torch.float32),
    "fp16": Precision("fp16", torch.float16, torch.float32, torch.float32, scaled=True),
}


def precision(name: str, grad_dtype: str = "fp32") -> Precision:
    """The policy called `name`; grad_dtype as in Workload. Raises FivefoldError for what the trainer does not run."""
    if name not in PRECISIONS:
        raise FivefoldError(
            f"The trainer does not run {name}: it has {', '.join(PRECISIONS)}. Choose bf16, which has fp8's master "
            "weights and gradients; fp8 is only planned.",
            code="precision-not-trainable",
            option="--precision",
            value=name,
            legal=list(PRECISIONS),
        )
    policy = PRECISIONS[name]
    if grad_dtype == "bf16":
        if name != "bf16":
            raise FivefoldError(
                f"bf16 gradients go with bf16 compute, not with {name}.",
                code="precision-not-trainable",
                option="--grad-dtype",
                value=grad_dtype,
                legal=["fp32"],
            )
        return policy._replace(gradient=torch.bfloat16)
    return policy


class LossScale:
    """Dynamic loss scaling: halve after an overflow, double after `interval` steps without one.

    The constants are torch.amp.GradScaler's defaults (2^16, 2, 1/2, 2,000). Without `enabled` the scale stays one.
    """

    def __init__(self, enabled: bool, scale: float = 2.0**16, interval: int = 2000) -> None:
        self.enabled = enabled
        self.value = scale if enabled else 1.0
        self.interval = interval
        self._good_steps = 0

    def update(self, overflowed: bool) -> None:
        """Tell whether this step's gradients overflowed, on any rank: every rank has to hear the same."""
        if not self.enabled:
            return
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value = max(self.value / 2, 1.0)
        elif self._good_steps == self.interval:
            self.value, self._good_steps = self.value * 2, 0
