"""What the commands' answers have in common: the estimate of a question, its ramp, and the JSON's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import convert

from fivefold.cli.problem import Question
from fivefold.errors import FivefoldError
from fivefold.estimate import Estimate
from fivefold.estimate import estimate as price
from fivefold.estimate.compare import Comparison, compare
from fivefold.estimate.problem import Problem
from fivefold.layout import Layout, RampPlan, plan_ramp_up
from fivefold.runtime import load_runtime

if TYPE_CHECKING:
    from fivefold.search.moving import Moved
    from fivefold.search.stages import Balance


def estimated(question: Question) -> Estimate:
    """The estimate of the question's own layout."""
    return price(question.model, question.cluster, question.work, question.layout, question.runtime)


def compared(questions: tuple[Question, Question]) -> Comparison:
    """Both sides priced and set against each other."""
    a, b = (estimated(question) for question in questions)
    return compare(a, b)


def balanced_stages(question: Question, found: Estimate) -> Balance:
    """The best blocks per stage of a layout that is legal."""
    from fivefold.search.stages import balance

    problem = Problem(question.model, question.cluster, question.work, load_runtime(question.runtime))
    return balance(problem, convert(found.inputs["layout"], Layout), question.runtime)


def ramp_of(question: Question, found: Estimate | None) -> tuple[RampPlan | None, tuple[str, ...]]:
    """The batch ramp-up for a layout, or a sentence on why this layout cannot have it."""
    if question.ramp is None or found is None:
        return None, ()
    try:
        ramp = plan_ramp_up(question.ramp, question.work, found.layout, option="--ramp")
    except FivefoldError as error:
        return None, (f"The ramp is not possible with this layout. {error.message}",)
    return ramp, tuple(ramp.notes)


def as_document(document: dict[str, Any], question: Question, **extra: Any) -> dict[str, Any]:
    """A library document with the flags' defaults among its inputs, and the command's own fields beside its body."""
    inputs = {**document["inputs"], "defaults": question.defaults, "ramp": msgspec.to_builtins(question.ramp)}
    return {**document, **msgspec.to_builtins(extra), "inputs": inputs}


def moved_document(moved: Moved | None) -> dict[str, Any] | None:
    """A moved plan without its estimates' inputs, but for the clusters that they are on."""
    if moved is None:
        return None
    fields = msgspec.to_builtins(moved)
    for name, estimate in (("before", moved.before), ("after", moved.after)):
        if estimate is not None:
            inputs = estimate.resolved_inputs()
            fields[name]["inputs"] = {key: inputs[key] for key in ("cluster", "workload", "layout")}
    return fields
