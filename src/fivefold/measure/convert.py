"""From a published run to the input of `estimate`: model, cluster, workload, layout, runtime, and what was assumed.

The model is built from the row's own sizes: a published run is often a cut-down that no catalogue has. What a row does
not state is chosen by the rules of its framework (frameworks/), never from the row's performance, and Case.assumed
names it; a row without a model, a cluster or a batch is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from fivefold.cluster import Cluster, load_curve_of
from fivefold.errors import FivefoldError
from fivefold.layout import Layout, Workload
from fivefold.layout.workload import SINGLE, Lora, Precision
from fivefold.measure.architecture import model_of
from fivefold.measure.attention import drops_out, is_unfused
from fivefold.measure.complete import completed
from fivefold.measure.frameworks import Framework
from fivefold.measure.hardware import cluster_of
from fivefold.measure.layouts import layout_of
from fivefold.measure.policies import KEPT
from fivefold.measure.recipes import changes_of
from fivefold.measure.runs import Run
from fivefold.measure.unstated import (
    framework_of,
    precision_of,
    runtime_of,
)
from fivefold.measure.words import (
    holds_4_bits,
    is_finetuned,
    offloaded,
    optimizer_of,
    trains_adapters,
)
from fivefold.model.spec import ModelSpec
from fivefold.runtime import load_runtime

Choice = Literal["ep", "shard_groups", "zero", "micro_batch", "local_batch", "recompute"]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run as input of `estimate`.

    assumed: fields that the source does not state. open: what `choose` still has to settle, in its order;
        "local_batch" is the micro-batch of frameworks whose pipelines cut the local batch by themselves.
    changes: numbers of the profile that the source's recipe sets otherwise.
    recomputes_in_part: as of its Framework. policies: what those of its Framework keep (Profile.checkpoint_keeps).
    shard_groups: of hybrid sharding, the numbers of groups that it may have, most first.
    tuned: how the number was come by where it is a vendor's or the best of a sweep, "" elsewhere.
    """

    run: Run
    model: ModelSpec
    cluster: Cluster
    work: Workload
    layout: Layout
    runtime: str
    assumed: tuple[str, ...]
    open: tuple[Choice, ...] = ()
    changes: dict[str, Any] = {}
    recomputes_in_part: bool = True
    policies: tuple[tuple[str, ...], ...] = ()
    shard_groups: tuple[int, ...] = (1,)
    tuned: str = ""


class Unconvertible(Exception):  # noqa: N818  (the reason why a row is skipped; not an error of the user's)
    """A run that is not modelled, or not stated well enough; the message says why."""


# Without these a row is no run of a model on a cluster.
_NEEDED = ("seq", "gbs", "gpu", "gpus", "tp")
# Where a row does not say which: NeMo's recipes adapt linear_qkv (finetune_performance_optimizations of its
# collections/llm/recipes, read) with its LoRA's default rank (from memory).
_ADAPTERS = Lora(rank=32, targets=("q", "k", "v"))
# What a GPU that lacks a recipe's matrix units runs instead.
_NEXT_PRECISION: dict[Precision, Precision] = {
    "nvfp4": "mxfp8",
    "mxfp8": "fp8",
    "fp8": "bf16",
    "bf16": "fp16",
    "fp16": "bf16",
    "tf32": "fp32",
}


def convert(run: Run, runtime: str | None = None) -> Case:
    """The run as input of `estimate`, under its own runtime or the given one.

    Raises Unconvertible with the reason, and FivefoldError for an unknown `runtime`.
    """
    assumed: set[str] = set()
    line = framework_of(run)
    run = completed(run, assumed)
    _check(run)
    own, stands_in = runtime_of(run, line)
    if stands_in:
        assumed.add("runtime")
    runtime = own if runtime is None else load_runtime(runtime).name
    if runtime != own:
        assumed.add("runtime")
    try:
        model = model_of(run, assumed)
        cluster = cluster_of(run, line, assumed)
        work = _workload(run, line, runtime, cluster, assumed)
        layout, groups = layout_of(run, model, line, runtime, assumed)
    except FivefoldError as error:
        raise Unconvertible(error.message) from error
    _check_world(run, model, layout)
    return Case(
        run=run,
        model=model,
        cluster=cluster,
        work=work,
        layout=layout,
        runtime=runtime,
        assumed=tuple(sorted(assumed)),
        open=tuple(_unsettled(run, line, model, layout, assumed)),
        changes=changes_of(run, line),
        recomputes_in_part=line.recomputes_in_part,
        policies=tuple(KEPT[name] for name in line.policies),
        shard_groups=groups,
        tuned=line.tuned,
    )


def _unsettled(run: Run, line: Framework, model: ModelSpec, layout: Layout, assumed: set[str]) -> Iterator[Choice]:
    """The choices that are left to `choose`, in its order."""
    if "ep" in assumed and run.ep is None and model.is_moe:
        yield "ep"
    if "shard_groups" in assumed:
        yield "shard_groups"
    if "zero" in assumed and line.shards_to_fit and layout.zero == 0:
        yield "zero"
    if "micro_batch" in assumed and run.mbs is None:
        yield "local_batch" if line.pipeline_fills else "micro_batch"
    # Activations that are offloaded to the host need no recomputation.
    if "recompute" in assumed and "cpu_offloading" not in (run.overlap or ""):
        yield "recompute"


def _check(run: Run) -> None:
    missing = [field for field in _NEEDED if getattr(run, field) is None]
    if missing:
        raise Unconvertible(f"not stated: {', '.join(missing)}")


# ---------------------------------------------------------------- workload


def _workload(run: Run, line: Framework, runtime: str, cluster: Cluster, assumed: set[str]) -> Workload:
    kind, stated = precision_of(run, line)
    if not stated:
        assumed.add("precision")
    precision: Precision = msgspec.convert(kind, Precision)
    while precision not in cluster.gpu.peak_flops_per_s and precision in _NEXT_PRECISION:
        assumed.add("precision")
        precision = _NEXT_PRECISION[precision]
    unfused, stated = is_unfused(run, line, flash=load_curve_of(cluster).attention_kernel != "mem_efficient")
    if not stated:
        assumed.add("attention")
    # Composer's mixed precision PURE reduces gradients in 16 bit, DEFAULT in fp32 (get_mixed_precision).
    pure = "Mode=PURE" in (run.overlap or "")
    whole = load_runtime(runtime).sharding == "distributed_optimizer"
    narrow = pure or (line.grad_dtype if whole else line.sharded_grad_dtype) == "bf16"
    narrow = narrow and precision not in SINGLE  # gradients of fp32 weights are what they are
    if narrow:
        assumed.add("grad_dtype")
    return Workload(
        seq_len=int(run.seq or 1),
        global_batch=int(run.gbs or 1),
        precision=precision,
        grad_dtype="bf16" if narrow else "fp32",
        attention="unfused" if unfused else "flash",
        dropout=drops_out(run, line),
        offload=offloaded(run),
        optimizer=optimizer_of(run, runtime, assumed),
        trained="adapters" if trains_adapters(run) else "all",
        document_length=line.packs_documents if is_finetuned(run) else None,
        document_lengths="equal",
        lora=_ADAPTERS if trains_adapters(run) else None,
        base_precision="nf4" if trains_adapters(run) and holds_4_bits(run) else "compute",
    )


# ---------------------------------------------------------------- layout


def _check_world(run: Run, model: ModelSpec, layout: Layout) -> None:
    split = layout.tp * layout.cp * layout.pp
    gpus = int(run.gpus or 1)
    if gpus % split:
        raise Unconvertible(f"tp {layout.tp}, cp {layout.cp}, pp {layout.pp} do not divide {gpus} GPUs")
    if layout.pp > model.layers + 2:  # embedding and head may have a stage each
        raise Unconvertible(f"a pipeline of {layout.pp} stages for {model.layers} blocks")
