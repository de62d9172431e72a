"""The data-parallel limit against a ring written out step by step, and the table of axes."""

from __future__ import annotations

import pytest

from fivefold.cluster import dp_limit, explain_axes, load_cluster
from fivefold.cluster.limits import BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK
from fivefold.errors import FivefoldError
from fivefold.runtime import load_runtime


def ring_seconds(cluster, ranks: int, bucket_bytes: float) -> float:
    """A bucket's reduce-scatter and all-gather, edge by edge, over the first `ranks` GPUs of a two-level cluster."""
    inner, outer = cluster.links
    total = cluster.launch_s
    for _ in range(2):
        for _ in range(ranks - 1):
            crossing = ranks // inner.span if ranks > inner.span else 0
            mean = (crossing * outer.latency_s + (ranks - crossing) * inner.latency_s) / ranks
            slowest = max(1 / inner.achieved_per_s, 1 / (outer.achieved_per_s * inner.span) if crossing else 0)
            total += mean + bucket_bytes / ranks * slowest
    return total


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80g-sxm"])
@pytest.mark.parametrize("gpus", [8, 64, 1024])
def test_the_limit_is_where_backward_hides_the_ring(name, gpus):
    cluster, rate = load_cluster(name, gpus=gpus), 200e12
    limit = dp_limit(cluster, rate, bucket_bytes=10**8)
    parameters_in_bucket = 10**8 / 2
    backward_s = 4 * parameters_in_bucket * limit.tokens_with_latency / rate
    assert backward_s == pytest.approx(ring_seconds(cluster, gpus, 10**8), rel=1e-9)


def test_first_order_is_the_missions_rule_with_constant_one():
    cluster = load_cluster("a100-80g-sxm", gpus=64)
    limit = dp_limit(cluster, 150e12)
    assert limit.constant == 1
    assert limit.tokens_first_order == pytest.approx(150e12 / limit.link_bytes_per_s)
    assert limit.link == "infiniband" and limit.link_bytes_per_s == pytest.approx(8 * 25e9 * 0.96)
    assert limit.tokens_finite < limit.tokens_first_order < limit.tokens_with_latency < limit.tokens_one_card
    assert limit.tokens_one_card == pytest.approx(150e12 / (25e9 * 0.96))


def test_latency_comes_second_and_grows_with_the_ranks():
    small, large = (dp_limit(load_cluster("h100", gpus=n), 4e14, bucket_bytes=10**8) for n in (16, 512))
    assert large.tokens_with_latency > 2 * small.tokens_with_latency
    assert large.tokens_first_order == pytest.approx(small.tokens_first_order)


def test_sentences_carry_the_numbers():
    text = " ".join(dp_limit(load_cluster("h100", gpus=64), 4e14).sentences)
    assert "400 TFLOP/s" in text and "constant is 1" in text and "126 steps" in text


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(FivefoldError, match="positive number"):
        dp_limit(load_cluster("h100", gpus=64), rate)


def test_one_gpu_has_no_limit():
    with pytest.raises(FivefoldError, match="2 GPUs or more"):
        dp_limit(load_cluster("h100", gpus=1), 4e14)


def test_axes_table():
    table = explain_axes(global_batch=512, micro_batch=2, dp=64)
    cuts = {row.axis: row.cuts for row in table.rows}
    assert cuts.keys() == {"dp", "tp", "cp", "pp", "ep", "etp"}
    for axis, word in {"dp": "batch", "tp": "hidden", "cp": "sequence", "pp": "layers", "ep": "experts"}.items():
        assert word in cuts[axis]
    assert "= 4." in table.headroom
    assert "TP x PP x CP x DP" in table.readings[0] and "ETP x EP x PP" in table.readings[0]
    assert "TP x PP x CP x EP x DP" in table.readings[1]
    assert set(table.to_dict()) == {"rows", "pairs", "readings", "headroom"}


def test_axes_table_refuses_an_impossible_batch():
    with pytest.raises(FivefoldError, match="1 or more"):
        explain_axes(global_batch=0)


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_a_ring_inside_a_node_is_slowest_over_its_own_link(dp):
    """However narrow the network would be with the shares of so few GPUs."""
    assert dp_limit(load_cluster("h100-sxm", gpus=16), 4e14, dp=dp).link == "nvlink"


def test_the_rules_bucket_is_the_one_that_megatrons_profile_has():
    profile = load_runtime("megatron")
    assert (profile.grad_buckets, profile.grad_bucket_growth) == (BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK)
