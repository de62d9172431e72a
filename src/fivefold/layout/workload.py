"""Workload: how much is trained per step, in which precision, with which optimizer."""

from __future__ import annotations

from typing import Literal

import msgspec

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"]
# Recipes that quantise the operands of linear layers.
QUANTISED = ("fp8", "mxfp8", "nvfp4")
Optimizer = Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit"]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One training step's work.

    seq_len: tokens per sequence. global_batch: sequences per optimizer step.
    attention: "unfused" materialises the scores, as frameworks did before FlashAttention, with dropout on them.
    trained: "adapters" freezes every weight of the model; the adapters themselves are taken to cost nothing (LoRA).
    moe_imbalance: tokens on the most loaded expert-parallel rank over the mean, 1.0 when balanced.
    tokens: token budget of the whole run, for time and cost. price: cost of one GPU for one hour.
    """

    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    attention: Literal["flash", "unfused"] = "flash"
    trained: Literal["all", "adapters"] = "all"
    moe_imbalance: float = 1.0
    tokens: float | None = None
    price: float | None = None

    @property
    def tokens_per_batch(self) -> int:
        return self.seq_len * self.global_batch

    @property
    def compute_bytes(self) -> int:
        """Of one element of an activation, and of a weight as it is multiplied: quantised recipes quantise operands."""
        return 4 if self.precision == "fp32" else 2
