"""From flags to the library's objects, with every default written down: the question that a command asks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import lcm
from typing import Any, get_args

from msgspec import to_builtins
from msgspec.structs import replace

from fivefold.cli.flags import ClusterFlags, LayoutFlags, ModelFlags, RuntimeFlags, WorkFlags
from fivefold.cli.values import layout_text, option_of, pins_of, positive, refuse_control, runtime_name, whole, word
from fivefold.cluster import Cluster, load_cluster
from fivefold.errors import FivefoldError
from fivefold.estimate.planfile import SavedPlan, load_plan
from fivefold.layout import Layout, RampUp, Recompute, Workload, parse_count, parse_ramp_up
from fivefold.layout.batch import check_ramp_up, global_batch_from_tokens
from fivefold.layout.workload import Optimizer, Precision
from fivefold.model import ModelSpec, load_model
from fivefold.runtime import load_runtime

DEFAULT_GPU = "h100-sxm"
DEFAULT_RUNTIME = "megatron"
# The published models of the catalogue were pre-trained on sequences of 2K to 8K tokens, whatever they extend to later.
LONGEST_DEFAULT_SEQ = 8192
# The low end of what large pre-training runs use (Llama 1: about 4M tokens per batch).
DEFAULT_TOKENS_PER_BATCH = 4 * 1024 * 1024
# A batch asked for in tokens may move so far to a number of sequences that more layouts divide.
_BATCH_TOLERANCE = 0.02


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
    return dataclasses.replace(question, layout=chosen)


def _usual_layout(runtime: str) -> Layout:
    """The library's defaults; a runtime without ZeRO-1 shards as much as it can."""
    stages = load_runtime(runtime).zero_stages
    usual = Layout()
    return usual if usual.zero in stages else replace(usual, zero=max(stages))


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
            own = one_layout(layout_text(option, text), question.layout)
            question = dataclasses.replace(question, layout=own)
        sides.append(question)
    return _same_batch(sides[0], sides[1])


def _same_batch(a: Question, b: Question) -> tuple[Question, Question]:
    """Default batches follow the layout; two of them have to be one to be compared: the least common multiple."""
    if "--global-batch" not in a.defaults or "--global-batch" not in b.defaults or a.work.seq_len != b.work.seq_len:
        return a, b
    units = [_layout_unit(each.layout, each.cluster.gpus) or each.cluster.gpus for each in (a, b)]
    batch = _round_up(DEFAULT_TOKENS_PER_BATCH // a.work.seq_len, lcm(*units))
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
    spec = load_model(saved.model if saved else model, mtp=model_flags.mtp, layers=model_flags.layers)
    refuse_control(to_builtins(spec), "The model", "MODEL")
    runtime = runtime_of(runtime_flags, saved, defaults)
    cluster = cluster_of(cluster_flags, saved, defaults)
    ramp = parse_ramp_up(work_flags.ramp, "--ramp") if work_flags.ramp is not None else None
    work = _workload(work_flags, saved, spec, cluster, batch_unit, ramp, defaults)
    if ramp is not None:
        check_ramp_up(ramp, work, "--ramp")
    return Question(model=spec, cluster=cluster, work=work, runtime=runtime, ramp=ramp, defaults=defaults)


def runtime_of(flags: RuntimeFlags, saved: SavedPlan | None, defaults: dict[str, str]) -> str:
    if flags.runtime is None and saved is None:
        defaults["--runtime"] = DEFAULT_RUNTIME
    name = flags.runtime or (saved.runtime if saved else DEFAULT_RUNTIME)
    load_runtime(runtime_name(name))  # refuses unknown ones before anything else is said
    return name


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
    gpus = flags.gpus or (saved.cluster.gpus if saved else None)
    if named is None:
        named = defaults["--gpu"] = DEFAULT_GPU
    cluster = load_cluster(named, flags.gpus if flags.gpus is not None else gpus, flags.gpus_per_node)
    refuse_control(to_builtins(cluster), "The cluster", "--cluster")
    if gpus is None and not _file_says_gpus(named):
        raise FivefoldError(
            f"How many GPUs? Add --gpus, for example --gpus {cluster.gpus_per_node}"
            + (f", or gpus = {cluster.gpus_per_node} to {named[:60]}." if is_plan_file(named) else "."),
            code="missing-option",
            option="--gpus",
            legal="1 or more",
        )
    return cluster


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
    from fivefold.search.advice import resized

    load_cluster(DEFAULT_GPU, flags.gpus)  # refuses an impossible number in the usual words
    return resized(cluster, flags.gpus)


def _file_says_gpus(named: str) -> bool:
    """Whether a cluster file, which was read before without a complaint, holds the number of GPUs."""
    if not is_plan_file(named):
        return False
    import msgspec

    with open(named, "rb") as stream:
        return "gpus" in msgspec.toml.decode(stream.read())


def _workload(
    flags: WorkFlags,
    saved: SavedPlan | None,
    model: ModelSpec,
    cluster: Cluster,
    layout: Layout | None,
    ramp: RampUp | None,
    defaults: dict[str, str],
) -> Workload:
    base = saved.workload if saved else None
    seq = _seq_len(flags, base, model, defaults)
    words = {"precision": get_args(Precision), "optimizer": get_args(Optimizer), "grad_dtype": ("fp32", "bf16")}
    chosen: dict[str, Any] = {}
    for name, legal in words.items():
        value = getattr(flags, name)
        if value is not None:
            chosen[name] = word(option_of(name), value, legal)
        elif base is None:
            defaults[option_of(name)] = legal[0]
    if flags.moe_imbalance is not None:
        chosen["moe_imbalance"] = positive("--moe-imbalance", flags.moe_imbalance)
    if flags.tokens is not None:
        chosen["tokens"] = parse_count(flags.tokens, "--tokens")
    if flags.price is not None:
        chosen["price"] = positive("--price", flags.price)
    batch = _global_batch(flags, base, seq, cluster.gpus, layout, ramp, defaults)
    work = replace(base or Workload(seq_len=seq, global_batch=batch), seq_len=seq, global_batch=batch, **chosen)
    if work.price is not None and work.tokens is None:
        raise FivefoldError(
            "--price needs --tokens, the token budget whose cost is asked for, for example --tokens 1.4T.",
            code="missing-option",
            option="--tokens",
        )
    return work


def _seq_len(flags: WorkFlags, base: Workload | None, model: ModelSpec, defaults: dict[str, str]) -> int:
    if flags.seq_len is not None:
        return whole("--seq-len", flags.seq_len)
    if base is not None:
        return base.seq_len
    seq = min(model.max_position, LONGEST_DEFAULT_SEQ)
    why = "the model's longest" if seq == model.max_position else f"as {model.name} takes up to {model.max_position:,}"
    defaults["--seq-len"] = f"{seq}, {why}"
    return seq


def _global_batch(
    flags: WorkFlags,
    base: Workload | None,
    seq: int,
    gpus: int,
    layout: Layout | None,
    ramp: RampUp | None,
    defaults: dict[str, str],
) -> int:
    """Sequences per step, from whichever flag gives them."""
    if flags.global_batch is not None and flags.tokens_per_batch is not None:
        raise FivefoldError(
            "--global-batch and --tokens-per-batch both give the batch; give one of them.",
            code="contradiction",
            option="--tokens-per-batch",
            value=flags.tokens_per_batch[:60],
        )
    if flags.global_batch is not None:
        return whole("--global-batch", flags.global_batch)
    unit = _layout_unit(layout, gpus) if layout is not None else None
    if flags.tokens_per_batch is not None:
        return _batch_of_tokens(parse_count(flags.tokens_per_batch, "--tokens-per-batch"), seq, gpus, unit, defaults)
    if ramp is not None:
        defaults["--global-batch"] = f"{ramp.end}, the end of --ramp"
        return ramp.end
    if base is not None:
        return base.global_batch
    wanted = max(DEFAULT_TOKENS_PER_BATCH // seq, 1)
    unit = unit or _searched_unit(gpus, wanted)
    batch = _round_up(wanted, unit)
    defaults["--global-batch"] = f"{batch} sequences, {batch * seq / 1e6:.1f}M tokens, a multiple of {unit}"
    return batch


def _round_up(value: int, unit: int) -> int:
    return max(-(-value // unit), 1) * unit


def _layout_unit(layout: Layout, gpus: int) -> int | None:
    """Sequences by which the batch of one layout can change; None where its degrees do not divide the GPUs, so that
    there is no number of replicas."""
    replica = max(layout.tp * layout.cp * layout.pp, 1)
    if gpus % replica:
        return None
    interleaved = layout.vpp > 1 and layout.schedule in (None, "interleaved")
    return max(layout.micro_batch * (gpus // replica) * (layout.pp if interleaved else 1), 1)


def _searched_unit(gpus: int, wanted: int) -> int:
    """The GPUs, so that any layout divides; halved while they are more than the batch that is wanted."""
    unit = gpus
    while unit > wanted and unit % 2 == 0:
        unit //= 2
    return unit


def _batch_of_tokens(tokens: int, seq: int, gpus: int, unit: int | None, defaults: dict[str, str]) -> int:
    """The nearest batch that the layout, or else the GPUs divide, and near it one that many layouts divide."""
    if unit is None:
        unit = _searched_unit(gpus, max(tokens // seq, 1))
        batch = global_batch_from_tokens(tokens, seq, unit)
        while abs(global_batch_from_tokens(tokens, seq, unit * 2) * seq / tokens - 1) <= _BATCH_TOLERANCE:
            unit *= 2
    batch = global_batch_from_tokens(tokens, seq, unit)
    defaults["--global-batch"] = (
        f"{batch} sequences, {batch * seq / tokens - 1:+.1%} of {tokens:,} tokens, a multiple of {unit}"
    )
    return batch


__all__ = ["Question", "comparison_questions", "estimate_question", "is_plan_file", "one_layout", "plan_question"]
