"""fivefold's own trainer as a launcher's job: `fivefold train` on a plan file."""

from __future__ import annotations

from fivefold.cluster import Cluster
from fivefold.interop.launch.job import Job, Need, Variable, checked, nodes_of, slug

_PLAN = Need("PLAN", "the plan file, where every rank can read it")


def trainer_job(
    cluster: Cluster,
    name: str,
    *,
    plan: str | None = None,
    steps: int | None = None,
    log: str | None = None,
    about: tuple[str, ...] = (),
) -> Job:
    """plan: path of the plan file; None leaves a variable that has to be set. steps, log: of `fivefold train`."""
    nodes, per_node = nodes_of(cluster)
    where = Variable(_PLAN.name) if plan is None else checked("--out", plan)
    options = {
        "--steps": None if steps is None else str(steps),
        "--log-file": None if log is None else checked("--out", log),
    }
    return Job(
        name=slug(name),
        about=about,
        nodes=nodes,
        gpus_per_node=per_node,
        program=("-m", "fivefold", "train", where),
        groups=(("run", {key: value for key, value in options.items() if value is not None}),),
        environment={"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"},
        needs=(_PLAN,) if plan is None else (),
    )
