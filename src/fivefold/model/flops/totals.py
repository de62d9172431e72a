"""FLOPs of a block, of the items beside the blocks and of the whole model."""

from __future__ import annotations

from fivefold.model.flops.cores import Convention, attention_flops_per_token
from fivefold.model.flops.matmuls import block_matmuls
from fivefold.model.spec import Block, ModelSpec

TRAINING_TO_FORWARD = 3


def block_flops_per_token(block: Block, hidden: int, seq_len: float, convention: Convention = "noncausal") -> float:
    """Forward FLOPs per token of one block."""
    linears = sum(matmul.flops_per_token for matmul in block_matmuls(block, hidden))
    return linears + attention_flops_per_token(block.mixer, seq_len, convention)


def head_flops_per_token(model: ModelSpec) -> int:
    """Forward FLOPs per token of the output projection, tied or not."""
    return 2 * model.hidden * model.vocab


def mtp_flops_per_token(model: ModelSpec, seq_len: float, convention: Convention = "noncausal") -> float:
    """Forward FLOPs per token of one multi-token-prediction module: projection 2h -> h, block, the head once more."""
    projection = 2 * (2 * model.hidden) * model.hidden
    block = block_flops_per_token(model.mtp_block, model.hidden, seq_len, convention)
    return projection + block + head_flops_per_token(model)


def forward_flops_per_token(model: ModelSpec, seq_len: float, convention: Convention = "noncausal") -> float:
    """Forward FLOPs per token of the whole model at sequences of seq_len tokens."""
    blocks = sum(run.count * block_flops_per_token(run.block, model.hidden, seq_len, convention) for run in model.runs)
    mtp = model.mtp * mtp_flops_per_token(model, seq_len, convention) if model.mtp else 0.0
    return blocks + head_flops_per_token(model) + mtp


def training_flops_per_token(model: ModelSpec, seq_len: float, convention: Convention = "noncausal") -> float:
    """Forward and backward model FLOPs per token; the numerator of MFU."""
    return TRAINING_TO_FORWARD * forward_flops_per_token(model, seq_len, convention)
