"""The time of linear attention and of state spaces, against published times of their forward kernels and by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fivefold.cluster import load_cluster, load_curve_of, load_gpu
from fivefold.cluster.compute import streaming_seconds
from fivefold.cluster.curve import load_curve, override_curve
from fivefold.estimate.items import ItemWriter
from fivefold.estimate.scans import scan_seconds
from fivefold.estimate.shard import distinct_shards
from fivefold.layout import Layout, Recompute, Workload
from fivefold.layout.columns import Columns
from fivefold.model import count_params
from fivefold.model.spec import (
    Attention,
    Block,
    BlockRun,
    Experts,
    FeedForward,
    GatedDeltaNet,
    Mamba,
    Mamba2,
    Mixer,
    ModelSpec,
)
from fivefold.runtime import load_runtime


def passes(
    mixer: Mixer,
    gpu: str = "h100-sxm",
    seq: int = 8192,
    layout: Layout | None = None,
    changes: dict[str, Any] | None = None,
) -> tuple[float, float]:
    """Milliseconds of the forward and the backward scan of one sequence; changes: of the GPU's curve."""
    cluster = load_cluster(gpu, gpus=8)
    model = ModelSpec(
        name="one",
        family="one",
        hidden=4096,
        vocab=1000,
        max_position=seq,
        runs=(BlockRun(1, Block(mixer=mixer, feed=None)),),
    )
    work = Workload(seq_len=seq, global_batch=8)
    shard, _ = distinct_shards(Columns.from_layouts([layout or Layout()], 8, work), seq)
    ledger = ItemWriter(model, work, load_runtime("megatron"), shard).block(model.kinds[0])
    (row,) = ledger.scans
    ahead, back = scan_seconds(override_curve(gpu, changes or {}), cluster.gpu, ledger, row, "bf16")
    return float(ahead[0]) * 1e3, float(back[0]) * 1e3


def delta_net(heads: int) -> GatedDeltaNet:
    return GatedDeltaNet(key_heads=heads, value_heads=heads, key_dim=128, value_dim=128, conv=4)


def norms_ms(heads: int, gpu: str, seq: int) -> float:
    """What the norms of queries and keys add, 16 bit read and written by a kernel each."""
    moved = 2 * 2 * 2 * heads * 128 * seq
    return float(streaming_seconds(load_curve(gpu), load_gpu(gpu), moved, 2)) * 1e3


GRANITE = Mamba2(heads=128, head_dim=64, groups=1, state=128, conv=4, chunk=256)


@pytest.mark.parametrize(
    ("mixer", "gpu", "seq", "measured_ms"),
    [
        # MoonshotAI/FlashKDA, BENCHMARK_H20.md of April 2026: flash-linear-attention's chunk_gated_delta_rule, batch 1,
        # norms of queries and keys included (use_qk_l2norm_in_kernel, benchmarks/generate_benchmark_hopper_h20_md.py).
        (delta_net(96), "h20-sxm", 8192, 3.1985),
        (delta_net(64), "h20-sxm", 8192, 2.0062),
        # vLLM pull request 27299, October 2025: mamba_ssm's kernels ("original"), tokens per second on one H100.
        (GRANITE, "h100-sxm", 8192, 8192 / 1.262327e7 * 1e3),
        (GRANITE, "h100-sxm", 32768, 32768 / 1.180002e7 * 1e3),
    ],
)
def test_forward_scans_take_what_was_published(mixer: Mixer, gpu: str, seq: int, measured_ms: float) -> None:
    norms = norms_ms(mixer.key_heads, gpu, seq) if isinstance(mixer, GatedDeltaNet) else 0.0
    assert passes(mixer, gpu, seq)[0] + norms == pytest.approx(measured_ms, rel=0.15)


def test_products_of_scans_are_triton_kernels() -> None:
    """FlashAttention 2's rate, whichever kernel attends: the same with cuDNN's rates doubled."""
    faster = {"attention": {"cudnn": {"forward": [1.0, 1.0, 1.0], "backward": [1.0, 1.0, 1.0]}}}
    assert passes(GRANITE) == passes(GRANITE, changes=faster)
    slower = {"attention": {"fa2": {"forward": [0.1, 0.1, 0.1]}}}
    assert passes(GRANITE)[0] < passes(GRANITE, changes=slower)[0]


@pytest.mark.parametrize("mixer", [delta_net(32), GRANITE, Mamba(inner=8192, state=16, conv=4, dt_rank=256)], ids=str)
def test_scans_grow_with_tokens_and_shrink_with_ranks(mixer: Mixer) -> None:
    """Linear in the sequence, unlike attention, but for a launch of each kernel; a rank has its share of the heads."""
    ahead, back = passes(mixer)
    longer, longer_back = passes(mixer, seq=4 * 8192)
    assert longer == pytest.approx(4 * ahead, rel=0.1)
    assert longer_back == pytest.approx(4 * back, rel=0.1)
    assert back > 1.5 * ahead
    if isinstance(mixer, GatedDeltaNet):
        assert passes(mixer, layout=Layout(tp=2))[0] == pytest.approx(ahead / 2, rel=0.1)


def test_a_hybrid_pays_for_its_scans(price) -> None:
    """One block in four with attention, as in qwen3-next: the step of each mix lies between those of its parts."""
    attention = Attention(heads=32, kv_heads=4, head_dim=128)
    feed = FeedForward(ffn=8192)

    def seconds(kinds: list[Mixer]) -> float:
        runs = tuple(BlockRun(4, Block(mixer=mixer, feed=feed)) for mixer in kinds)
        model = ModelSpec(name="mix", family="mix", hidden=4096, vocab=4096, max_position=65536, runs=runs)
        return price(model, Layout(), gpus=8, seq_len=32768, global_batch=8).step.seconds.value

    all_attention, none = seconds([attention] * 4), seconds([delta_net(32)] * 4)
    mixed = seconds([delta_net(32), delta_net(32), delta_net(32), attention])
    assert none < mixed < all_attention
    assert mixed == pytest.approx((3 * none + all_attention) / 4, rel=0.02)


# Nemotron 3 Nano (30B-A3B): 23 Mamba 2, 23 expert and 6 attention blocks (its config.json, from memory; the pattern's
# exact order changes nothing on one pipeline stage). 31.6B parameters, as published.
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NANO_BLOCKS = {
    "M": Block(mixer=Mamba2(heads=64, head_dim=64, groups=8, state=128, conv=4, chunk=128), feed=None),
    "E": Block(
        mixer=None,
        feed=Experts(num_experts=128, top_k=6, ffn=1856, shared_ffn=3712, gated=False, activation="relu2"),
    ),
    "*": Block(mixer=Attention(heads=32, kv_heads=2, head_dim=128, rope=False), feed=None),
}
NANO = ModelSpec(
    name="nemotron-3-nano",
    family="nemotron_h",
    hidden=2688,
    vocab=131072,
    max_position=8192,
    runs=tuple(BlockRun(1, _NANO_BLOCKS[kind]) for kind in _NANO),
)


@pytest.mark.parametrize(
    ("gpu", "gpus", "work", "layout", "tokens_per_s"),
    [
        # Megatron-Bridge, performance summary of 26.06: tokens per second and GPU. Its recipes dispatch by Hybrid-EP.
        (
            "h100-sxm",
            16,
            {"global_batch": 1024, "precision": "fp8"},
            Layout(ep=8, recompute=Recompute(kind="selective", modules=("moe", "moe_act", "layernorm", "core_attn"))),
            14719,
        ),
        ("b200", 8, {"global_batch": 512, "precision": "mxfp8"}, Layout(ep=8, micro_batch=2), 32768),
        ("gb200-nvl72", 8, {"global_batch": 512, "precision": "mxfp8"}, Layout(ep=8, micro_batch=2), 33522),
    ],
    ids=["h100", "b200", "gb200"],
)
def test_a_published_hybrid_runs_as_fast_as_published(price, gpu, gpus, work, layout, tokens_per_s) -> None:
    assert count_params(NANO).total == pytest.approx(31.6e9, rel=0.002)
    step = price(NANO, layout, gpu=gpu, gpus=gpus, seq_len=8192, moe_dispatcher="deepep", **work).step
    assert step.tokens_per_s_per_gpu == pytest.approx(tokens_per_s, rel=0.15)


def test_what_moves_nothing_takes_no_time() -> None:
    cluster = load_cluster("h100-sxm", gpus=8)
    model = ModelSpec(
        name="one",
        family="one",
        hidden=4096,
        vocab=1000,
        max_position=8192,
        runs=(BlockRun(1, Block(mixer=GRANITE, feed=None)),),
    )
    work = Workload(seq_len=8192, global_batch=8)
    shard, _ = distinct_shards(Columns.from_layouts([Layout(), Layout(tp=2)], 8, work), 8192)
    ledger = ItemWriter(model, work, load_runtime("megatron"), shard).block(model.kinds[0])
    row = ledger.scans[0]
    nothing = np.array([1.0, 0.0])
    silent = type(row)(
        **{
            name: getattr(row, name) * nothing if name.endswith(("bytes", "flops")) else getattr(row, name)
            for name in row.__slots__
        }
    )
    ahead, back = scan_seconds(load_curve_of(cluster), cluster.gpu, ledger, silent, "bf16")
    assert ahead[0] > 0 == ahead[1]
    assert back[0] > 0 == back[1]
