"""How much of a step belongs to owners whose constants are less sure than those of matrix products and attention.

Those are timed as kernels. How many passes over memory a framework's other operations make, what of its collectives it
hides and how fast its host launches are not, so that a step which spends its time there is less sure.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fivefold.estimate.kernel import Kernel
from fivefold.estimate.price import COMMUNICATION, OWNERS

# Half-widths of the 80% range of these owners' seconds, relative; fused and unfused operations differ by more than the
# first. Fit: interval score of the judged sources of docs/accuracy.md, each with the same weight, beside the runtimes'
# time_spread and the spread of mixtures of experts; rounded up, because a source that was left out is covered less.
WIDTHS = {"memory": 0.5, "communication": 0.2, "host": 0.1}
_KIND = {**dict.fromkeys(COMMUNICATION, "communication"), "memory": "memory", "host": "host"}


def doubt(kernel: Kernel, rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[n] relative half-width that these owners give to the step times `seconds` of `rows`. They are added up: a stack
    that is old or unusual is so in several ways at once."""
    return np.sum([WIDTHS[kind] * share for kind, share in shares(kernel, rows, seconds).items()], axis=0)


def shares(kernel: Kernel, rows: np.ndarray, seconds: np.ndarray) -> Mapping[str, np.ndarray]:
    """[n] shares of the step times `seconds` by kind of owner, from the busiest pipeline rank; its bubble belongs to
    the owners of its work, because it waits for work like its own."""
    plan, v, table, costs = kernel.plan[rows], kernel.variant[rows], kernel.table, kernel.variants
    work = np.add(*kernel.pass_seconds(rows)) * table.exists[plan]
    at, rank = np.arange(len(rows)), work.argmax(axis=1)
    count, again = table.count[plan][at, rank], table.again[plan][at, rank]
    by_owner = np.einsum("np,npo->no", count, (costs.forward + costs.backward)[v])
    by_owner += np.einsum("np,npo->no", again, costs.again[v])
    gathers = (count * (costs.gather_forward + costs.gather_backward)[v]).sum(axis=1)
    reduction, update = kernel.exposed_reduction_seconds(rows), kernel.optimizer_seconds(rows)
    pipeline = np.maximum(seconds - reduction - update - kernel.problem.step_overhead_s, 0.0)
    scale = pipeline / np.maximum(work[at, rank], np.finfo(float).tiny)
    found = {
        kind: scale * sum(by_owner[:, index] for index, owner in enumerate(OWNERS) if _KIND.get(owner) == kind)
        for kind in WIDTHS
    }
    found["memory"] = found["memory"] + update
    found["communication"] = found["communication"] + scale * gathers + reduction
    return {kind: part / seconds for kind, part in found.items()}
