"""A tiny model of every kind, its training in one process, and the same under a layout on forked ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

from ranks import run_ranks

from fivefold.layout import Layout, ResolvedLayout, Workload, resolve
from fivefold.model import Attention, Block, BlockRun, FeedForward, ModelSpec
from fivefold.train.data import Synthetic
from fivefold.train.mesh import Mesh
from fivefold.train.verify import Proof, RankReport, Reference, Verdict, compare, observe, run_reference

SEQ, BATCH, VOCAB = 16, 8, 67  # the vocabulary divides over no number of ranks
LLAMA = Block(mixer=Attention(heads=4, kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True), feed=FeedForward(ffn=40))
GPT2 = Block(
    mixer=Attention(heads=4, kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True, rope=False),
    feed=FeedForward(ffn=40, gated=False, bias=True, activation="gelu_tanh"),
    norm="layernorm",
    norm_bias=True,
)


def llama(layers: int = 4, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        name="tiny-llama", family="llama", hidden=32, vocab=VOCAB, max_position=SEQ, runs=(BlockRun(layers, LLAMA),),
        tied_embeddings=tied,
    )  # fmt: skip


def gpt2(layers: int = 4) -> ModelSpec:
    return ModelSpec(
        name="tiny-gpt2", family="gpt2", hidden=32, vocab=VOCAB, max_position=SEQ, learned_positions=SEQ,
        runs=(BlockRun(layers, GPT2),), tied_embeddings=True, final_norm="layernorm", final_norm_bias=True,
    )  # fmt: skip


def layout_of(spec: ModelSpec, ranks: int, **degrees: Any) -> ResolvedLayout:
    return resolve(Layout(**degrees), spec, ranks, Workload(seq_len=SEQ, global_batch=BATCH))


def proof_of(spec: ModelSpec, precision: str = "fp64") -> Proof:
    return Proof(spec=spec, data=Synthetic(VOCAB, SEQ, uneven=True), global_batch=BATCH, precision=precision)


@cache
def reference_of(spec: ModelSpec, precision: str = "fp64") -> Reference:
    return run_reference(proof_of(spec, precision))


def reports_of(spec: ModelSpec, layout: ResolvedLayout, ranks: int, precision: str = "fp64") -> list[RankReport]:
    proof = proof_of(spec, precision)
    return run_ranks(ranks, lambda rank: observe(proof, layout, Mesh(layout)))


def verdict_of(
    spec: ModelSpec, ranks: int, precision: str = "fp64", tolerance: float = 1e-12, **degrees: Any
) -> Verdict:
    layout = layout_of(spec, ranks, **degrees)
    return compare(spec, layout, reference_of(spec, precision), reports_of(spec, layout, ranks, precision), tolerance)
