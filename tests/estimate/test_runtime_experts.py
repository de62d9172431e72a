"""What single numbers of a profile do to mixtures of experts, by hand: tokens that are sent once or padded."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from numbers_of import HIDDEN, TOKENS, in_step_seconds, kernel, memory_seconds, saved, streams

from fivefold.cluster.compute import grouped_gemm_seconds
from fivefold.estimate import Kernel
from fivefold.layout import Layout
from fivefold.layout.layout import RECOMPUTE_MODULES


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


def test_each_expert_of_a_grouped_product_is_launched(small):
    """Eight experts, two grouped products: seven further launches each, once forward and twice backward."""
    off, on = (kernel(small["mixtral"], Layout(), launch_host_s=1.0, group_launch_host_s=each) for each in (0.0, 0.1))
    assert float((on.variants.forward_s - off.variants.forward_s)[0, 0]) == pytest.approx(2 * 7 * 0.1)
    assert float((on.variants.backward_s - off.variants.backward_s)[0, 0]) == pytest.approx(2 * 2 * 7 * 0.1)


def test_permutations_are_one_kernel_or_two(small):
    for fused, kernels in ((True, 1), (False, 2)):
        rows = kernel(small["mixtral"], Layout(ep=4), fused_permutation=fused).ledgers[0].streams
        found = [(row.forward_kernels, row.backward_kernels) for row in rows if row.name in ("permute", "unpermute")]
        assert found == [(kernels, kernels)] * 2
