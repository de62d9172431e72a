"""Small problems and an enumeration that knows nothing of the search: nested loops over option values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.cluster import Cluster, load_cluster
from fivefold.estimate import Problem
from fivefold.estimate.estimate import rule_context
from fivefold.layout import Layout, Recompute, Workload
from fivefold.layout.rules import violations
from fivefold.model import load_model
from fivefold.model.spec import BlockRun, ModelSpec
from fivefold.runtime import load_runtime

RECOMPUTE: dict[str, list[Recompute]] = {
    "dense": [Recompute(kind="selective", modules=parts) for parts in (("layernorm",), ("mlp",), ("layernorm", "mlp"))],
    "experts": [
        Recompute(kind="selective", modules=parts)
        for parts in (("layernorm",), ("moe_act",), ("layernorm", "moe_act"), ("moe",))
    ],
}


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def cut(name: str, layers: int) -> ModelSpec:
    """A catalogue model with its last run of blocks shortened so that `layers` are left."""
    model = load_model(name)
    *head, tail = model.runs
    return replace(model, runs=(*head, BlockRun(layers - sum(run.count for run in head), tail.block)))


def small_cluster(gpus: int, memory_gb: float, gpu: str = "h100-sxm", **options: Any) -> Cluster:
    """A cluster whose GPUs have less memory, so that a small model is as tight as a large one."""
    cluster = load_cluster(gpu, gpus=gpus, **options)
    return replace(cluster, gpu=replace(cluster.gpu, memory_bytes=int(memory_gb * 1e9)))


def every_layout(problem: Problem, *, replicas: bool = False) -> Iterator[Layout]:
    """Every combination of option values that obeys the runtime's rules, by loops.

    replicas: hybrid sharding with any number of replicas as well.
    """
    model, gpus, work, name = problem.model, problem.cluster.gpus, problem.work, problem.runtime.name
    context = rule_context(model, problem.cluster, work, name)
    recompute = [Recompute(), Recompute(kind="full")]
    if name == "megatron":
        recompute += [Recompute(kind="full", layers=n) for n in (1, 2, 4, 8) if n < model.layers]
        recompute += RECOMPUTE["experts" if model.is_moe else "dense"]
    else:
        recompute.append(Recompute(kind="selective"))
    uneven = [{}, *({"account_for_embedding": e, "account_for_loss": h} for e, h in ((1, 1), (0, 1), (1, 0)))]
    n = divisors(gpus)
    for tp, cp, pp in product(n, n, [p for p in n if p <= model.layers]):
        if gpus % (tp * cp * pp):
            continue
        ranks = gpus // (tp * pp)
        for kind, vpp, ep, etp, zero, copies, sp, micro_batch, again, ends in product(
            ("p2p", "a2a") if cp > 1 else ("p2p",),
            range(1, model.layers // pp + 1) if pp > 1 else (1,),
            n if model.is_moe else (1,),
            sorted({1, tp}) if model.is_moe else (1,),
            problem.runtime.zero_stages,
            divisors(ranks) if replicas else (1,),
            (True, False) if tp > 1 else (False,),
            divisors(work.global_batch),
            recompute,
            uneven if pp > 1 and name == "megatron" else [{}],
        ):
            layout = Layout(
                tp=tp,
                cp=cp,
                cp_kind=kind,
                pp=pp,
                vpp=vpp,
                ep=ep,
                etp=etp,
                zero=zero,
                dp_replicate=copies,
                sequence_parallel=sp,
                micro_batch=micro_batch,
                recompute=again,
                **{option: bool(value) for option, value in ends.items()},
            )
            if not violations(layout, context):
                yield layout


@pytest.fixture(scope="session")
def problem_of():
    def build(model: ModelSpec, cluster: Cluster, runtime: str = "megatron", **work: Any) -> Problem:
        load = Workload(**({"seq_len": 2048, "global_batch": 4} | work))
        return Problem(model, cluster, load, load_runtime(runtime))

    return build
