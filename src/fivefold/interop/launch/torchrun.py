"""A bash script that starts one node's processes with torchrun; on several nodes it is started once on each.

torchrun's options: PyTorch 2.13, torch/distributed/run.py. The c10d rendezvous gives out node ranks as nodes arrive;
ranks of one node stay together, which is all that tensor parallelism needs.
"""

from __future__ import annotations

from fivefold.interop.launch.job import Job, Need, in_shell
from fivefold.interop.launch.script import arrays, command, expanded, head, prologue

ADDRESS = Need("MASTER_ADDR", "the host name or address of one of the nodes, the same on all of them")
_PORT = Need("MASTER_PORT", "A free port on MASTER_ADDR.", "29500")


def torchrun(job: Job) -> dict[str, str]:
    """File name to text."""
    several = job.nodes > 1
    start = ["exec", "torchrun", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.gpus_per_node)]
    if several:
        start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", '"$MASTER_ADDR:$MASTER_PORT"', "--rdzv-id", job.name]
    else:
        start += ["--standalone"]
    words = [*start, *map(in_shell, job.program), *expanded(job)]
    usage = f"# Start it on each of the {job.nodes} nodes." if several else "# Start it on the node itself."
    lines = [
        *head(job), usage, *prologue(job, (ADDRESS, _PORT) if several else ()), *arrays(job), "", command(words),
    ]  # fmt: skip
    return {f"{job.name}.sh": "\n".join(lines) + "\n"}
