"""Random legal plans of the megatron runtime: models of every kind, and layouts drawn blindly and kept where legal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from fivefold.cluster import Cluster, load_cluster
from fivefold.layout import Columns, Context, Layout, Workload, valid_mask
from fivefold.layout.layout import RECOMPUTE_KINDS, RECOMPUTE_MODULES, SCHEDULES
from fivefold.model.spec import (
    Attention,
    Block,
    BlockRun,
    Experts,
    Feed,
    FeedForward,
    LatentAttention,
    ModelSpec,
    Rotary,
)

_DRAWN = 2000


@dataclass(frozen=True)
class Plan:
    """One legal plan."""

    model: ModelSpec
    cluster: Cluster
    work: Workload
    layout: Layout


def context(model: ModelSpec, cluster: Cluster, work: Workload) -> Context:
    return Context(
        model=model,
        cluster_gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node,
        scale_up_size=cluster.spans[0],
        work=work,
        runtime="megatron",
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Models that Megatron-LM's command line can express."""
    layers = draw(st.sampled_from((4, 6, 8, 12, 14, 16, 24, 30, 32, 60, 62, 80)))
    heads = draw(st.sampled_from((8, 16, 24, 32, 64)))
    hidden = heads * draw(st.sampled_from((64, 96, 128)))
    latent = draw(st.booleans())
    bias = draw(st.sampled_from(("none", "qkv", "all")))
    experts = draw(st.booleans())
    learned = not latent and draw(st.integers(0, 5)) == 0
    mixer: Attention | LatentAttention
    if latent:
        bias = "none" if bias == "qkv" else bias
        mixer = LatentAttention(
            heads=heads,
            q_lora_rank=draw(st.sampled_from((None, 768, 1536))),
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=draw(st.sampled_from((64, 128))),
            bias=bias == "all",
        )
    else:
        mixer = Attention(
            heads=heads,
            kv_heads=draw(st.sampled_from([kv for kv in (1, 2, 4, 8, heads) if heads % kv == 0])),
            head_dim=draw(st.sampled_from((64, 128))),
            qkv_bias=bias != "none",
            out_bias=bias == "all",
            qk_norm=draw(st.booleans()),
            rope=not learned,
            window=draw(st.sampled_from((None, None, None, 1024))),
        )
    gated = draw(st.booleans())
    activation = "silu" if gated else draw(st.sampled_from(("gelu", "gelu_tanh", "relu2")))
    dense = FeedForward(ffn=hidden * 4, gated=gated, bias=bias == "all", activation=activation)
    rms = draw(st.booleans())

    def block(feed: Feed) -> Block:
        return Block(mixer=mixer, feed=feed, norm="rmsnorm" if rms else "layernorm", norm_bias=not rms)

    runs = (BlockRun(layers, block(dense)),)
    if experts:
        sparse = Experts(
            num_experts=draw(st.sampled_from((8, 16, 64, 160))),
            top_k=draw(st.sampled_from((1, 2, 6))),
            ffn=draw(st.sampled_from((1024, 1536))),
            shared_ffn=0 if bias == "all" else draw(st.sampled_from((0, 2048))),
            gated=gated,
            activation=activation,
            bias=bias == "all",
        )
        first = draw(st.sampled_from((0, 1, 3)))
        runs = (*((BlockRun(first, block(dense)),) if first else ()), BlockRun(layers - first, block(sparse)))
    return ModelSpec(
        name=draw(st.text(min_size=1, max_size=12)),
        family="random",
        hidden=hidden,
        vocab=draw(st.sampled_from((50257, 32000, 128256))),
        max_position=8192,
        runs=runs,
        tied_embeddings=draw(st.booleans()),
        learned_positions=8192 if learned else 0,
        rotary=Rotary(theta=draw(st.sampled_from((10_000.0, 500_000.0)))),
        final_norm="rmsnorm" if rms else "layernorm",
        final_norm_bias=not rms,
        mtp=0 if learned else draw(st.sampled_from((0, 0, 1))),
    )


@st.composite
def plans(draw: st.DrawFn, most: int = 5, illegal: int = 0) -> list[Plan]:
    """Up to `most` legal plans of one problem, perhaps none, and some that break a rule."""
    model = draw(models())
    gpus = draw(st.sampled_from((1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 512)))
    cluster = load_cluster(draw(st.sampled_from(("h100-sxm", "a100-80g-sxm", "b200-sxm"))), gpus=gpus)
    work = Workload(
        seq_len=draw(st.sampled_from((2048, 4096, 8192))),
        global_batch=draw(st.sampled_from((64, 96, 256, 1536))),
        precision=draw(st.sampled_from(("bf16", "bf16", "fp16", "fp8"))),
        optimizer=draw(st.sampled_from(("adamw", "adamw", "sgd", "muon"))),
        grad_dtype=draw(st.sampled_from(("fp32", "bf16"))),
        attention=draw(st.sampled_from(("flash", "flash", "unfused"))),
        dropout=draw(st.booleans()),
    )
    columns = _columns(np.random.default_rng(draw(st.integers(0, 1 << 32))), model, gpus, work)
    mask = valid_mask(columns, context(model, cluster, work))
    rows = [*np.flatnonzero(mask)[:most], *np.flatnonzero(~mask)[:illegal]]
    return [Plan(model, cluster, work, columns.row(int(row))) for row in rows]


def _columns(random: np.random.Generator, model: ModelSpec, gpus: int, work: Workload) -> Columns:
    divisors = [d for d in range(1, gpus + 1) if gpus % d == 0]

    def pick(values: list[int]) -> np.ndarray:
        return random.choice(values, _DRAWN)

    vpp, pp = pick([1, 1, 1, 2, 3, 4, 5]), pick(divisors)
    kind = pick([0, 0, RECOMPUTE_KINDS.index("selective"), RECOMPUTE_KINDS.index("full")])
    selective, full = kind == RECOMPUTE_KINDS.index("selective"), kind == RECOMPUTE_KINDS.index("full")
    uneven = (random.random(_DRAWN) < 0.4) & (pp > 1)
    first, middle = pick([*range(1, model.layers)]), pick([*range(1, max(model.layers // 2, 2))])
    last = model.layers - first - middle * (pp - 2)
    overlap_grad = random.random(_DRAWN) < 0.7
    zero = pick([0, 1])
    account = random.random((2, _DRAWN)) < 0.15
    return Columns.build(
        gpus,
        work,
        tp=pick([d for d in divisors if d <= 8]),
        cp=pick([d for d in divisors if d <= 4]),
        cp_kind=pick([0, 0, 1]),
        pp=pp,
        vpp=np.where(pp > 1, vpp, 1),
        ep=pick(divisors if model.is_moe else [1]),
        etp=pick([1, 2, 4] if model.is_moe else [1]),
        dp_replicate=pick([1, 1, 1, 2]),
        zero=zero,
        sp=random.random(_DRAWN) < 0.6,
        micro_batch=pick([1, 1, 2, 4]),
        schedule=np.where(vpp > 1, SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")),
        recompute_kind=kind,
        recompute_layers=np.where(full & (random.random(_DRAWN) < 0.5), pick([1, 2, 3, 4, 6, 8]), -1),
        recompute_modules=np.where(selective, random.integers(0, 1 << len(RECOMPUTE_MODULES), _DRAWN), 0),
        first_stage_layers=np.where(uneven & (pick([0, 1, 1]) > 0), first, 0),
        last_stage_layers=np.where(uneven & (pick([0, 1, 1]) > 0), last, 0),
        account_for_embedding=account[0] & ~uneven,
        account_for_loss=account[1] & ~uneven,
        overlap_grad=overlap_grad,
        overlap_param=overlap_grad & (zero > 0) & (random.random(_DRAWN) < 0.7),
        overlap_tp=random.random(_DRAWN) < 0.2,
        overlap_ep=random.random(_DRAWN) < 0.2,
    )
