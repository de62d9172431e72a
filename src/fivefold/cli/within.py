"""`fivefold plan --days`: the search on one number of GPUs after the other, each with that number's own defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from fivefold.cli.flags import ClusterFlags, ModelFlags, RuntimeFlags, WorkFlags
from fivefold.cli.problem import DEFAULT_GPU, Question, named_cluster, plan_question
from fivefold.cli.values import positive
from fivefold.errors import FivefoldError
from fivefold.estimate import Problem
from fivefold.runtime import load_runtime
from fivefold.search import Plan
from fivefold.search.in_time import MOST_GPUS, fewest_in_time, too_late
from fivefold.search.search import Searched, searched


def plan_within(
    days: float,
    model: str,
    model_flags: ModelFlags,
    cluster: ClusterFlags,
    work: WorkFlags,
    runtime: RuntimeFlags,
    pins: dict[str, Any],
    top: int,
    objective: str,
) -> tuple[Question, Plan]:
    """The question on the fewest GPUs that finish in `days`, and its answer with every count that was tried; on the
    most GPUs, with advice and no plans, where none does."""
    _check(days, work.tokens, objective)
    most = cluster.gpus or MOST_GPUS
    named = cluster.cluster or cluster.gpu or DEFAULT_GPU
    node = named_cluster(cluster, named, gpus_per_node=cluster.gpus_per_node).gpus_per_node

    def question_on(gpus: int) -> Question:
        return plan_question(model, model_flags, dataclasses.replace(cluster, gpus=gpus), work, runtime)

    done: dict[int, Searched] = {}

    def plan_at(gpus: int) -> Plan:
        asked = question_on(gpus)
        while len(done) > 1:  # searches are large; the answer is the last one or the one before
            done.pop(next(iter(done)))
        done[gpus] = searched(asked.model, asked.cluster, asked.work, asked.runtime, dict(pins), top)
        return done[gpus].plan(1, explain=False)

    start = question_on(node)
    problem = Problem(start.model, start.cluster, start.work, load_runtime(start.runtime))
    found, rows = fewest_in_time(plan_at, problem, days, most)
    if found is not None:
        answer = done[found].plan(top, explain=True)
        return question_on(found), msgspec.structs.replace(answer, counts=rows)
    largest = max(rows, key=lambda row: (row.seconds is not None, row.gpus)).gpus
    answer = plan_at(largest)
    if not answer.plans:
        answer = done[largest].plan(1, explain=True)
    return question_on(largest), msgspec.structs.replace(
        answer,
        plans=(),
        pareto=(),
        fastest=None,
        budget=None,
        counts=rows,
        advice=(too_late(rows, days, most), *answer.advice),
    )


def _check(days: float, tokens: str | None, objective: str) -> None:
    positive("--days", days)
    if tokens is None:
        raise FivefoldError(
            "--days needs --tokens, the token budget that has to be done by then, for example --tokens 15T.",
            code="missing-option",
            option="--tokens",
        )
    if objective != "tokens_per_s":
        raise FivefoldError(
            f"--days looks for the fewest GPUs, and --objective {objective[:40]} for something else. Give one of them.",
            code="contradiction",
            option="--objective",
            value=objective[:40],
        )
