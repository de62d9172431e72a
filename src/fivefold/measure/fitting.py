"""A small robust fit: log factors that are 1 unless the runs say otherwise.

Logs of measured over predicted seconds are linear in the logs of the factors, to first order. Each factor's log has a
normal prior around 0, so that one run already moves what it can tell and three cannot bend seven; residuals have a
Student distribution, so that one odd run cannot steer; and their size is learned beside, so that runs which contradict
each other are believed less. Solved by reweighted least squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Degrees of freedom of the residuals' Student distribution: 1 has the heaviest tails, one run in ten may be anything.
_TAILS = 1.0
# Residuals are expected at this size, and that belief weighs as much as so many runs.
_EXPECTED, _BELIEF = 0.08, 3.0
_ROUNDS = 12
# How sharply factors are given up that make left-out runs worse: those that leave 1.1 times the plain errors keep
# 0.64 of their logs, those that leave 1.5 times keep 0.08. Fit: median errors of benchmarks/accuracy_calibrated.py.
_SHARPNESS = 8.0


@dataclass(frozen=True, slots=True)
class Solution:
    """logs: [K] of the factors. covariance: [K, K]. weights: [N] of the runs. residual: their expected size."""

    logs: np.ndarray
    covariance: np.ndarray
    weights: np.ndarray
    residual: float


def solve(slopes: np.ndarray, logs: np.ndarray, widths: np.ndarray) -> Solution:
    """The factors' logs x of logs ~ slopes x: [N, K], [N] and the priors' standard deviations [K]."""
    size, prior = len(logs), np.diag(1 / widths**2)
    variance = (_BELIEF * _EXPECTED**2 + float(logs @ logs)) / (_BELIEF + size)
    weights = np.ones(size)
    found, covariance = np.zeros(len(widths)), np.diag(widths**2)
    for _ in range(_ROUNDS):
        weighted = slopes * (weights / variance)[:, None]
        covariance = np.linalg.inv(slopes.T @ weighted + prior)
        found = covariance @ (weighted.T @ logs)
        left = (logs - slopes @ found) ** 2
        unsure = np.einsum("nk,kl,nl->n", slopes, covariance, slopes)
        variance = (_BELIEF * _EXPECTED**2 + float(weights @ (left + unsure))) / (_BELIEF + size)
        weights = (_TAILS + 1) / (_TAILS + left / variance)
    return Solution(found, covariance, weights, float(np.sqrt(variance)))


def left_out(slopes: np.ndarray, logs: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """[N] what is left of each run's log when the factors are fitted to the other runs alone."""
    every = np.arange(len(logs))
    return np.array([logs[i] - slopes[i] @ solve(slopes[every != i], logs[every != i], widths).logs for i in every])


def kept(logs: np.ndarray, apart: np.ndarray) -> float:
    """The share of the factors' logs that is worth keeping: 1 where the runs predict each other better with them than
    without, less the worse they do. logs: [N] of the runs without factors, apart: [N] what left_out leaves of them."""
    plain, left = float(np.abs(logs).sum()), float(np.abs(apart).sum())
    return 1.0 if left <= plain else 2 / (1 + (left / max(plain, np.finfo(float).tiny)) ** _SHARPNESS)
