"""Small models of four families, and one-line estimates, shared by the tests of this room, which may also import what
lies beside them (numbers_of.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.estimate import Estimate, Kernel, Problem, estimate
from fivefold.layout import Columns, Layout, Workload
from fivefold.model.spec import Attention, Block, BlockRun, Experts, FeedForward, LatentAttention, ModelSpec
from fivefold.runtime import load_runtime

sys.path.insert(0, str(Path(__file__).parent))

_GROUPED = Attention(heads=16, kv_heads=8, head_dim=64)
_LATENT = LatentAttention(
    heads=16, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
)

# A vocabulary of 4096 = 32 x 128 rows needs no padding up to tp 32, so parameters stay comparable over tp.
SMALL: dict[str, ModelSpec] = {
    "llama": ModelSpec(
        name="small-llama",
        family="llama",
        hidden=1024,
        vocab=4096,
        max_position=4096,
        runs=(BlockRun(16, Block(mixer=_GROUPED, feed=FeedForward(ffn=4096))),),
    ),
    "mixtral": ModelSpec(
        name="small-mixtral",
        family="mixtral",
        hidden=1024,
        vocab=4096,
        max_position=4096,
        runs=(BlockRun(16, Block(mixer=_GROUPED, feed=Experts(num_experts=8, top_k=2, ffn=2048))),),
    ),
    "deepseek": ModelSpec(
        name="small-deepseek",
        family="deepseek_v3",
        hidden=1024,
        vocab=4096,
        max_position=4096,
        runs=(
            BlockRun(2, Block(mixer=_LATENT, feed=FeedForward(ffn=8192))),
            BlockRun(14, Block(mixer=_LATENT, feed=Experts(num_experts=16, top_k=4, ffn=512, shared_ffn=1024))),
        ),
    ),
    "gpt2": ModelSpec(
        name="small-gpt2",
        family="gpt2",
        hidden=1024,
        vocab=4096,
        max_position=4096,
        runs=(
            BlockRun(
                16,
                Block(
                    mixer=Attention(heads=16, kv_heads=16, head_dim=64, qkv_bias=True, out_bias=True, rope=False),
                    feed=FeedForward(ffn=4096, gated=False, bias=True, activation="gelu"),
                    norm="layernorm",
                    norm_bias=True,
                ),
            ),
        ),
        tied_embeddings=True,
        learned_positions=4096,
        final_norm="layernorm",
        final_norm_bias=True,
    ),
}


def _price(model: Any, layout: Layout, *, gpus: int = 16, runtime: str = "megatron", **work: Any) -> Estimate:
    """An estimate of a layout that has to be valid; `work` overrides 2048 tokens x 64 sequences, gpu the H100."""
    gpu = work.pop("gpu", "h100-sxm")
    spec = SMALL[model] if isinstance(model, str) else model
    load = Workload(**({"seq_len": 2048, "global_batch": 64} | work))
    est = estimate(spec, load_cluster(gpu, gpus=gpus), load, layout, runtime=runtime)
    assert est.valid, [rule.message for rule in est.violations]
    return est


def _kernel(model: Any, layouts: list[Layout], *, gpus: int = 16, runtime: str = "megatron", **work: Any) -> Kernel:
    """The batched kernel over layouts that nobody checks."""
    every_rank = work.pop("every_rank", False)
    spec = SMALL[model] if isinstance(model, str) else model
    load = Workload(**({"seq_len": 2048, "global_batch": 64} | work))
    problem = Problem(spec, load_cluster("h100-sxm", gpus=gpus), load, load_runtime(runtime))
    return Kernel(problem, Columns.from_layouts(layouts, gpus, load), every_rank=every_rank)


def _with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """The model with its last run cut or stretched so that it has `layers` blocks."""
    *head, tail = model.runs
    count = layers - sum(run.count for run in head)
    return replace(model, runs=(*head, BlockRun(count, tail.block)))


@pytest.fixture(scope="session")
def small() -> dict[str, ModelSpec]:
    return SMALL


@pytest.fixture(scope="session")
def price():
    return _price


@pytest.fixture(scope="session")
def kernel_of():
    return _kernel


@pytest.fixture(scope="session")
def with_layers():
    return _with_layers
