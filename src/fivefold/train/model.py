"""A decoder-only Transformer as the papers write it: nothing here knows about ranks.

Pre-norm blocks of grouped-query attention and a feed-forward network: the shapes of Llama, Mistral, Qwen2, Qwen3 and
GPT-2, all read off a ModelSpec. Parameters have the names of fivefold.model.model_tensors. Parallelism is applied
from outside (fivefold.train.parallel) by replacing modules and the attention core, so a forward here reads head
counts off its tensors and never off the specification.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from fivefold.errors import FivefoldError
from fivefold.model import Attention as AttentionSpec
from fivefold.model import Block as BlockSpec
from fivefold.model import FeedForward as FeedForwardSpec
from fivefold.model import ModelSpec, Rotary, model_tensors
from fivefold.model import Tensor as TensorSpec
from fivefold.model.spec import Norm
from fivefold.train.ops import ACTIVATIONS, RMSNorm, rotate

ROTARY_SCALINGS = ("default", "llama3")


class Rotation(NamedTuple):
    """Cosines and sines of the rotary embedding, [batch or 1, seq, 1, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor


class Core(Protocol):
    """Softmax attention: q [batch, seq, heads, head_dim], k and v [batch, seq, kv_heads, head_dim] -> like q."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor: ...


def attention_core(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Full attention by PyTorch's SDPA, which takes FlashAttention where the device has it (shapes: see Core)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


class WindowedCore:
    """Causal attention to the last `window` tokens, the query's own among them (Mistral; transformers' convention)."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        if not causal or k.shape[1] <= self.window:
            return attention_core(q, k, v, causal)
        place = torch.arange(k.shape[1], device=q.device)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < self.window)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


def rotation(positions: Tensor, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> Rotation:
    """The rotary table for `positions` ([seq] or [batch, seq]); angles in at least fp32, then cast to `dtype`."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=exact) / head_dim
    angles = positions.reshape(-1, positions.shape[-1], 1, 1).to(exact) * _stretched(rotary.theta**-steps, rotary)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def _stretched(frequencies: Tensor, rotary: Rotary) -> Tensor:
    """Llama 3.1's frequencies: those with few turns in the original length slow down by `factor`, those with many stay,
    and between the two the share of each falls linearly with the number of turns (transformers 5.24, rope_type llama3;
    Grattafiori et al. 2024, arXiv 2407.21783, has the idea)."""
    if rotary.scaling != "llama3":
        return frequencies
    factor, low, high, original = (
        float(number or 0)
        for number in (rotary.factor, rotary.low_freq_factor, rotary.high_freq_factor, rotary.original_positions)
    )
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class Attention(nn.Module):
    """Grouped-query attention. `core` is the part between the projections, which context parallelism replaces."""

    def __init__(self, spec: AttentionSpec, hidden: int, eps: float) -> None:
        super().__init__()
        self.spec = spec
        self.head_dim = spec.head_dim
        self.core: Core = WindowedCore(spec.window) if spec.window else attention_core
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, eps) if spec.qk_norm else None
        self.o_proj = nn.Linear(width, hidden, bias=spec.out_bias)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values: one step, so that an axis can do all that they share at once."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: Tensor, turn: Rotation | None) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.project(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        return self.o_proj(self.core(q, k, v).flatten(-2))


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)) when gated (SwiGLU, Shazeer 2020, arXiv 2002.05202), else down(act(up(x)))."""

    def __init__(self, spec: FeedForwardSpec, hidden: int) -> None:
        super().__init__()
        self.act = ACTIVATIONS[spec.activation]
        self.gate_proj = nn.Linear(hidden, spec.ffn, bias=spec.bias) if spec.gated else None
        self.up_proj = nn.Linear(hidden, spec.ffn, bias=spec.bias)
        self.down_proj = nn.Linear(spec.ffn, hidden, bias=spec.bias)

    def expand(self, x: Tensor) -> tuple[Tensor, ...]:
        """The input projections, the activated one first: one step, so that an axis can do what they share at once."""
        return (self.up_proj(x),) if self.gate_proj is None else (self.gate_proj(x), self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(*self.expand(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); x is [batch, seq, hidden]."""

    def __init__(self, spec: BlockSpec, hidden: int, eps: float) -> None:
        super().__init__()
        if not isinstance(spec.mixer, AttentionSpec) or not isinstance(spec.feed, FeedForwardSpec):
            raise FivefoldError(
                "The trainer runs dense blocks of grouped-query attention; this model has a block of "
                f"{type(spec.mixer).__name__} and {type(spec.feed).__name__}. Choose a dense model, or only plan it.",
                code="model-not-trainable",
                option="MODEL",
                value=f"{type(spec.mixer).__name__} + {type(spec.feed).__name__}",
                legal=["Attention + FeedForward"],
            )
        self.input_layernorm = norm(spec.norm, hidden, spec.norm_bias, eps)
        self.self_attn = Attention(spec.mixer, hidden, eps)
        self.post_attention_layernorm = norm(spec.norm, hidden, spec.norm_bias, eps)
        self.mlp = FeedForward(spec.feed, hidden)

    def forward(self, x: Tensor, turn: Rotation | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The blocks `layers` of a model, and the embedding and the head where this stage holds them.

    layers: range of block indices, None for all. dtype: of parameters and activations. device: "meta" gives shapes
    without values; elsewhere the values are not initialised either (fivefold.train.init.initialise does that).
    A tied head on the embedding's stage is the same Parameter; alone, it is a Parameter "lm_head.weight" of its own.
    Raises FivefoldError for what the trainer does not run: experts, latent attention, multi-token prediction.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: range | None = None,
        embedding: bool = True,
        head: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _refuse(spec)
        self.spec = spec
        self.embed_tokens: nn.Embedding | None = None
        self.embed_positions: nn.Embedding | None = None
        self.norm: nn.Module | None = None
        self.lm_head: nn.Linear | None = None
        with torch.device("meta"):
            if embedding:
                self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden)
            if embedding and spec.learned_positions:
                self.embed_positions = nn.Embedding(spec.learned_positions, spec.hidden)
            here = range(spec.layers) if layers is None else layers
            blocks = list(_blocks(spec))
            self.layers = nn.ModuleDict({str(i): Block(blocks[i], spec.hidden, spec.norm_eps) for i in here})
            if head:
                self.norm = norm(spec.final_norm, spec.hidden, spec.final_norm_bias, spec.norm_eps)
                self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if dtype is not None:
            self.to(dtype)
        self.to_empty(device=device or "cpu")
        if spec.tied_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens [batch, seq] (hidden states [batch, seq, hidden] on a later stage) to logits [batch, seq, vocab]
        (hidden states on an earlier stage). positions: [seq] or [batch, seq], by default 0, 1, ... over x's sequence.
        """
        positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        turn = self.rotation(positions, x.dtype)
        for block in self.layers.values():
            x = block(x, turn)
        return x if self.lm_head is None or self.norm is None else self.lm_head(self.norm(x))

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        """The table that all blocks share, None where positions are learned."""
        mixer = self.spec.kinds[0].mixer
        if not isinstance(mixer, AttentionSpec) or not mixer.rope:
            return None
        return rotation(positions, mixer.head_dim, self.spec.rotary, dtype)


def norm(kind: Norm, hidden: int, bias: bool, eps: float) -> nn.Module:
    if kind == "rmsnorm":
        return RMSNorm(hidden, eps)
    return nn.LayerNorm(hidden, eps, bias=bias)


def tensor_table(spec: ModelSpec) -> dict[str, TensorSpec]:
    """The full tensor behind every parameter name of a Decoder, on whichever stage.

    A tied head that is alone on its stage is called lm_head.weight there, and is the embedding's tensor.
    """
    table = {tensor.name: tensor for tensor in model_tensors(spec)}
    if spec.tied_embeddings:
        table["lm_head.weight"] = table["embed_tokens.weight"]
    return table


def _blocks(spec: ModelSpec) -> Iterator[BlockSpec]:
    for run in spec.runs:
        for _ in range(run.count):
            yield run.block


def _refuse(spec: ModelSpec) -> None:
    if spec.mtp:
        raise FivefoldError(
            f"{spec.name} has {spec.mtp} multi-token-prediction modules, which the trainer does not run: set mtp to 0.",
            code="model-not-trainable",
            option="--mtp",
            value=spec.mtp,
            legal=[0],
        )
    shapes = {
        (block.mixer.head_dim, block.mixer.rope) for block in spec.kinds if isinstance(block.mixer, AttentionSpec)
    }
    if len(shapes) > 1:
        raise FivefoldError(
            f"{spec.name} has blocks of different head sizes or position embeddings; the trainer shares one rotary "
            "table between all blocks. Only models with one kind of head run.",
            code="model-not-trainable",
            option="MODEL",
            value=sorted(shapes),
        )
    if (spec.rotary.scaling not in ROTARY_SCALINGS or spec.rotary.share != 1) and any(rope for _, rope in shapes):
        raise FivefoldError(
            f"{spec.name} turns {spec.rotary.share:g} of each head with rotary scaling {spec.rotary.scaling}; the "
            f"trainer turns whole heads, with scaling {' or '.join(ROTARY_SCALINGS)}.",
            code="model-not-trainable",
            option="MODEL",
            value=spec.rotary.scaling,
            legal=list(ROTARY_SCALINGS),
        )
