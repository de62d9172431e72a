"""The field's rules of thumb, each as a comparison that the cost model computes.

    python benchmarks/rules_of_thumb.py            print the table of docs/rules_of_thumb.md
    python benchmarks/rules_of_thumb.py --write    put it there

tests/search/test_rules_of_thumb.py runs the same comparisons and asserts what they have to show.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fivefold as ff
from fivefold.estimate import Estimate

DOCUMENT = Path(__file__).parent.parent / "docs" / "rules_of_thumb.md"
FULL = ff.Recompute(kind="full")


@dataclass(frozen=True)
class Comparison:
    """One computed pair. better, worse: words; ratio: how many times slower, or larger, `worse` is per unit of work."""

    rule: str
    question: str
    better: str
    worse: str
    ratio: float


def _work(seq_len: int, global_batch: int) -> ff.Workload:
    return ff.Workload(seq_len=seq_len, global_batch=global_batch)


def _price(model: str, gpus: int, work: ff.Workload, runtime: str = "megatron", **layout: Any) -> Estimate:
    est = ff.estimate(
        ff.load_model(model), ff.load_cluster("h100-sxm", gpus=gpus), work, ff.Layout(**layout), runtime=runtime
    )
    if not est.valid:
        raise ValueError(est.violations[0].message)
    return est


def _best(model: str, gpus: int, work: ff.Workload, runtime: str = "megatron", **pins: Any) -> Estimate:
    """The fastest layout that fits under pins."""
    cluster = ff.load_cluster("h100-sxm", gpus=gpus)
    plan = ff.plan(ff.load_model(model), cluster, work, runtime=runtime, pins=pins, top=1, explain=False)
    if plan.fastest is None:
        raise ValueError(f"nothing fits: {plan.advice}")
    return plan.plans[plan.fastest]


def _seconds(est: Estimate) -> float:
    if est.step is None:
        raise ValueError("the layout breaks a rule")
    return est.step.seconds.value


def _rate(est: Estimate) -> float:
    return est.step.tokens_per_s_per_gpu if est.step else 0.0


def _degrees(est: Estimate) -> str:
    named = [f"{axis}{getattr(est.layout, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(est.layout, axis) > 1]
    return " ".join(named) or "data parallel only"


def _slower(rule: str, question: str, better: Estimate, worse: Estimate) -> Comparison:
    texts = [f"{_degrees(est)}: {_rate(est):,.0f} tokens/s/GPU" for est in (better, worse)]
    return Comparison(rule, question, *texts, ratio=_rate(better) / _rate(worse))


def tensor_parallel_leaves_the_node() -> Comparison:
    work = _work(8192, 256)
    inside, across = (_price("llama-3-70b", 128, work, tp=tp, pp=4) for tp in (8, 16))
    return _slower("TP stays in the node", "Llama-3-70B, 128 H100, PP4", inside, across)


def zero3_under_a_pipeline() -> Comparison:
    work = _work(8192, 512)
    alone, piped = (_price("llama-3-70b", 64, work, "torchtitan", zero=3, pp=pp, recompute=FULL) for pp in (1, 4))
    return _slower("ZeRO-3 is not combined with PP", "Llama-3-70B, 64 H100, FSDP2", alone, piped)


def sharded_data_parallel_scales_to(gpus: int) -> Estimate:
    """Fully sharded data parallelism alone, one sequence of 4,096 tokens per GPU."""
    return _price("llama-2-13b", gpus, _work(4096, gpus), "torchtitan", zero=3, recompute=FULL)


def sharded_data_parallel_stops_scaling() -> Comparison:
    small, large = sharded_data_parallel_scales_to(512), sharded_data_parallel_scales_to(1024)
    found = _slower("pure ZeRO-3 holds to about 512 GPUs", "Llama-2-13B, 1 sequence of 4,096 per GPU", small, large)
    texts = [f"{gpus} GPUs: {_rate(est):,.0f} tokens/s/GPU" for gpus, est in ((512, small), (1024, large))]
    return Comparison(found.rule, found.question, *texts, ratio=found.ratio)


def context_parallel_at_128k() -> Comparison:
    work = _work(131072, 32)
    free, without = _best("llama-3.1-8b", 32, work), _best("llama-3.1-8b", 32, work, cp=1)
    return _slower("CP from 128K tokens", "Llama-3.1-8B at 131,072 tokens, 32 H100, best plan", free, without)


def expert_parallel_for_experts() -> Comparison:
    work = _work(4096, 1024)
    free, without = _best("mixtral-8x7b", 64, work), _best("mixtral-8x7b", 64, work, ep=1)
    return _slower("EP for a mixture of experts", "Mixtral 8x7B, 64 H100, best plan", free, without)


def tensor_parallel_price(model: str) -> float:
    """How many times slower TP8 is than TP1 on 8 H100s, memory aside."""
    one, eight = (_price(model, 8, _work(4096, 64), tp=tp) for tp in (1, 8))
    return _rate(one) / _rate(eight)


def tensor_parallel_when_narrow() -> Comparison:
    work = _work(4096, 512)
    free, four = _best("llama-3.2-3b", 64, work), _best("llama-3.2-3b", 64, work, tp=4)
    return _slower("TP from hidden size 4096", "Llama-3.2-3B (hidden 3,072), 64 H100, best plan", free, four)


def pipeline_when_shallow() -> Comparison:
    work = _work(4096, 256)
    free, two = _best("llama-3-8b", 64, work, pp=1), _best("llama-3-8b", 64, work, pp=4)
    return _slower("PP from 50 blocks", "Llama-3-8B (32 blocks), 64 H100, best plan", free, two)


def pipeline_at_forty_blocks() -> Comparison:
    work = _work(4096, 256)
    piped, without = _best("llama-2-13b", 64, work, pp=2), _best("llama-2-13b", 64, work, pp=1)
    return _slower("PP from 50 blocks: does not hold", "Llama-2-13B (40 blocks), 64 H100, best plan", piped, without)


def reduction_bytes(zero: int) -> int:
    """Bytes that one rank sends to reduce gradients over 64 replicas; ZeRO-1 scatters what DP reduces everywhere."""
    est = _price("llama-3-8b", 64, _work(4096, 64), zero=zero)
    return sum(row.bytes_sent_per_rank for row in est.traffic if row.axis == "dp" and "reduce" in row.collective)


def reduce_scatter_is_half_an_all_reduce() -> Comparison:
    scatter, everywhere = reduction_bytes(1), reduction_bytes(0)
    return Comparison(
        "reduce-scatter is half an all-reduce",
        "Llama-3-8B, gradients in fp32 over 64 replicas",
        f"ZeRO-1 sends {scatter / 1e9:.1f} GB",
        f"ZeRO-0 sends {everywhere / 1e9:.1f} GB",
        everywhere / scatter,
    )


COMPARISONS: tuple[Callable[[], Comparison], ...] = (
    tensor_parallel_leaves_the_node,
    zero3_under_a_pipeline,
    sharded_data_parallel_stops_scaling,
    context_parallel_at_128k,
    expert_parallel_for_experts,
    tensor_parallel_when_narrow,
    pipeline_when_shallow,
    pipeline_at_forty_blocks,
    reduce_scatter_is_half_an_all_reduce,
)


def table() -> str:
    """The comparisons as a Markdown table."""
    lines = ["| rule | question | better | worse | ratio |", "|---|---|---|---|---|"]
    for compute in COMPARISONS:
        row = compute()
        lines.append(f"| {row.rule} | {row.question} | {row.better} | {row.worse} | {row.ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    from pages import print_or_put  # beside this script, which a test loads from elsewhere

    print_or_put(DOCUMENT, table(), sys.argv[1:])


if __name__ == "__main__":
    main()
