"""A kernel of one layout under a profile with other numbers, and what the tests of those numbers read off it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.cluster.compute import streaming_seconds
from fivefold.estimate import Kernel, Problem
from fivefold.estimate.price import OWNERS
from fivefold.layout import Columns, Layout, Workload
from fivefold.layout.layout import RECOMPUTE_MODULES
from fivefold.layout.workload import Precision
from fivefold.runtime import load_runtime

TOKENS, HIDDEN, VOCAB = 2048, 1024, 4096
ONE = np.arange(1)
SELECTIVE = RECOMPUTE_MODULES.index("core_attn")


def kernel(
    model,
    layout: Layout,
    gpus: int = 16,
    runtime: str = "megatron",
    grad_dtype: Literal["fp32", "bf16"] = "fp32",
    dropout: bool = False,
    precision: Precision = "bf16",
    **changes: Any,
) -> Kernel:
    work = Workload(seq_len=TOKENS, global_batch=64, grad_dtype=grad_dtype, dropout=dropout, precision=precision)
    profile = replace(load_runtime(runtime), **changes)
    return Kernel(
        Problem(model, load_cluster("h100-sxm", gpus=gpus), work, profile), Columns.from_layouts([layout], gpus, work)
    )


def saved(k: Kernel) -> dict[str, float]:
    return {row.name: float(np.ravel(row.bytes)[0]) for row in k.ledgers[0].saved}


def streams(k: Kernel, name: str) -> tuple[float, float]:
    row = next(row for row in k.ledgers[0].streams if row.name == name)
    return float(np.ravel(row.forward_bytes)[0]), float(np.ravel(row.backward_bytes)[0])


def in_step_seconds(k: Kernel, moved: float, kernels: int) -> float:
    """What the GPU's memory takes for so many bytes, inside a step."""
    curve = k.pricer.curve
    return curve.in_step * float(streaming_seconds(curve, k.problem.cluster.gpu, moved, kernels))


def memory_seconds(k: Kernel, side: str) -> float:
    """Seconds of a block's operations that the GPU's memory bounds, in one pass."""
    return float(getattr(k.costs[0], side)[OWNERS.index("memory"), 0])
