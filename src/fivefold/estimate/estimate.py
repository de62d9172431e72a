"""`estimate`: one layout's memory, step time and their owners, from the batched kernel with a batch of one."""

from __future__ import annotations

from typing import Any

import msgspec

from fivefold.cluster import Cluster, apart, beside
from fivefold.cluster.calibration import Calibration
from fivefold.errors import FivefoldError
from fivefold.estimate.assumed import mixer_assumptions
from fivefold.estimate.calibrated import with_calibration
from fivefold.estimate.counted import flops_per_token, parameters
from fivefold.estimate.detail import Detail
from fivefold.estimate.host import check_host
from fivefold.estimate.kernel import Problem
from fivefold.estimate.option_assumptions import option_assumptions
from fivefold.estimate.result import (
    Assumption,
    Estimate,
    RuleViolation,
)
from fivefold.layout.columns import Columns
from fivefold.layout.layout import Layout
from fivefold.layout.rules import Context, Violation, violations
from fivefold.layout.stages import check_degrees, resolve_row
from fivefold.layout.typed import check_layout, check_workload
from fivefold.layout.workload import Workload
from fivefold.model.spec import ModelSpec
from fivefold.runtime import load_runtime
from fivefold.runtime.accelerators import caveat


def estimate(
    model: ModelSpec,
    cluster: Cluster,
    work: Workload,
    layout: Layout,
    runtime: str = "megatron",
    calibration: Calibration | None = None,
) -> Estimate:
    """Price one layout, with a calibration's factors where one is given or the cluster has one.

    A layout that breaks a rule of the runtime is not priced: `valid` is False, `violations` say which rules, and
    memory and step are None. Raises FivefoldError for input that has no meaning at all (unknown runtime, degree 0).
    """
    profile = load_runtime(runtime)
    check_inputs(model, cluster, work)
    cluster = with_calibration(cluster, calibration)
    check_layout(layout)
    check_degrees(layout, cluster.gpus)
    columns = Columns.from_layouts([layout], cluster.gpus, work)
    resolved = resolve_row(columns, model, runtime)
    context = rule_context(model, cluster, work, runtime)
    broken = tuple(as_violation(found) for found in violations(columns, context))
    problem = Problem(model, cluster, work, profile)
    check_host(problem)
    detail = None if broken else Detail(problem, columns, resolved)
    return Estimate(
        layout=resolved,
        valid=not broken,
        violations=broken,
        fits=None if detail is None else detail.fits,
        assumptions=assumptions(problem),
        memory=None if detail is None else detail.memory,
        step=None if detail is None else detail.step,
        params=parameters(model, work, profile),
        flops_per_token=flops_per_token(problem, 0.0) if detail is None else detail.flops,
        traffic=() if detail is None else detail.traffic,
        inputs={**inputs_of(problem, runtime), "layout": msgspec.to_builtins(layout)},
    )


def check_inputs(model: ModelSpec, cluster: Cluster, work: Workload) -> None:
    """FivefoldError where an argument is not what it should be: a name instead of a loaded model, a fraction..."""
    for value, kind, loader in ((model, ModelSpec, "load_model"), (cluster, Cluster, "load_cluster")):
        if not isinstance(value, kind):
            raise FivefoldError(
                f"Expected a {kind.__name__}, got {type(value).__name__}. Load one with fivefold.{loader}(...).",
                code="wrong-type",
                option=kind.__name__,
                value=str(value)[:200],
                legal=kind.__name__,
            )
    check_workload(work)


def rule_context(model: ModelSpec, cluster: Cluster, work: Workload, runtime: str) -> Context:
    """What the rules look at beside the layout."""
    return Context(
        model=model,
        cluster_gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node,
        scale_up_size=cluster.spans[0],
        work=work,
        runtime=runtime,
    )


def inputs_of(problem: Problem, runtime: str) -> dict[str, Any]:
    """Every input and default that was used, resolved."""
    model, cluster = problem.model, problem.cluster
    return {
        "model": {**msgspec.to_builtins(model), "layers": model.layers},
        "cluster": cluster.to_dict(),
        "workload": msgspec.to_builtins(problem.work),
        "runtime": {"name": problem.runtime.name, "versions": problem.runtime.versions, "asked": runtime},
    }


def assumptions(problem: Problem) -> tuple[Assumption, ...]:
    """The numbers of the runtime and of the GPU's compute curve that the estimate took for granted."""
    profile = problem.runtime
    rows = [
        Assumption(field=f"runtime.{key}", value=getattr(profile, key), source=source)
        for key, source in profile.sources.items()
    ]
    gpu = problem.cluster.gpu
    rows += [
        Assumption(field=f"gpu.{key}", value=_plain(getattr(gpu, key, None)), source=source)
        for key, source in gpu.sources.items()
    ]
    rows += [
        Assumption(field=f"link.{link.name}.bandwidth_per_s", value=link.bandwidth_per_s, source=link.source)
        for link in problem.cluster.links
    ]
    cluster = problem.cluster
    host = cluster.host_source or "given, 1.0 by default"
    rows += [
        Assumption(field="cluster.host_work_ratio", value=cluster.host_work_ratio, source=host),
        Assumption(field="cluster.gpu_spread", value=apart.SPREAD, source=apart.SOURCE),
        Assumption(field="cluster.slower_beside_collectives", value=beside.SLOWER, source=beside.SOURCE),
    ]
    if problem.fit is not None:
        source = f"{problem.fit.provenance}: {problem.fit.source}"
        rows += [
            Assumption(field=f"calibration.{name}", value=factor, source=source)
            for name, factor in problem.fit.factors.items()
        ]
    said = caveat(profile.name, gpu.vendor)
    if said is not None:
        rows.append(Assumption(field="runtime.hardware", value=gpu.vendor, source=said))
    rows += mixer_assumptions(problem.model)
    rows += option_assumptions(problem)
    if problem.model.is_moe:
        rows.append(
            Assumption(field="workload.moe_imbalance", value=problem.work.moe_imbalance, source="given, 1.0 by default")
        )
    return tuple(rows)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, dict, type(None))) else str(value)


def as_violation(found: Violation) -> RuleViolation:
    """A broken rule as an estimate says it."""
    return RuleViolation(
        id=found.id,
        option=found.option,
        value=found.value,
        legal=found.legal,
        message=found.message,
        source=found.source,
        runtimes=tuple(found.runtimes),
    )


__all__ = [
    "Estimate",
    "as_violation",
    "assumptions",
    "check_inputs",
    "estimate",
    "flops_per_token",
    "inputs_of",
    "parameters",
    "rule_context",
]
