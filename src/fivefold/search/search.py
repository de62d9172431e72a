"""`plan`: search the whole space of layouts for one model, cluster and workload."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any, get_args

from msgspec.structs import replace

from fivefold.cluster import Cluster
from fivefold.cluster.calibration import Calibration
from fivefold.errors import FivefoldError
from fivefold.estimate import Problem
from fivefold.estimate.calibrated import with_calibration
from fivefold.estimate.estimate import check_inputs
from fivefold.estimate.host import check_host
from fivefold.layout.workload import Workload
from fivefold.model.spec import ModelSpec
from fivefold.runtime import load_runtime
from fivefold.search.answer import answer
from fivefold.search.found import Found, search
from fivefold.search.gpu_counts import usual_counts, with_gpus
from fivefold.search.pins import checked_pins
from fivefold.search.result import Objective, Plan
from fivefold.search.space import LISTED

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def plan(
    model: ModelSpec,
    cluster: Cluster,
    work: Workload,
    runtime: str = "megatron",
    top: int = LISTED,
    pins: dict[str, Any] | None = None,
    objective: Objective = "tokens_per_s",
    explain: bool = True,
    calibration: Calibration | None = None,
) -> Plan:
    """The best layouts and the reasons for the first.

    pins: option name to one value or several, e.g. {"tp": [4, 8], "zero": 1}. objective: "tokens_per_s" (default),
    "memory" (least peak), "gpus" (fewest GPUs that fit, then fastest), "time" or "cost" of work.tokens. calibration:
    factors fitted to the user's own runs; None: the cluster's, if it has one.
    A question without an answer gives a Plan without plans, whose `advice` says what is missing. Raises FivefoldError
    for bad input.
    """
    question = searched(model, cluster, work, runtime, pins, top, objective, calibration)
    return question.plan(top, explain=explain, advise=True)


@dataclass(slots=True)
class Searched:
    """A search, which took `seconds`, and can answer more than once: shortly, and then with reasons."""

    found: Found
    runtime: str
    pins: dict[str, tuple[Any, ...]]
    objective: Objective
    seconds: float

    def plan(self, top: int, *, explain: bool, advise: bool | None = None) -> Plan:
        """The plan. explain: with reasons. advise: with advice where nothing fits, by default as `explain`."""
        start = perf_counter()
        advise = explain if advise is None else advise
        answered = answer(self.found, self.runtime, top, self.objective, self.pins, explain, advise)
        return replace(answered, seconds_used=self.seconds + perf_counter() - start)


def searched(
    model: ModelSpec,
    cluster: Cluster,
    work: Workload,
    runtime: str = "megatron",
    pins: dict[str, Any] | None = None,
    top: int = LISTED,
    objective: Objective = "tokens_per_s",
    calibration: Calibration | None = None,
) -> Searched:
    """The search of `plan` without its answer yet, which lists at most `top`. Raises FivefoldError as plan does."""
    start = perf_counter()
    check_inputs(model, cluster, work)
    _check(objective, top, work)
    problem = Problem(model, with_calibration(cluster, calibration), work, load_runtime(runtime))
    check_host(problem)
    checked = checked_pins(pins)
    if objective == "gpus":
        problem = _fewest_gpus(problem, runtime, checked)
    found = search(problem, runtime, checked, top)
    return Searched(found, runtime, checked, objective, perf_counter() - start)


def _fewest_gpus(problem: Problem, runtime: str, pins: dict[str, tuple[Any, ...]]) -> Problem:
    """The same problem on the fewest GPUs, at most those given, on which some layout fits."""
    for gpus in usual_counts(problem.cluster.gpus_per_node, problem.cluster.gpus):
        smaller = with_gpus(problem, gpus)
        try:
            found = search(smaller, runtime, pins, most=0)
        except FivefoldError:
            continue
        if len(found.rows):
            return smaller
    return problem


def _check(objective: str, top: int, work: Workload) -> None:
    if objective not in OBJECTIVES:
        raise FivefoldError(
            f"--objective {objective} is not known. Legal: {', '.join(OBJECTIVES)}.",
            code="unknown-objective",
            option="--objective",
            value=objective,
            legal=list(OBJECTIVES),
        )
    check_top(top)
    needs = {"time": ("tokens",), "cost": ("tokens", "price")}.get(objective, ())
    for name in needs:
        if getattr(work, name) is None:
            raise FivefoldError(
                f"--objective {objective} needs --{name}: the token budget"
                + (" and the price of one GPU for one hour." if objective == "cost" else "."),
                code="missing-option",
                option=f"--{name}",
            )


def check_top(top: int) -> None:
    """Raises FivefoldError unless `top` is a number of answers that can be shown."""
    if not 1 <= top <= 100:
        raise FivefoldError(
            f"--top {top} is out of range: ask for 1 to 100.",
            code="bad-top",
            option="--top",
            value=top,
            legal="1 to 100",
        )
