"""What is trained: ModelSpec, read from a catalogue name or a Hugging Face config.json, and its exact counts.

load_model gives the ModelSpec; tensors lists every parameter with its shape and split, flops counts the operations
per token, and simple holds the closed formulas of the literature to set beside both.
"""

from __future__ import annotations

from fivefold.model import simple
from fivefold.model.catalogue import load_model, models
from fivefold.model.flops import (
    Matmul,
    attention_flops_per_token,
    attention_widths,
    block_flops_per_token,
    block_matmuls,
    forward_flops_per_token,
    head_flops_per_token,
    keys_per_query,
    mtp_flops_per_token,
    training_flops_per_token,
)
from fivefold.model.huggingface import first_layers, read_config
from fivefold.model.spec import (
    Attention,
    Block,
    BlockRun,
    Experts,
    Feed,
    FeedForward,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Mamba,
    Mamba2,
    Mixer,
    ModelSpec,
    Rotary,
    SideBySide,
)
from fivefold.model.tensors import (
    ParamCounts,
    Tensor,
    block_params,
    block_tensors,
    count_params,
    embedding_tensors,
    head_tensors,
    local_shape,
    model_tensors,
    mtp_tensors,
    norm_names,
    padded_vocab,
    shard_counts,
)

__all__ = [
    "Attention",
    "Block",
    "BlockRun",
    "Experts",
    "Feed",
    "FeedForward",
    "GatedDeltaNet",
    "Indexer",
    "LatentAttention",
    "Mamba",
    "Mamba2",
    "Matmul",
    "Mixer",
    "ModelSpec",
    "ParamCounts",
    "Rotary",
    "SideBySide",
    "Tensor",
    "attention_flops_per_token",
    "attention_widths",
    "block_flops_per_token",
    "block_matmuls",
    "block_params",
    "block_tensors",
    "count_params",
    "embedding_tensors",
    "first_layers",
    "forward_flops_per_token",
    "head_flops_per_token",
    "head_tensors",
    "keys_per_query",
    "load_model",
    "local_shape",
    "model_tensors",
    "models",
    "mtp_flops_per_token",
    "mtp_tensors",
    "norm_names",
    "padded_vocab",
    "read_config",
    "shard_counts",
    "simple",
    "training_flops_per_token",
]
