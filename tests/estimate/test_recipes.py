"""What older kernels, narrow precisions, adapters and slow hosts cost, against sums written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster, load_curve_of
from fivefold.cluster.compute import batched_gemm_seconds, gemm_seconds, grouped_gemm_seconds
from fivefold.cluster.curve import load_curve
from fivefold.estimate import Kernel, Problem, by_operation
from fivefold.estimate.kernels import unfused_seconds
from fivefold.estimate.ledger import Attend
from fivefold.layout import Columns, Layout, Recompute, Workload
from fivefold.model import load_model
from fivefold.runtime import load_runtime

ONE = np.arange(1)
SLOW = {"launch_host_s": 1.0}


def kernel_of(name="llama-3-8b", *, runtime="megatron", gpu="h100-sxm", layout=None, changes=None, **work):
    """A kernel of one layout on eight GPUs, 8,192 tokens and 16 sequences unless said otherwise."""
    layout = layout or Layout(zero=3 if runtime == "torchtitan" else 1)
    load = Workload(**({"seq_len": 8192, "global_batch": 16} | work))
    profile = replace(load_runtime(runtime), **(changes or {}))
    columns = Columns.from_layouts([layout], 8, load)
    return Kernel(Problem(load_model(name), load_cluster(gpu, gpus=8), load, profile), columns)


def test_unfused_attention_keeps_what_korthikanti_counts():
    """Korthikanti et al. 2022, equation 1: 5 a s / h more, in units of s b h bytes, than attention's inputs and output;
    the log-sum-exp of a flash kernel is all that differs besides. Without dropout softmax's output alone is kept."""
    work = {"seq_len": 2048, "global_batch": 8, "precision": "fp16"}
    model = load_model("gpt3-6.7b")
    heads = model.kinds[0].mixer.heads
    for dropout, changes, each in ((True, {}, 5), (False, {}, 2), (False, {"scores_kept_fp32": True}, 6)):
        flash, unfused = (
            kernel_of(
                "gpt3-6.7b", gpu="a100-80g-sxm", changes=changes, attention=kind, dropout=dropout, **work
            ).variants
            for kind in ("flash", "unfused")
        )
        assert unfused.saved[0, 0] - flash.saved[0, 0] == pytest.approx(each * heads * 2048 * 2048, rel=1e-9)


@pytest.mark.parametrize(("parallel", "ranks"), [(False, 1), (True, 2)])
def test_dropout_keeps_masks_of_one_byte_an_element(parallel, ranks):
    """Korthikanti et al. 2022, section 4.1: two masks of s b h bytes a block, which sequence parallelism shards, and
    the embedding's; whole blocks that are recomputed keep none of theirs."""
    layout = Layout(tp=2, sequence_parallel=parallel)
    elements = 8192 * load_model("llama-3-8b").hidden / ranks
    plain, masked = (kernel_of("llama-3-8b", layout=layout, dropout=on).variants for on in (False, True))
    more = masked.saved - plain.saved
    assert more[0].tolist() == [2 * elements, elements, 0, 0]  # block, embedding, head, MTP
    assert np.all(masked.forward_s[0, 0] > plain.forward_s[0, 0])
    again = replace(layout, recompute=Recompute(kind="full"))
    plain, masked = (kernel_of("llama-3-8b", layout=again, dropout=on).variants for on in (False, True))
    assert masked.kept[0, 0] == plain.kept[0, 0]


def test_unfused_attention_is_slower_and_recomputing_it_is_cheap():
    """Korthikanti et al. 2022, table 4: without its core's scores a 22B block costs 7% more."""
    base = {"seq_len": 2048, "global_batch": 32, "precision": "fp16"}
    layout = Layout(tp=8, micro_batch=4, zero=0)
    plain = kernel_of("gpt-22b", gpu="a100-80g-sxm", layout=layout, attention="unfused", dropout=True, **base)
    flash = kernel_of("gpt-22b", gpu="a100-80g-sxm", layout=layout, **base)
    again = replace(layout, recompute=Recompute(kind="selective"))
    selective = kernel_of("gpt-22b", gpu="a100-80g-sxm", layout=again, attention="unfused", dropout=True, **base)
    block = plain.variants.forward_s[0, 0] + plain.variants.backward_s[0, 0]
    assert flash.variants.forward_s[0, 0] < plain.variants.forward_s[0, 0]
    assert 0.03 < selective.variants.again_s[0, 0] / block < 0.15
    assert block == pytest.approx(19.0e-3, rel=0.15)  # table 4, with sequence parallelism


@pytest.mark.parametrize(
    ("squares", "bytes_ahead", "bytes_back", "kernels"), [(8, 9, 11, 2), (6, 36 + 5, 40 + 5, 6), (2, 36 + 5, 40 + 5, 6)]
)
def test_scores_of_odd_numbers_of_heads_pass_through_memory_in_fp32(squares, bytes_ahead, bytes_back, kernels):
    """Megatron's fused softmax takes blocks of four of micro-batch x heads."""
    gpu = load_cluster("a100-80g-sxm").gpu
    curve, seq, width = load_curve(gpu.name), 1024, 64
    row = Attend("core", 4 * squares * seq**2 * width, seq, width, squares * seq**2)
    ahead, back = unfused_seconds(curve, gpu, row, np.asarray(row.flops, dtype=float), "fp16", dropout=True)
    score = batched_gemm_seconds(curve, gpu, squares, seq, seq, width, "fp16")
    value = batched_gemm_seconds(curve, gpu, squares, seq, width, seq, "fp16")
    moved = squares * seq**2 / (gpu.memory_bandwidth_per_s * curve.streaming_efficiency)
    assert ahead == pytest.approx(score + value + bytes_ahead * moved + kernels * curve.launch_s)
    assert back == pytest.approx(score + 3 * value + bytes_back * moved + kernels * curve.launch_s)


def test_a_softmax_that_nothing_fuses_is_four_more_launches():
    """gpt2-xl has 25 heads: a micro-batch of four of its sequences is fused, one alone is not."""
    work = {"seq_len": 1024, "global_batch": 64, "attention": "unfused"}
    one, four = (
        kernel_of("gpt2-xl", layout=Layout(micro_batch=size), changes=SLOW, **work).variants for size in (1, 4)
    )
    assert one.forward_s[0, 0] - four.forward_s[0, 0] == pytest.approx(4)
    assert one.backward_s[0, 0] - four.backward_s[0, 0] == pytest.approx(4)


@pytest.mark.parametrize(
    ("precision", "grad_dtype", "fused", "separate"),
    [("bf16", "fp32", 42, 8 + 4 + 28 + 6 + 4), ("fp16", "fp32", 42, 8 + 8 + 4 + 28 + 6 + 4), ("fp16", "bf16", 36, 58)],
)
def test_an_update_of_separate_kernels_passes_over_gradients_again(precision, grad_dtype, fused, separate):
    """Bytes a parameter of Megatron-LM's in 2021: division by the replicas, unscaling, norm, Adam, copy to the weights
    and clearing; 16-bit gradients: 4 to divide, 6 to copy to fp32, and so on to 58."""
    work = {"seq_len": 2048, "precision": precision, "grad_dtype": grad_dtype}
    seconds = {}
    for apart in (False, True):
        changes = {"separate_update": apart, "gradients_checked": False, "gradients_scaled": False}
        kernel = kernel_of("gpt2-xl", layout=Layout(zero=0), changes=changes, **work)
        cluster = kernel.problem.cluster
        curve = load_curve(cluster.gpu.name)
        elements = np.add(*kernel.rank_parameters(ONE))[0, 0]
        bandwidth = cluster.gpu.memory_bandwidth_per_s * curve.streaming_efficiency
        seconds[apart] = (kernel.optimizer_seconds(ONE)[0] - 4 * curve.launch_s) * bandwidth / elements
    assert (seconds[False], seconds[True]) == (pytest.approx(fused), pytest.approx(separate))


def test_an_update_of_a_kernel_for_each_operation_moves_what_the_profile_says():
    """AdamW's alone: of the 42 bytes of one kernel's, 4 are read for the norm and 4 cleared."""
    seconds = {}
    for optimizer in ("adamw", "sgd"):
        for moved in (0.0, 80.0):
            layout, changes = Layout(zero=0), {"adamw_update_bytes": moved}
            seconds[optimizer, moved] = kernel_of("gpt2-xl", layout=layout, changes=changes, optimizer=optimizer)
    kernel = seconds["adamw", 80.0]
    cluster, elements = kernel.problem.cluster, np.add(*kernel.rank_parameters(ONE))[0, 0]
    rate = cluster.gpu.memory_bandwidth_per_s * load_curve(cluster.gpu.name).streaming_efficiency
    more = kernel.optimizer_seconds(ONE)[0] - seconds["adamw", 0.0].optimizer_seconds(ONE)[0]
    assert more * rate / elements == pytest.approx(80 - (42 - 4 - 4))
    assert seconds["sgd", 80.0].optimizer_seconds(ONE)[0] == seconds["sgd", 0.0].optimizer_seconds(ONE)[0]


def test_single_operations_keep_every_second_product():
    """Llama 3 8B by hand: query, value, gate and down projections, attention's output and the block's input stay."""
    layout = Layout(zero=3, recompute=Recompute(kind="selective"))
    kernel = kernel_of(runtime="torchtitan", layout=layout)
    per_token = 2 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096) + 4 * 32
    assert kernel.variants.kept[0, 0] == pytest.approx(8192 * per_token)
    ledger = kernel.ledgers[0]
    again = dict(zip([row.name for row in ledger.gemms], by_operation.redone(ledger), strict=True))
    assert np.asarray(again["qkv_proj"]).item() == pytest.approx(1024 / 6144)
    assert (again["out_proj"], again["mlp.fc1"], again["mlp.fc2"]) == (1.0, 0.5, 0.0)


def test_a_slow_host_makes_a_block_last_as_long_as_its_launches():
    fast, slow = kernel_of(changes={"launch_host_s": 0.0}), kernel_of(changes={"launch_host_s": 1.0})
    # Forward: 4 products, attention, 2 norms, 2 residuals, rotary twice, one activation; backward: products twice.
    assert slow.variants.forward_s[0, 0] == pytest.approx(4 + 1 + 2 + 2 + 2 + 1)
    assert slow.variants.backward_s[0, 0] == pytest.approx(8 + 2 + 2 + 2 + 2 + 1)
    usual = kernel_of()
    assert usual.variants.forward_s[0, 0] == fast.variants.forward_s[0, 0]  # 8,192 tokens keep the GPU busy


def test_narrow_precisions_leave_the_head_in_sixteen_bits():
    halves = {precision: kernel_of(gpu="b200", precision=precision).variants for precision in ("bf16", "fp8", "nvfp4")}
    block, head = 0, 2
    assert halves["fp8"].forward_s[0, head] == halves["bf16"].forward_s[0, head]
    times = [halves[precision].forward_s[0, block] for precision in ("bf16", "fp8", "nvfp4")]
    assert times == sorted(times, reverse=True)


def test_adapters_leave_out_weight_gradients_states_and_reductions():
    whole, frozen = kernel_of(), kernel_of(trained="adapters")
    assert frozen.variants.forward_s[0, 0] == whole.variants.forward_s[0, 0]
    assert frozen.variants.backward_s[0, 0] < 0.7 * whole.variants.backward_s[0, 0]
    parts = {name: float(value[0, 0]) for name, value in frozen.rank_memory(ONE).items()}
    assert parts["gradients"] == parts["master"] == parts["optimizer"] == 0
    assert frozen.exposed_reduction_seconds(ONE)[0] == frozen.optimizer_seconds(ONE)[0] == 0


def test_batched_products_pay_no_launch_of_their_own():
    cluster = load_cluster("a100-80g-sxm")
    curve, gpu = load_curve_of(cluster), cluster.gpu
    sizes = (64, 1024, 1024, 64)
    grouped = grouped_gemm_seconds(curve, gpu, *sizes, "fp16")
    batched = batched_gemm_seconds(curve, gpu, *sizes, "fp16")
    assert grouped - batched == pytest.approx(63 * curve.group_launch_s)
    assert batched_gemm_seconds(curve, gpu, 1, *sizes[1:], "fp16") == gemm_seconds(curve, gpu, *sizes[1:], "fp16")
