"""From flags to the library's objects, with every default written down: the question that a command asks."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import replace

from fivefold.cli.calibration import calibrated
from fivefold.cli.flags import ClusterFlags, LayoutFlags, ModelFlags, RuntimeFlags, WorkFlags
from fivefold.cli.values import (
    layout_text,
    pins_of,
    refuse_control,
    runtime_name,
)
from fivefold.cli.work import DEFAULT_TOKENS_PER_BATCH, layout_unit, round_up, workload_of
from fivefold.cluster import Cluster, load_cluster
from fivefold.errors import FivefoldError, asked_as, option_of
from fivefold.estimate.planfile import SavedPlan, load_plan
from fivefold.layout import Layout, RampUp, Recompute, Workload, parse_ramp_up
from fivefold.layout.batch import check_ramp_up
from fivefold.model import ModelSpec, load_model
from fivefold.runtime import load_runtime
from fivefold.runtime.accelerators import caveat, why_not

if TYPE_CHECKING:
    from fivefold.search import Plan

DEFAULT_GPU = "h100-sxm"
DEFAULT_RUNTIME = "megatron"
# Their tensor parallelism all-reduces (rules accelerate-sp and deepspeed-autotp-sp).
_WITHOUT_SEQUENCE_PARALLELISM = ("accelerate", "deepspeed-zero")
_MOST_MTP = 16  # DeepSeek-V3 trains one; Gloeckle et al. 2024 four


@dataclass(frozen=True, slots=True)
class Question:
    """What a command is asked. layout: the one to price; all defaults in a search. defaults: flag to what was taken."""

    model: ModelSpec
    cluster: Cluster
    work: Workload
    runtime: str
    layout: Layout = field(default_factory=Layout)
    ramp: RampUp | None = None
    defaults: dict[str, str] = field(default_factory=dict)

    def plan(self, pins: dict[str, Any], top: int, objective: str) -> Plan:
        """The search's answer, within the layouts that the pins leave."""
        from fivefold.search import plan

        return plan(
            self.model,
            self.cluster,
            self.work,
            self.runtime,
            top=top,
            pins=dict(pins),
            objective=objective,  # type: ignore[arg-type]  # plan refuses other words itself
        )


def is_plan_file(model: str) -> bool:
    return model.lower().endswith(".toml")


def plan_question(
    model: str, model_flags: ModelFlags, cluster: ClusterFlags, work: WorkFlags, runtime: RuntimeFlags
) -> Question:
    """The question of a search, where the layout is not known yet."""
    if is_plan_file(model):
        raise FivefoldError(
            f"{model[:100]!r} is a plan file, and plan searches for one. Price it with fivefold estimate, or give the "
            "model's name.",
            code="plan-file",
            option="MODEL",
            value=model[:100],
        )
    return _question(model, None, model_flags, cluster, work, runtime, batch_unit=None)


def refuse_mixed(model: str | None, days: float | None, like: str | None) -> None:
    """MODEL, --like and --days of fivefold plan: what belongs together and what is missing."""
    if like is not None and (model is not None or days is not None):
        other = "MODEL" if model is not None else "--days"
        raise FivefoldError(
            f"--like moves a plan file, which holds its own model, to another cluster. Leave out {other}.",
            code="contradiction",
            option=other,
            value=(model or str(days))[:60],
        )
    if like is None and model is None:
        raise FivefoldError(
            "MODEL is missing. Name a model of the catalogue (fivefold models), a config.json, or a plan file with "
            "--like.",
            code="missing-option",
            option="MODEL",
        )


def estimate_question(
    model: str,
    model_flags: ModelFlags,
    cluster: ClusterFlags,
    work: WorkFlags,
    runtime: RuntimeFlags,
    layout: LayoutFlags,
) -> Question:
    """The question about one layout; MODEL may be a plan file, whose values the flags replace."""
    saved = load_plan(model) if is_plan_file(model) else None
    start = saved.layout if saved else _usual_layout(runtime.runtime or DEFAULT_RUNTIME)
    chosen = one_layout(layout, start)
    question = _question(model, saved, model_flags, cluster, work, runtime, batch_unit=chosen)
    if saved is None and layout.zero is None:
        question.defaults["--zero"] = str(start.zero)
    if saved is None and layout.sequence_parallel is None:
        question.defaults.update(_sequence_parallel(chosen, question.runtime))
    return dataclasses.replace(question, layout=chosen)


def _sequence_parallel(layout: Layout, runtime: str) -> dict[str, str]:
    """What a layout that does not say takes by default, where there is a choice."""
    if layout.tp == 1 or layout.sequence_parallel:
        return {}
    on = layout.sequence_parallel is None
    return {"--sequence-parallel": "on, as --tp is above 1" if on else f"off, {runtime} has none"}


def _usual_layout(runtime: str) -> Layout:
    """The library's defaults; a runtime without ZeRO-1 shards as much as it can, and one without sequence parallelism
    does without it at any --tp."""
    profile = load_runtime(runtime_name(runtime))
    usual = Layout()
    if profile.name in _WITHOUT_SEQUENCE_PARALLELISM:
        usual = replace(usual, sequence_parallel=False)
    return usual if usual.zero in profile.zero_stages else replace(usual, zero=max(profile.zero_stages))


def comparison_questions(
    models: tuple[str, str | None],
    layouts: tuple[str | None, str | None],
    model_flags: ModelFlags,
    cluster: ClusterFlags,
    work: WorkFlags,
    runtime: RuntimeFlags,
    layout: LayoutFlags,
) -> tuple[Question, Question]:
    """Both sides' questions: the common flags, and each side's own layout text over them."""
    first, second = models[0], models[1] or models[0]
    if work.ramp is not None:
        raise FivefoldError(
            "compare prices one step, which a ramp-up does not change. Leave out --ramp.",
            code="not-here",
            option="--ramp",
            value=work.ramp[:60],
        )
    if first == second and layouts == (None, None):
        raise FivefoldError(
            "Both sides are the same. Name a second plan file, or two layouts, for example --a tp=4,pp=4 --b tp=8.",
            code="missing-option",
            option="--b",
        )
    sides = []
    for model, option, text in ((first, "--a", layouts[0]), (second, "--b", layouts[1])):
        question = estimate_question(model, model_flags, cluster, work, runtime, layout)
        if text is not None:
            flags = layout_text(option, text)
            own = one_layout(flags, question.layout)
            taken = {name: said for name, said in question.defaults.items() if name != "--sequence-parallel"}
            if not is_plan_file(model) and flags.sequence_parallel is None and layout.sequence_parallel is None:
                taken |= _sequence_parallel(own, question.runtime)
            question = dataclasses.replace(question, layout=own, defaults=taken)
        sides.append(question)
    return _same_batch(sides[0], sides[1])


def _same_batch(a: Question, b: Question) -> tuple[Question, Question]:
    """Default batches follow the layout; two of them have to be one to be compared: the least common multiple."""
    if "--global-batch" not in a.defaults or "--global-batch" not in b.defaults or a.work.seq_len != b.work.seq_len:
        return a, b
    units = [layout_unit(each.layout, each.cluster.gpus) or each.cluster.gpus for each in (a, b)]
    batch = round_up(DEFAULT_TOKENS_PER_BATCH // a.work.seq_len, lcm(*units))
    taken = f"{batch} sequences, which both layouts divide"
    return tuple(  # type: ignore[return-value]
        dataclasses.replace(
            each, work=replace(each.work, global_batch=batch), defaults={**each.defaults, "--global-batch": taken}
        )
        for each in (a, b)
    )


def one_layout(flags: LayoutFlags, base: Layout) -> Layout:
    """`base` with the options that were given. FivefoldError where a set of values was given."""
    values: dict[str, Any] = {}
    for name, given in pins_of(flags).items():
        if len(given) != 1:
            raise FivefoldError(
                f"{option_of(name)} has {len(given)} values, and here one layout is priced. Give one value, or search "
                "with fivefold plan.",
                code="several-values",
                option=option_of(name),
                value=", ".join(str(value) for value in given)[:100],
            )
        values[name] = given[0]
    return _with_options(base, values)


def _with_options(base: Layout, values: dict[str, Any]) -> Layout:
    """The flat options that the user names, in the nested fields of a Layout."""
    recompute, overlap = base.recompute, base.overlap
    kinds = {"recompute": "kind", "recompute_modules": "modules", "recompute_layers": "layers"}
    changed = {field_: values.pop(name) for name, field_ in kinds.items() if name in values}
    if changed:
        # A named kind starts afresh; modules or layers alone say which kind is meant.
        implied = "selective" if "modules" in changed else "full"
        start = Recompute(kind=changed.get("kind", implied))
        recompute = replace(start, **{key: value for key, value in changed.items() if key != "kind"})
    switches = {name.removeprefix("overlap_"): values.pop(name) for name in [*values] if name.startswith("overlap_")}
    return replace(base, recompute=recompute, overlap=replace(overlap, **switches), **values)


# ---------------------------------------------------------------- parts


def _question(
    model: str,
    saved: SavedPlan | None,
    model_flags: ModelFlags,
    cluster_flags: ClusterFlags,
    work_flags: WorkFlags,
    runtime_flags: RuntimeFlags,
    batch_unit: Layout | None,
) -> Question:
    defaults: dict[str, str] = {}
    _check_mtp_modules(model_flags)
    spec = load_model(saved.model if saved else model, mtp=model_flags.mtp, layers=model_flags.layers)
    if model_flags.mtp_modules is not None:
        spec = replace(spec, mtp=model_flags.mtp_modules)
    refuse_control(to_builtins(spec), "The model", "MODEL")
    runtime = runtime_of(runtime_flags, saved, defaults)
    cluster = calibrated(cluster_of(cluster_flags, saved, defaults), cluster_flags)
    _check_software(runtime_flags, runtime, cluster, defaults)
    ramp = parse_ramp_up(work_flags.ramp, "--ramp") if work_flags.ramp is not None else None
    work = workload_of(work_flags, saved, spec, cluster, batch_unit, ramp, defaults)
    if ramp is not None:
        check_ramp_up(ramp, work, "--ramp")
    return Question(model=spec, cluster=cluster, work=work, runtime=runtime, ramp=ramp, defaults=defaults)


def _check_mtp_modules(flags: ModelFlags) -> None:
    modules = flags.mtp_modules
    if modules is None:
        return
    if flags.mtp:
        raise FivefoldError(
            f"--mtp takes the configuration's number of modules, and --mtp-modules {modules} another; give one of "
            "them.",
            code="contradiction",
            option="--mtp-modules",
            value=modules,
        )
    if not 0 <= modules <= _MOST_MTP:
        raise FivefoldError(
            f"--mtp-modules {modules} is not possible: 0 to {_MOST_MTP}.",
            code="bad-number",
            option="--mtp-modules",
            value=modules,
            legal=f"0 to {_MOST_MTP}",
        )


def runtime_of(flags: RuntimeFlags, saved: SavedPlan | None, defaults: dict[str, str]) -> str:
    if flags.runtime is None and saved is None:
        defaults["--runtime"] = DEFAULT_RUNTIME
    name = flags.runtime or (saved.runtime if saved else DEFAULT_RUNTIME)
    load_runtime(runtime_name(name))  # refuses unknown ones before anything else is said
    return name


def _check_software(flags: RuntimeFlags, name: str, cluster: Cluster, defaults: dict[str, str]) -> None:
    """Refuse a runtime that was asked for and certainly does not run on the accelerator; else say what is priced."""
    runtime, gpu = load_runtime(runtime_name(name)).name, cluster.gpu
    reason = why_not(runtime, gpu.vendor)
    if flags.runtime is not None and reason is not None:
        raise FivefoldError(
            f"{runtime} does not run on {gpu.name}: {reason}. To compare the hardware all the same, leave out "
            "--runtime: the default's layout is then priced as if it ran there, and the answer says so.",
            code="runtime-hardware",
            option="--runtime",
            value=name[:60],
        )
    said = caveat(runtime, gpu.vendor)
    if said is not None:
        defaults["--runtime"] = f"{name} ({said})"


def cluster_of(flags: ClusterFlags, saved: SavedPlan | None, defaults: dict[str, str]) -> Cluster:
    """The cluster of the flags, or of the plan file where they say nothing."""
    if flags.gpu is not None and flags.cluster is not None:
        raise FivefoldError(
            f"--gpu {flags.gpu[:60]} and --cluster {flags.cluster[:60]} both say what the job runs on; give one. A "
            f'cluster file can start from a GPU of the catalogue with base = "{flags.gpu[:60]}".',
            code="contradiction",
            option="--gpu",
            value=flags.gpu[:60],
        )
    named = flags.cluster or flags.gpu
    if named is None and saved is not None:
        return _resized(saved.cluster, flags)
    if named is None:
        named = defaults["--gpu"] = DEFAULT_GPU
    gpus = saved.cluster.gpus if saved is not None and flags.gpus is None else flags.gpus
    cluster = named_cluster(flags, named, gpus, flags.gpus_per_node, counted=True)
    refuse_control(to_builtins(cluster), "The cluster", "--cluster")
    return cluster


def named_cluster(
    flags: ClusterFlags, named: str, gpus: int | None = None, gpus_per_node: int | None = None, *, counted: bool = False
) -> Cluster:
    """load_cluster, whose mistakes about a name are those of the flag that named it."""
    with nullcontext() if flags.cluster is None else asked_as("--gpu", "--cluster"):
        return load_cluster(named, gpus, gpus_per_node, counted=counted)


def _resized(cluster: Cluster, flags: ClusterFlags) -> Cluster:
    """The plan file's cluster, with another number of GPUs if asked."""
    if flags.gpus_per_node is not None:
        raise FivefoldError(
            "--gpus-per-node cannot be changed alone on the cluster of a plan file, whose links depend on it. Name the "
            "cluster too, with --gpu or --cluster.",
            code="missing-option",
            option="--gpus-per-node",
            value=flags.gpus_per_node,
        )
    if flags.gpus is None:
        return cluster
    from fivefold.search.gpu_counts import resized

    load_cluster(DEFAULT_GPU, flags.gpus)  # refuses an impossible number in the usual words
    return resized(cluster, flags.gpus)


__all__ = ["Question", "comparison_questions", "estimate_question", "is_plan_file", "one_layout", "plan_question"]
