"""Parameters and FLOPs per token of what is trained."""

from __future__ import annotations

from fivefold.estimate.adapters import count_adapters
from fivefold.estimate.kernel import Problem
from fivefold.estimate.result import (
    Flops,
    Params,
)
from fivefold.layout.workload import Workload
from fivefold.model import count_params, training_flops_per_token
from fivefold.model.spec import ModelSpec
from fivefold.runtime import Profile


def parameters(model: ModelSpec, work: Workload, runtime: Profile) -> Params:
    counts = count_params(model)
    trained = None if work.lora is None else count_adapters(model, work.lora, runtime)[0]
    return Params(total=counts.total, active=counts.active, trained=trained)


def flops_per_token(problem: Problem, recomputed: float) -> Flops:
    """Training FLOPs per token: hardware is what is executed, causal attention and recomputation included. Causal and
    hardware count the pairs inside documents where a sequence holds several; noncausal charges whole squares."""
    model, seq = problem.model, problem.work.seq_len
    saved = _without_weight_gradients(problem)
    causal = training_flops_per_token(model, problem.work.attended_seq, "causal") - saved
    return Flops(
        noncausal=float(training_flops_per_token(model, seq, "noncausal") - saved),
        causal=float(causal),
        hardware=float(causal + recomputed),
    )


def _without_weight_gradients(problem: Problem) -> float:
    """FLOPs per token that training adapters saves: the weight gradients of frozen layers, less the adapters' own."""
    model, lora = problem.model, problem.work.lora
    if lora is None:
        return 0.0
    # Attention's part grows with the keys, which leaves what the layers take.
    one, two = (training_flops_per_token(model, keys, "noncausal") for keys in (1, 2))
    return float(2 * one - two) / 3 - 6.0 * count_adapters(model, lora, problem.runtime)[1]
