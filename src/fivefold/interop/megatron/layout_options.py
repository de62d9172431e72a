"""Layouts and the options that make them, in both directions.

Semantics: Megatron-LM megatron/training/arguments.py (validate_args, read at 000c4ac24f) and Megatron-Core
transformer_config and transformer_block: block recomputation counts layers per model chunk. Megatron-FSDP turns both
overlaps on where it shards everything (megatron_fsdp.py, MegatronFSDP.__init__).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fivefold.interop.megatron.given import Given
from fivefold.interop.megatron.options import OPTION_OF
from fivefold.interop.megatron.stage_text import counts_of
from fivefold.layout.layout import RECOMPUTE_MODULES, Layout, Overlap, Recompute, RecomputeModule

# What Megatron-FSDP shards, by stage of ZeRO (DistributedDataParallelConfig.data_parallel_sharding_strategy).
SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")

Options = dict[str, Any]  # option to value: text, or True for a switch; what is not there is left out


@dataclass(slots=True)
class LayoutParts:
    """A layout and what was noticed. notes: what the figures simplify."""

    layout: Layout = field(default_factory=Layout)
    notes: list[str] = field(default_factory=list)


def read_layout(given: Given, layers: int, moe: bool) -> LayoutParts:
    """The layout of a launch. layers: blocks of the model. What is wrong in it is for the rules to say."""
    parts = LayoutParts()
    tp = given.integer("--tensor-model-parallel-size") or 1
    pp = given.integer("--pipeline-model-parallel-size") or 1
    sp = given.flag("--sequence-parallel")
    if sp and tp == 1:
        parts.notes.append("--sequence-parallel does nothing with a tensor-model-parallel-size of 1: it is turned off.")
    stages = _stages(given, layers, pp, parts)
    vpp = stages.pop("vpp")
    zero = _zero(given)
    overlap = Overlap(
        grad=given.flag("--overlap-grad-reduce") or zero == 3,
        param=given.flag("--overlap-param-gather") or zero == 3,
        tp=given.flag("--tp-comm-overlap"),
        ep=given.flag("--overlap-moe-expert-parallel-comm"),
    )
    parts.layout = Layout(
        tp=tp,
        cp=given.integer("--context-parallel-size") or 1,
        cp_kind=_cp_kind(given, parts),
        pp=pp,
        vpp=vpp,
        ep=given.integer("--expert-model-parallel-size") or 1,
        etp=_etp(given, tp, moe),
        dp_replicate=given.integer("--num-distributed-optimizer-instances") or 1,
        zero=zero,
        sequence_parallel=sp and tp > 1,
        micro_batch=given.integer("--micro-batch-size", needed="Megatron-LM has no default for it") or 1,
        recompute=_recompute(given, layers, pp, vpp, parts),
        overlap=overlap,
        **stages,
    )
    return parts


def is_fsdp(given: Given) -> bool:
    """Whether Megatron-FSDP runs the launch's data parallelism; it had another name before."""
    return given.flag("--use-megatron-fsdp") or given.flag("--use-custom-fsdp")


def _zero(given: Given) -> int:
    sharded = SHARDING.index(given.word("--data-parallel-sharding-strategy"))
    if is_fsdp(given):
        return sharded
    return 1 if given.flag("--use-distributed-optimizer") else 0


def _etp(given: Given, tp: int, moe: bool) -> int:
    """Without a value the experts keep the dense TP; without experts there is nothing to split."""
    asked = given.integer("--expert-tensor-parallel-size")
    return 1 if not moe else asked or tp


def _cp_kind(given: Given, parts: LayoutParts) -> Any:
    kinds = dict.fromkeys(given.texts("--cp-comm-type") or ("p2p",))
    if [*kinds] == ["a2a"]:
        return "a2a"
    if [*kinds] != ["p2p"]:
        parts.notes.append(f"--cp-comm-type {' '.join(kinds)} is priced as p2p, ring attention.")
    return "p2p"


def _stages(given: Given, layers: int, pp: int, parts: LayoutParts) -> dict[str, Any]:
    """Chunks and how blocks lie on the pipeline, as fields of a Layout."""
    embedding = given.flag("--account-for-embedding-in-pipeline-split")
    loss = given.flag("--account-for-loss-in-pipeline-split")
    fields: dict[str, Any] = {
        "vpp": 1,
        "account_for_embedding": embedding,
        "account_for_loss": loss,
        "first_stage_layers": given.integer("--decoder-first-pipeline-num-layers", low=0),
        "last_stage_layers": given.integer("--decoder-last-pipeline-num-layers", low=0),
    }
    text = given.text("--pipeline-model-parallel-layout")
    if text is not None:
        found = counts_of(text, layers, pp)
        if found.problem:
            given.missing["--pipeline-model-parallel-layout"] = found.problem
        parts.notes += found.notes
        return {**fields, **found.fields}
    chunks = given.integer("--num-virtual-stages-per-pipeline-rank")
    per_chunk = given.integer("--num-layers-per-virtual-pipeline-stage")
    if chunks is None and per_chunk is not None:
        chunks = (layers + embedding + loss) // pp // per_chunk
    fields["vpp"] = max(chunks or 1, 1)
    return fields


def _recompute(given: Given, layers: int, pp: int, vpp: int, parts: LayoutParts) -> Recompute:
    kind = given.word("--recompute-granularity")
    if given.flag("--recompute-activations"):
        kind = "selective"
    modules = given.texts("--recompute-modules")
    if given.flag("--moe-layer-recompute"):
        kind, modules = kind or "selective", (*modules, "moe")
    if kind == "full":
        return Recompute(kind="full", layers=_recomputed_layers(given, layers, pp, vpp, parts))
    if kind != "selective":
        return Recompute()
    known: tuple[RecomputeModule, ...] = tuple(name for name in RECOMPUTE_MODULES if name in modules)
    for name in modules:
        if name not in RECOMPUTE_MODULES:
            parts.notes.append(f"--recompute-modules {name[:40]} is not modelled: its tensors are priced as kept.")
    if modules and not known:
        return Recompute()
    return Recompute(kind="selective", modules=known)


def _recomputed_layers(given: Given, layers: int, pp: int, vpp: int, parts: LayoutParts) -> int | None:
    count = given.integer("--recompute-num-layers")
    method = given.word("--recompute-method")
    if method == "block" and count is not None:
        whole = count * vpp  # per chunk in Megatron, per rank in a layout
        return None if whole * pp >= layers else whole
    if method == "uniform" and (count or 1) > 1:
        parts.notes.append(
            f"--recompute-num-layers {count} keeps one input per {count} layers and works on {count} at once; "
            "it is priced as one layer at a time."
        )
    return None


# ---------------------------------------------------------------- from a layout to options


def layout_options(layout: Layout, layers: int, moe: bool, like: Given | None = None) -> Options:
    """The options that make `layout` in Megatron-LM.

    like: a launch whose way of saying the same things is kept where there are several.
    """
    tp = layout.tp
    pipeline = _pipeline_options(layout, layers, like)
    values: dict[str, Any] = {
        "layout.tp": str(tp),
        "layout.pp": str(layout.pp),
        "layout.cp": str(layout.cp),
        "layout.cp_kind": layout.cp_kind if layout.cp > 1 else None,
        "layout.ep": str(layout.ep) if moe else None,
        "layout.etp": str(layout.etp) if moe else None,
        "layout.micro_batch": str(layout.micro_batch),
        "layout.sequence_parallel": (tp > 1 if layout.sequence_parallel is None else layout.sequence_parallel) or None,
        "layout.zero": layout.zero >= 1 or None,
        "layout.fsdp": layout.zero >= 2 or None,
        "layout.sharding": SHARDING[layout.zero] if layout.zero >= 2 else None,
        "layout.dp_replicate": str(layout.dp_replicate) if layout.dp_replicate > 1 else None,
        **_overlap_options(layout, like),
        "layout.overlap_tp": layout.overlap.tp or None,
        "layout.overlap_ep": layout.overlap.ep or None,
        **pipeline,
        **_recompute_options(layout, like),
    }
    return {OPTION_OF[field_].name: value for field_, value in values.items() if value not in (None, False)}


def _overlap_options(layout: Layout, like: Given | None) -> dict[str, Any]:
    """Of data parallelism. Where everything is sharded they go without saying, and stay where they are said."""
    overlap = layout.overlap
    param = layout.zero >= 1 and overlap.grad if overlap.param is None else overlap.param
    values = {"layout.overlap_grad": overlap.grad or None, "layout.overlap_param": param or None}
    if layout.zero < 3:
        return values
    return {name: value for name, value in values.items() if like is not None and OPTION_OF[name].name in like}


def _pipeline_options(layout: Layout, layers: int, like: Given | None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "layout.account_for_embedding": layout.account_for_embedding or None,
        "layout.account_for_loss": layout.account_for_loss or None,
        "layout.first_stage_layers": _text(layout.first_stage_layers),
        "layout.last_stage_layers": _text(layout.last_stage_layers),
    }
    if layout.vpp == 1:
        return values
    counted = layers + layout.account_for_embedding + layout.account_for_loss
    uneven = layout.first_stage_layers is not None or layout.last_stage_layers is not None
    stages = layout.pp * layout.vpp
    if (like is not None and "--num-virtual-stages-per-pipeline-rank" in like) or uneven or counted % stages:
        return {**values, "layout.vpp": str(layout.vpp)}
    return {**values, "layout.layers_per_chunk": str(counted // stages)}


def _recompute_options(layout: Layout, like: Given | None) -> dict[str, Any]:
    recompute = layout.recompute
    if recompute.kind == "none":
        return {}
    if recompute.kind == "selective":
        short = like is not None and "--recompute-activations" in like and not recompute.modules
        named = " ".join(recompute.modules) or None
        kind = {"layout.recompute_activations": True} if short else {"layout.recompute_kind": "selective"}
        return {**kind, "layout.recompute_modules": named}
    if recompute.layers is None:
        return {
            "layout.recompute_kind": "full",
            "layout.recompute_method": "uniform",
            "layout.recompute_layers": "1",
        }
    return {
        "layout.recompute_kind": "full",
        "layout.recompute_method": "block",
        "layout.recompute_layers": str(max(recompute.layers // max(layout.vpp, 1), 1)),
    }


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def changed_options(old: Options, new: Options, like: Given | None = None) -> tuple[Options, Options]:
    """(old, new) with only what differs; None where an option is not there. What a launch leaves to Megatron-LM's
    default is None too."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    before = {name: old.get(name) if like is None or name in like else None for name in names}
    return before, {name: new.get(name) for name in names}
