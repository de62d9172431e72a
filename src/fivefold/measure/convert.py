"""From a published run to the input of `estimate`: model, cluster, workload, layout, runtime, and what was assumed.

The model is built from the row's own sizes: a published run is often a cut-down that no catalogue has. What a row does
not state takes the default that Case.assumed names; what fivefold does not model is refused with the reason.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import msgspec

from fivefold.cluster import Cluster, load_cluster, load_curve_of
from fivefold.errors import FivefoldError
from fivefold.layout import Layout, Recompute, Workload
from fivefold.layout.layout import RECOMPUTE_MODULES, Overlap, RecomputeModule
from fivefold.measure.runs import Run
from fivefold.model import block_params
from fivefold.model.spec import Attention, Block, BlockRun, Experts, Feed, FeedForward, ModelSpec
from fivefold.runtime import load_runtime


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run as input of `estimate`. assumed: fields that the source does not state."""

    run: Run
    model: ModelSpec
    cluster: Cluster
    work: Workload
    layout: Layout
    runtime: str
    assumed: tuple[str, ...]


class Unconvertible(Exception):  # noqa: N818  (the reason why a row is skipped; not an error of the user's)
    """A run that is not modelled, or not stated well enough; the message says why."""


# (start of the published framework, runtime, whether that runtime stands in for another framework)
_FRAMEWORKS: tuple[tuple[str, str, bool], ...] = (
    ("megatron-lm", "megatron", False),
    ("megatron-core", "megatron", False),
    ("megatron-bridge", "megatron", False),
    ("nemo", "megatron", False),
    ("torchtitan", "torchtitan", False),
    ("llm-foundry/composer fsdp", "torchtitan", True),
    ("nanotron", "megatron", True),
)
# Published GPU -> (system of the catalogue, whether something about it is assumed: form factor, memory, power).
_GPUS: dict[str, tuple[str, bool]] = {
    "B200": ("b200", False),
    "GB200": ("gb200-nvl72", False),
    "H100": ("h100-sxm", True),
    "H100-80GB-SXM": ("h100-sxm", False),
    "H100-96GB-HBM2e": ("h100-sxm", True),
    "H100-96GB-HBM2e (500W)": ("h100-sxm", True),
    "H200": ("h200-sxm", False),
    "A100": ("a100-80g-sxm", True),
    "A100-80GB": ("a100-80g-sxm", False),
    "A100-40GB": ("a100-40g-sxm", False),
    "A100-80GB (Ampere)": ("a100-80g-sxm", True),
    "A100-80GB (NDm A100 v4)": ("a100-80g-sxm", False),
    "A100 (DGX-A100, HBM not stated)": ("a100-80g-sxm", True),
    "A100-PCIe-80GB": ("a100-80g-pcie", False),
    "MI300X": ("mi300x", False),
    "V100-32GB": ("v100-sxm-32g", False),
    "V100-16GB": ("v100-sxm-16g", False),
}
# Attention kernels of a framework where they are not the GPU's usual one. llm-foundry's tables are of 2023 and
# FlashAttention 1 (Dao et al. 2022); nanotron 0.5 calls the flash-attn 2 package (both from memory).
_KERNELS: tuple[tuple[str, str], ...] = (("llm-foundry", "fa1"), ("nanotron", "fa2"))
# FlashAttention 1's rates as fa2's over this. FlashAttention-2 (Dao 2023) reports 1.7 to 3.0 times FlashAttention 1 and
# 1.3 to 2.5 times its Triton version; 1.7 is what fits the shipped llm-foundry runs, whose error is so not blind to it.
_FA2_OVER_FA1 = 1.7
# (system, word in the published interconnect) -> the catalogue's system with that network.
_NETWORKS = {("h100-sxm", "EFA"): "aws-p5"}


def convert(run: Run, runtime: str | None = None) -> Case:
    """The run as input of `estimate`, under its own runtime or the given one.

    Raises Unconvertible with the reason, and FivefoldError for an unknown `runtime`.
    """
    assumed: set[str] = set()
    own = _runtime(run, assumed)
    runtime = own if runtime is None else load_runtime(runtime).name
    if runtime != own:
        assumed.add("runtime")
    try:
        model = _model(run, assumed)
        cluster = _cluster(run, assumed)
        work = _workload(run, runtime, assumed)
        layout = _layout(run, model, runtime, assumed)
    except FivefoldError as error:
        raise Unconvertible(error.message) from error
    _check_world(run, layout)
    return Case(
        run=run, model=model, cluster=cluster, work=work, layout=layout, runtime=runtime, assumed=tuple(sorted(assumed))
    )


def _need(run: Run, *fields: str) -> None:
    missing = [field for field in fields if getattr(run, field) is None]
    if missing:
        raise Unconvertible(f"not stated: {', '.join(missing)}")


def _runtime(run: Run, assumed: set[str]) -> str:
    _need(run, "framework")
    name = str(run.framework)
    if "pipeline" in name and "1f1b" not in name:
        raise Unconvertible(f"the schedule of {name} is not modelled")
    for start, runtime, stands_in in _FRAMEWORKS:
        if name.lower().startswith(start):
            if stands_in:
                assumed.add("runtime")
            return runtime
    raise Unconvertible(f"the framework {name[:60]} is not modelled")


# ---------------------------------------------------------------- model


def _model(run: Run, assumed: set[str]) -> ModelSpec:
    if run.arch not in ("dense", "moe"):
        raise Unconvertible(
            f"the architecture {run.arch or 'is not stated'!r} cannot be built from the table's columns"
        )
    _need(run, "layers", "hidden", "heads", "vocab", "gated_mlp", "seq")
    layers, hidden, heads = _int(run.layers), _int(run.hidden), _int(run.heads)
    if run.head_dim is None and hidden % heads:
        raise Unconvertible(f"head_dim is not stated and {heads} heads do not divide hidden {hidden}")
    kv_heads = run.kv_heads or heads
    for field in ("kv_heads", "tied_embeddings"):
        if getattr(run, field) is None:
            assumed.add(field)
    like_gpt = not run.gated_mlp
    tied = bool(run.tied_embeddings) if run.tied_embeddings is not None else like_gpt
    block = Block(
        mixer=Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=run.head_dim or hidden // heads,
            qkv_bias=like_gpt,
            out_bias=like_gpt,
            rope=not like_gpt,
        ),
        feed=_feed(run, like_gpt),
        norm="layernorm" if like_gpt else "rmsnorm",
        norm_bias=like_gpt,
    )
    return ModelSpec(
        name=run.model or run.id,
        family="gpt2" if like_gpt else "llama",
        hidden=hidden,
        vocab=_int(run.vocab),
        max_position=_int(run.seq),
        runs=(BlockRun(layers, block),),
        tied_embeddings=tied,
        learned_positions=_int(run.seq) if like_gpt else 0,
        final_norm="layernorm" if like_gpt else "rmsnorm",
        final_norm_bias=like_gpt,
        source=run.source or "",
    )


def _feed(run: Run, like_gpt: bool) -> Feed:
    gated = bool(run.gated_mlp)
    if run.arch == "moe":
        _need(run, "experts", "topk", "moe_ffn")
        width = _int(run.moe_ffn)
        return Experts(
            num_experts=_int(run.experts),
            top_k=_int(run.topk),
            ffn=width,
            shared_ffn=width * (run.shared_experts or 0),
            gated=gated,
        )
    _need(run, "ffn")
    return FeedForward(ffn=_int(run.ffn), gated=gated, bias=like_gpt, activation="gelu" if like_gpt else "silu")


# ---------------------------------------------------------------- cluster and workload


def _cluster(run: Run, assumed: set[str]) -> Cluster:
    _need(run, "gpu", "gpus")
    if run.gpu not in _GPUS:
        raise Unconvertible(f"the GPU {str(run.gpu)[:60]!r} is not in the catalogue")
    system, guessed = _GPUS[str(run.gpu)]
    if guessed:
        assumed.add("gpu")
    network = run.interconnect or ""
    if not network:
        assumed.add("interconnect")
    for (base, word), other in _NETWORKS.items():
        if system == base and word in network:
            system = other
    per_node = run.gpus_per_node
    if per_node is None:
        assumed.add("gpus_per_node")
    gpus = _int(run.gpus)
    cluster = load_cluster(system, gpus=gpus, gpus_per_node=None if per_node is None else min(per_node, gpus))
    changes = _attention_kernel(run, cluster, assumed)
    return msgspec.structs.replace(cluster, compute=changes) if changes else cluster


def _attention_kernel(run: Run, cluster: Cluster, assumed: set[str]) -> dict[str, Any]:
    """Changes of the GPU's compute curve so that whatever kernel the runtime picks has the framework's rates."""
    name = next((kernel for start, kernel in _KERNELS if (run.framework or "").lower().startswith(start)), None)
    attention = load_curve_of(cluster).attention
    if name is None or "fa2" not in attention:
        return {}
    assumed.add("attention_kernel")
    rates = msgspec.to_builtins(attention["fa2"])
    if name == "fa1":
        for side in ("forward", "backward"):
            rates[side] = [rate / _FA2_OVER_FA1 for rate in rates[side]]
        rates["source"] = "FlashAttention 1: fa2's rates over a fitted ratio"
    return {"attention": dict.fromkeys(attention, rates)}


def _workload(run: Run, runtime: str, assumed: set[str]) -> Workload:
    _need(run, "seq", "gbs")
    if run.precision_kind in (None, "unknown"):
        assumed.add("precision")
    elif run.precision_kind not in ("bf16", "fp16", "fp8"):
        raise Unconvertible(f"the precision {run.precision_kind} is not modelled")
    attention = (run.attention or "").lower()
    if "unfused" in attention:
        raise Unconvertible("attention without a flash kernel is not modelled")
    # Composer's mixed precision PURE reduces gradients in bf16, DEFAULT in fp32; the torchtitan profile has fp32 only.
    pure = "Mode=PURE" in (run.overlap or "")
    if pure and runtime == "torchtitan":
        assumed.add("grad_dtype")
    return Workload(
        seq_len=_int(run.seq),
        global_batch=_int(run.gbs),
        precision="bf16" if run.precision_kind in (None, "unknown") else run.precision_kind,  # type: ignore[arg-type]
        grad_dtype="bf16" if pure and runtime != "torchtitan" else "fp32",
    )


# ---------------------------------------------------------------- layout


def _layout(run: Run, model: ModelSpec, runtime: str, assumed: set[str]) -> Layout:
    _need(run, "tp", "mbs")
    tp, pp = _int(run.tp), run.pp or 1
    moe = run.arch == "moe"
    for field in ("cp", "pp") + (("ep",) if moe else ()):
        if getattr(run, field) is None:
            assumed.add(field)
    if pp > 1 and run.vpp is None:
        assumed.add("vpp")
    if tp > 1 and run.sp is None:
        assumed.add("sequence_parallel")
    return Layout(
        tp=tp,
        cp=run.cp or 1,
        cp_kind="a2a" if "a2a" in (run.overlap or "") and (run.cp or 1) > 1 else "p2p",
        pp=pp,
        vpp=run.vpp or 1,
        ep=(run.ep or 1) if moe else 1,
        etp=_etp(run, tp, assumed) if moe else 1,
        zero=_zero(run, runtime, assumed),
        sequence_parallel=None if run.sp is None else bool(run.sp) and tp > 1,
        micro_batch=_int(run.mbs),
        recompute=_recompute(run, runtime, assumed),
        overlap=_overlap(run, assumed),
        **_stages(run, model, assumed),
    )


def _stages(run: Run, model: ModelSpec, assumed: set[str]) -> dict[str, Any]:
    """How blocks lie on the pipeline: evenly, unless the framework is known to do otherwise.

    nanotron fills each stage up to its share of the matrix parameters, the head's among them (nanotron models/base.py
    and get_block_compute_costs). On Megatron-Core, models such as Llama 3.1 405B (126 blocks) run with embedding and
    head counted as a block each.
    """
    pp, chunks = run.pp or 1, (run.pp or 1) * (run.vpp or 1)
    if pp == 1:
        return {}
    if (run.framework or "").lower().startswith("nanotron"):
        assumed.add("stages")
        return _by_parameters(model, pp)
    if model.layers % chunks and (model.layers + 2) % chunks == 0:
        assumed.add("stages")
        return {"account_for_embedding": True, "account_for_loss": True}
    return {}


def _by_parameters(model: ModelSpec, pp: int) -> dict[str, Any]:
    block = block_params(model.runs[0].block, model.hidden)
    share = (model.layers * block + model.vocab * model.hidden) / pp
    ends = [min(math.ceil(share * (rank + 1) / block), model.layers) for rank in range(pp - 1)]
    per_stage = [end - start for start, end in itertools.pairwise([0, *ends, model.layers])]
    # A layout has a first, a last and equal middle stages: the widest stage and the last are kept.
    last, widest = per_stage[-1], max(per_stage[:-1])
    return {"first_stage_layers": model.layers - last - (pp - 2) * widest, "last_stage_layers": last}


def _etp(run: Run, tp: int, assumed: set[str]) -> int:
    if run.etp is not None:
        return run.etp
    assumed.add("etp")
    return tp if (run.ep or 1) == 1 else 1


def _zero(run: Run, runtime: str, assumed: set[str]) -> int:
    if run.zero is not None:
        return run.zero
    if run.dist_opt is not None and runtime == "megatron":
        return run.dist_opt
    assumed.add("zero")
    return 3 if runtime == "torchtitan" else 1


def _recompute(run: Run, runtime: str, assumed: set[str]) -> Recompute:
    kind = run.recompute_kind or "unknown"
    if kind == "unknown":
        assumed.add("recompute")
        return Recompute()
    text = run.recompute or ""
    layers = re.search(r"block num_layers=(\d+)", text)
    if kind == "full":
        return Recompute(kind="full", layers=int(layers[1]) if layers else None)
    if kind == "none":
        return Recompute()
    modules: list[RecomputeModule] = [name for name in RECOMPUTE_MODULES if re.search(rf"\b{name}\b", text)]
    if runtime == "torchtitan" and not modules:
        raise Unconvertible("torchtitan's selective checkpointing chooses single operations, which is not modelled")
    return Recompute(kind="selective", modules=tuple(modules))


def _overlap(run: Run, assumed: set[str]) -> Overlap:
    """Megatron-LM's switches are opt-in, so where the source lists its overlap, what it does not list was off. The
    recipes of NeMo and Megatron-Bridge switch gradient, parameter and tensor-parallel overlap on (from memory)."""
    framework, text = (run.framework or "").lower(), run.overlap or ""
    listed = framework.startswith("megatron-lm") and bool(text)
    if not listed and (run.dp != 1 or run.tp != 1):
        assumed.add("overlap")
    recipe = framework.startswith(("nemo", "megatron-bridge", "megatron-core"))
    return Overlap(
        grad="overlap-grad-reduce" in text or not listed,
        param="overlap-param-gather" in text if listed else None,
        tp="--tp-comm-overlap" in text or (recipe and (run.tp or 1) > 1 and run.sp != 0),
        ep="overlap-moe-expert-parallel-comm" in text,
    )


def _check_world(run: Run, layout: Layout) -> None:
    split = layout.tp * layout.cp * layout.pp
    gpus = _int(run.gpus)
    if gpus % split:
        raise Unconvertible(f"tp {layout.tp}, cp {layout.cp}, pp {layout.pp} do not divide {gpus} GPUs")
    if run.dp is not None and run.dp != gpus // split:
        raise Unconvertible(f"the published dp {run.dp} is not {gpus} GPUs over tp, cp and pp, {gpus // split}")


def _int(value: Any) -> int:
    """A number that _need has seen to be there."""
    return int(value)
