"""Flags of launchers, for the commands that write launch files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from fivefold.cli.flags import whole_number
from fivefold.cli.values import word

if TYPE_CHECKING:
    from fivefold.interop.launch.kubernetes import KubernetesOptions
    from fivefold.interop.launch.slurm import SlurmOptions

SLURM = Group("Slurm", sort_key=6)
KUBERNETES = Group("Kubernetes", sort_key=7)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """What a Slurm site asks for."""

    partition: Annotated[str | None, Parameter(group=SLURM)] = None
    "Partition."

    account: Annotated[str | None, Parameter(group=SLURM)] = None
    "Account."

    qos: Annotated[str | None, Parameter(group=SLURM)] = None
    "Quality of service."

    constraint: Annotated[str | None, Parameter(group=SLURM)] = None
    "Features that nodes must have."

    reservation: Annotated[str | None, Parameter(group=SLURM)] = None
    "Reservation."

    time: Annotated[str | None, Parameter(group=SLURM)] = None
    "Time limit: minutes, HH:MM:SS or D-HH:MM:SS."

    cpus_per_gpu: Annotated[int | None, Parameter(group=SLURM, converter=whole_number)] = None
    "CPU cores of each rank."

    warn: Annotated[int, Parameter(group=SLURM, converter=whole_number)] = 300
    "Seconds before the limit at which ranks save and the job goes back into the queue."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class KubernetesFlags:
    """What a Kubernetes manifest needs."""

    kind: Annotated[str, Parameter(group=KUBERNETES)] = "trainjob"
    "trainjob (Kubeflow Trainer v2), pytorchjob (its predecessor) or jobset."

    image: Annotated[str | None, Parameter(group=KUBERNETES)] = None
    "Container image with the framework in it."

    namespace: Annotated[str | None, Parameter(group=KUBERNETES)] = None
    "Namespace."

    training_runtime: Annotated[str, Parameter(group=KUBERNETES)] = "torch-distributed"
    "The TrainingRuntime of a TrainJob."


def slurm_options(flags: SlurmFlags) -> SlurmOptions:
    from fivefold.interop.launch.slurm import SlurmOptions

    return SlurmOptions(
        partition=flags.partition,
        account=flags.account,
        qos=flags.qos,
        constraint=flags.constraint,
        reservation=flags.reservation,
        time=flags.time,
        cpus_per_gpu=flags.cpus_per_gpu,
        warn_s=flags.warn,
    )


def kubernetes_options(flags: KubernetesFlags) -> KubernetesOptions:
    from fivefold.interop.launch.kubernetes import KINDS, KubernetesOptions

    return KubernetesOptions(
        kind=word("--kind", flags.kind, tuple(KINDS)),
        image=flags.image,
        namespace=flags.namespace,
        runtime=flags.training_runtime,
    )
