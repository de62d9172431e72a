"""`--smoke`: the plan's layout on a model that a laptop trains, with as many replicas as there are processes."""

from __future__ import annotations

from fivefold.errors import FivefoldError
from fivefold.train.job import Job
from fivefold.train.verify.shrink import Shrunk, Sizes, shrink

# Large enough to learn the synthetic walk in some tens of steps, small enough for milliseconds per step.
SMOKE = Sizes(head_dim=16, seq_len=64, vocab=131)


def smoke(job: Job, world: int) -> Shrunk:
    """`job`, which obeys all rules, for `world` processes. Raises FivefoldError where they hold no whole replica."""
    layout = job.layout
    if world % job.model_ranks or not 1 <= world // job.model_ranks <= job.resolved.dp:
        most = min(job.resolved.dp, 4)
        raise FivefoldError(
            f"--smoke keeps the {job.model_ranks} ranks of a replica (tp {layout.tp}, cp {layout.cp}, pp {layout.pp}) "
            f"and up to {job.resolved.dp:,} replicas, and {world} are running. Start it with torchrun --nproc-per-node "
            f"{job.model_ranks} (or up to {job.resolved.dp:,} times as many) -m fivefold train.",
            code="world-size",
            option="--nproc-per-node",
            value=world,
            legal=[job.model_ranks * dp for dp in range(1, most + 1)],
        )
    return shrink(job, world // job.model_ranks, SMOKE)
