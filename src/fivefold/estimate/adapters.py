"""LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank adapters beside frozen linear layers. QLoRA (Dettmers et al. 2023,
arXiv 2305.14314): these in 4 bits.

An adapter of rank r beside a [k, n] layer has two matrices, [k, r] and [r, n]. Beside a column-parallel layer the first
is whole on every rank and the second split like the layer; beside a row-parallel one the other way around, so that a
rank always holds r (k + n) elements of its own k and n. Frozen layers compute no weight gradient; gradients of inputs
go on through them. What layers save for backward is left as if all were trained: with every layer adapted it is the
same, since each adapter needs its layer's input; with few it is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fivefold.estimate.ledger import Gemm, Ledger, Saved, Stream, Weight
from fivefold.estimate.shard import Shard
from fivefold.layout.mixers import softmax_attention
from fivefold.layout.workload import Lora, Workload
from fivefold.model.spec import Attention, Block, Experts, FeedForward, ModelSpec
from fivefold.runtime import Profile

# Bytes of one weight in 4 bits with a scale per 64, itself in 8 bits with an fp32 scale per 256 (QLoRA, section 3).
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)

Widths = Callable[[Block, Shard], dict[str, np.ndarray | float]]


def _attention(block: Block, s: Shard) -> dict[str, np.ndarray | float]:
    mixer = softmax_attention(block.mixer)
    if not isinstance(mixer, Attention):
        return {}
    key = np.maximum(mixer.kv_heads / s.tp, 1) * mixer.head_dim
    return {"q": mixer.heads / s.tp * mixer.head_dim * (2 if mixer.gate else 1), "k": key, "v": key}


def _halves(gated: bool, width: np.ndarray | float) -> dict[str, np.ndarray | float]:
    return {"gate": width, "up": width} if gated else {"up": width}


def _dense(block: Block, s: Shard) -> dict[str, np.ndarray | float]:
    feed = block.feed
    return _halves(feed.gated, feed.ffn / s.tp) if isinstance(feed, FeedForward) else {}


def _routed(block: Block, s: Shard) -> dict[str, np.ndarray | float]:
    feed = block.feed
    return _halves(feed.gated, feed.ffn / s.etp) if isinstance(feed, Experts) else {}


def _shared(block: Block, s: Shard) -> dict[str, np.ndarray | float]:
    feed = block.feed
    return _halves(feed.gated, feed.shared_ffn / s.tp) if isinstance(feed, Experts) else {}


# Of each product that several targets share, their widths; a product with one target has its own width.
_SPLIT: dict[str, Widths] = {
    "qkv_proj": _attention,
    "mlp.fc1": _dense,
    "experts.fc1": _routed,
    "shared_experts.fc1": _shared,
}
_PARTS = {"qkv_proj": 3, "mlp.fc1": 2, "experts.fc1": 2, "shared_experts.fc1": 2}  # of gated layers
_WHOLE = {"out_proj": "o", "mlp.fc2": "down", "experts.fc2": "down", "shared_experts.fc2": "down"}


def fuses_adapters(runtime: Profile) -> bool:
    """Whether projections that the runtime computes as one have one adapter, with one first matrix (Megatron-Bridge's
    LoRA on linear_qkv and linear_fc1), when all of them are targets."""
    return runtime.norms_fused_into_linears


def add_adapters(ledger: Ledger, block: Block, shard: Shard, work: Workload, runtime: Profile) -> None:
    """Adds the adapters of one block to its ledger, and what 4-bit weights cost."""
    size = work.compute_bytes
    if work.base_precision == "nf4":
        _add_dequantisation(ledger, size)
    if work.lora is None:
        return
    rank = work.lora.rank
    for row in list(ledger.gemms):
        split = _SPLIT[row.name](block, shard) if row.name in _SPLIT else {}
        if row.name in _WHOLE:
            split = {_WHOLE[row.name]: np.asarray(row.n)}
        split = {target: width for target, width in split.items() if target in work.lora.targets}
        if fuses_adapters(runtime) and len(split) == _PARTS.get(row.name):
            split = {"all": sum(split.values())}
        for target, width in split.items():
            name = f"{row.name}.lora_{target}"
            elements = rank * (np.asarray(row.k) + width) * row.groups
            ledger.adapters.append(Weight(name, elements, expert=row.grouped, matrix=False))
            sizes = {"module": row.module, "m": row.m, "groups": row.groups, "grouped": row.grouped}
            ledger.gemms.append(Gemm(f"{name}.a", n=rank, k=row.k, sixteen_bit=True, adapter=True, **sizes))
            ledger.gemms.append(Gemm(f"{name}.b", n=width, k=rank, sixteen_bit=True, adapter=True, **sizes))
            tokens = np.asarray(row.m) * row.groups
            ledger.saved.append(Saved(f"{name} latent", row.module, size * tokens * rank))
            # The adapter's output is added to the layer's; backward hands the same gradient to both.
            ledger.streams.append(Stream(f"{name} sum", row.module, 3 * size * tokens * width, 0, 0, 0))


def _add_dequantisation(ledger: Ledger, size: int) -> None:
    """Every product with a 4-bit weight first unpacks it, forward and for the gradient of its input."""
    for row in ledger.weights:
        if row.matrix:
            moved = (NF4_BYTES + size) * np.asarray(row.elements)
            ledger.streams.append(Stream(f"{row.name} unpacked", "mixer", moved, moved))


def count_adapters(model: ModelSpec, lora: Lora, runtime: Profile) -> tuple[int, int]:
    """(all, those that one token passes) elements of a whole model's adapters."""
    total = active = 0
    for run in model.runs:
        one, used = _block_adapters(model.hidden, run.block, lora, fuses_adapters(runtime))
        total, active = total + run.count * one, active + run.count * used
    return total, active


def _block_adapters(hidden: int, block: Block, lora: Lora, fused: bool) -> tuple[int, int]:
    mixer, feed = block.mixer, block.feed
    sizes: dict[str, int] = {}
    if isinstance(mixer, Attention):
        out = mixer.heads * mixer.head_dim
        sizes = {"q": out * (2 if mixer.gate else 1), "k": mixer.kv_heads * mixer.head_dim, "o": out}
        sizes["v"] = sizes["k"]
    fixed = sum(hidden + size for name, size in sizes.items() if name in lora.targets)
    if fused and {"q", "k", "v"} <= sizes.keys() & set(lora.targets):
        fixed -= 2 * hidden

    def projections(ffn: int, gated: bool, width: int = hidden) -> int:
        names = ("gate", "up", "down") if gated else ("up", "down")
        shared = width if fused and gated and {"gate", "up"} <= set(lora.targets) else 0
        return sum(width + ffn for name in names if name in lora.targets) - shared if ffn else 0

    if isinstance(feed, FeedForward):
        fixed += projections(feed.ffn, feed.gated)
    if isinstance(feed, Experts):
        fixed += projections(feed.shared_ffn, feed.gated)
        each = projections(feed.ffn, feed.gated, feed.latent or hidden)
        return lora.rank * (fixed + feed.num_experts * each), lora.rank * (fixed + feed.top_k * each)
    return lora.rank * fixed, lora.rank * fixed
