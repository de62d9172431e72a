"""Every parameter tensor of a model by name: its full shape, and how it is split over the ranks.

The names are those of transformers' Llama-like modules, with fused projections kept apart (q_proj, k_proj, v_proj,
gate_proj, up_proj) and the routed experts of a block stacked in one tensor. Linear weights have shape (out, in).

The splits are Megatron's (Shoeybi et al. 2019, arXiv 1909.08053; for latent attention and experts Megatron-Core,
from memory): norms, the router and the down-projections of latent attention are kept whole on every rank of tp.
Mixers that Megatron does not have say in mixers.py whose way is taken.
"""

from __future__ import annotations

from fivefold.model.tensors.blocks import (
    block_tensors,
    embedding_tensors,
    head_tensors,
    model_tensors,
    mtp_tensors,
    norm_names,
)
from fivefold.model.tensors.counts import ParamCounts, block_params, count_params, shard_counts
from fivefold.model.tensors.tensor import Grid, Split, Tensor, local_shape, padded_vocab

__all__ = [
    "Grid",
    "ParamCounts",
    "Split",
    "Tensor",
    "block_params",
    "block_tensors",
    "count_params",
    "embedding_tensors",
    "head_tensors",
    "local_shape",
    "model_tensors",
    "mtp_tensors",
    "norm_names",
    "padded_vocab",
    "shard_counts",
]
