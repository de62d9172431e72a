"""The catalogue of GPUs and systems, and the user's own cluster files.

A cluster file is TOML. Every number may be given: `base` names what it starts from, [gpu] and [[links]] replace single
numbers (links are matched by name, a new name adds a level; `keep_links = false` drops the base's links; span is a
number of GPUs, "node", or 0 for all), [compute] replaces numbers of the compute curve. Unknown keys are refused.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fivefold.cluster.compute import Curve, override_curve
from fivefold.cluster.spec import NCCL_ALGORITHMS, Algorithm, Cluster, Count, Gpu, Link, Name, Seconds
from fivefold.errors import FivefoldError

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
    gpu: _Table = {}
    links: Annotated[list[_Table], msgspec.Meta(max_length=MAX_LINKS)] = []
    compute: Annotated[_Table, msgspec.Meta(max_length=100)] = {}


@lru_cache(maxsize=1)
def _catalogue() -> _Table:
    text = resources.files("fivefold.cluster").joinpath("data/gpus.toml").read_bytes()
    return msgspec.toml.decode(text)


def gpus() -> list[str]:
    """Names of the GPUs in the catalogue; load_cluster takes each, and knows a reference node for it."""
    return list(_catalogue()["gpu"])


def clusters() -> list[str]:
    """Names of all systems in the catalogue: one per GPU, and cloud nodes with another network."""
    return list(_catalogue()["system"])


def aliases() -> dict[str, str]:
    """Other names that load_cluster takes."""
    return dict(_catalogue()["alias"])


def load_curve_of(cluster: Cluster) -> Curve:
    """The compute curve of the cluster's GPU, with the numbers that the cluster's file replaces."""
    return override_curve(cluster.gpu.curve or cluster.gpu.name, cluster.compute)


def load_gpu(name: str) -> Gpu:
    """One GPU of the catalogue, by name or alias."""
    return load_cluster(name).gpu


def load_cluster(name_or_path: str | Path, gpus: int | None = None, gpus_per_node: int | None = None) -> Cluster:
    """A cluster from the catalogue ("h100-sxm") or from a TOML file ("mine.toml").

    gpus: GPUs of the job; None: what the file says, else one scale-up domain. gpus_per_node: None: the system's.
    Raises FivefoldError for an unknown name, and for a file with the place of the mistake.
    """
    where = str(name_or_path)
    _check_count("--gpus", gpus)
    _check_count("--gpus-per-node", gpus_per_node)
    if isinstance(name_or_path, Path) or where.lower().endswith(".toml"):
        table, file = _read(Path(name_or_path)), where
    else:
        table, file = {"base": where}, None
    return _build(table, file, gpus, gpus_per_node)


def _check_count(option: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20):
        raise FivefoldError(
            f"{option} is {value!r}; it has to be a whole number from 1 to {1 << 20:,}.",
            code="bad-count",
            option=option,
            value=value,
            legal=f"1 to {1 << 20}",
        )


def _read(path: Path) -> _Table:
    """The file as a table; refuses what is not a moderate, well-formed TOML file."""
    try:
        if not path.is_file():
            raise _file_error(path, "there is no such file", "give the path of a TOML file or a name of the catalogue")
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _file_error(path, error.strerror or "it cannot be read", "check the path and its permissions") from error
    if len(raw) > MAX_FILE_BYTES:
        raise _file_error(path, f"it is larger than {MAX_FILE_BYTES:,} bytes", "a cluster file is a few kilobytes")
    try:
        return msgspec.toml.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _file_error(path, str(error)[:200] or "it is nested too deeply", "correct the TOML syntax") from error


def _file_error(path: object, problem: str, remedy: str, option: str = "--cluster") -> FivefoldError:
    message = f"Cluster file {str(path)!r}: {problem}. To go on, {remedy}."
    return FivefoldError(message, code="bad-cluster-file", option=option, value=str(path))


def _build(table: _Table, file: str | None, gpus: int | None, gpus_per_node: int | None) -> Cluster:
    label = file or "catalogue"
    given = _convert(table, _ClusterFile, label, "")
    base = _system(given.base) if given.base is not None else None
    if base is None:
        missing = [key for key, there in _required(given, gpus_per_node).items() if not there]
        if missing:
            raise _file_error(label, f"without base it has to give {', '.join(missing)}", "add them, or add base")
    system = base or {}
    per_node = gpus_per_node or given.gpus_per_node or system["gpus_per_node"]
    gpu_table = _merge_gpu(system.get("gpu"), given.gpu, file)
    gpu = _convert(gpu_table, Gpu, label, "gpu")
    links = _links(system.get("links", []) if given.keep_links else [], given.links, per_node, label)
    algorithms = given.algorithms or tuple(system.get("algorithms", NCCL_ALGORITHMS))
    cluster = Cluster(
        name=given.name or given.base or gpu.name,
        gpu=gpu,
        gpus=gpus or given.gpus or max(per_node, links[0].span if links else 1),
        gpus_per_node=per_node,
        links=links,
        launch_s=given.launch_s if given.launch_s is not None else system.get("launch_s", 4e-5),
        algorithms=algorithms,
        compute=given.compute,
        source=label if base is None else system.get("source", ""),
    )
    check_cluster(cluster, label)
    return cluster


def check_cluster(cluster: Cluster, label: str) -> None:
    """Refuse a cluster that was read from `label` and whose parts do not go together. Raises FivefoldError."""
    if "ring" not in cluster.algorithms:
        raise _file_error(label, 'algorithms lacks "ring", which every group falls back on', 'add "ring"')
    if not cluster.links:
        raise _file_error(label, "no link is left", "add [[links]] or drop keep_links = false")
    _check_spans([link.span for link in cluster.links], label)
    _refuse_nan(msgspec.to_builtins(cluster), label, "")
    if cluster.compute:
        load_curve_of(cluster)  # refuses unknown constants now rather than when they are used


def _required(given: _ClusterFile, gpus_per_node: int | None) -> dict[str, bool]:
    return {
        "gpus_per_node": bool(given.gpus_per_node or gpus_per_node),
        "[gpu]": bool(given.gpu),
        "[[links]]": bool(given.links),
    }


def _system(name: str) -> _Table:
    """One system's table with its GPU's table in place of the GPU's name."""
    book = _catalogue()
    key = name.strip().lower()
    key = book["alias"].get(key, key)
    if key not in book["system"]:
        import difflib  # only on the way to an error

        near = difflib.get_close_matches(key, [*book["system"], *book["alias"]], n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise FivefoldError(
            f"There is no GPU or cluster {name[:80]!r} in the catalogue.{hint} Known are {', '.join(book['system'])}; "
            "or give the path of a TOML file, ending in .toml.",
            code="unknown-gpu",
            option="--gpu",
            value=name[:80],
            legal=list(book["system"]),
        )
    own = book["system"][key]
    table = {**book["system"].get(own.get("like", key), {}), **own}
    return {**table, "gpu": {"name": own["gpu"], **book["gpu"][own["gpu"]]}}


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


def _links(base: list[_Table], given: list[_Table], per_node: int, label: str) -> tuple[Link, ...]:
    """Links innermost first: the base's with the file's numbers over them, then the file's new ones, sorted by span."""
    merged = {link["name"]: dict(link) for link in base if _span(link, per_node) != 1}
    for at, link in enumerate(given):
        name = link.get("name")
        if not isinstance(name, str):
            raise _file_error(label, f"links[{at}] has no name", 'add name = "nvlink", or another text')
        merged[name] = {**merged.get(name, {}), **link}
    links = [
        _convert({**link, "span": _span(link, per_node)}, Link, label, f"links.{name}") for name, link in merged.items()
    ]
    return tuple(sorted(links, key=lambda link: link.span or math.inf))


def _check_spans(spans: list[int], label: str) -> None:
    if spans[-1] != 0 or len(set(spans)) != len(spans) or spans[0] == 1:
        raise _file_error(
            label,
            f"links span {spans} GPUs, but exactly one, the outermost, has to span everything (span = 0), and the "
            "others 2 or more, no two the same",
            "correct span",
        )
    for inner, outer in pairwise(spans[:-1]):
        if outer % inner:
            raise _file_error(
                label, f"a link spans {outer} GPUs, not a multiple of the {inner} inside it", "correct span"
            )


def _span(link: _Table, per_node: int) -> Any:
    """Domain size of a link's table: a number, "node" or "node/2" (each of two CPU sockets)."""
    span = link.get("span")
    return {"node": per_node, "node/2": max(per_node // 2, 1)}.get(span, span) if isinstance(span, str) else span


def _convert(table: _Table, kind: Any, label: str, place: str) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$", f"`{place}" if place else "`").replace("`.", "`")
        raise FivefoldError(
            f"Cluster file {label!r}: {text}{f' in {place}' if place and place not in text else ''}. Correct that key.",
            code="bad-cluster-file",
            option=place or "--cluster",
            value=label,
            legal=list(kind.__struct_fields__),
        ) from error


def _refuse_nan(value: Any, label: str, place: str) -> None:
    """NaN passes range checks; every number of a file has to be finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _file_error(label, f"{place} is not a finite number", "give a finite number", option=place)
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_nan(item, label, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            _refuse_nan(item, label, f"{place}[{at}]")
