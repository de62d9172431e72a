"""One block timed alone beside its ledger: Korthikanti et al. 2022, table 4.

    python benchmarks/layer_times.py

A block of the 22B model (hidden 6,144, 64 heads, 2,048 tokens, micro-batch 4, tensor parallel over 8 A100-80GB) ran
forward and backward in a loop of its own. So it is priced as kernels and collectives alone: without `in_step` and
`tp_in_step`, which are what a training step adds to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.estimate.kernel import Kernel, Problem
from fivefold.layout import Layout, Recompute, Workload
from fivefold.layout.columns import Columns
from fivefold.model import load_model
from fivefold.runtime import load_runtime

TP = 8


@dataclass(frozen=True, slots=True)
class Timed:
    """A row of the published table: milliseconds of forward and of backward, recomputation included."""

    name: str
    sequence_parallel: bool
    recompute: Recompute
    forward_ms: float
    backward_ms: float


NONE, SELECTIVE, FULL = Recompute(), Recompute(kind="selective"), Recompute(kind="full")
PUBLISHED = (
    Timed("no recomputation", False, NONE, 7.7, 11.9),
    Timed("sequence parallelism", True, NONE, 7.2, 11.8),
    Timed("full recomputation", False, FULL, 7.7, 19.5),
    Timed("selective recomputation", False, SELECTIVE, 7.7, 13.2),
    Timed("selective recomputation and sequence parallelism", True, SELECTIVE, 7.2, 13.1),
)


def block_ms(row: Timed) -> tuple[float, float]:
    """Predicted (forward, backward) milliseconds of the block."""
    model = load_model("gpt-22b")
    cluster = replace(load_cluster("a100-80g-sxm", gpus=TP), compute={"in_step": 1.0})
    work = Workload(seq_len=2048, global_batch=4, precision="fp16", attention="unfused", dropout=True)
    layout = Layout(tp=TP, micro_batch=4, zero=0, sequence_parallel=row.sequence_parallel, recompute=row.recompute)
    runtime = replace(load_runtime("megatron"), tp_in_step=1.0)
    table = Kernel(Problem(model, cluster, work, runtime), Columns.from_layouts([layout], TP, work)).variants
    forward, backward, again = (np.ravel(column)[0] for column in (table.forward_s, table.backward_s, table.again_s))
    return 1e3 * float(forward), 1e3 * float(backward + again)


def main() -> None:
    for row in PUBLISHED:
        forward, backward = block_ms(row)
        error = (forward + backward) / (row.forward_ms + row.backward_ms) - 1
        print(
            f"{row.name:50} forward {forward:5.2f} of {row.forward_ms:4.1f} ms, "
            f"backward {backward:5.2f} of {row.backward_ms:4.1f} ms, together {error:+.1%}"
        )


if __name__ == "__main__":
    main()
