"""Small problems and an enumeration that knows nothing of the search: nested loops over option values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.cluster import Cluster, load_cluster
from fivefold.estimate import Estimate, Problem, estimate
from fivefold.estimate.estimate import rule_context
from fivefold.layout import Columns, Layout, Recompute, Workload
from fivefold.layout.rules import valid_mask
from fivefold.model import load_model
from fivefold.model.spec import BlockRun, LatentAttention, ModelSpec
from fivefold.runtime import load_runtime
from fivefold.search import Plan, plan

_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("core_attn",)),
    ("", ("layernorm",)),
    ("dense", ("mlp",)),
    ("dense", ("layernorm", "mlp")),
    ("experts", ("moe_act",)),
    ("experts", ("layernorm", "moe_act")),
    ("experts", ("moe",)),
    ("latent", ("mla_up_proj",)),
    ("latent", ("layernorm", "moe_act", "mla_up_proj")),
)


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


def _recomputations(model: ModelSpec, runtime: str) -> list[Recompute]:
    recompute = [Recompute(), Recompute(kind="full")]
    if runtime != "megatron":
        return [*recompute, Recompute(kind="selective")]
    latent = any(isinstance(block.mixer, LatentAttention) for block in model.kinds)
    has = {"": True, "dense": not model.is_moe, "experts": model.is_moe, "latent": latent}
    recompute += [Recompute(kind="selective", modules=parts) for what, parts in _PARTS if has[what]]
    return recompute + [Recompute(kind="full", layers=n) for n in range(1, model.layers)]


def every_layout(problem: Problem) -> list[Layout]:
    """Every combination of option values that obeys the runtime's rules, by loops."""
    work, name = problem.work, problem.runtime.name
    layouts = list(_combinations(problem))
    columns = Columns.from_layouts(layouts, problem.cluster.gpus, work)
    valid = valid_mask(columns, rule_context(problem.model, problem.cluster, work, name))
    return [layout for layout, obeys in zip(layouts, valid, strict=True) if obeys]


def _combinations(problem: Problem) -> Iterator[Layout]:
    model, gpus, work, name = problem.model, problem.cluster.gpus, problem.work, problem.runtime.name
    recompute = _recomputations(model, name)
    uneven = [{}, *({"account_for_embedding": e, "account_for_loss": h} for e, h in ((1, 1), (0, 1), (1, 0)))]
    n = divisors(gpus)
    for tp, cp, pp in product(n, n, [p for p in n if p <= model.layers]):
        if gpus % (tp * cp * pp):
            continue
        for kind, vpp, ep, etp, zero, sp, micro_batch, again, ends in product(
            ("p2p", "a2a") if cp > 1 else ("p2p",),
            range(1, model.layers // pp + 1) if pp > 1 else (1,),
            n if model.is_moe else (1,),
            sorted({1, tp}) if model.is_moe else (1,),
            problem.runtime.zero_stages,
            (True, False) if tp > 1 else (False,),
            divisors(work.global_batch),
            recompute,
            uneven if pp > 1 and name == "megatron" else [{}],
        ):
            yield Layout(
                tp=tp,
                cp=cp,
                cp_kind=kind,
                pp=pp,
                vpp=vpp,
                ep=ep,
                etp=etp,
                zero=zero,
                sequence_parallel=sp,
                micro_batch=micro_batch,
                recompute=again,
                **{option: bool(value) for option, value in ends.items()},
            )


def problem_of(model: ModelSpec, cluster: Cluster, runtime: str = "megatron", **work: Any) -> Problem:
    """A problem with 2048 tokens x 4 sequences unless `work` says otherwise."""
    load = Workload(**({"seq_len": 2048, "global_batch": 4} | work))
    return Problem(model, cluster, load, load_runtime(runtime))


def found(problem: Problem, **options: Any) -> Plan:
    """The search's answer to a problem; reasons only on request."""
    options = {"explain": False} | options
    return plan(problem.model, problem.cluster, problem.work, problem.runtime.name, **options)


def priced(problem: Problem, layout: Layout) -> Estimate:
    return estimate(problem.model, problem.cluster, problem.work, layout, problem.runtime.name)


@pytest.fixture(scope="session")
def help_with():
    """The functions above, for test modules: help_with.cut(...), help_with.problem_of(...)."""
    functions = (cut, small_cluster, every_layout, problem_of, found, priced)
    return SimpleNamespace(**{function.__name__: function for function in functions})
