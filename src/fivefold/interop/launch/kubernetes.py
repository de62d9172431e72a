"""Kubernetes manifests: Kubeflow's TrainJob (Trainer v2), its older PyTorchJob, and JobSet.

Fields and limits: kubeflow/trainer trainjob_types.go, read at 0015772c28 (after 2.2); kubeflow/training-operator
pytorch_types.go, read at 2f18ab7af0 (1.9 era); kubernetes-sigs/jobset jobset_types.go, read at 0336a8fd9f (after 0.10).
A container's arguments pass no shell. Kubernetes itself replaces $(NAME) in them by the container's variables, and
writes $$ as $, so that text with dollars is doubled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fivefold.errors import FivefoldError
from fivefold.interop.launch.job import Job, Value, Variable, Word, checked, comment, flat
from fivefold.interop.launch.manifest import yaml

Kind = Literal["trainjob", "pytorchjob", "jobset"]

_ARGUMENTS = 128  # most words of a TrainJob's args
_PORT = "29500"
_RESTARTS = 3
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# Every variable that has to be set, checked in the container before anything starts.
_GUARD = """\
for name in $NEEDED; do
  if [ -z "${!name:-}" ]; then
    echo "$name is not set. Give it a value in the manifest." >&2
    exit 64
  fi
done
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """image: of the container, with the framework in it. runtime: the TrainingRuntime that a TrainJob refers to."""

    kind: Kind = "trainjob"
    image: str | None = None
    namespace: str | None = None
    runtime: str = "torch-distributed"


def kubernetes(job: Job, site: KubernetesOptions | None = None) -> dict[str, str]:
    """File name to text. Raises FivefoldError without an image, and for what the kind cannot hold."""
    site = site or KubernetesOptions()
    if not site.image:
        raise FivefoldError(
            "A Kubernetes manifest names a container image, and a plan has none. Add --image, for example --image "
            "nvcr.io/nvidia/nemo:25.09.",
            code="missing-option",
            option="--image",
        )
    document = KINDS[site.kind](job, site)
    about = "".join(f"# {comment(line)}\n" for line in job.about)
    return {f"{job.name}.{site.kind}.yaml": about + yaml(document)}


def _metadata(job: Job, site: KubernetesOptions) -> dict[str, Any]:
    if site.namespace is not None and not _NAMESPACE.fullmatch(site.namespace):
        raise FivefoldError(
            f"--namespace {site.namespace[:70]!r} is no namespace.",
            code="bad-namespace",
            option="--namespace",
            value=site.namespace[:70],
            legal="lower-case letters, digits and dashes, 63 at most",
        )
    return {"name": job.name, **({} if site.namespace is None else {"namespace": site.namespace})}


def _container(job: Job, site: KubernetesOptions, torchrun: tuple[str, ...]) -> dict[str, Any]:
    """What every kind of manifest says of the container. torchrun: its options, where the operator sets none."""
    words = [_word(word) for word in job.program]
    options = [word for _, options in job.groups for name, value in options.items() for word in _joined(name, value)]
    return {
        "image": checked("--image", site.image or ""),
        "command": ["bash", "-c", _GUARD, "rank"],
        "args": ["torchrun", *torchrun, *words, *options],
        "env": _environment(job),
    }


def _joined(name: str, value: Value) -> list[str]:
    """--name=value where there is one value: half the words."""
    words = flat(name, value)
    if len(words) == 2:
        return [f"{name}={_word(words[1])}"]
    return [_word(word) for word in words]


def _word(word: Word) -> str:
    if isinstance(word, Variable):
        return f"$({word.name}){word.suffix}"
    return checked("an option's value", word).replace("$", "$$")


def _environment(job: Job) -> list[dict[str, str]]:
    needed = [need.name for need in job.needs if need.default is None]
    fixed = {**job.environment, "NEEDED": " ".join(needed)}
    open_ = {need.name: need.default or "" for need in job.needs}
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in {**open_, **fixed}.items()]


def _gpus(job: Job) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": job.gpus_per_node}}


def _pod(job: Job, container: dict[str, Any], restart: str) -> dict[str, Any]:
    """A pod's spec. NCCL and data loaders share memory that the default 64 MiB of /dev/shm does not hold."""
    return {
        "restartPolicy": restart,
        "containers": [
            {
                **container,
                "resources": _gpus(job),
                "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def _trainjob(job: Job, site: KubernetesOptions) -> dict[str, Any]:
    """The runtime's torch policy gives torchrun its place by PET_ variables."""
    container = _container(job, site, ())
    if len(container["args"]) > _ARGUMENTS:
        raise FivefoldError(
            f"A TrainJob holds {_ARGUMENTS} arguments and this launch has {len(container['args'])}. Use --kind jobset.",
            code="too-many-arguments",
            option="--kind",
            value="trainjob",
            legal=["jobset", "pytorchjob"],
        )
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, site),
        "spec": {
            "runtimeRef": {"name": checked("--training-runtime", site.runtime)},
            "trainer": {
                **container,
                "numNodes": job.nodes,
                "numProcPerNode": job.gpus_per_node,
                "resourcesPerNode": _gpus(job),
            },
        },
    }


def _pytorchjob(job: Job, site: KubernetesOptions) -> dict[str, Any]:
    """The operator gives torchrun its place by PET_ variables; it looks for the container named pytorch."""
    container = {"name": "pytorch", **_container(job, site, ())}

    def replicas(count: int) -> dict[str, Any]:
        return {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": {"spec": {name: value for name, value in _pod(job, container, "").items() if value}},
        }

    workers = {"Worker": replicas(job.nodes - 1)} if job.nodes > 1 else {}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job, site),
        "spec": {
            "nprocPerNode": str(job.gpus_per_node),
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": _RESTARTS},
            "pytorchReplicaSpecs": {"Master": replicas(1), **workers},
        },
    }


def _jobset(job: Job, site: KubernetesOptions) -> dict[str, Any]:
    """An indexed job whose pods find the first one by its host name: set-job-0-0.set."""
    place = (
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.gpus_per_node}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={job.name}-node-0-0.{job.name}",
        f"--master-port={_PORT}",
    )
    container = {"name": "node", **_container(job, site, place)}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, site),
        "spec": {
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {
                    "name": "node",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "completionMode": "Indexed",
                            "completions": job.nodes,
                            "parallelism": job.nodes,
                            "backoffLimit": 0,
                            "template": {"spec": _pod(job, container, "Never")},
                        }
                    },
                }
            ],
        },
    }


KINDS: dict[Kind, Callable[[Job, KubernetesOptions], dict[str, Any]]] = {
    "trainjob": _trainjob,
    "pytorchjob": _pytorchjob,
    "jobset": _jobset,
}
