"""What single numbers of a profile do to bytes and seconds, by hand: saved copies, the loss, gradients that wait,
kernels that nothing fuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numbers_of import HIDDEN, ONE, TOKENS, VOCAB, kernel, saved, streams

from fivefold.cluster import collective_seconds, load_cluster, load_curve_of
from fivefold.cluster.compute import streaming_seconds
from fivefold.cluster.groups import place
from fivefold.estimate import Kernel, Problem
from fivefold.estimate.price import OWNERS
from fivefold.layout import Columns, Layout, Workload
from fivefold.runtime import load_runtime


def test_states_in_segments_of_their_own_do_not_fragment(small):
    changes: dict[str, Any] = {"fragmentation": 0.5, "context_bytes": 0, "nccl_bytes_per_group": 0}
    for apart in (False, True):
        k = kernel(small["llama"], Layout(pp=2), states_fragment=not apart, **changes)
        parts = {name: np.ravel(part) for name, part in k.rank_memory(ONE).items()}
        worst = int(np.argmax(sum(parts.values())))
        total = sum(part[worst] for part in parts.values())
        fragments = parts["activations"][worst] + parts["logits"][worst] if apart else total
        assert k.peak(ONE).reserved == pytest.approx(total + 0.5 * fragments, abs=16)


def test_a_loss_over_a_sharded_vocabulary_has_bytes_of_its_own(small):
    changes: dict[str, Any] = {"loss_bytes_per_logit": 14, "sharded_loss_bytes_per_logit": 40}
    moved: dict[str, Any] = {"loss_moved_bytes": (20, 30), "sharded_loss_moved_bytes": (50, 60)}
    for tp, each, passes in ((1, 14, (20, 30)), (2, 40, (50, 60))):
        k = kernel(small["llama"], Layout(tp=tp), **changes, **moved)
        assert float(k.variants.logits[0, k.blocks + 1]) == each * TOKENS * VOCAB / tp
        (loss,) = (row for row in k.ledgers[k.blocks + 1].streams if row.name == "cross_entropy")
        found = float(loss.forward_bytes[0]), float(loss.backward_bytes[0])
        assert found == tuple(each * TOKENS * VOCAB / tp for each in passes)


@pytest.mark.parametrize("runtime", ["megatron", "megatron@0.3", "deepspeed", "nanotron"])
def test_an_unfused_loss_is_one_fp32_kernel_for_each_operation(small, runtime):
    """Megatron's vocab-parallel cross-entropy, which the others have too, read and written bytes of each logit."""
    cast, maximum, subtraction, exponential, total, division = (2 + 4, 4, 4 + 4, 4 + 4, 4, 4 + 4)
    scaling, cast_back = (4 + 4, 4 + 2)
    k = kernel(small["llama"], Layout(), runtime=runtime)
    (loss,) = (row for row in k.ledgers[k.blocks + 1].streams if row.name == "cross_entropy")
    forward = cast + maximum + subtraction + exponential + total + division
    assert float(loss.forward_bytes[0]) == forward * TOKENS * VOCAB
    assert float(loss.backward_bytes[0]) == (scaling + cast_back) * TOKENS * VOCAB


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


def test_gathered_parameters_are_laid_out_by_rank_and_tensor(small):
    """Two norms and four products a block, the embedding, the final norm and the projection, of 16 ranks each."""
    tensors = 6 * small["llama"].layers + 3
    for zero, gpus, seconds in ((1, 16, 16e-3 * tensors), (1, 8, 8e-3 * tensors), (0, 16, 0.0), (1, 1, 0.0)):
        slow, fast = (
            kernel(small["llama"], Layout(zero=zero), gpus, "nanotron", unpack_host_s=each) for each in (1e-3, 0.0)
        )
        assert slow.step_seconds(ONE)[0] - fast.step_seconds(ONE)[0] == pytest.approx(seconds)
    assert load_runtime("nanotron").unpack_host_s > 0 == load_runtime("megatron").unpack_host_s


def test_clipping_whole_gradients_moves_them_three_times(small):
    """The norm reads its shard (4 bytes a parameter of 16 ranks'), or all (4) and the clipping reads and writes (8)."""
    shard, whole = (kernel(small["llama"], Layout(), whole_clip_bytes=each) for each in (0, 12))
    curve, gpu = load_curve_of(whole.problem.cluster), whole.problem.cluster.gpu
    moved = (12 - 4 / 16) * float(whole.rank_parameters(ONE)[0][0, 0])
    extra = float(whole.optimizer_seconds(ONE)[0] - shard.optimizer_seconds(ONE)[0])
    assert extra == pytest.approx(float(streaming_seconds(curve, gpu, moved) - streaming_seconds(curve, gpu, 0.0)))


@pytest.mark.parametrize(("gpus", "passes"), [(1, 1), (16, 3)])
def test_whole_gradients_are_checked_and_divided_by_their_replicas(small, gpus, passes):
    """The check reads each (4 bytes), the division by more than one replica reads and writes it, sharded states or
    not."""
    seconds, moved = [], 0.0
    for each in (True, False):
        k = kernel(small["llama"], Layout(), gpus, gradients_checked=each, gradients_scaled=each)
        curve, gpu = load_curve_of(k.problem.cluster), k.problem.cluster.gpu
        moved = 4 * passes * float(k.rank_parameters(ONE)[0][0, 0])
        seconds.append(float(k.optimizer_seconds(ONE)[0]))
    extra = float(streaming_seconds(curve, gpu, moved) - streaming_seconds(curve, gpu, 0.0))
    assert seconds[0] - seconds[1] == pytest.approx(extra)


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
    laid_out = replace(free, step_overhead_s=0.0, unpack_host_s=0.01)
    own, slow = (Kernel(Problem(small["mixtral"], node, work, laid_out), columns) for node in nodes)
    longer = slow.exposed_reduction_seconds(ONE) - own.exposed_reduction_seconds(ONE)
    none = Kernel(Problem(small["mixtral"], nodes[0], work, free), columns).exposed_reduction_seconds(ONE)
    assert longer == pytest.approx(0.5 * (own.exposed_reduction_seconds(ONE) - none))
    own, slow = (Kernel(Problem(small["mixtral"], node, work, free), columns) for node in nodes)
    assert float((slow.step_seconds(ONE) - own.step_seconds(ONE))[0]) == pytest.approx(0.25)
    assert float((slow.lower_bound(ONE) - own.lower_bound(ONE))[0]) == pytest.approx(0.25)


def test_stretched_rotary_is_kernels_of_its_own(small):
    model = replace(small["llama"], rotary=replace(small["llama"].rotary, scaling="yarn"))
    elements = TOKENS * 64 * 24
    assert streams(kernel(model, Layout()), "rotary") == (24 * elements, 20 * elements)
    assert streams(kernel(model, Layout(), stretched_rotary_apart=False), "rotary") == (4 * elements, 4 * elements)
    assert streams(kernel(small["llama"], Layout()), "rotary") == (4 * elements, 4 * elements)


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
