"""Ranks apart: equal GPUs differ in speed, a synchronised step takes as long as its slowest one, and the slowest of
more GPUs is slower.

Sinha et al., SC 2022, saw 8% of variation on average among GPUs of one model and one cluster, whatever the application.
The spread is fitted to how step times grow with the number of GPUs at constant work per GPU, each family of runs with a
level of its own, so that no level is fitted: 1.1 +- 0.2% (61 runs in 16 bit of NVIDIA's recipes on 8 to 2,048 H100),
1.2 +- 0.5% (10 runs of torchtitan and Megatron), 1.8 +- 2.9% (23 of llm-foundry on 16 to 128 A100).
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

SPREAD = 0.0125  # standard deviation of the seconds that equal GPUs take for equal work, relative
SOURCE = (
    "standard deviation of the speed of equal GPUs, for whose slowest a step waits: fit to how published steps grow "
    "with the number of GPUs"
)
# The constants of training steps (Curve.in_step) were fitted on one node: what its slowest GPU costs is in them.
_FITTED_ON = 8


@cache
def slowest(gpus: int) -> float:
    """Compute seconds of the slowest of `gpus` GPUs over those of the slowest of one node; 1 up to a node."""
    return 1 + SPREAD * max(_largest_of(gpus) - _largest_of(_FITTED_ON), 0.0)


def _largest_of(n: int) -> float:
    """Expected largest of n standard normal numbers (Blom 1958; within 0.02 from n = 8 on)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
