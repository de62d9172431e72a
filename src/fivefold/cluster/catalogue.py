"""The catalogue of GPUs and systems, and the user's own cluster files.

A cluster file is TOML. Every number may be given: `base` names what it starts from, [gpu] and [[links]] replace single
numbers (links are matched by name, a new name adds a level; `keep_links = false` drops the base's links; span is a
number of GPUs, "node", or 0 for all), [compute] replaces numbers of the compute curve. Unknown keys are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from fivefold.cluster.curve import Curve, override_curve
from fivefold.cluster.links import check_spans, merge_links
from fivefold.cluster.mistakes import convert, file_error, refuse_nan
from fivefold.cluster.spec import (
    NCCL_ALGORITHMS,
    Algorithm,
    Bandwidth,
    Cluster,
    Count,
    Gpu,
    HostBytes,
    Name,
    Seconds,
    Text,
    WorkRatio,
)
from fivefold.cluster.tables import alias_names, gpu_names, gpu_table, system_names, system_table
from fivefold.errors import FivefoldError
from fivefold.files import Unreadable, read_table

MAX_FILE_BYTES = 1 << 20
MAX_LINKS = 8

_Table = dict[str, Any]


class _ClusterFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The top level of a cluster file; tables are merged into the base before they are checked themselves."""

    base: Name | None = None
    name: Name | None = None
    gpus: Count | None = None
    gpus_per_node: Count | None = None
    launch_s: Seconds | None = None
    algorithms: Annotated[tuple[Algorithm, ...], msgspec.Meta(min_length=1)] | None = None
    keep_links: bool = True
    host_memory_bytes: HostBytes | None = None
    host_link_bandwidth_per_s: Bandwidth | None = None
    host_memory_bandwidth_per_s: Bandwidth | None = None
    host_pcie: Text | None = None
    host_sockets: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    host_work_ratio: WorkRatio | None = None
    host_source: Text | None = None
    gpu: _Table = {}
    links: Annotated[list[_Table], msgspec.Meta(max_length=MAX_LINKS)] = []
    compute: Annotated[_Table, msgspec.Meta(max_length=100)] = {}


def gpus() -> list[str]:
    """Names of the GPUs in the catalogue; load_cluster takes each, and knows a reference node for it."""
    return gpu_names()


def clusters() -> list[str]:
    """Names of all systems in the catalogue: one per GPU, and nodes of clouds and vendors that differ from it."""
    return system_names()


def aliases() -> dict[str, str]:
    """Other names that load_cluster takes, such as the names of cloud instances."""
    return dict(alias_names())


def load_curve_of(cluster: Cluster) -> Curve:
    """The compute curve of the cluster's GPU, with the numbers that the cluster's file replaces."""
    return override_curve(cluster.gpu.curve or cluster.gpu.name, cluster.compute)


def load_gpu(name: str) -> Gpu:
    """One GPU of the catalogue, by name or alias."""
    return load_cluster(name).gpu


def load_cluster(
    name_or_path: str | Path, gpus: int | None = None, gpus_per_node: int | None = None, *, counted: bool = False
) -> Cluster:
    """A cluster from the catalogue ("h100-sxm") or from a TOML file ("mine.toml").

    gpus: GPUs of the job; None: what the file says, else one scale-up domain, which `counted` refuses to guess.
    gpus_per_node: None: the system's.
    Raises FivefoldError for an unknown name, and for a file with the place of the mistake.
    """
    where = str(name_or_path)
    _check_count("--gpus", gpus)
    _check_count("--gpus-per-node", gpus_per_node)
    if isinstance(name_or_path, Path) or where.lower().endswith(".toml"):
        table, file = _read(Path(name_or_path)), where
    else:
        table, file = {"base": where}, None
    try:
        cluster = _build(table, file, gpus, gpus_per_node)
    except FivefoldError as error:
        if file is not None and error.code == "unknown-gpu":
            raise error.said_of(f"Cluster file {file!r}, base: ", "base") from error
        if file is not None or gpus_per_node is None or error.code != "bad-cluster-file":
            raise
        if gpus != gpus_per_node or gpus_per_node >= load_cluster(name_or_path).gpus_per_node:
            raise _bad_per_node(where, gpus_per_node) from error
        cluster = _build(table, file, gpus, None)  # a job on a part of one node, as without gpus_per_node
    if counted and gpus is None and "gpus" not in table:
        raise _uncounted(cluster, file)
    return cluster


def _uncounted(cluster: Cluster, file: str | None) -> FivefoldError:
    node = cluster.gpus_per_node
    in_file = f", or gpus = {node} to {file[:60]}" if file is not None else ""
    return FivefoldError(
        f"How many GPUs? Add --gpus, for example --gpus {node}{in_file}.",
        code="missing-option",
        option="--gpus",
        legal="1 or more",
    )


def _bad_per_node(name: str, gpus_per_node: int) -> FivefoldError:
    """The catalogue's links of a node do not nest with so many GPUs: bridges of 2 in a node of 5."""
    legal = [count for count in range(1, load_cluster(name).gpus_per_node + 1) if _builds(name, count)]
    return FivefoldError(
        f"--gpus-per-node {gpus_per_node} does not go with {name[:80]}, whose links inside a node join GPUs in groups "
        f"that it does not divide. Choose one of {', '.join(map(str, legal))}, or describe the node in a cluster file.",
        code="bad-count",
        option="--gpus-per-node",
        value=gpus_per_node,
        legal=legal,
    )


def _builds(name: str, gpus_per_node: int) -> bool:
    try:
        _build({"base": name}, None, None, gpus_per_node)
    except FivefoldError:
        return False
    return True


def _check_count(option: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20):
        raise FivefoldError(
            f"{option} is {value!r}; it has to be a whole number from 1 to {1 << 20:,}.",
            code="bad-count",
            option=option,
            value=value,
            legal=f"1 to {1 << 20}",
        )


_READ_ADVICE = {
    "absent": "give the path of a TOML file or a name of the catalogue",
    "closed": "check the path and its permissions",
    "large": "a cluster file is a few kilobytes",
    "syntax": "correct the TOML syntax",
}


def _read(path: Path) -> _Table:
    """The file as a table; refuses what is not a moderate, well-formed TOML file."""
    try:
        return read_table(path, MAX_FILE_BYTES)
    except Unreadable as error:
        raise file_error(path, error.reason, _READ_ADVICE[error.kind]) from error


def _build(table: _Table, file: str | None, gpus: int | None, gpus_per_node: int | None) -> Cluster:
    label = file or "catalogue"
    given = convert(table, _ClusterFile, label, "")
    base = _system(given.base) if given.base is not None else None
    if base is None:
        missing = [key for key, there in _required(given, gpus_per_node).items() if not there]
        if missing:
            raise file_error(label, f"without base it has to give {', '.join(missing)}", "add them, or add base")
    system = base or {}
    per_node = gpus_per_node or given.gpus_per_node or system["gpus_per_node"]
    gpu_table = _merge_gpu(system.get("gpu"), given.gpu, file)
    gpu = convert(gpu_table, Gpu, label, "gpu")
    base_links = system.get("links", []) if given.keep_links else []
    base_gpus = system.get("gpus_per_node", per_node)
    links = merge_links(base_links, given.links, per_node, base_gpus, given.gpus_per_node or base_gpus, label)
    algorithms = given.algorithms or tuple(system.get("algorithms", NCCL_ALGORITHMS))
    cluster = Cluster(
        name=given.name or given.base or gpu.name,
        gpu=gpu,
        gpus=gpus or given.gpus or system.get("gpus") or max(per_node, links[0].span if links else 1),
        gpus_per_node=per_node,
        links=links,
        launch_s=given.launch_s if given.launch_s is not None else system.get("launch_s", 4e-5),
        algorithms=algorithms,
        compute=given.compute,
        source=label if base is None else system.get("source", ""),
        **_host(given, system, per_node, label),
    )
    check_cluster(cluster, label)
    return cluster


_HOST_NUMBERS = ("host_memory_bytes", "host_link_bandwidth_per_s", "host_memory_bandwidth_per_s", "host_work_ratio")


def _host(given: _ClusterFile, system: _Table, per_node: int, label: str) -> dict[str, Any]:
    """The host's numbers: the file's over the system's, with a source that says which are the file's.

    With another number of GPUs per node than the system has, each GPU keeps its share of the system's host.
    """
    host = {"host_work_ratio": 1.0} | {name: system[name] for name in _HOST_NUMBERS if name in system}
    said = [system.get("host_source", "")]
    own_per_node = system.get("gpus_per_node", per_node)
    if own_per_node != per_node and "host_memory_bytes" in system:
        share = per_node / own_per_node
        host["host_memory_bytes"] = int(system["host_memory_bytes"] * share)
        host["host_memory_bandwidth_per_s"] = system["host_memory_bandwidth_per_s"] * share
        said.append(f"Memory scaled from {own_per_node} to {per_node} GPUs a node")
    replaced = {name: getattr(given, name) for name in _HOST_NUMBERS if getattr(given, name) is not None}
    said[:0] = [given.host_source or "", f"{', '.join(replaced)}: given in {label}" if replaced else ""]
    return {
        **host,
        **replaced,
        "host_pcie": system.get("host_pcie", "") if given.host_pcie is None else given.host_pcie,
        "host_sockets": system.get("host_sockets", 0) if given.host_sockets is None else given.host_sockets,
        "host_source": ". ".join(text for text in said if text)[:2000],
    }


def check_cluster(cluster: Cluster, label: str) -> None:
    """Refuse a cluster that was read from `label` and whose parts do not go together. Raises FivefoldError."""
    if "ring" not in cluster.algorithms:
        raise file_error(label, 'algorithms lacks "ring", which every group falls back on', 'add "ring"')
    if not cluster.links:
        raise file_error(label, "no link is left", "add [[links]] or drop keep_links = false")
    check_spans([link.span for link in cluster.links], label)
    for link in cluster.links:
        if 0 < link.peer_bandwidth_per_s < 1e6:
            problem = f"peer_bandwidth_per_s = {link.peer_bandwidth_per_s:g} of {link.name[:40]!r} is under 1 MB/s"
            raise file_error(label, problem, "give bytes per second, or 0 for a switched link", "peer_bandwidth_per_s")
    refuse_nan(msgspec.to_builtins(cluster), label, "")
    if cluster.compute:
        try:
            load_curve_of(cluster)  # refuses unknown constants now rather than when they are used
        except FivefoldError as error:
            if error.code != "bad-compute-constant":
                raise
            raise error.said_of(f"Cluster file {label!r}, ", "[compute]") from error


def _required(given: _ClusterFile, gpus_per_node: int | None) -> dict[str, bool]:
    return {
        "gpus_per_node": bool(given.gpus_per_node or gpus_per_node),
        "[gpu]": bool(given.gpu),
        "[[links]]": bool(given.links),
    }


def _system(name: str) -> _Table:
    """One system's table with its GPU's table in place of the GPU's name."""
    key = name.strip().lower()
    key = alias_names().get(key, key)
    if key not in system_names():
        raise _unknown(name, key)
    table = system_table(key)
    return {**table, "gpu": gpu_table(table["gpu"])}


def _unknown(name: str, key: str) -> FivefoldError:
    import difflib  # only on the way to an error

    known = system_names()
    near = difflib.get_close_matches(key, [*known, *alias_names()], n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return FivefoldError(
        f"There is no GPU or cluster {name[:80]!r} in the catalogue.{hint} GPUs are {', '.join(gpu_names())}; nodes of "
        "clouds and vendors are listed by fivefold gpus; your own cluster is the path of a TOML file, ending in .toml.",
        code="unknown-gpu",
        option="--gpu",
        value=name[:80],
        legal=known,
    )


def _merge_gpu(base: _Table | None, given: _Table, file: str | None) -> _Table:
    """Replaced numbers carry the file's name as their source, unless the file states a better one."""
    merged = {**(base or {}), **given}
    for key in ("peak_flops_per_s", "sources"):
        old, new = (base or {}).get(key, {}), given.get(key, {})
        if isinstance(new, dict):
            merged[key] = {**old, **new}
    if file is not None and isinstance(merged.get("sources"), dict):
        replaced = {key: f"given in {file}"[:2000] for key in given if key not in ("sources", "name")}
        merged["sources"] = {**merged["sources"], **replaced, **given.get("sources", {})}
    if base is None:
        return {"name": "custom", **merged}
    if "curve" not in merged:
        merged["curve"] = base["name"]
    return merged
