"""The constants that benchmarks/ablation.py takes away: value, source, and how a case gets the neutral value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

from msgspec.structs import replace

from fivefold.cluster import Cluster, apart, beside, load_curve_of
from fivefold.cluster.curve import merged
from fivefold.estimate import reduction
from fivefold.measure import hardware
from fivefold.measure.convert import Case
from fivefold.runtime import PROFILES

Change = Callable[[Case], Case]


class Constant(NamedTuple):
    """One constant: its values by GPU or runtime in words, its neutral value, how a case gets that, and its source.

    within: where the constant is a module's, a context in which that has the neutral value.
    fitted: what it was fitted to, "runs" or "timings" (of kernels and collectives); "" for what is read or remembered.
    """

    name: str
    room: str
    unit: str
    values: str
    neutral: str
    source: str
    change: Change
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    fitted: str = ""


# Field of a runtime's profile, its unit, the neutral value.
_PROFILE: tuple[tuple[str, str, float | bool], ...] = (
    ("tp_in_step", "ratio", 1.0),
    ("tp_beside_dgrad_hidden", "share", 0.0),
    ("tp_beside_wgrad_hidden", "share", 0.0),
    ("tp_overlap_hidden", "share", 0.0),
    ("ep_overlap_hidden", "share", 0.0),
    ("step_overhead_s", "s", 0.0),
    ("launch_host_s", "s", 0.0),
    ("op_host_s", "s", 0.0),
    ("group_launch_host_s", "s", 0.0),
    ("dispatch_host_s", "s", 0.0),
    ("unpack_host_s", "s", 0.0),
    ("registered_buffers", "switch", False),
    ("expert_extras_apart", "switch", False),
    ("experts_padded", "switch", False),
    ("stretched_rotary_apart", "switch", False),
    ("gather_copy_bytes", "bytes", 0.0),
    ("scatter_copy_bytes", "bytes", 0.0),
    ("unfused_norms", "switch", False),
    ("tokens_sent_once", "switch", False),
    ("wgrad_bytes", "bytes", 8),
    ("bf16_wgrad_bytes", "bytes", 0),
    ("separate_update", "switch", False),
    ("bf16_all_reduces", "switch", False),
    ("sharded_reduced_at_once", "switch", False),
    ("whole_clip_bytes", "bytes", 0),
    ("quantised_gathers", "switch", False),
    ("sequence_second", "switch", False),
    ("ring_gathers", "switch", False),
    ("repeats_keys_and_values", "switch", False),
    ("compiled_casts", "switch", False),
    ("adamw_update_bytes", "bytes", 0),
    ("input_gradient_bytes", "bytes", 0),
    ("norms_kept_fp32", "switch", False),
    ("scores_kept_fp32", "switch", False),
    ("gathered_inputs_kept", "switch", False),
    ("gather_buffers", "buffers", 0),
    ("sharded_weight_bytes", "bytes", 0),
    ("replica_bucket_bytes", "bytes", 0),
    ("micro_batch_grad_bytes", "bytes", 0),
    ("sharded_loss_bytes_per_logit", "bytes", 0),
    ("workspace_bytes", "bytes", 0),
    ("context_bytes", "bytes", 0),
    ("nccl_bytes_per_group", "bytes", 0),
    ("fragmentation", "share", 0.0),
    ("loss_bytes_per_logit", "bytes", 2),
    ("quantised_weight_bytes", "bytes", 2),
    ("prefetch_blocks", "blocks", 0),
    ("time_spread", "share", 0.10),
)
# Field of a GPU's compute curve, its unit, the neutral value.
CURVE: tuple[tuple[str, str, float], ...] = (
    ("in_step", "ratio", 1.0),
    ("depth_ramp", "elements of k", 0.0),
    ("wave_share", "share", 0.0),
    ("split_depth", "elements of k", 1e9),
    ("memory_efficiency", "share", 1.0),
    ("memory_exposed", "share", 0.0),
    ("launch_s", "s", 0.0),
    ("group_launch_s", "s", 0.0),
    ("streaming_efficiency", "share", 1.0),
)
CURVE_TABLES = ("efficiency", "precision")
_CURVE_SOURCES = {"runs": "fitted to training runs", "timings": "fitted to timed kernels", "": "from memory"}
ATTENTION = (("forward", 1.0), ("backward", 1.0), ("seq_half", 0.0), ("tail", 0.0))
# Field of a link, its unit, the neutral value.
LINK: tuple[tuple[str, str, float | None], ...] = (
    ("efficiency", "share", 1.0),
    ("all_to_all_efficiency", "share", None),
    ("latency_s", "s", 0.0),
    ("in_network_efficiency", "share", None),
    ("in_network_latency_s", "s", 0.0),
)


def constants(cases: Iterable[Case]) -> list[Constant]:
    """All constants, with the values that the cases use."""
    cases = list(cases)
    return [
        *(_of_profile(*line) for line in _PROFILE if hasattr(PROFILES[0], line[0])),
        *(_of_curve(*line, cases) for line in CURVE),
        *(_of_curve_table(name, cases) for name in CURVE_TABLES),
        *(_of_attention(name, value, cases) for name, value in ATTENTION),
        *(_of_links(*line, cases) for line in LINK),
        _of_clusters(cases),
        _of_hosts(cases),
        _of_ranks_apart(),
        _of_compute_beside_collectives(),
        *_of_recipes(),
    ]


def _of_profile(field: str, unit: str, neutral: float | bool) -> Constant:
    values = {profile.name: getattr(profile, field) for profile in PROFILES}
    sources = list(dict.fromkeys(profile.sources[field] for profile in PROFILES if field in profile.sources))
    first = sources[0] if sources else "of the framework's code, or from memory"

    def change(case: Case) -> Case:
        return replace(case, changes={**case.changes, field: neutral})

    fitted = "runs" if any(source.startswith("fit") for source in sources) else ""
    return Constant(field, "runtime", unit, _values(values), word(neutral), first, change, fitted=fitted)


def _compute(case: Case, changes: dict[str, Any]) -> Case:
    return replace(case, cluster=replace(case.cluster, compute=merged(case.cluster.compute, changes)))


def _of_curve(field: str, unit: str, neutral: float, cases: list[Case]) -> Constant:
    values = {case.cluster.gpu.name: getattr(load_curve_of(case.cluster), field) for case in _one_per_gpu(cases)}
    fitted = {"in_step": "runs", "launch_s": ""}.get(field, "timings")
    source = "compute.toml: " + _CURVE_SOURCES[fitted]

    def change(case: Case) -> Case:
        return _compute(case, {field: neutral})

    return Constant(field, "GPU curve", unit, _values(values), f"{neutral:g}", source, change, fitted=fitted)


def _of_curve_table(field: str, cases: list[Case]) -> Constant:
    values = {
        case.cluster.gpu.name: "/".join(f"{value:g}" for value in getattr(load_curve_of(case.cluster), field).values())
        for case in _one_per_gpu(cases)
    }

    def change(case: Case) -> Case:
        return _compute(case, {field: dict.fromkeys(getattr(load_curve_of(case.cluster), field), 1.0)})

    source = "compute.toml: fitted to timed kernels, or the best matrix product (MAMF)"
    return Constant(field, "GPU curve", "share", _values(values), "1", source, change, fitted="timings")


def _of_attention(field: str, neutral: float, cases: list[Case]) -> Constant:
    keys = (field,) if field in ("forward", "backward") else (f"{field}_forward", f"{field}_backward")

    def change(case: Case) -> Case:
        rates = load_curve_of(case.cluster).attention
        new = {
            kernel: {key: [neutral] * len(rate.head_dims) if key == field else neutral for key in keys}
            for kernel, rate in rates.items()
        }
        return _compute(case, {"attention": new})

    values = {}
    for case in _one_per_gpu(cases):
        curve = load_curve_of(case.cluster)
        rate = curve.attention[curve.attention_kernel]
        got = [getattr(rate, key) for key in keys]
        values[case.cluster.gpu.name] = "/".join(
            f"{max(value):g}" if isinstance(value, tuple) else f"{value:g}" for value in got
        )
    source = "compute.toml: fitted to timed kernels, or published figures"
    unit = "tokens" if field == "seq_half" else "blocks" if field == "tail" else "share"
    name = f"attention.{field}"
    return Constant(name, "GPU curve", unit, _values(values), f"{neutral:g}", source, change, fitted="timings")


def with_links(field: str, value: float | None, cluster: Cluster) -> Cluster:
    """The cluster with another value of one field of all its links."""
    return replace(cluster, links=tuple(replace(link, **{field: value}) for link in cluster.links))


def _of_links(field: str, unit: str, neutral: float | None, cases: list[Case]) -> Constant:
    values = {}
    for case in _one_per_gpu(cases):
        got = [getattr(link, field) for link in case.cluster.links]
        values[case.cluster.gpu.name] = "/".join("-" if value is None else f"{value:g}" for value in got)

    def change(case: Case) -> Case:
        return replace(case, cluster=with_links(field, neutral, case.cluster))

    word = "as efficiency" if neutral is None else f"{neutral:g}"
    source = "systems.toml: measured collectives of that system, or the nearest one's"
    return Constant(f"link.{field}", "network", unit, _values(values), word, source, change, fitted="timings")


def _of_clusters(cases: list[Case]) -> Constant:
    values = {case.cluster.gpu.name: case.cluster.launch_s for case in _one_per_gpu(cases)}
    return Constant(
        "launch_s of a collective",
        "network",
        "s",
        _values(values),
        "0",
        "systems.toml: fitted with the latency to measured collectives",
        lambda case: replace(case, cluster=replace(case.cluster, launch_s=0.0)),
        fitted="timings",
    )


def _of_hosts(cases: list[Case]) -> Constant:
    values = {case.cluster.gpu.name: case.cluster.host_work_ratio for case in _one_per_gpu(cases)}
    return Constant(
        "host_work_ratio",
        "host",
        "ratio",
        _values(values),
        "1",
        "fit: pairs of Megatron-LM's functional tests on A100 or GB200 and on H100 that are not deterministic",
        lambda case: replace(case, cluster=replace(case.cluster, host_work_ratio=1.0)),
        fitted="runs",
    )


def _of_ranks_apart() -> Constant:
    @contextmanager
    def equal() -> Iterator[None]:
        with mock.patch.object(apart, "SPREAD", 0.0):
            apart.slowest.cache_clear()
            yield
        apart.slowest.cache_clear()

    source = "fit: growth of step times with the number of GPUs, levels free (cluster/apart.py)"
    value = f"{apart.SPREAD:g}"
    return Constant("spread of GPUs", "cluster", "share", value, "0", source, replace, equal, fitted="runs")


def _of_compute_beside_collectives() -> Constant:
    @contextmanager
    def undisturbed() -> Iterator[None]:
        with ExitStack() as stack:
            for module in (beside, reduction):
                stack.enter_context(mock.patch.object(module, "WAITED", 0.0))
            stack.enter_context(mock.patch.object(beside.unhidden, "__defaults__", (0.0,)))
            yield

    source = "Lee et al. 2025, abstract (cluster/beside.py)"
    name = "compute slower beside collectives"
    return Constant(name, "cluster", "share", f"{beside.SLOWER:g}", "0", source, replace, undisturbed)


def _of_recipes() -> list[Constant]:
    """What is taken of how a published run was made, beside what its row states."""

    def older_attention(case: Case) -> Case:
        rates = case.cluster.compute.get("attention", {})
        if not any(str(rate.get("source", "")).startswith("FlashAttention 1") for rate in rates.values()):
            return case
        sides = ("forward", "backward")
        new = {
            kernel: {side: [value * hardware._FA2_OVER_FA1 for value in rate[side]] for side in sides}
            for kernel, rate in rates.items()
        }
        return _compute(case, {"attention": new})

    def without_recipe(case: Case) -> Case:
        return replace(case, changes={}) if case.changes else case

    ratio = f"{hardware._FA2_OVER_FA1:g}"
    return [
        Constant(
            "FlashAttention 2 over 1",
            "published runs",
            "ratio",
            ratio,
            "1",
            "hardware.py: the low end of FlashAttention-2's paper, fits llm-foundry",
            older_attention,
            fitted="runs",
        ),
        Constant(
            "recipes' own profile numbers",
            "published runs",
            "–",
            "by framework, release and CUDA graphs",
            "the runtime's",
            "measure/frameworks/, recipes.py: code of the frameworks, or from memory",
            without_recipe,
        ),
    ]


def _one_per_gpu(cases: Iterable[Case]) -> list[Case]:
    return list({case.cluster.gpu.name: case for case in cases}.values())


def _values(values: Mapping[str, Any]) -> str:
    """Values with who has them, equal ones together."""
    owners: dict[str, list[str]] = defaultdict(list)
    for owner, value in values.items():
        owners[word(value)].append(owner)
    if len(owners) == 1:
        return next(iter(owners))
    return ", ".join(f"{value} ({' '.join(names)})" for value, names in owners.items())


def word(value: Any) -> str:
    return value if isinstance(value, str) else ("on" if value else "off") if isinstance(value, bool) else f"{value:g}"
