"""What single numbers of a profile do to bytes and seconds, by hand: saved copies, the loss, gradients that wait,
kernels that nothing fuses, tokens that are sent once."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import collective_seconds, load_cluster, load_curve_of
from fivefold.cluster.apart import slowest
from fivefold.cluster.beside import WAITED
from fivefold.cluster.compute import grouped_gemm_seconds, streaming_seconds
from fivefold.cluster.groups import place
from fivefold.estimate import Kernel, Problem
from fivefold.estimate.price import OWNERS
from fivefold.layout import Columns, Layout, Overlap, Workload
from fivefold.layout.layout import RECOMPUTE_MODULES
from fivefold.layout.workload import Precision
from fivefold.runtime import load_runtime

TOKENS, HIDDEN, VOCAB = 2048, 1024, 4096
ONE = np.arange(1)
SELECTIVE = RECOMPUTE_MODULES.index("core_attn")


def kernel(
    model,
    layout: Layout,
    gpus: int = 16,
    runtime: str = "megatron",
    grad_dtype: Literal["fp32", "bf16"] = "fp32",
    dropout: bool = False,
    precision: Precision = "bf16",
    **changes: Any,
) -> Kernel:
    work = Workload(seq_len=TOKENS, global_batch=64, grad_dtype=grad_dtype, dropout=dropout, precision=precision)
    profile = replace(load_runtime(runtime), **changes)
    return Kernel(
        Problem(model, load_cluster("h100-sxm", gpus=gpus), work, profile), Columns.from_layouts([layout], gpus, work)
    )


def saved(k: Kernel) -> dict[str, float]:
    return {row.name: float(np.ravel(row.bytes)[0]) for row in k.ledgers[0].saved}


def streams(k: Kernel, name: str) -> tuple[float, float]:
    row = next(row for row in k.ledgers[0].streams if row.name == name)
    return float(np.ravel(row.forward_bytes)[0]), float(np.ravel(row.backward_bytes)[0])


def in_step_seconds(k: Kernel, moved: float, kernels: int) -> float:
    """What the GPU's memory takes for so many bytes, inside a step."""
    curve = k.pricer.curve
    return curve.in_step * float(streaming_seconds(curve, k.problem.cluster.gpu, moved, kernels))


def memory_seconds(k: Kernel, side: str) -> float:
    """Seconds of a block's operations that the GPU's memory bounds, in one pass."""
    return float(getattr(k.costs[0], side)[OWNERS.index("memory"), 0])


@pytest.mark.parametrize(("tp", "parallel", "whole"), [(2, True, 1), (2, False, 0), (1, False, 0)])
def test_buffers_that_gathers_fill_stay_allocated(small, tp, parallel, whole):
    layout = Layout(tp=tp, sequence_parallel=parallel)
    none, two = (kernel(small["llama"], layout, gather_buffers=n) for n in (0, 2))
    more = two.rank_memory(ONE)["buffers"] - none.rank_memory(ONE)["buffers"]
    assert more == 2 * whole * 2 * TOKENS * HIDDEN  # two of them, 2 bytes an element, of all tokens


def test_states_in_segments_of_their_own_do_not_fragment(small):
    changes: dict[str, Any] = {"fragmentation": 0.5, "context_bytes": 0, "nccl_bytes_per_group": 0}
    for apart in (False, True):
        k = kernel(small["llama"], Layout(pp=2), states_fragment=not apart, **changes)
        parts = {name: np.ravel(part) for name, part in k.rank_memory(ONE).items()}
        worst = int(np.argmax(sum(parts.values())))
        total = sum(part[worst] for part in parts.values())
        fragments = parts["activations"][worst] + parts["logits"][worst] if apart else total
        assert k.peak(ONE).reserved == pytest.approx(total + 0.5 * fragments, abs=16)


def test_gathered_inputs_that_are_kept_are_not_gathered_again(small):
    again, kept = (kernel(small["llama"], Layout(tp=2), gathered_inputs_kept=on) for on in (False, True))
    # Whole inputs of the query-key-value and of the gate-up projection, beside the shards that the norms gave.
    assert sum(saved(kept).values()) - sum(saved(again).values()) == 2 * 2 * TOKENS * HIDDEN
    moved = [
        sum(
            float(np.ravel(row.bytes)[0])
            for row in k.ledgers[0].exchanges
            if row.op == "all_gather" and row.when == "backward"
        )
        for k in (again, kept)
    ]
    assert moved == [4 * 2 * TOKENS * HIDDEN, 2 * 2 * TOKENS * HIDDEN]  # left: the gradients of both outputs
    # Without sequence parallelism nothing is gathered.
    assert sum(
        saved(kernel(small["llama"], Layout(tp=2, sequence_parallel=False), gathered_inputs_kept=True)).values()
    ) == (sum(saved(kernel(small["llama"], Layout(tp=2, sequence_parallel=False))).values()))


def test_a_loss_over_a_sharded_vocabulary_has_bytes_of_its_own(small):
    changes: dict[str, Any] = {"loss_bytes_per_logit": 14, "sharded_loss_bytes_per_logit": 40}
    for tp, each in ((1, 14), (2, 40)):
        k = kernel(small["llama"], Layout(tp=tp), **changes)
        assert float(k.variants.logits[0, k.blocks + 1]) == each * TOKENS * VOCAB / tp


@pytest.mark.parametrize(("pp", "whole"), [(1, False), (2, True)])
def test_gradients_behind_a_pipeline_are_whole_until_the_last_backward(small, pp, whole):
    k = kernel(small["llama"], Layout(pp=pp, zero=2), runtime="torchtitan")
    dense, _ = k.rank_parameters(ONE)
    assert k.rank_memory(ONE)["gradients"] == pytest.approx(4 * dense / (1 if whole else 16 // pp))


def test_replicas_without_zero_hold_buckets(small):
    for zero, dp, bucket in ((0, 16, 2), (1, 16, 0), (0, 1, 0)):
        k = kernel(small["llama"], Layout(zero=zero), gpus=dp, runtime="nanotron")
        dense, _ = k.rank_parameters(ONE)
        assert k.rank_memory(ONE)["buffers"] == pytest.approx(bucket * dense)


def test_sharded_states_may_still_get_the_whole_sum_after_backward(small):
    """One all-reduce and then one gather, nothing beside them; without ZeRO no difference."""
    for zero in (0, 1):
        usual, at_once = (
            kernel(small["llama"], Layout(zero=zero), sharded_reduced_at_once=each) for each in (False, True)
        )
        dense, _ = at_once.rank_parameters(ONE)
        group = at_once.groups(ONE).dense
        whole_sum, gather = (
            float(collective_seconds(at_once.problem.cluster, op, size * dense[0], group)[0])
            for op, size in (("all_reduce", 4), ("all_gather", 2))
        )
        alone = float(usual.exposed_reduction_seconds(ONE)[0]) if zero == 0 else whole_sum + gather
        assert at_once.exposed_reduction_seconds(ONE)[0] == pytest.approx(alone)


def test_compute_falls_behind_beside_gathers_but_of_registered_buffers(small):
    """Blocks that a GPU computes for longer than they are gathered and scattered."""
    run = small["llama"].runs[0]
    wide = replace(
        small["llama"], runs=(replace(run, block=replace(run.block, feed=replace(run.block.feed, ffn=65536))),)
    )
    layout = Layout(zero=3, micro_batch=4)
    held, free = (kernel(wide, layout, gpus=8, runtime="megatron-fsdp", registered_buffers=on) for on in (False, True))
    reduce_s, gather_s = held.reduction_seconds(ONE, held.variants.dense[:, :1], held.variants.expert[:, :1])
    assert free.variants.gather_forward[0, 0] == free.variants.gather_backward[0, 0] == 0
    assert held.variants.gather_forward[0, 0] == pytest.approx(WAITED * gather_s[0, 0])
    assert held.variants.gather_backward[0, 0] == pytest.approx(WAITED * (gather_s + reduce_s)[0, 0])


def test_clipping_whole_gradients_moves_them_three_times(small):
    """The norm reads its shard (4 bytes a parameter of 16 ranks'), or all (4) and the clipping reads and writes (8)."""
    shard, whole = (kernel(small["llama"], Layout(), whole_clip_bytes=each) for each in (0, 12))
    curve, gpu = load_curve_of(whole.problem.cluster), whole.problem.cluster.gpu
    moved = (12 - 4 / 16) * float(whole.rank_parameters(ONE)[0][0, 0])
    extra = float(whole.optimizer_seconds(ONE)[0] - shard.optimizer_seconds(ONE)[0])
    assert extra == pytest.approx(float(streaming_seconds(curve, gpu, moved) - streaming_seconds(curve, gpu, 0.0)))


def test_compute_waits_for_the_slowest_gpu(small):
    """The same work per GPU on more of them: only the compute curve's level moves."""
    node, many = (kernel(small["llama"], Layout(), gpus=gpus, launch_host_s=0.0) for gpus in (8, 64))
    assert many.pricer.curve.in_step == pytest.approx(node.pricer.curve.in_step * slowest(64))
    assert many.costs[0].forward[0] == pytest.approx(slowest(64) * node.costs[0].forward[0])


def test_a_micro_batchs_gradients_wait_for_the_end_of_its_backward(small):
    """Two micro-batches in flight on the first of two stages: at the end of a backward the other one's activations are
    there and all gradients; the larger of this and of the start of the backward counts."""
    layout = Layout(pp=2)
    activations = {}
    for each in (0, 1_000):
        k = kernel(small["llama"], layout, runtime="nanotron", micro_batch_grad_bytes=each)
        activations[each] = float(k.rank_memory(ONE)["activations"][0, 0])
    dense, _ = k.rank_parameters(ONE)
    in_flight = k.plans[0].part.plain[0, 0] * float(k.variants.saved[0, 0])  # of one micro-batch
    assert activations[1_000] == pytest.approx(in_flight + 1_000 * float(dense[0, 0]))
    assert activations[0] < activations[1_000]


@pytest.mark.parametrize(
    ("runtime", "changes", "each"),
    # Cleared (2); read (2) and added to an fp32 (4 + 4) or a 16-bit accumulator (2 + 2); scattered as it is.
    [
        ("megatron", {}, 12),
        ("megatron", {"grad_dtype": "bf16"}, 8),
        ("nanotron", {}, 12),
        ("torchtitan", {}, 2),
    ],
)
def test_an_embeddings_gradient_is_as_large_as_its_weight(small, runtime, changes, each):
    """A vocabulary eight times as large looks no more up, and has seven times its gradient more to clear and to add."""
    few, many = small["llama"].vocab, 8 * small["llama"].vocab
    passes = []
    for vocab in (few, many):
        k = kernel(replace(small["llama"], vocab=vocab), Layout(tp=2), runtime=runtime, launch_host_s=0.0, **changes)
        passes.append(k.costs[k.blocks].backward[OWNERS.index("memory")][0])
    more = each * (many - few) / 2 * small["llama"].hidden
    curve, gpu = k.pricer.curve, k.problem.cluster.gpu
    assert passes[1] - passes[0] == pytest.approx(curve.in_step * streaming_seconds(curve, gpu, more, 0))


def test_adding_gradients_to_the_accumulator_is_a_kernel_of_its_own(small):
    fused, apart = (kernel(small["llama"], Layout(), wgrad_bytes=each, launch_host_s=0.0) for each in (2, 12))
    cluster = fused.problem.cluster
    curve, products = fused.pricer.curve, 4
    elements = sum(row.elements for row in fused.ledgers[0].weights if row.matrix)
    alone = 10 * float(np.ravel(elements)[0]) / (cluster.gpu.memory_bandwidth_per_s * curve.streaming_efficiency)
    more = float((apart.costs[0].backward - fused.costs[0].backward).sum())
    assert more == pytest.approx(curve.in_step * (alone + products * curve.launch_s))
    assert np.all(apart.costs[0].forward == fused.costs[0].forward)


def test_a_16_bit_accumulator_is_read_and_written_in_half_as_many_bytes(small):
    wide, narrow = (
        kernel(small["llama"], Layout(), grad_dtype=kind, wgrad_bytes=12, launch_host_s=0.0)
        for kind in ("fp32", "bf16")
    )
    cluster = wide.problem.cluster
    curve = wide.pricer.curve
    elements = float(np.ravel(sum(row.elements for row in wide.ledgers[0].weights if row.matrix))[0])
    less = float((wide.costs[0].backward - narrow.costs[0].backward).sum())
    saved = 4 * elements / (cluster.gpu.memory_bandwidth_per_s * curve.streaming_efficiency)
    assert less == pytest.approx(curve.in_step * saved)


def test_deepspeed_accumulates_and_reduces_gradients_of_bf16_in_its_own_optimizer(small):
    """A cast to fp32 (6 bytes) and an addition of the copy (12) instead of one addition (10), and a reduction of whole
    gradients where fp16's scatters them."""
    layout = Layout(zero=1)
    own = kernel(small["llama"], layout, runtime="deepspeed", launch_host_s=0.0)
    off: dict[str, Any] = {"bf16_wgrad_bytes": 0, "bf16_all_reduces": False}
    other = kernel(small["llama"], layout, runtime="deepspeed", launch_host_s=0.0, **off)
    cluster = own.problem.cluster
    curve = own.pricer.curve
    elements = float(np.ravel(sum(row.elements for row in own.ledgers[0].weights if row.matrix))[0])
    more = float((own.costs[0].backward - other.costs[0].backward).sum())
    moved = 8 * elements / (cluster.gpu.memory_bandwidth_per_s * curve.streaming_efficiency)
    assert more == pytest.approx(curve.in_step * moved)
    dense, expert = own.rank_parameters(ONE)
    (whole, gathered), (scattered, same) = (k.reduction_seconds(ONE, dense, expert) for k in (own, other))
    group = place(cluster, np.array([16]), ONE + 1)
    for op, seconds in (("all_reduce", whole), ("reduce_scatter", scattered)):
        assert seconds[0, 0] == pytest.approx(float(collective_seconds(cluster, op, 4 * dense[0, 0], group)[0]))
    assert gathered == same


def test_dropout_before_a_residual_keeps_a_mask_and_passes_the_gradient_once_more(small):
    plain, dropped = (kernel(small["gpt2"], Layout(), dropout=on) for on in (False, True))
    width = small["gpt2"].hidden
    elements = TOKENS * width
    assert streams(dropped, "mixer_residual") == (6 * elements, 6 * elements)
    assert streams(dropped, "mixer_dropout mask") == (elements, (1 + 4) * elements)
    # Korthikanti et al. 2022, equation 1: a byte of mask after attention and one after the feed-forward.
    assert sum(saved(dropped).values()) - sum(saved(plain).values()) == 2 * elements


def test_unfused_norms_and_rotary_move_fp32(small):
    k, elements = kernel(small["llama"], Layout(), unfused_norms=True), TOKENS * HIDDEN
    assert streams(k, "input_norm") == (36 * elements, 56 * elements)
    assert streams(k, "rotary") == (20 * TOKENS * 64 * 24, 20 * TOKENS * 64 * 24)
    # A layer norm is one kernel in PyTorch too.
    gpt = [kernel(small["gpt2"], Layout(), unfused_norms=on) for on in (False, True)]
    assert streams(gpt[0], "input_norm") == streams(gpt[1], "input_norm")


def test_an_eager_gate_is_five_kernels(small):
    """PyTorch's silu (2 tensors) and product (3); backward the product's two gradients (3 each) and silu's (3). Fused,
    both inputs are read and their product written, and backward both and its gradient read and two written."""
    eager, fused = (kernel(small["llama"], Layout(), fused_glu=on) for on in (False, True))
    act = 2 * TOKENS * 4096
    assert streams(eager, "mlp.activation") == (5 * act, 9 * act)
    assert streams(fused, "mlp.activation") == (3 * act, 5 * act)


def test_gradients_of_an_input_that_several_layers_read_are_added(small):
    """Query, key and value's two further ones, and the gate's one. GPT-2 projects them by one layer."""
    apart, together = (kernel(small["llama"], Layout(tp=4), input_gradient_bytes=on) for on in (6.0, 0.0))
    elements = TOKENS * HIDDEN
    assert streams(apart, "qkv_proj input gradients") == (0, 6 * 2 * elements)
    assert streams(apart, "mlp.fc1 input gradients") == (0, 6 * elements)
    more = {row.name for row in apart.ledgers[0].streams} - {row.name for row in together.ledgers[0].streams}
    assert more == {"qkv_proj input gradients", "mlp.fc1 input gradients"}
    gpt = kernel(small["gpt2"], Layout(), input_gradient_bytes=6.0)
    assert not {row.name for row in gpt.ledgers[0].streams if row.name.endswith("gradients")}


def test_keys_and_values_copied_for_every_query_head(small):
    """Llama's 16 query and 8 key heads of 64: both tensors read and written, kept instead of the fewer heads."""
    few, many = (kernel(small["llama"], Layout(), repeats_keys_and_values=on) for on in (False, True))
    moved = 2 * TOKENS * 64 * 2 * (8 + 16)
    assert streams(many, "repeated keys and values") == (moved, moved)
    assert sum(saved(many).values()) - sum(saved(few).values()) == 2 * TOKENS * 64 * 2 * (16 - 8)
    gpt = kernel(small["gpt2"], Layout(), repeats_keys_and_values=True)
    assert "repeated keys and values" not in saved(gpt)


def test_tokens_sent_once_are_fewer_bytes(small):
    """Two experts out of 8 on 4 ranks: a second one is on the first one's rank with chance 1/4."""
    layout = Layout(ep=4)
    twice, once = (kernel(small["mixtral"], layout, tokens_sent_once=on) for on in (False, True))

    def dispatched(k: Kernel) -> float:
        row = next(row for row in k.ledgers[0].exchanges if row.name == "dispatch")
        return float(np.ravel(row.bytes)[0])

    unit = 2 * TOKENS * HIDDEN
    assert dispatched(twice) == 2 * unit
    assert dispatched(once) == pytest.approx(1.75 * unit)
    assert streams(twice, "permute")[0] == streams(twice, "permute by expert")[0] == 2 * 2 * unit
    assert streams(once, "permute")[0] == pytest.approx((2 + 1.75) * unit)
    # A rank with one expert has its tokens in order as they come.
    assert streams(kernel(small["mixtral"], Layout(ep=8)), "permute by expert")[0] == 0


def test_tokens_sent_once_cross_the_network_once_per_node(small):
    """Sixteen ranks on two nodes: two copies at most leave, of eight choices, and one of them to the other node."""
    feed = replace(small["mixtral"].runs[0].block.feed, num_experts=16, top_k=8)
    model = _with_feed(small["mixtral"], feed)
    twice, once = (kernel(model, Layout(ep=16), tokens_sent_once=on) for on in (False, True))
    cluster = once.problem.cluster
    card = cluster.links[-1].all_to_all_per_s

    def exposed(k: Kernel) -> float:
        row, seconds = next(pair for pair in k.costs[0].exchanges if pair[0].name == "dispatch")
        assert row.axis == "ep"
        return float(np.ravel(seconds)[0])

    unit, in_step = 2 * TOKENS * HIDDEN, once.problem.runtime.tp_in_step
    assert exposed(twice) > in_step * 8 * unit / 2 / card
    assert in_step * 0.99 * unit / card < exposed(once) < in_step * (unit / card + 2e-4)


def _with_feed(model, feed):
    run = model.runs[0]
    return replace(model, runs=(replace(run, block=replace(run.block, feed=feed)),))


def test_experts_get_different_numbers_of_tokens(small):
    """Which fill their tiles by half on average, but for the weights' gradients, whose rows are no tokens."""
    k = kernel(small["mixtral"], Layout(), launch_host_s=0.0)
    pricer, feed = k.pricer, small["mixtral"].runs[0].block.feed
    sizes = (8, 2 * TOKENS / 8, 2 * feed.ffn, HIDDEN)
    priced = [each for each in pricer.products.of(k.ledgers[0]) if each.rows[0].grouped]
    (first,) = [(each, index) for each in priced for index, row in enumerate(each.rows) if row.name == "experts.fc1"]
    curve, gpu = pricer.curve, k.problem.cluster.gpu
    for kind, uneven in (("fwd", True), ("wgrad", False)):
        groups, m, n, depth = sizes if kind == "fwd" else (8, sizes[2], sizes[3], sizes[1])
        alone = grouped_gemm_seconds(curve, gpu, groups, m, n, depth, "bf16", kind, uneven=uneven)
        products, index = first
        assert products.alone[kind][index] == pytest.approx(curve.in_step * alone)


def test_the_host_waits_for_the_counts_of_tokens(small):
    """Forward nothing hides it; backward, and in a block without experts, it is launches like others, or nothing."""
    off, on = (
        kernel(
            small["mixtral"], Layout(), launch_host_s=1e-9, op_host_s=0.0, group_launch_host_s=0.0, dispatch_host_s=each
        )
        for each in (0.0, 0.1)
    )
    assert float((on.variants.forward_s - off.variants.forward_s)[0, 0]) == pytest.approx(0.1)
    assert float((on.variants.backward_s - off.variants.backward_s)[0, 0]) == pytest.approx(
        0.1 - float(off.variants.backward_s[0, 0]), rel=1e-3
    )
    dense = [kernel(small["llama"], Layout(), dispatch_host_s=each) for each in (0.0, 0.1)]
    assert np.all(dense[0].variants.forward_s == dense[1].variants.forward_s)
    # Recomputed experts are dispatched again.
    again = [float(k.costs[0].recompute[RECOMPUTE_MODULES.index("moe"), :, 0].sum()) for k in (off, on)]
    assert again[1] - again[0] == pytest.approx(0.1)


def test_routing_is_operations_of_pytorch(small):
    """24 forward and 13 backward, in place of the 6 and 4 kernels that count as an operation of the framework each."""
    changes = {"launch_host_s": 1.0, "group_launch_host_s": 0.0, "dispatch_host_s": 0.0}
    own, same = (kernel(small["mixtral"], Layout(), op_host_s=each, **changes) for each in (0.25, 0.0))
    assert float((own.variants.forward_s - same.variants.forward_s)[0, 0]) == pytest.approx(24 * 0.25 - 6)
    assert float((own.variants.backward_s - same.variants.backward_s)[0, 0]) == pytest.approx(13 * 0.25 - 4)
    dense = [kernel(small["llama"], Layout(), op_host_s=each, **changes) for each in (0.25, 0.0)]
    assert np.all(dense[0].variants.forward_s == dense[1].variants.forward_s)


def test_a_slower_host_takes_longer_for_all_it_does(small):
    """Launches and the work of a step, each in proportion, where a pass takes no less; not the counts of tokens."""
    work, layout = Workload(seq_len=TOKENS, global_batch=64), Layout()
    profile = replace(
        load_runtime("megatron"),
        launch_host_s=0.1,
        op_host_s=0.1,
        group_launch_host_s=0.1,
        dispatch_host_s=0.0,
        step_overhead_s=0.5,
    )
    nodes = [replace(load_cluster("h100-sxm", gpus=16), host_work_ratio=each) for each in (1.0, 1.5)]
    columns = Columns.from_layouts([layout], 16, work)
    own, slow = (Kernel(Problem(small["mixtral"], node, work, profile), columns) for node in nodes)
    assert np.all(slow.pass_seconds(ONE)[0] == pytest.approx(1.5 * own.pass_seconds(ONE)[0]))
    assert np.all(slow.pass_seconds(ONE)[1] == pytest.approx(1.5 * own.pass_seconds(ONE)[1]))
    assert slow.problem.step_overhead_s == 0.75
    counts = replace(profile, launch_host_s=1e-9, op_host_s=0.0, group_launch_host_s=0.0, dispatch_host_s=1.0)
    own, slow = (Kernel(Problem(small["mixtral"], node, work, counts), columns) for node in nodes)
    assert np.all(slow.pass_seconds(ONE)[0] == pytest.approx(own.pass_seconds(ONE)[0], rel=1e-6))
    free = replace(profile, launch_host_s=0.0)
    own, slow = (Kernel(Problem(small["mixtral"], node, work, free), columns) for node in nodes)
    assert float((slow.step_seconds(ONE) - own.step_seconds(ONE))[0]) == pytest.approx(0.25)
    assert float((slow.lower_bound(ONE) - own.lower_bound(ONE))[0]) == pytest.approx(0.25)


def test_biases_of_experts_and_clamps_are_kernels_of_their_own(small):
    """By hand, in units of the output's element: product 2, sum 6, joined 4; backward two products of 4 with sums of 2,
    joined 4. In fp32 4, 10, 8 and a cast of 6; backward twice that cast, 12 for each product, joined 4."""
    feed = replace(small["mixtral"].runs[0].block.feed, bias=True, clamped=True)
    model = _with_feed(small["mixtral"], feed)
    out, act = 2 * TOKENS * HIDDEN, 2 * 2 * TOKENS * feed.ffn
    plain, fused = (kernel(model, Layout(ep=2), expert_extras_apart=on) for on in (True, False))
    assert streams(plain, "experts.fc2 bias") == (12 * out, 16 * out)
    assert streams(plain, "experts.clamp") == (8 * act, 10 * act)
    assert saved(plain)["experts.clamped"] == 2 * act
    assert {row.name for row in plain.ledgers[0].streams} - {row.name for row in fused.ledgers[0].streams} == {
        "experts.fc2 bias", "experts.clamp",
    }  # fmt: skip
    # The GPU starts two kernels for the biases of each of four local experts, and three for the clamps.
    by_hand = in_step_seconds(plain, 12 * out, 2 * 4) + in_step_seconds(plain, 8 * act, 3)
    assert memory_seconds(plain, "forward") - memory_seconds(fused, "forward") == pytest.approx(by_hand)
    single = kernel(model, Layout(ep=2), tokens_sent_once=True)
    assert streams(single, "experts.fc2 bias") == (28 * out, 40 * out)
    # Two launches for each of four local experts, four backward.
    slow = kernel(model, Layout(ep=2), launch_host_s=1e-9, group_launch_host_s=1.0)
    quick = kernel(small["mixtral"], Layout(ep=2), launch_host_s=1e-9, group_launch_host_s=1.0)
    assert float((slow.variants.forward_s - quick.variants.forward_s)[0, 0]) == pytest.approx(8)
    assert float((slow.variants.backward_s - quick.variants.backward_s)[0, 0]) == pytest.approx(16)


def test_stretched_rotary_is_kernels_of_its_own(small):
    model = replace(small["llama"], rotary=replace(small["llama"].rotary, scaling="yarn"))
    elements = TOKENS * 64 * 24
    assert streams(kernel(model, Layout()), "rotary") == (24 * elements, 20 * elements)
    assert streams(kernel(model, Layout(), stretched_rotary_apart=False), "rotary") == (4 * elements, 4 * elements)
    assert streams(kernel(small["llama"], Layout()), "rotary") == (4 * elements, 4 * elements)


def test_quantised_experts_are_padded_or_fused(small):
    """Padding copies what arrived and what leaves; fused kernels activate and quantise without passing memory."""
    model, layout = small["mixtral"], Layout(ep=4)
    received = 2 * 2 * TOKENS * HIDDEN
    assert streams(kernel(model, layout, precision="fp8"), "pad, permute") == (2 * received, 2 * received)
    for changes in ({"precision": "bf16"}, {"precision": "fp8", "tokens_sent_once": True}):
        assert not any(row.name.startswith("pad") for row in kernel(model, layout, **changes).ledgers[0].streams)
    apart, fused = (kernel(model, layout, precision="fp8", fused_experts=on) for on in (False, True))
    names = [{row.name for row in k.ledgers[0].streams} for k in (apart, fused)]
    assert names[0] - names[1] == {"experts.activation"}
    # What a kernel of products brings along: the cast of the second product's input, of the gradient of the first's
    # output, twice as wide, and what lies between; 4 bytes an element are cast.
    act = TOKENS * 2 * model.runs[0].block.feed.ffn
    for side, wide in (("forward", 1), ("backward", 2)):
        between = in_step_seconds(apart, streams(apart, "experts.activation")[wide - 1], 1)
        cast = in_step_seconds(apart, 4 * wide * act, 1)
        assert memory_seconds(apart, side) - memory_seconds(fused, side) == pytest.approx(between + cast)
    sixteen = [kernel(model, layout, fused_experts=on) for on in (False, True)]
    assert np.all(sixteen[0].costs[0].forward == sixteen[1].costs[0].forward)


def test_fully_sharded_units_are_copied_beside_compute(small):
    """Per parameter 4 bytes after each of two gathers and 6 before the scatter, in the stream of compute."""
    layout = Layout(zero=3)
    off, on = (
        kernel(small["llama"], layout, runtime="torchtitan", gather_copy_bytes=4 * each, scatter_copy_bytes=6 * each)
        for each in (0, 1)
    )
    cluster = on.problem.cluster
    curve = on.pricer.curve
    rate = cluster.gpu.memory_bandwidth_per_s * curve.streaming_efficiency
    block = float(on.variants.dense[0, 0])
    gather, scatter = (curve.in_step * (each * block / rate + curve.launch_s) for each in (4, 6))
    assert float((on.variants.forward_s - off.variants.forward_s)[0, 0]) == pytest.approx(gather)
    assert float((on.variants.backward_s - off.variants.backward_s)[0, 0]) == pytest.approx(gather + scatter)
    # ZeRO-2 keeps what it gathered, and a pipeline's micro-batches scatter nothing.
    kept = [kernel(small["llama"], Layout(zero=2), runtime="torchtitan", gather_copy_bytes=each) for each in (0, 4)]
    assert np.all(kept[0].variants.forward_s == kept[1].variants.forward_s)


def test_each_expert_of_a_grouped_product_is_launched(small):
    """Eight experts, two grouped products: seven further launches each, once forward and twice backward."""
    off, on = (kernel(small["mixtral"], Layout(), launch_host_s=1.0, group_launch_host_s=each) for each in (0.0, 0.1))
    assert float((on.variants.forward_s - off.variants.forward_s)[0, 0]) == pytest.approx(2 * 7 * 0.1)
    assert float((on.variants.backward_s - off.variants.backward_s)[0, 0]) == pytest.approx(2 * 2 * 7 * 0.1)


def test_each_step_of_a_ring_is_launched(small):
    """Of four ranks: two more kernels of attention forward and four more backward than of two, and two more sends."""
    two, four = (kernel(small["llama"], Layout(cp=cp), launch_host_s=1.0).variants for cp in (2, 4))
    assert float((four.forward_s - two.forward_s)[0, 0]) == pytest.approx(2 + 2)
    assert float((four.backward_s - two.backward_s)[0, 0]) == pytest.approx(4 + 2)
    two, four = (kernel(small["llama"], Layout(cp=cp, cp_kind="a2a"), launch_host_s=1.0).variants for cp in (2, 4))
    assert float((four.forward_s - two.forward_s)[0, 0]) == pytest.approx(0)


def first(column: Any) -> float:
    return float(np.ravel(column)[0])


def copied(k: Kernel) -> dict[str, float]:
    return {
        f"{row.name} {row.when}": float(np.ravel(row.copied)[0]) for row in k.ledgers[0].exchanges if np.any(row.copied)
    }


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_sequences_after_sequences_are_copied_around_a_collective(small, micro_batch):
    layout = Layout(tp=4, micro_batch=micro_batch, overlap=Overlap(tp=False))
    k = kernel(small["llama"], layout, sequence_second=True)
    whole = 2 * 2 * micro_batch * TOKENS * HIDDEN  # read and written in 16 bit
    found = copied(k)
    assert set(found.values()) == {whole}
    scatters = {name for name in found if name.startswith("scatter")}
    assert len(scatters) == 4  # outputs of two row-parallel layers, input gradients of two column-parallel ones
    # One sequence's parts follow each other as gathered: no copy after a gather.
    assert len(found) - len(scatters) == (0 if micro_batch == 1 else 4)
    for on in (Overlap(tp=True), Overlap(tp=False)):
        plain = Layout(tp=4, micro_batch=micro_batch, overlap=on)
        assert not copied(kernel(small["llama"], plain, sequence_second=bool(on.tp)))


def test_a_copy_takes_the_time_of_its_bytes(small):
    layout = Layout(tp=4, micro_batch=4)
    without, with_copies = (kernel(small["llama"], layout, sequence_second=on) for on in (False, True))
    cluster = without.problem.cluster
    curve = without.pricer.curve
    bandwidth = cluster.gpu.memory_bandwidth_per_s * curve.streaming_efficiency
    four = curve.in_step * 4 * (2 * 2 * 4 * TOKENS * HIDDEN / bandwidth + curve.launch_s)
    for side in ("forward", "backward"):
        more = getattr(with_copies.costs[0], side)[1, 0] - getattr(without.costs[0], side)[1, 0]
        assert more == pytest.approx(four), side


def test_single_operations_gather_again_and_a_checkpoint_that_stops_early_does_not_scatter(small):
    """torchtitan's selective recomputation keeps what was scattered; a whole block's ends before its last scatter."""
    cost = kernel(small["llama"], Layout(tp=4, zero=3), runtime="torchtitan").costs[0]
    rows = {row.name: float(s[0]) for row, s in cost.exchanges if row.when == "forward"}
    gathers = rows["gather qkv_proj input"] + rows["gather mlp.fc1 input"]
    assert float(cost.recompute[SELECTIVE, 1, 0]) == pytest.approx(gathers)
    assert float(cost.full[1, 0]) == pytest.approx(gathers + rows["scatter out_proj output"])
    assert rows["scatter mlp.fc2 output"] > 0


def test_a_ring_that_gathers_moves_every_query_heads_keys_at_once_and_their_gradients_in_fp32(small):
    """Grouped queries: 2048 / 4 tokens of 16 heads of 64 keys and values, whatever the number of their own heads."""
    k = kernel(small["llama"], Layout(cp=4, zero=3), runtime="torchtitan")
    kv = 2 * TOKENS / 4 * 16 * (64 + 64)
    rows = {f"{row.name} {row.when}": row for row in k.ledgers[0].exchanges if row.axis == "cp" and np.any(row.bytes)}
    assert {name: (row.op, first(row.bytes), first(row.ring_steps)) for name, row in rows.items()} == {
        "gather keys and values forward": ("all_gather", 4 * kv, 1),
        "gather keys and values backward": ("all_gather", 4 * kv, 1),
        "ring gradients backward": ("send", 2 * kv, 4),
    }
    assert first(rows["ring gradients backward"].copied) == 4 * 2 * 2 * kv
    alone = kernel(small["llama"], Layout(zero=3), runtime="torchtitan").ledgers[0]
    assert not [row for row in alone.exchanges if row.axis == "cp" and np.any(row.bytes)]


def test_a_ring_that_is_waited_for_hides_behind_nothing(small):
    layout = Layout(cp=4, zero=3)
    hidden, waited = (kernel(small["llama"], layout, runtime="torchtitan", ring_waits=on) for on in (False, True))
    alone = {
        (row.name, row.when): float(seconds[0]) for row, seconds in waited.pricer.exchanges.alone(waited.ledgers[0])
    }
    copies = {
        (row.name, row.when): float(seconds[0])
        for row, seconds in waited.costs[0].exchanges
        if row.axis == "cp" and np.any(row.bytes)
    }
    curve, gpu = waited.pricer.curve, waited.problem.cluster.gpu
    rate = gpu.memory_bandwidth_per_s * curve.streaming_efficiency
    for row, _ in waited.costs[0].exchanges:
        if row.axis == "cp" and np.any(row.bytes):
            key = (row.name, row.when)
            copied = curve.in_step * (first(row.copied) / rate + curve.launch_s)
            assert copies[key] == pytest.approx(alone[key] + copied)
    assert sum(float(s[0]) for row, s in hidden.costs[0].exchanges if row.axis == "cp") < sum(copies.values())


def test_a_checkpoint_keeps_what_its_policy_names(small):
    """Of a block whose products and attention are all kept, norms, rotary embeddings and the activation run again."""
    early: dict[str, Any] = {"runtime": "megatron-fsdp", "checkpoint_stops_early": True}
    all_kept = ("qkv_proj", "core_attention", "out_proj", "mlp.fc1", "mlp.fc2")
    compute, memory = OWNERS.index("compute"), OWNERS.index("memory")
    nothing, everything, query = (
        kernel(small["llama"], Layout(zero=3), checkpoint_keeps=kept, **early).costs[0]
        for kept in ((), all_kept, ("qkv_proj",))
    )
    assert everything.full[compute, 0] == pytest.approx(0, abs=1e-12)
    assert everything.full[memory, 0] == nothing.full[memory, 0] > 0
    assert nothing.full[compute, 0] > query.full[compute, 0] > 0
    width = 16 * 64 + 2 * 8 * 64  # queries, and keys and values of half as many heads
    assert nothing.full_flops[0] - query.full_flops[0] == 2 * TOKENS * HIDDEN * width
    assert query.input_bytes[0] - nothing.input_bytes[0] == 2 * TOKENS * width
    # Attention's output, its fp32 log-sum-exp, and what the other products but the last one make.
    others = TOKENS * (2 * width + 2 * HIDDEN + 4 * 16 + 2 * HIDDEN + 2 * 2 * 4096)
    assert everything.input_bytes[0] - nothing.input_bytes[0] == others


def test_what_quantises_the_input_of_a_kept_product_runs_again(small):
    """The gradient of its weight needs it."""
    memory = OWNERS.index("memory")
    nothing, query = (
        kernel(small["llama"], Layout(zero=3), runtime="megatron-fsdp", precision="fp8", checkpoint_keeps=kept).costs[0]
        for kept in ((), ("qkv_proj",))
    )
    assert query.full[memory, 0] == nothing.full[memory, 0]
