"""Workload: how much is trained per step, in which precision, with which optimizer."""

from __future__ import annotations

from typing import Literal

import msgspec

Precision = Literal["bf16", "fp16", "fp8"]
Optimizer = Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit"]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One training step's work.

    seq_len: tokens per sequence. global_batch: sequences per optimizer step.
    moe_imbalance: tokens on the most loaded expert-parallel rank over the mean, 1.0 when balanced.
    tokens: token budget of the whole run, for time and cost. price: cost of one GPU for one hour.
    """

    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    moe_imbalance: float = 1.0
    tokens: float | None = None
    price: float | None = None

    @property
    def tokens_per_batch(self) -> int:
        return self.seq_len * self.global_batch
