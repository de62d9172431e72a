"""Small and real models, and a builder of contexts, shared by the tests of this room; makes the cases beside the tests
importable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.layout import Context, Layout, Workload
from fivefold.model.spec import (
    Attention,
    Block,
    BlockRun,
    Experts,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    ModelSpec,
)

sys.path.insert(0, str(Path(__file__).parent))


def _model(name: str, layers: int, block: Block, hidden: int, **more: Any) -> ModelSpec:
    more = {"vocab": 32000, "max_position": 8192, **more}
    return ModelSpec(name=name, family="test", hidden=hidden, runs=(BlockRun(layers, block),), **more)


LLAMA_70B = Block(mixer=Attention(heads=64, kv_heads=8, head_dim=128), feed=FeedForward(ffn=28672))
LATENT = LatentAttention(
    heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)

MODELS: dict[str, ModelSpec] = {
    # meta-llama/Meta-Llama-3-70B config.json
    "llama-3-70b": _model("llama-3-70b", 80, LLAMA_70B, 8192, vocab=128256),
    # mistralai/Mixtral-8x7B config.json
    "mixtral": _model(
        "mixtral",
        32,
        Block(mixer=Attention(heads=32, kv_heads=8, head_dim=128), feed=Experts(num_experts=8, top_k=2, ffn=14336)),
        4096,
    ),
    # deepseek-ai/DeepSeek-V3 config.json, with one multi-token-prediction module
    "deepseek-v3": ModelSpec(
        name="deepseek-v3",
        family="test",
        hidden=7168,
        vocab=129280,
        max_position=163840,
        runs=(
            BlockRun(3, Block(mixer=LATENT, feed=FeedForward(ffn=18432))),
            BlockRun(58, Block(mixer=LATENT, feed=Experts(num_experts=256, top_k=8, ffn=2048, shared_ffn=2048))),
        ),
        mtp=1,
    ),
    # openai-community/gpt2 config.json: tied, learned positions, 12 heads, odd vocabulary
    "gpt2": _model(
        "gpt2",
        12,
        Block(mixer=Attention(heads=12, kv_heads=12, head_dim=64), feed=FeedForward(ffn=3072, gated=False)),
        768,
        vocab=50257,
        max_position=1024,
        learned_positions=1024,
        tied_embeddings=True,
    ),
    "windowed": _model(
        "windowed",
        8,
        Block(mixer=Attention(heads=16, kv_heads=16, head_dim=64, window=1024), feed=FeedForward(ffn=4096)),
        1024,
    ),
    "plain": _model(
        "plain", 8, Block(mixer=Attention(heads=16, kv_heads=16, head_dim=64), feed=FeedForward(ffn=4096)), 1024
    ),
    "seven-blocks": _model(
        "seven-blocks", 7, Block(mixer=Attention(heads=16, kv_heads=16, head_dim=64), feed=FeedForward(ffn=4096)), 1024
    ),
    # widths that no usual degree divides in one place only
    "odd-ffn": _model(
        "odd-ffn", 8, Block(mixer=Attention(heads=16, kv_heads=16, head_dim=64), feed=FeedForward(ffn=4098)), 1024
    ),
    "six-kv": _model(
        "six-kv", 8, Block(mixer=Attention(heads=24, kv_heads=6, head_dim=64), feed=FeedForward(ffn=4096)), 1536
    ),
    "latent": _model("latent", 8, Block(mixer=LATENT, feed=FeedForward(ffn=4096)), 1024),
    "one-mtp": _model(
        "one-mtp",
        8,
        Block(mixer=Attention(heads=16, kv_heads=16, head_dim=64), feed=FeedForward(ffn=4096)),
        1024,
        mtp=1,
    ),
    "two-heads": ModelSpec(
        name="two-heads",
        family="test",
        hidden=1024,
        vocab=32000,
        max_position=8192,
        runs=tuple(
            BlockRun(4, Block(mixer=Attention(heads=16, kv_heads=16, head_dim=width), feed=FeedForward(ffn=4096)))
            for width in (64, 128)
        ),
    ),
    "sinks": _model(
        "sinks",
        8,
        Block(mixer=Attention(heads=16, kv_heads=16, head_dim=64, sinks=True), feed=FeedForward(ffn=4096)),
        1024,
    ),
    "delta-net": _model(
        "delta-net",
        8,
        Block(
            mixer=GatedDeltaNet(key_heads=16, value_heads=32, key_dim=64, value_dim=64, conv=4),
            feed=FeedForward(ffn=4096),
        ),
        1024,
    ),
    # blocks without attention and without a feed-forward
    "mamba2": _model(
        "mamba2", 8, Block(mixer=Mamba2(heads=16, head_dim=64, groups=4, state=64, conv=4), feed=None), 1024
    ),
    "odd-hidden": _model(
        "odd-hidden", 8, Block(mixer=Attention(heads=16, kv_heads=16, head_dim=64), feed=FeedForward(ffn=4096)), 1030
    ),
}

_WORK = (
    "seq_len",
    "global_batch",
    "precision",
    "optimizer",
    "grad_dtype",
    "moe_imbalance",
    "tokens",
    "offload",
    "document_length",
    "cuda_graphs",
    "dropout",
    "moe_dispatcher",
    "lora",
    "base_precision",
    "trained",
)
_PLACE = ("model", "world", "node", "domain", "runtime", "version")


def build(**given: Any) -> tuple[Layout, Context]:
    """A layout and a context from one flat set of names: Layout's, Workload's, and those of the context."""
    work: dict[str, Any] = {"seq_len": 8192, "global_batch": 512}
    work |= {key: given.pop(key) for key in _WORK if key in given}
    place = {key: given.pop(key) for key in _PLACE if key in given}
    runtime = place.get("runtime", "megatron")
    if not runtime.startswith("megatron"):
        given.setdefault("zero", 3)
    model = place.get("model", "llama-3-70b")
    context = Context(
        model=MODELS[model] if isinstance(model, str) else model,
        cluster_gpus=place.get("world", 64),
        gpus_per_node=place.get("node", 8),
        scale_up_size=place.get("domain", 8),
        work=Workload(**work),
        runtime=runtime,
        version=place.get("version"),
    )
    return Layout(**given), context


@pytest.fixture(scope="session")
def models() -> dict[str, ModelSpec]:
    return MODELS


@pytest.fixture(scope="session")
def make():
    return build
