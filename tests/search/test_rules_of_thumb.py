"""The field's rules of thumb come out of the cost model, or docs/rules_of_thumb.md names the run that disagrees."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import fivefold as ff

_FILE = Path(__file__).parents[2] / "benchmarks" / "rules_of_thumb.py"
_SPEC = importlib.util.spec_from_file_location("rules_of_thumb", _FILE)
assert _SPEC and _SPEC.loader
rules = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = rules
_SPEC.loader.exec_module(rules)

# What each ratio has to be at least; a rule that comes out has a worse side beyond the tie of two layouts.
AT_LEAST = {
    "tensor_parallel_leaves_the_node": 1.2,
    "zero3_under_a_pipeline": 1.05,
    "sharded_data_parallel_stops_scaling": 1.1,
    "context_parallel_at_128k": 1.05,
    "expert_parallel_for_experts": 1.05,
    "tensor_parallel_when_narrow": 1.2,
    "pipeline_when_shallow": 1.05,
    "pipeline_at_forty_blocks": 1.02,
    "reduce_scatter_is_half_an_all_reduce": 1.999,
}


@pytest.fixture(scope="module")
def computed():
    return {function.__name__: function() for function in rules.COMPARISONS}


def test_every_comparison_is_asserted():
    assert AT_LEAST.keys() == {function.__name__ for function in rules.COMPARISONS}


@pytest.mark.parametrize("name", AT_LEAST)
def test_rule_of_thumb(name, computed):
    assert computed[name].ratio >= AT_LEAST[name], computed[name]


def test_reduce_scatter_is_exactly_half(computed):
    assert computed["reduce_scatter_is_half_an_all_reduce"].ratio == pytest.approx(2.0, rel=1e-9)


def test_sharded_data_parallelism_holds_up_to_512_and_falls_after():
    """From 64 to 512 GPUs little is lost; from 512 to 2,048 half is."""
    rates = {n: rules.sharded_data_parallel_scales_to(n).step.tokens_per_s_per_gpu for n in (64, 512, 1024, 2048)}
    assert rates[512] > 0.9 * rates[64]
    assert rates[512] > 1.1 * rates[1024] > 1.1 * rates[2048]


def test_the_price_of_tensor_parallelism_falls_with_the_hidden_size():
    models = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-2-13b", "llama-3-70b")
    hidden = [ff.load_model(name).hidden for name in models]
    prices = [rules.tensor_parallel_price(name) for name in models]
    assert hidden == sorted(hidden) and prices == sorted(prices, reverse=True)
    assert prices[0] > 2 * prices[-1] * 0.9


def test_tensor_parallelism_is_chosen_for_wide_models_only():
    """Free to choose, 64 H100s train a 3B model without TP and a 70B model with it."""
    work = ff.Workload(seq_len=4096, global_batch=512)
    cluster = ff.load_cluster("h100-sxm", gpus=64)
    narrow = ff.plan(ff.load_model("llama-3.2-3b"), cluster, work, explain=False).plans[0]
    wide = ff.plan(ff.load_model("llama-3-70b"), cluster, work, explain=False).plans[0]
    assert narrow.layout.tp == 1 < wide.layout.tp <= 8


# The Ultra-Scale Playbook's plot of tokens/s/GPU against TP with sequence parallelism: a 3B model, H100s, and the
# micro-batch that filled the memory. Its sequence length is not stated; 4096 is that of the same source's other runs.
MEASURED_TP = {2: (14167.3, 4), 4: (13460.2, 10), 8: (10888.5, 20)}


def test_tensor_parallel_scaling_has_the_measured_order():
    """Each doubling of TP loses throughput, as measured; and within a factor of 1.5 everywhere."""
    model = ff.load_model("llama-3.2-3b")
    rates = []
    for tp, (measured, micro_batch) in MEASURED_TP.items():
        work = ff.Workload(seq_len=4096, global_batch=micro_batch)
        cluster = ff.load_cluster("h100-sxm", gpus=tp)
        est = ff.estimate(model, cluster, work, ff.Layout(tp=tp, micro_batch=micro_batch))
        rates.append(est.step.tokens_per_s_per_gpu)
        assert 1 / 1.5 < rates[-1] / measured < 1.5
    assert rates == sorted(rates, reverse=True)


def test_the_document_is_up_to_date(computed):
    """The table says what is computed now; `python benchmarks/rules_of_thumb.py --write` brings it up to date."""
    text = rules.DOCUMENT.read_text()
    rows = re.findall(r"^\| ([^|]+) \|.*\| ([\d.]+) \|$", text, flags=re.MULTILINE)
    stated = {rule: float(ratio) for rule, ratio in rows}
    assert stated.keys() == {row.rule for row in computed.values()}
    for row in computed.values():
        assert stated[row.rule] == pytest.approx(row.ratio, rel=0.1), f"run {_FILE.name} --write"
