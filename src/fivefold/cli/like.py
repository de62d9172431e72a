"""`fivefold plan --like`: a plan file's recipe on another cluster or runtime, beside the best free layout there."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from fivefold.cli.flags import ClusterFlags, LayoutFlags, ModelFlags, RuntimeFlags, WorkFlags
from fivefold.cli.problem import Question, estimate_question, is_plan_file
from fivefold.errors import FivefoldError
from fivefold.estimate import Problem
from fivefold.estimate.planfile import load_plan
from fivefold.runtime import load_runtime
from fivefold.search import Plan
from fivefold.search.moving import Moved, move


def plan_like(
    like: str,
    model_flags: ModelFlags,
    cluster: ClusterFlags,
    work: WorkFlags,
    runtime: RuntimeFlags,
    layout: LayoutFlags,
    pins: dict[str, Any],
    top: int,
    objective: str,
) -> tuple[Question, Plan, Moved]:
    """The question on the new cluster, the free search's answer to it, and the plan moved there."""
    if not is_plan_file(like):
        raise FivefoldError(
            f"--like {like[:60]!r} is not a plan file (.toml), such as fivefold plan --save writes.",
            code="bad-plan-file",
            option="--like",
            value=like[:100],
        )
    saved = load_plan(like)
    before = saved.estimate()
    if before.step is None:
        raise FivefoldError(
            f"--like {like[:60]!r}: its layout breaks a rule of {saved.runtime} and would not start where it comes "
            f"from: {before.violations[0].message}",
            code="bad-plan",
            option="--like",
            value=like[:100],
        )
    question = estimate_question(like, model_flags, cluster, work, runtime, layout)
    problem = Problem(question.model, question.cluster, question.work, load_runtime(question.runtime))
    moved = move(before, problem, question.layout, question.runtime, fixed=tuple(pins))
    if moved.after is not None:
        question = dataclasses.replace(
            question, work=msgspec.convert(moved.after.inputs["workload"], type(question.work))
        )
    found = question.plan(pins, top, objective)
    return question, found, msgspec.structs.replace(moved, best_gain_s=_gain(moved, found))


def _gain(moved: Moved, found: Plan) -> float | None:
    best = found.plans[0].step if found.plans else None
    if best is None or moved.after is None or moved.after.step is None:
        return None
    return moved.after.step.seconds.value - best.seconds.value
