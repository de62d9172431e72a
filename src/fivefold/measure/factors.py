"""The factors of a calibration fitted to converted runs, and the priors that hold them.

Predictions are exact at every step of the fit: the same kernel, with the factors applied as an estimate applies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
from msgspec.structs import replace

from fivefold.cluster.calibration import CONSTANTS, Calibration, Constant, Fit
from fivefold.errors import FivefoldError
from fivefold.measure.convert import Case, Unconvertible
from fivefold.measure.fitting import Solution, kept, left_out, solve
from fivefold.measure.predict import Predicted, predict_all

# Standard deviation of the log of each factor between published stacks: chosen so that three runs of a stack predict
# its others best (benchmarks/accuracy_calibrated.py), rounded. Loose ones help some sources and harm others.
WIDTHS: dict[Constant, float] = {
    "products": 0.05,
    "attention": 0.03,
    "memory": 0.20,
    "scale_up": 0.20,
    "network": 0.10,
    "step": 0.5,
    "launch": 0.02,
}
_FAR = ("step", "launch")  # factors that matter little for most runs, and are moved far to see a difference
_ROUNDS = 4  # of pricing; the slopes are those at 1, near which the priors keep the factors
_SETTLED = 1e-3
_USUAL = 0.1  # half-width of the interval of a usual run, at which residuals have the size that `solve` expects


@dataclass(frozen=True, slots=True)
class Fitted:
    """N runs, K factors in the order of CONSTANTS.

    solution: as solved, with its logs times the share that is worth keeping. plain, fitted: [N] logs of the predicted
    seconds without and with the factors. left_out: [N] log error of each run with factors fitted to the others, to
    first order; NaN for a lone run. slopes: [N, K] at factors of 1. wide: [N] log half-widths of the runs' intervals.
    """

    solution: Solution
    slopes: np.ndarray
    plain: np.ndarray
    fitted: np.ndarray
    left_out: np.ndarray
    wide: np.ndarray

    @property
    def factors(self) -> dict[Constant, float]:
        return as_factors(self.solution.logs)


def fit(cases: Sequence[Case], widths: Mapping[Constant, float] = WIDTHS) -> Fitted:
    """Fit cases of one GPU and runtime, whose choices are made, that can be priced, and whose seconds are measured."""
    width = np.array([widths[name] for name in CONSTANTS])
    measured = np.log([float(case.run.measured_s or 0) for case in cases])
    ones = np.zeros(len(CONSTANTS))
    plain, wide = predicted(cases, ones)
    now, size = plain, wide / _USUAL  # a run that is less sure cold tells less
    slopes = slopes_at(cases, ones, now)
    per_size = slopes / size[:, None]
    left = measured - now  # what the factors have to explain, if all were linear
    solution = solve(per_size, left / size, width)
    for _ in range(_ROUNDS - 1):
        now = log_seconds(cases, solution.logs)
        left = measured - now + slopes @ solution.logs
        before, solution = solution, solve(per_size, left / size, width)
        if np.abs(slopes @ (solution.logs - before.logs)).max() < _SETTLED:
            break
    if len(cases) == 1:
        return Fitted(solution, slopes, plain, log_seconds(cases, solution.logs), np.full(1, np.nan), wide)
    apart = left_out(per_size, left / size, width)
    share = kept(left / size, apart)
    solution = dataclasses.replace(solution, logs=share * solution.logs)
    apart = (share * apart + (1 - share) * left / size) * size
    return Fitted(solution, slopes, plain, log_seconds(cases, solution.logs), apart, wide)


def slopes_at(cases: Sequence[Case], logs: np.ndarray, now: np.ndarray) -> np.ndarray:
    """[N, K] change of the logs of the predicted seconds, `now`, with each factor's log, by differences."""
    columns = []
    for at, name in enumerate(CONSTANTS):
        step = 0.5 if name in _FAR else 0.1
        moved = logs.copy()
        moved[at] += step
        columns.append((log_seconds(cases, moved) - now) / step)
    return np.stack(columns, axis=1)


def log_seconds(cases: Sequence[Case], logs: np.ndarray) -> np.ndarray:
    """[N] logs of the predicted seconds with factors of these logs. Raises FivefoldError for what cannot be priced."""
    return predicted(cases, logs)[0]


def predicted(cases: Sequence[Case], logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N] logs of the predicted seconds, and log half-widths of their intervals before any run is taken into account.

    These leave out how far the GPU's overall level may be off, because the runs themselves tell that.
    """
    found = predict_all([with_factors(case, as_factors(logs)) for case in cases])
    lost = next((each for each in found if isinstance(each, Unconvertible)), None)
    if lost is not None:
        raise FivefoldError(f"A run cannot be priced: {lost}", code="unpriced-run")
    seconds = [each.seconds for each in found if isinstance(each, Predicted)]
    return np.log([each.value for each in seconds]), np.log([each.high / each.value for each in seconds])


def as_factors(logs: np.ndarray) -> dict[Constant, float]:
    return {name: exp(value) for name, value in zip(CONSTANTS, logs.tolist(), strict=True)}


def with_factors(case: Case, factors: Mapping[Constant, float]) -> Case:
    """The case on its cluster with these factors."""
    gpu, experts = case.cluster.gpu.name, case.model.is_moe
    fit = Fit(gpu=gpu, runtime=case.runtime, runs=1, factors=dict(factors), spread=1.0, scale=1.0, experts=experts)
    return with_calibration(case, Calibration(fits=(fit,)))


def with_calibration(case: Case, calibration: Calibration) -> Case:
    """The case on its cluster with a calibration."""
    return replace(case, cluster=replace(case.cluster, calibration=calibration))
