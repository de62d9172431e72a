"""Model FLOPs per token, counted from the operations.

A matrix product of (m, k) by (k, n) is 2 m n k FLOPs. Counted: every linear, the router, the attention scores and
their product with the values, linear attention and state spaces by their chunked algorithms (cores.py), the head. Not
counted: the embedding look-up, norms, softmax, rotary embedding, depthwise convolutions, activation functions, biases;
they are bandwidth, not arithmetic.

Two conventions for attention over a sequence of s tokens:
    noncausal  every token is charged s keys, as most published MFU numbers do (Narayanan et al. 2021, nanotron);
    causal     only the half of the score matrix that a causal mask keeps, s / 2 keys (Megatron-Bridge since 25.11).
A window of w < s tokens charges w keys, and causal w - w^2 / (2 s): the area of the band below the diagonal. Attention
within chunks of c charges c, and causal c / 2.
Backward is two products for each of the forward's, so training is three times the forward; recomputation is no
model FLOP and belongs to the layout.
"""

from __future__ import annotations

from fivefold.model.flops.cores import (
    CONVENTIONS,
    DELTA_CHUNK,
    MAMBA_FLOPS_PER_STATE,
    Convention,
    attention_flops_per_token,
    attention_widths,
    keys_per_query,
)
from fivefold.model.flops.matmuls import Matmul, block_matmuls
from fivefold.model.flops.totals import (
    TRAINING_TO_FORWARD,
    block_flops_per_token,
    forward_flops_per_token,
    head_flops_per_token,
    mtp_flops_per_token,
    training_flops_per_token,
)

__all__ = [
    "CONVENTIONS",
    "DELTA_CHUNK",
    "MAMBA_FLOPS_PER_STATE",
    "TRAINING_TO_FORWARD",
    "Convention",
    "Matmul",
    "attention_flops_per_token",
    "attention_widths",
    "block_flops_per_token",
    "block_matmuls",
    "forward_flops_per_token",
    "head_flops_per_token",
    "keys_per_query",
    "mtp_flops_per_token",
    "training_flops_per_token",
]
