"""Compute times against measured points that no constant was fitted to, physical limits, and a published layer time."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.cluster import gpus, load_gpu
from fivefold.cluster.compute import (
    attention_seconds,
    batched_gemm_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    streaming_seconds,
)
from fivefold.cluster.curve import curves, load_curve, override_curve
from fivefold.errors import FivefoldError

POINTS = list(csv.DictReader((Path(__file__).parent / "data" / "gemm_points.csv").open(encoding="utf-8")))
NAMES = {
    "A100-PCIe-80GB": "a100-80g-pcie",
    "H100-SXM": "h100-sxm",
    "B200": "b200",
    "RTX-4090": "rtx-4090",
    "MI300X": "mi300x",
    "MI355X": "mi355x",
}
KINDS = {"TN": "fwd", "NN": "dgrad", "NT": "wgrad", "fwd": "fwd", "bwd_grad_act": "dgrad", "bwd_grad_w": "wgrad"}


def product_error(row: dict[str, str]) -> float:
    """|predicted/measured - 1| of one held product; the csv's conventions are told in benchmarks/fit_compute.py."""
    name, kind = NAMES[row["gpu"]], KINDS[row["layout"]]
    groups, m, n, k = (int(row[c]) for c in ("batch", "m", "n", "k"))
    measured_s = 2 * groups * m * n * k / float(row["tflops"]) / 1e12
    if row["op"] == "group_matmul":
        m, n, k = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[kind]
    fp32 = kind == "wgrad" and (row["out_dtype"] == "fp32" or "main_grad_dtype=fp32" in row["shape"])
    moved = (4 if fp32 else 2) * (2 if kind == "wgrad" and row["accumulate"] == "True" else 1)
    predicted_s = grouped_gemm_seconds(
        load_curve(name),
        load_gpu(name),
        groups,
        m,
        n,
        k,
        kind=kind,
        output_bytes=moved,  # type: ignore[arg-type]
    )
    return abs(float(predicted_s) / measured_s - 1)


def attention_error(row: dict[str, str]) -> float:
    name, backward = NAMES[row["gpu"]], row["op"] == "sdp_bwd"
    size = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row["shape"])}
    pairs = size["batch"] * size["head_num"] * size["seq_len"] ** 2
    full = (5 if backward else 2) * pairs * (size["qk_head_dim"] + size["v_head_dim"])
    counted = full / 2 if row["mask"] == "causal" else full  # SimuMax counts the full square of a causal kernel
    measured_s = counted / float(row["tflops"]) / 1e12
    flops, seq = (full, 2 * size["seq_len"]) if row["mask"] == "none" else (full / 2, size["seq_len"])
    predicted_s = attention_seconds(
        load_curve(name),
        load_gpu(name),
        flops,
        seq,
        size["qk_head_dim"],
        backward=backward,
        kernel=row["kernel"] or None,
    )
    return abs(float(predicted_s) / measured_s - 1)


# The bounds are the held residuals printed by benchmarks/fit_compute.py with some room; B200's 90th percentile is two
# power states of one GPU, which shape does not tell apart.
@pytest.mark.parametrize(
    ("gpu", "op", "median", "p90"),
    [
        ("A100-PCIe-80GB", "matmul", 0.03, 0.10),
        ("A100-PCIe-80GB", "group_matmul", 0.05, 0.10),
        ("H100-SXM", "matmul", 0.06, 0.20),
        ("B200", "matmul", 0.06, 0.35),
        ("B200", "group_matmul", 0.10, 0.20),
        ("A100-PCIe-80GB", "sdp_fwd", 0.05, 0.12),
        ("A100-PCIe-80GB", "sdp_bwd", 0.05, 0.12),
        ("H100-SXM", "sdp_fwd", 0.05, 0.08),
        ("H100-SXM", "sdp_bwd", 0.05, 0.05),
        ("B200", "sdp_bwd", 0.08, 0.12),
        ("MI300X", "sdp_fwd", 0.06, 0.15),
        ("MI300X", "sdp_bwd", 0.05, 0.12),
        ("MI355X", "sdp_fwd", 0.05, 0.15),
        ("MI355X", "sdp_bwd", 0.05, 0.15),
    ],
)
def test_held_points(gpu: str, op: str, median: float, p90: float) -> None:
    error_of = attention_error if op.startswith("sdp") else product_error
    rows = [row for row in POINTS if (row["gpu"], row["op"], row["held"]) == (gpu, op, "1")]
    if (gpu, op) == ("B200", "sdp_bwd"):
        # Calls of some 110 us whatever their work: the host, not the GPU.
        rows = [row for row in rows if "head_num=4," not in row["shape"] and "head_num=8," not in row["shape"]]
    errors = [error_of(row) for row in rows]
    assert len(errors) >= 3
    assert np.median(errors) <= median
    assert np.quantile(errors, 0.9) <= p90


@pytest.mark.parametrize("row", [row for row in POINTS if row["op"] == "matmul_best"], ids=lambda row: row["gpu"])
def test_no_faster_than_the_best_shape_ever_found(row: dict[str, str]) -> None:
    # GH200 runs H100's chip at 900 W: its best may lie above ours, never much below.
    name = {
        "NVIDIA A100 SXM": "a100-80g-sxm",
        "NVIDIA A100 PCIe": "a100-80g-pcie",
        "NVIDIA GH200 SXM": "h100-sxm",
        "NVIDIA H100 SXM": "h100-sxm",
        "NVIDIA H200 SXM": "h200-sxm",
        "NVIDIA B200 SXM": "b200",
        "NVIDIA GB200 SXM": "gb200-nvl72",
        "AMD MI300X": "mi300x",
    }[row["gpu"]]
    precision = "fp8" if row["dtype"].startswith("fp8") else "bf16"
    sizes = [int(row[c]) for c in "mnk"]
    tflops = 2 * np.prod(sizes) / gemm_seconds(load_curve(name), load_gpu(name), *sizes, precision) / 1e12  # type: ignore
    assert 0.5 * float(row["tflops"]) < tflops < 1.02 * float(row["tflops"])


def test_every_gpu_of_the_catalogue_has_a_curve_with_its_source() -> None:
    for name in gpus():
        gpu, curve = load_gpu(name), load_curve(name)
        assert curve.source
        assert all(rates.source for rates in curve.attention.values())
        # Whatever the datasheet has a matrix peak for, the curve has a factor for.
        assert set(gpu.peak_flops_per_s) <= set(curve.precision), name
        for kind in ("fwd", "dgrad", "wgrad"):
            assert gemm_seconds(curve, gpu, 4096, 4096, 4096, half(gpu), kind) > 0  # type: ignore[arg-type]
    assert set(curves()) == set(gpus())


def half(gpu) -> Any:
    """A 16-bit format that the GPU multiplies: Volta has no bf16, TPUs have no fp16."""
    return "bf16" if "bf16" in gpu.peak_flops_per_s else "fp16"


sizes = st.integers(1, 200_000)
names = st.sampled_from(curves())
kinds = st.sampled_from(["fwd", "dgrad", "wgrad"])


@given(names, kinds, sizes, sizes, sizes, st.integers(1, 256), st.integers(0, 3), st.integers(1, 5_000))
@settings(max_examples=300, deadline=None)
def test_product_never_gets_cheaper_by_growing(name, kind, m, n, k, groups, which, more) -> None:
    curve, gpu = load_curve(name), load_gpu(name)
    small = [groups, m, n, k]
    large = list(small)
    large[which] += more
    before, after = (grouped_gemm_seconds(curve, gpu, *size, half(gpu), kind) for size in (small, large))
    assert after >= before * (1 - 1e-12)


@given(names, kinds, sizes, sizes, sizes, st.integers(1, 256))
@settings(max_examples=300, deadline=None)
def test_product_respects_arithmetic_and_memory(name, kind, m, n, k, groups) -> None:
    curve, gpu = load_curve(name), load_gpu(name)
    seconds = grouped_gemm_seconds(curve, gpu, groups, m, n, k, half(gpu), kind)
    rate = gpu.peak_flops_per_s[half(gpu)] * curve.efficiency[kind]
    moved = 2 * (m * k + k * n) + (8 if kind == "wgrad" else 2) * m * n
    assert seconds >= 2 * groups * m * n * k / rate * (1 - 1e-12)
    assert seconds >= groups * moved / gpu.memory_bandwidth_per_s / curve.memory_efficiency * (1 - 1e-12)


@given(names, kinds, sizes, sizes, sizes)
@settings(max_examples=100, deadline=None)
def test_one_group_is_a_plain_product(name, kind, m, n, k) -> None:
    curve, gpu = load_curve(name), load_gpu(name)
    assert grouped_gemm_seconds(curve, gpu, 1, m, n, k, half(gpu), kind) == gemm_seconds(
        curve, gpu, m, n, k, half(gpu), kind
    )


@pytest.mark.parametrize("name", ["a100-80g-sxm", "h100-sxm"])
def test_uneven_groups_take_the_mean_of_their_sizes(name) -> None:
    """64 groups of 1,024 rows, four tiles each if all were equal: against groups whose rows differ by up to two tiles,
    each priced alone. A curve without waits for a last wave, so that tiles are all that differs."""
    curve, gpu = (
        msgspec.structs.replace(load_curve(name), wave_share=0.0, launch_s=0.0, group_launch_s=0.0),
        load_gpu(name),
    )
    rows = 1024 + np.arange(-512, 513, 8)
    alone = grouped_gemm_seconds(curve, gpu, 64, rows, 4096, 4096).mean()
    equal, uneven = (grouped_gemm_seconds(curve, gpu, 64, 1024, 4096, 4096, uneven=on) for on in (False, True))
    assert uneven == pytest.approx(alone, rel=0.03)
    assert equal < 0.97 * alone
    # Few rows fill one tile, not half of one.
    few = [grouped_gemm_seconds(curve, gpu, 64, 8, 4096, 4096, uneven=on) for on in (False, True)]
    assert few[0] == few[1]


@pytest.mark.parametrize("name", curves())
def test_limits_of_large_and_thin_products(name: str) -> None:
    curve, gpu = load_curve(name), load_gpu(name)
    size = 1 << 17
    large = 2 * size**3 / gemm_seconds(curve, gpu, size, size, size, half(gpu)) / gpu.peak_flops_per_s[half(gpu)]
    assert large == pytest.approx(curve.efficiency["fwd"], rel=0.02)
    # One row against a weight matrix reads the matrix: 2 bytes per element.
    thin = 2 * size * size / gemm_seconds(curve, gpu, 1, size, size, half(gpu))
    reach = gpu.memory_bandwidth_per_s * curve.memory_efficiency
    assert 0.5 * reach < thin <= reach


@given(names, st.booleans(), st.integers(6, 17), st.integers(0, 12), st.sampled_from([64, 96, 128, 192, 256]))
@settings(max_examples=200, deadline=None)
def test_attention_grows_and_stays_below_its_rate(name, backward, seq_log2, heads_log2, head_dim) -> None:
    curve, gpu = load_curve(name), load_gpu(name)

    def seconds_and_flops(seq: int, heads: int) -> tuple[float, float]:
        flops = (5 if backward else 2) * heads * seq**2 * head_dim
        return float(attention_seconds(curve, gpu, flops, seq, head_dim, half(gpu), backward)), flops

    seq, heads = 1 << seq_log2, 1 << heads_log2
    seconds, flops = seconds_and_flops(seq, heads)
    assert seconds_and_flops(2 * seq, heads)[0] > seconds
    assert seconds_and_flops(seq, 2 * heads)[0] > seconds
    rates = curve.attention[curve.attention_kernel]
    assert flops / seconds <= gpu.peak_flops_per_s[half(gpu)] * max(rates.backward if backward else rates.forward)


def test_attention_kernels_rank_as_published() -> None:
    # Shah et al. 2024, Figure 5: at 16k tokens, head size 128, causal, FA2 335 < cuDNN 539 < FA3 616 TFLOP/s on H100.
    curve, gpu = load_curve("h100-sxm"), load_gpu("h100-sxm")
    flops = 2 * 16 * 16384**2 * 128
    tflops = [
        float(flops / attention_seconds(curve, gpu, flops, 16384, 128, kernel=kernel) / 1e12)
        for kernel in ("fa2", "cudnn", "fa3")
    ]
    assert tflops == pytest.approx([335, 539, 616], rel=0.06)


@given(names, st.floats(0, 1e12), st.integers(0, 100))
def test_streaming_is_bytes_over_bandwidth_and_launches(name, moved, kernels) -> None:
    curve, gpu = load_curve(name), load_gpu(name)
    reach = gpu.memory_bandwidth_per_s * curve.streaming_efficiency
    assert streaming_seconds(curve, gpu, moved, kernels) == pytest.approx(moved / reach + kernels * curve.launch_s)


def test_arrays_broadcast_and_equal_single_calls() -> None:
    curve, gpu = load_curve("h100-sxm"), load_gpu("h100-sxm")
    m, n = np.array([[128], [4096], [30000]]), np.array([64, 5120])
    table = gemm_seconds(curve, gpu, m, n, 8192, "bf16", "wgrad")
    assert table.shape == (3, 2)
    assert all(
        table[i, j] == gemm_seconds(curve, gpu, m[i, 0], n[j], 8192, "bf16", "wgrad") for i, j in np.ndindex(3, 2)
    )
    flops = 2 * 16 * np.array([1024.0, 8192.0]) ** 2 * 128
    assert attention_seconds(curve, gpu, flops, np.array([1024, 8192]), np.array([[64], [128]])).shape == (2, 2)


def layer_seconds(sequence_parallel: bool, backward: bool) -> float:
    """Korthikanti et al. 2022's 22B layer (h 6144, 64 heads, s 2048, mbs 4, TP 8) on A100-80GB, no flash attention.

    Tensors through memory, in bf16, are counted by hand: x is tokens x hidden, a the scores of the rank's heads.
    """
    gpu = load_gpu("a100-80g-sxm")
    curve = override_curve("a100-80g-sxm", {"group_launch_s": 0.0})  # batched products are one strided kernel
    t, h, s, heads, tp = 4 * 2048, 6144, 2048, 4 * 64 // 8, 8
    linears = [(t, 3 * h // tp, h), (t, h, h // tp), (t, 4 * h // tp, h), (t, h, 4 * h // tp)]
    core = [(s, s, h // 64), (s, h // 64, s)]
    x, a = 2 * t * h, 2 * heads * s * s
    if backward:
        seconds = sum(gemm_seconds(curve, gpu, m, k, n, "bf16", "dgrad") for m, n, k in linears)
        seconds += sum(gemm_seconds(curve, gpu, n, k, m, "bf16", "wgrad") for m, n, k in linears)
        seconds += 2 * sum(grouped_gemm_seconds(curve, gpu, heads, *size) for size in core)
        full, core_bytes = (
            2 * 3 * x + 2 * 2.5 * x,
            2.5 * a + 3 * a,
        )  # norms and dropouts; dropout's and softmax's backward
        split_bytes = 1.5 * x  # GeLU's backward, 4h / tp wide
    else:
        seconds = sum(gemm_seconds(curve, gpu, *size) for size in linears)
        seconds += sum(grouped_gemm_seconds(curve, gpu, heads, *size) for size in core)
        full, core_bytes = 2 * 2 * x + 2 * 3.5 * x, 2 * a + 2.5 * a  # norms, dropout + residual; softmax, dropout
        split_bytes = 1.0 * x
    moved = full / (tp if sequence_parallel else 1) + core_bytes + split_bytes
    seconds += streaming_seconds(curve, gpu, moved, 10)
    # Two all-reduces of 96 MiB (or as many bytes in gathers and scatters) at the 202 GB/s of bus bandwidth that
    # vTrain's nccl-tests table (trace/a100/AR_GPU8) has for 64 and for 128 MiB on 8 A100s.
    return float(seconds) + 2 * 2 * 7 / 8 * x / 202e9


@pytest.mark.parametrize(
    ("sequence_parallel", "backward", "published_ms"),
    [(False, False, 7.7), (True, False, 7.2), (False, True, 11.9), (True, True, 11.8)],  # Table 4
)
def test_korthikanti_layer(sequence_parallel: bool, backward: bool, published_ms: float) -> None:
    assert layer_seconds(sequence_parallel, backward) * 1e3 == pytest.approx(published_ms, rel=0.07)


def test_overrides_replace_one_number_and_keep_the_rest() -> None:
    base = load_curve("h100-sxm")
    changed = override_curve("h100-sxm", {"efficiency": {"fwd": 0.6}, "attention": {"fa3": {"tail_forward": 2.0}}})
    assert changed.efficiency == {**base.efficiency, "fwd": 0.6}
    assert changed.attention["fa3"] == msgspec.structs.replace(base.attention["fa3"], tail_forward=2.0)
    assert msgspec.structs.replace(changed, efficiency=base.efficiency, attention=base.attention) == base
    assert load_curve("h100-sxm") == base


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"efficency": {"fwd": 0.6}}, "efficency"),
        ({"efficiency": {"forward": 0.6}}, "efficiency"),
        ({"efficiency": {"fwd": -0.6}}, "efficiency"),
        ({"efficiency": {"fwd": float("nan")}}, "nan"),
        ({"launch_s": "2us"}, "launch_s"),
        ({"wave_share": 1.5}, "wave_share"),
        ({"attention_kernel": "fa9"}, "fa9"),
        ({"attention": {"fa2": {"head_dims": [64]}}}, "head_dims"),
        ({"tile": [0, 128]}, "tile"),
        ({"precision": "bf16"}, "precision"),
    ],
)
def test_impossible_overrides_are_refused_by_name(changes: dict, said: str) -> None:
    with pytest.raises(FivefoldError, match=said) as error:
        override_curve("h100-sxm", changes)
    assert "h100-sxm" in error.value.message


def test_refusals_name_what_is_legal() -> None:
    with pytest.raises(FivefoldError) as error:
        load_curve("h1000")
    assert "h100-sxm" in error.value.legal
    a100, v100 = load_gpu("a100-80g-sxm"), load_gpu("v100-sxm-32g")
    with pytest.raises(FivefoldError) as error:
        gemm_seconds(load_curve("a100-80g-sxm"), a100, 1, 1, 1, "fp8")
    assert "fp8" not in error.value.legal
    assert "bf16" in error.value.legal
    with pytest.raises(FivefoldError, match="bf16"):
        gemm_seconds(load_curve("v100-sxm-32g"), v100, 1, 1, 1)
    with pytest.raises(FivefoldError, match="fp8"):
        attention_seconds(load_curve("h100-sxm"), load_gpu("h100-sxm"), 1e9, 1024, 128, "fp8")
    with pytest.raises(FivefoldError, match="fa9"):
        attention_seconds(load_curve("h100-sxm"), load_gpu("h100-sxm"), 1e9, 1024, 128, kernel="fa9")
    with pytest.raises(FivefoldError, match="sideways"):
        gemm_seconds(load_curve("a100-80g-sxm"), a100, 1, 1, 1, "bf16", "sideways")  # type: ignore[arg-type]


# AMD, typical attained FLOPs of an MI325X (ROCm/rocm-blogs, October 2026): ten shapes of DeepSeek-V3, total FLOPs over
# total time.
TYPICAL = [
    (m, n, k) for m in (32, 32768) for n, k in ((2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 256))
]


def typical_tflops(name: str, precision: Any) -> float:
    gpu, curve = load_gpu(name), load_curve(name)
    seconds = sum(float(gemm_seconds(curve, gpu, *shape, precision)) for shape in TYPICAL)
    return sum(2 * m * n * k for m, n, k in TYPICAL) / seconds / 1e12


@pytest.mark.parametrize(("precision", "tflops"), [("bf16", 616), ("fp16", 606), ("fp8", 1143)])
def test_mi325x_attains_what_amd_measured_on_typical_products(precision: Any, tflops: float) -> None:
    assert typical_tflops("mi325x", precision) == pytest.approx(tflops, rel=0.02)


def test_mi300x_is_as_much_slower_as_its_best_product() -> None:
    """AMD, max-achievable FLOPs, part 2: 708 against 843 TFLOP/s in bf16, 1,273 against 1,519 in fp8."""
    for precision, ratio in (("bf16", 708 / 843), ("fp8", 1273 / 1519)):
        assert typical_tflops("mi300x", precision) / typical_tflops("mi325x", precision) == pytest.approx(
            ratio, rel=0.03
        )


@pytest.mark.parametrize(("size", "tflops"), [(4096, 1038), (8192, 1117), (16384, 1040)])
def test_mi350x_multiplies_as_pytorch_does(size: int, tflops: float) -> None:
    """hipBLASLt through PyTorch (HazyResearch/HipKittens analysis/mi350x_data_to_log.json)."""
    seconds = float(gemm_seconds(load_curve("mi350x"), load_gpu("mi350x"), size, size, size))
    assert 2 * size**3 / seconds / 1e12 == pytest.approx(tflops, rel=0.12)


# (tokens, Composable Kernel's TFLOP/s, AITER's), causal forward of 16 x 16 heads of 128 (HipKittens analysis/attn/fwd);
# backward (bkwd): Composable Kernel's, not causal, and the assembly kernels', causal.
FORWARD = [(2048, 601, 897), (4096, 745, 976), (8192, 834, 957), (16384, 893, 975)]
BACKWARD = [(2048, 428, 749), (4096, 448, 912), (8192, 470, 962), (16384, 470, 1081)]


@pytest.mark.parametrize(("backward", "points"), [(False, FORWARD), (True, BACKWARD)])
def test_mi355x_attends_between_its_published_kernels(backward: bool, points: list[tuple[int, int, int]]) -> None:
    gpu, curve = load_gpu("mi355x"), load_curve("mi355x")
    for tokens, slow, fast in points:
        flops = 2 * 16 * 16 * tokens**2 * 128 * (2.5 if backward else 1)
        seconds = float(attention_seconds(curve, gpu, flops, tokens, 128, backward=backward))
        assert 0.97 * slow < flops / seconds / 1e12 < fast


# Watts a GPU: datasheets, datacrunch.io and verda.com on Blackwell. AMD's pair, both timed, bears the rule out: 843 to
# 708 TFLOP/s at 1,000 and 750 W.
@pytest.mark.parametrize(
    ("name", "base", "watts"),
    [("b300", "b200", (1100, 1000)), ("gb300-nvl72", "gb200-nvl72", (1400, 1200))],
)
def test_chips_that_differ_in_power_follow_its_root(name: str, base: str, watts: tuple[int, int]) -> None:
    faster = load_curve(name).efficiency["fwd"] / load_curve(base).efficiency["fwd"]
    assert faster == pytest.approx((watts[0] / watts[1]) ** 0.5, rel=0.01)
    amd = 843 / 708
    assert amd == pytest.approx((1000 / 750) ** 0.5, rel=0.04)


def test_only_the_chips_that_aiter_has_kernels_for_run_them() -> None:
    """gfx942 and gfx950: MI300 and MI350; not MI200's gfx90a, and not what borrows AMD's curve."""
    with_aiter = {name for name in curves() if "aiter" in load_curve(name).attention}
    assert with_aiter == {"mi300a", "mi300x", "mi308x", "mi325x", "mi350x", "mi355x"}
    assert load_curve("mi210").attention == load_curve("mi250x-gcd").attention


# (kernel, head size, tokens, causal, TFLOP/s of the forward pass) of 2 sequences, 2,048 wide, on an H20 (issue 1310 of
# Dao-AILab/flash-attention, November 2024; 16,384 tokens: blog.gitcode.com's account of it).
H20 = [
    ("cudnn", 64, 2048, False, 126.1), ("cudnn", 64, 2048, True, 109.1), ("cudnn", 128, 2048, False, 129.1),
    ("cudnn", 128, 2048, True, 107.8), ("fa3", 64, 2048, False, 120.1), ("fa3", 64, 2048, True, 100.3),
    ("fa3", 128, 2048, False, 126.2), ("fa3", 128, 2048, True, 107.8), ("fa3", 64, 16384, False, 139.9),
    ("fa3", 64, 16384, True, 134.7), ("fa2", 64, 2048, False, 81.8), ("fa2", 64, 2048, True, 71.0),
    ("fa2", 128, 2048, False, 83.7), ("fa2", 128, 2048, True, 65.9),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "size", "tokens", "causal", "tflops"), H20)
def test_h20_attends_as_published(kernel: str, size: int, tokens: int, causal: bool, tflops: float) -> None:
    """Not causal, a query sees twice as many keys as the mean one of a causal sequence."""
    pairs = 1 if causal else 2
    flops = pairs * 2 * 2 * 2048 * tokens**2
    seconds = float(
        attention_seconds(load_curve("h20-sxm"), load_gpu("h20-sxm"), flops, pairs * tokens, size, kernel=kernel)
    )
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.05)


def test_a_low_peak_leaves_attention_to_the_products() -> None:
    """H20 has H100's exponentials a multiprocessor, and a quarter of its products: a larger share of the peak, in
    backward too, and no more than the best square product, 141.9 of 148 TFLOP/s (torch-performance-test-data)."""
    for backward in (False, True):
        share = {}
        for name in ("h20-sxm", "h100-sxm"):
            gpu, flops = load_gpu(name), 2 * 32 * 8192.0**2 * 128
            seconds = float(attention_seconds(load_curve(name), gpu, flops, 8192, 128, backward=backward))
            share[name] = flops / seconds / gpu.peak_flops_per_s["bf16"]
        assert 1.2 * share["h100-sxm"] < share["h20-sxm"] < 141.9 / 148


# Milliseconds on an H100 held at 500 W (FBGEMM pull request 2546): bf16, and fp8 with a scale for every row.
HELD_AT_500_W = (
    (8192, 8192, 8192, 1.879, 0.977),
    (65536, 8192, 7168, 13.383, 7.108),
    (65536, 3584, 8192, 7.044, 3.372),
)


@pytest.mark.parametrize(("precision", "column"), [("bf16", 3), ("fp8", 4)])
def test_products_of_an_h100_held_at_500_w(precision, column):
    gpu, curve = load_gpu("h100-96g-500w"), load_curve("h100-96g-500w")
    errors = [
        float(gemm_seconds(curve, gpu, *point[:3], precision)) * 1e3 / point[column] - 1 for point in HELD_AT_500_W
    ]
    assert max(map(abs, errors)) < 0.06
    assert abs(np.mean(errors)) < 0.025


def test_batched_products_are_one_kernel_and_groups_are_launched_one_by_one():
    curve, gpu = override_curve("h100-sxm", {"group_launch_s": 1e-6}), load_gpu("h100-sxm")
    grouped, batched = (
        seconds(curve, gpu, 96, 512, 512, 64) for seconds in (grouped_gemm_seconds, batched_gemm_seconds)
    )
    assert grouped - batched == pytest.approx(95e-6, rel=1e-6)
