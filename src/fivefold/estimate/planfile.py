"""plan.toml: one question and one answer, in a file that reads well and loads back exactly.

It holds the whole model (sizes, not a name alone), the whole cluster with the user's own numbers, the workload, every
field of the layout, and the runtime. Nothing in it is run. Fields that are None are left out, because TOML has no null.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fivefold.cluster import Cluster
from fivefold.cluster.catalogue import check_cluster
from fivefold.errors import FivefoldError
from fivefold.files import Unreadable, read_table, save_text
from fivefold.layout.layout import Layout
from fivefold.layout.workload import Workload
from fivefold.model.spec import ModelSpec
from fivefold.runtime import load_runtime

if TYPE_CHECKING:
    from fivefold.estimate.result import Estimate

SCHEMA = "fivefold-plan/1"
MAX_FILE_BYTES = 1 << 20
# Beyond any model, and small enough that a product of three stays inside a double and nothing huge is built.
MAX_LAYERS = 4096
MAX_SIZE = 1 << 31
# Sizes of a model that may be zero: the thing is then absent.
# Unicode's category Cc without the tab and the line feed: what a terminal may obey instead of showing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MAY_BE_ZERO = {"learned_positions", "mtp", "shared_ffn", "latent"}


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan file holds.

    runtime: as it was asked for, "megatron" or "megatron@0.16". model.name is the catalogue's name where it has one,
    and model.source says where the sizes come from.
    """

    runtime: str
    layout: Layout
    workload: Workload
    cluster: Cluster
    model: ModelSpec

    def estimate(self) -> Estimate:
        """Price the layout of the file again."""
        from fivefold.estimate.estimate import estimate  # loading a file needs no kernel

        return estimate(self.model, self.cluster, self.workload, self.layout, self.runtime)

    def save(self, path: str | Path) -> None:
        """Write the plan file; raises FivefoldError when the path cannot be written."""
        _write(self, path, ())


def save_plan(estimate: Estimate, path: str | Path) -> None:
    """Write one estimate's question and layout; its predictions go into comments, for the reader."""
    given = estimate.inputs
    model = {key: value for key, value in given["model"].items() if key in ModelSpec.__struct_fields__}
    plan = SavedPlan(
        runtime=given["runtime"]["asked"],
        layout=msgspec.convert(given["layout"], Layout),
        workload=msgspec.convert(given["workload"], Workload),
        cluster=msgspec.convert(given["cluster"], Cluster),
        model=msgspec.convert(model, ModelSpec),
    )
    _write(plan, path, _predictions(estimate))


def _predictions(estimate: Estimate) -> tuple[str, ...]:
    if estimate.step is None or estimate.memory is None:
        return ("This layout breaks a rule of the runtime and would not start.",)
    seconds = estimate.step.seconds
    return (
        f"Predicted: {seconds.value:.4g} s per step (80% interval {seconds.low:.4g} to {seconds.high:.4g}),",
        f"{estimate.memory.reserved_bytes / 1e9:.1f} of {estimate.memory.capacity_bytes / 1e9:.1f} GB per GPU.",
    )


def _write(plan: SavedPlan, path: str | Path, comments: tuple[str, ...]) -> None:
    import tomli_w  # only when something is saved

    table = {"schema": SCHEMA, **_without_none(msgspec.to_builtins(plan))}
    head = "".join(f"# {line}\n" for line in ("A fivefold plan. Price it again: fivefold estimate FILE", *comments))
    save_text(path, f"{head}\n{tomli_w.dumps(table)}", "The plan")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


# ---------------------------------------------------------------- reading


def load_plan(path: str | Path) -> SavedPlan:
    """Read a plan file. Raises FivefoldError with the key for what is missing, unknown, mistyped or out of range."""
    table = _table(Path(path))
    schema = table.pop("schema", None)
    if schema != SCHEMA:
        raise _error(path, f"schema is {schema!r}, and this version reads {SCHEMA!r}", "schema")
    _restore_absent(table)
    try:
        plan = msgspec.convert(table, SavedPlan)
    except msgspec.ValidationError as error:
        raise _error(path, str(error).replace("`$.", "`"), "") from error
    _refuse_unknown(table, msgspec.to_builtins(plan), "", path)
    _refuse_unbounded(table, "", path)
    _refuse_control(table, "", path)
    _check_model(plan.model, path)
    check_cluster(plan.cluster, f"{path}, cluster")
    if plan.runtime.endswith("@"):
        raise _error(path, f"runtime is {plan.runtime[:60]!r}, with an empty version after the @", "runtime")
    load_runtime(plan.runtime)
    return plan


def _table(path: Path) -> dict[str, Any]:
    try:
        return read_table(path, MAX_FILE_BYTES)
    except Unreadable as error:
        more = ", and a plan is a few kilobytes" if error.kind == "large" else ""
        raise _error(path, error.reason + more, "") from error


def _restore_absent(table: dict[str, Any]) -> None:
    """A block of a hybrid may have no mixer or no feed-forward, which a file without a null leaves out."""
    model = table.get("model")
    runs = model.get("runs") if isinstance(model, dict) else None
    for run in runs if isinstance(runs, list) else ():
        block = run.get("block") if isinstance(run, dict) else None
        if isinstance(block, dict) and ("mixer" in block or "feed" in block):
            block.setdefault("mixer", None)
            block.setdefault("feed", None)


def _refuse_unknown(given: Any, understood: Any, place: str, path: str | Path) -> None:
    """Every key of the file has to be one that was read."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for key, value in given.items():
            where = f"{place}.{key}".lstrip(".")
            if key not in understood:
                raise _error(path, f"the key {where[:80]} is not known here", where, list(understood))
            _refuse_unknown(value, understood[key], where, path)
    elif isinstance(given, list) and isinstance(understood, (list, tuple)):
        for at, (value, read) in enumerate(zip(given, understood, strict=False)):
            _refuse_unknown(value, read, f"{place}[{at}]", path)


def _refuse_unbounded(value: Any, place: str, path: str | Path) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _error(path, f"{place} is not a finite number", place)
    if isinstance(value, int) and not isinstance(value, bool) and not -1 <= value < 1 << 62:
        raise _error(path, f"{place} is out of range", place)
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_unbounded(item, f"{place}.{key}".lstrip("."), path)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _refuse_unbounded(item, f"{place}[{at}]", path)


def _refuse_control(value: Any, place: str, path: str | Path) -> None:
    """Names and sources are printed, so they hold nothing that steers a terminal."""
    if isinstance(value, str) and _CONTROL.search(value):
        raise _error(path, f"{place} holds a control character, in {value[:60]!r}", place)
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_control(key, f"{place}.{key}".lstrip("."), path)
            _refuse_control(item, f"{place}.{key}".lstrip("."), path)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _refuse_control(item, f"{place}[{at}]", path)


def _check_model(model: ModelSpec, path: str | Path) -> None:
    """Sizes of a model are whole numbers of 1 or more, and there are not absurdly many blocks."""
    if not 1 <= model.layers <= MAX_LAYERS or any(run.count < 1 for run in model.runs):
        raise _error(path, f"model.runs hold {model.layers} blocks; 1 to {MAX_LAYERS} are possible", "model.runs")
    _check_sizes(msgspec.to_builtins(model), "model", path)
    limits = {"norm_eps": (model.norm_eps, 1), "rotary.theta": (model.rotary.theta, 1e12)}
    limits["rotary.share"] = (model.rotary.share, 1)
    for name, (value, most) in limits.items():
        if not 0 < value <= most:
            raise _error(path, f"model.{name} is {value}; it has to be above 0 and at most {most:g}", f"model.{name}")


def _check_sizes(value: Any, place: str, path: str | Path) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            least = 0 if key in _MAY_BE_ZERO else 1
            where = f"{place}.{key}"
            if isinstance(item, int) and not isinstance(item, bool) and not least <= item <= MAX_SIZE:
                raise _error(path, f"{where} is {item}; it has to be {least} to {MAX_SIZE}", where)
            _check_sizes(item, where, path)
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            _check_sizes(item, f"{place}[{at}]", path)


def _error(path: str | Path, problem: str, place: str, legal: list[str] | None = None) -> FivefoldError:
    known = f"; known are {', '.join(legal[:40])}" if legal else ""
    return FivefoldError(
        f"Plan file {str(path)[:200]!r}: {problem}{known}. Correct it, or write a new one with fivefold plan --save.",
        code="bad-plan-file",
        option=place[:100] or "MODEL",
        value=str(path)[:200],
        legal=legal,
    )
