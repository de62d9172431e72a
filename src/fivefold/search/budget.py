"""Time and cost of a whole run: a token budget at the step's rate, and what failures and checkpoints add to it.

The failure model is Daly's (A higher order estimate of the optimum checkpoint interval for restart dumps, 2006):
failures come at a constant rate, each loses the work since the last checkpoint and the time to restart, and training
waits while a checkpoint is written.
"""

from __future__ import annotations

from math import exp, expm1, sqrt

import msgspec

from fivefold.estimate.optimizers import OPTIMIZERS
from fivefold.estimate.result import Estimate
from fivefold.layout.workload import Workload

# Llama 3 (Dubey et al. 2024, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs, that is one per
# 16,384 x 54 x 24 / 419 = 50,676 GPU hours.
GPU_MTBF_HOURS = 50_000.0
# The same, section 3.3.1: storage sustains 2 TB/s for a cluster of 16,384 GPUs, 1 GB/s for each node of eight.
CHECKPOINT_PER_NODE_PER_S = 1e9
# Detection, replacement of a node, start and loading. From memory; Llama 3's own "more than 90% effective training
# time" at 3.1 h between failures leaves at most 14 minutes.
RESTART_S = 600.0
_MASTER_BYTES = 4
_SOURCES = {
    "gpu_mtbf_hours": "default: Llama 3, 419 unexpected interruptions in 54 days on 16,384 GPUs",
    "checkpoint_bytes_per_s": "default: Llama 3's storage, 2 TB/s for 16,384 GPUs, in proportion to the nodes",
    "restart_s": "default: 10 minutes to detect, replace and load (from memory)",
}


class Reliability(msgspec.Struct, frozen=True, kw_only=True):
    """What failures do to a run.

    gpu_mtbf_hours: of one GPU with its share of the rest. mtbf_s: between failures of the whole job.
    checkpoint_bytes: weights, master and optimizer states. checkpoint_s: to write them. interval_s: of training between
    two checkpoints, Daly's optimum. restart_s: from a failure to the first new step. failures: expected in the run.
    goodput: training time over wall time. seconds, gpu_hours, cost: of the run on the wall clock.
    sources: where those of the numbers come from that were not given.
    """

    gpu_mtbf_hours: float
    mtbf_s: float
    checkpoint_bytes: int
    checkpoint_bytes_per_s: float
    checkpoint_s: float
    interval_s: float
    restart_s: float
    failures: float
    goodput: float
    seconds: float
    gpu_hours: float
    cost: float | None
    sources: dict[str, str]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Time and cost of a token budget with the first plan. seconds, gpu_hours, cost: of the training alone; those with
    failures and checkpoints are in `reliability`. cost is in the currency of the price, None without one."""

    tokens: float
    seconds: float
    gpu_hours: float
    cost: float | None
    reliability: Reliability | None = None


def budget_of(work: Workload, estimate: Estimate) -> Budget | None:
    """Time and cost of `work.tokens` with one layout; None without a token budget or a step time."""
    if work.tokens is None or estimate.step is None:
        return None
    seconds = work.tokens / estimate.step.tokens_per_s
    gpu_seconds = work.tokens / estimate.step.tokens_per_s_per_gpu
    hours = gpu_seconds / 3600
    cluster = estimate.inputs["cluster"]
    return Budget(
        tokens=work.tokens,
        seconds=seconds,
        gpu_hours=hours,
        cost=None if work.price is None else hours * work.price,
        reliability=reliability(
            work,
            estimate.params.total if estimate.params.trained is None else estimate.params.trained,
            seconds,
            cluster["gpus"],
            -(-cluster["gpus"] // cluster["gpus_per_node"]),
        ),
    )


def reliability(work: Workload, parameters: int, seconds: float, gpus: int, nodes: int) -> Reliability:
    """A run of `seconds` of training on `gpus`, with failures at the rate of the workload or of Llama 3's cluster."""
    given = {
        "gpu_mtbf_hours": work.gpu_mtbf_hours,
        "checkpoint_bytes_per_s": work.checkpoint_bytes_per_s,
        "restart_s": work.restart_s,
    }
    hours = work.gpu_mtbf_hours or GPU_MTBF_HOURS
    rate = work.checkpoint_bytes_per_s or CHECKPOINT_PER_NODE_PER_S * nodes
    restart_s = RESTART_S if work.restart_s is None else work.restart_s
    size = checkpoint_bytes(work, parameters)
    mtbf_s, write_s = hours * 3600 / gpus, size / rate
    interval_s = best_interval(write_s, mtbf_s)
    share = goodput(interval_s, write_s, restart_s, mtbf_s)
    wall_s = seconds / share if share > 0 else float("inf")
    gpu_hours = wall_s * gpus / 3600
    return Reliability(
        gpu_mtbf_hours=hours,
        mtbf_s=mtbf_s,
        checkpoint_bytes=size,
        checkpoint_bytes_per_s=rate,
        checkpoint_s=write_s,
        interval_s=interval_s,
        restart_s=restart_s,
        failures=wall_s / mtbf_s,
        goodput=share,
        seconds=wall_s,
        gpu_hours=gpu_hours,
        cost=None if work.price is None else gpu_hours * work.price,
        sources={name: text for name, text in _SOURCES.items() if given[name] is None},
    )


def checkpoint_bytes(work: Workload, parameters: int) -> int:
    """Bytes that a restart needs: low-precision weights, fp32 master and optimizer states of what is trained."""
    optimizer = OPTIMIZERS[work.optimizer]
    return int(parameters * (work.compute_bytes + _MASTER_BYTES + max(optimizer.matrix_bytes, optimizer.vector_bytes)))


def best_interval(write_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints that lose least (Daly 2006, equation 37); Young's sqrt(2 d M) is its
    first term."""
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    return sqrt(2 * write_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - write_s


def goodput(interval_s: float, write_s: float, restart_s: float, mtbf_s: float) -> float:
    """Training time over expected wall time (Daly 2006, equation 20); failures may strike while restarting too."""
    if interval_s <= 0:
        return exp(-restart_s / mtbf_s)  # checkpoints that take no time may be written all the time
    try:
        return interval_s / (mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + write_s) / mtbf_s))
    except OverflowError:
        return 0.0
