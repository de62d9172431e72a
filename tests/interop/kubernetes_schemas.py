"""Schemas of the three kinds of manifests, down to the fields that are written; nothing else may be there.

Transcribed from the types' Go sources: kubeflow/trainer pkg/apis/trainer/v1alpha1/trainjob_types.go at 0015772c28,
kubeflow/training-operator pkg/apis/kubeflow.org/v1/{pytorch_types,common_types}.go at 2f18ab7af0, and
kubernetes-sigs/jobset api/jobset/v1alpha2/jobset_types.go at 0336a8fd9f; pods and jobs from the Kubernetes API
reference (core/v1, batch/v1; from memory). A subset of JSON Schema: type, required, properties, items, enum, const,
pattern, minimum, maxLength, maxItems.
"""

from __future__ import annotations

import re
from typing import Any

Schema = dict[str, Any]
_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def _object(required: str = "", **properties: Schema) -> Schema:
    """An object that has these properties and no others."""
    return {
        "type": "object",
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": items} | ({} if most is None else {"maxItems": most})


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": r"[a-z]([-a-z0-9]*[a-z0-9])?", "maxLength": 63}
ENVIRONMENT = _list(_object("name", name={"type": "string", "pattern": r"[A-Za-z_][A-Za-z0-9_]*"}, value=TEXT), 128)
RESOURCES = _object(limits={"type": "object", "values": COUNT}, requests={"type": "object", "values": COUNT})
LONG: Schema = {"type": "string", "maxLength": 65536}
METADATA = _object("name", name=NAME, namespace=NAME)
TRAINER = _object(
    image={"type": "string", "maxLength": 500},
    command=_list(LONG, 128),
    args=_list(LONG, 128),
    env=ENVIRONMENT,
    numNodes=COUNT,
    numProcPerNode=COUNT,
    resourcesPerNode=RESOURCES,
)
CONTAINER = _object(
    "name image",
    name=NAME,
    image=TEXT,
    command=_list(TEXT),
    args=_list(TEXT),
    env=ENVIRONMENT,
    resources=RESOURCES,
    volumeMounts=_list(_object("name mountPath", name=NAME, mountPath=TEXT)),
)
VOLUMES = _list(_object("name", name=NAME, emptyDir=_object(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT)))


def _pod(*policies: str) -> Schema:
    return _object(
        "spec",
        spec=_object(
            "containers", restartPolicy={"enum": list(policies)}, containers=_list(CONTAINER), volumes=VOLUMES
        ),
    )


_REPLICAS = _object(
    "template",
    replicas=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=_pod("Always", "OnFailure", "Never"),
)
_JOB = _object(
    "template",
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit=COUNT,
    template=_pod("Never", "OnFailure"),
)

SCHEMAS: dict[str, Schema] = {
    "trainjob": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
        kind={"const": "TrainJob"},
        metadata=METADATA,
        spec=_object(
            "runtimeRef",
            runtimeRef=_object("name", name={"type": "string", "maxLength": 253}, apiGroup=TEXT, kind=TEXT),
            trainer=TRAINER,
        ),
    ),
    "pytorchjob": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "kubeflow.org/v1"},
        kind={"const": "PyTorchJob"},
        metadata=METADATA,
        spec=_object(
            "pytorchReplicaSpecs",
            nprocPerNode=TEXT,
            runPolicy=_object(cleanPodPolicy={"enum": ["", "All", "Running", "None"]}, backoffLimit=COUNT),
            pytorchReplicaSpecs=_object("Master", Master=_REPLICAS, Worker=_REPLICAS),
        ),
    ),
    "jobset": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
        kind={"const": "JobSet"},
        metadata=METADATA,
        spec=_object(
            failurePolicy=_object(maxRestarts=COUNT),
            network=_object(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
            replicatedJobs=_list(
                _object("name template", name=NAME, replicas=COUNT, template=_object("spec", spec=_JOB))
            ),
        ),
    ),
}


def faults(value: Any, schema: Schema, place: str = "$") -> list[str]:
    """Where a document breaks its schema; empty where it obeys."""
    if "const" in schema or "enum" in schema:
        legal = [schema["const"]] if "const" in schema else schema["enum"]
        return [] if value in legal else [f"{place}: {value!r} is none of {legal}"]
    kind = _TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{place}: {value!r} is no {schema['type']}"]
    found = []
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        found.append(f"{place}: {value!r} does not match {schema['pattern']}")
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        found.append(f"{place}: longer than {schema['maxLength']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{place}: below {schema['minimum']}")
    if kind is list:
        if len(value) > schema.get("maxItems", len(value)):
            found.append(f"{place}: more than {schema['maxItems']} items")
        for at, item in enumerate(value):
            found += faults(item, schema["items"], f"{place}[{at}]")
    if kind is dict:
        properties = schema.get("properties", {})
        found += [f"{place}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            inner = properties.get(name, schema.get("values"))
            found += [f"{place}: {name} is not known"] if inner is None else faults(item, inner, f"{place}.{name}")
    return found
