"""The layout of a published run: what the row states, and by its framework's rules what it does not."""

from __future__ import annotations

import re
from typing import Any

from fivefold.layout import Layout, Recompute, split_policy
from fivefold.layout.layout import RECOMPUTE_MODULES, Overlap, RecomputeModule
from fivefold.layout.workload import QUANTISED
from fivefold.measure.frameworks import Framework
from fivefold.measure.frameworks.profiles import KEEPS_GATHERED_IN_PIPELINES
from fivefold.measure.policies import stated_policy
from fivefold.measure.recipes import options_of
from fivefold.measure.recomputation import blocks_recomputed, recompute_kind
from fivefold.measure.runs import Run
from fivefold.measure.schedules import DUALPIPE, V_SHAPED, schedule_of, schedules_of
from fivefold.measure.unstated import (
    dated,
    has_sequence_parallelism,
    precision_of,
    runtime_of,
    zero_of,
)
from fivefold.measure.words import (
    is_ulysses,
    said,
    shard_groups,
    trains_adapters,
)
from fivefold.model.spec import ModelSpec
from fivefold.runtime import load_runtime

# What runs beside compute, in options and in words.
_GRADIENTS_OVERLAP = r"overlap[-_]grad[-_]reduce|\b(?:dp|grad\w*|all-?reduce|reduce-?scatter)[-_ ](?:comm[-_ ])?overlap"
_PARAMETERS_OVERLAP = r"overlap[-_]param[-_]gather|\b(?:dp|param\w*|all-?gather)[-_ ](?:comm[-_ ])?overlap"
_NONE_OVERLAPS = re.compile(
    r"(?:^|[;,] ?)(?:(?:no|without) (?:comm\w* )?overlap\b|overlap(?:_comm)?\W{1,3}(?:off|false|none|disabled)\b)",
    re.IGNORECASE,
)
# A bubble that would take this share of a step or more is taken to have been interleaved away (our choice), with at
# most as many chunks as NeMo's recipes have (frameworks/megatron.py).
_LARGE_BUBBLE, _MOST_CHUNKS = 0.25, 12


def layout_of(
    run: Run, model: ModelSpec, line: Framework, runtime: str, assumed: set[str]
) -> tuple[Layout, tuple[int, ...]]:
    """The layout, and the numbers of groups that may share its parameters."""
    tp, pp = int(run.tp or 1), run.pp or 1
    moe = model.is_moe
    for field in ("cp", "pp") + (("ep",) if moe else ()):
        if getattr(run, field) is None:
            assumed.add(field)
    if tp > 1 and run.sp is None:
        assumed.add("sequence_parallel")
    zero, stated = zero_of(run, line)
    if not stated:
        assumed.add("zero")
    vpp = _chunks(run, pp, model, line, assumed)
    experts = _expert_degrees(run, tp, pp, moe, line, assumed)
    groups = _that_hold(experts, shard_groups(run, zero, runtime, line.shard_nodes), (run.gpus or 1) // pp)
    if groups[1:]:
        assumed.add("shard_groups")
    layout = Layout(
        tp=tp,
        cp=run.cp or 1,
        cp_kind="a2a" if (run.cp or 1) > 1 and is_ulysses(run, runtime) else "p2p",
        pp=pp,
        vpp=vpp,
        **experts,
        zero=_stage(zero, pp, runtime),
        dp_replicate=groups[0],
        sequence_parallel=(has_sequence_parallelism(run, line) if run.sp is None else bool(run.sp)) and tp > 1,
        micro_batch=_micro_batch(run, line, assumed),
        schedule=schedule_of(run, pp, vpp, assumed),
        recompute=_recompute(run, line, -(-model.layers // pp), assumed),
        overlap=_overlap(run, model, line, assumed),
        **_stages(run, model, vpp, line, runtime, assumed),
    )
    return layout, groups


def _that_hold(experts: dict[str, int], groups: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Those numbers of groups for which the ranks of one group hold every expert; (1,) where there is none."""
    held = experts["ep"] * experts["etp"]
    return tuple(number for number in groups if ranks // number % held == 0 and ranks >= number * held) or (1,)


def _stage(zero: int, pp: int, runtime: str) -> int:
    """The published ZeRO stage as the profile has it: at most 1 for a profile that never shards parameters, at least 2
    for the others."""
    if load_runtime(runtime).sharding != "fully_sharded":
        return min(zero, 1)
    return 2 if pp > 1 and runtime in KEEPS_GATHERED_IN_PIPELINES else max(zero, 2)


def _chunks(run: Run, pp: int, model: ModelSpec, line: Framework, assumed: set[str]) -> int:
    """Chunks per pipeline rank: as published if the pipeline can have them, else as many equal chunks as the usual
    recipes of its framework have."""
    if pp == 1:
        return 1
    if run.vpp is None:
        assumed.add("vpp")
    named = schedules_of(run)
    usual = 2 if re.search(r"\binterleaved", run.notes or "", re.IGNORECASE) else 1
    sequences = (run.mbs or 1) * max((run.gpus or 1) // ((run.tp or 1) * (run.cp or 1) * pp), 1)
    micro_batches = (run.gbs or 1) // sequences
    # Anyone whom the bubble would cost a quarter of the step interleaves, if the framework can and the row does not say
    # 1F1B.
    can = "interleaved" in load_runtime(runtime_of(run, line)[0]).schedules and not line.pipeline_fills
    plain = re.search(r"\b1f1b\b", run.notes or "", re.IGNORECASE)
    large = (pp - 1) / max(micro_batches, 1) > _LARGE_BUBBLE
    most = _MOST_CHUNKS if can and large and not plain else line.interleaves
    if line.states_chunks:
        most = 1
    # Embedding and head take a block's place each where only that makes equal stages.
    places = next((places for places in (model.layers, model.layers + 2) if places % pp == 0), None)
    if most > 1 and places is not None:
        usual = max(v for v in range(1, most + 1) if places // pp % v == 0)
    vpp = run.vpp or (V_SHAPED.get(named[0], 1) if named else usual)
    # Interleaving runs micro-batches in groups of pp; a batch that has no whole groups is priced without.
    whole_groups = micro_batches % pp == 0
    if vpp > 1 and not whole_groups:
        assumed.add("vpp")
    return vpp if pp * vpp <= model.layers + 2 and whole_groups else 1


def _micro_batch(run: Run, line: Framework, assumed: set[str]) -> int:
    """As published; else what its framework makes of the local batch, or the largest that `choose` finds to fit."""
    pp, replicas = run.pp or 1, max((run.gpus or 1) // ((run.tp or 1) * (run.cp or 1) * (run.pp or 1)), 1)
    local = max((run.gbs or 1) // replicas, 1)
    if run.mbs is not None and local % run.mbs == 0:
        return run.mbs
    assumed.add("micro_batch")
    if run.mbs is not None:  # the last micro-batch of a step is a smaller one: all are taken to be as large as divides
        return next(size for size in range(min(run.mbs, local), 0, -1) if local % size == 0)
    return max(local // pp, 1) if line.pipeline_fills else 1


def _stages(run: Run, model: ModelSpec, vpp: int, line: Framework, runtime: str, assumed: set[str]) -> dict[str, Any]:
    """How blocks lie on the pipeline: by the profile's own split where it has one, else evenly unless the framework is
    known to do otherwise.

    On Megatron-Core, models such as Llama 3.1 405B (126 blocks) run with embedding and head counted as a block each;
    where modules of multi-token prediction are trained, they and the head lie on the last stage, with fewer blocks
    (set_deepseek_v3_pipeline_model_parallel_layout of Megatron-Bridge's recipes: 16, 16, 16 and 13 of 61). So are
    blocks there that do not divide otherwise (_get_kimi_k2_pipeline_layout).
    """
    pp = run.pp or 1
    if pp == 1:
        return {}
    if split_policy(runtime) != "even":
        assumed.add("stages")
        return {}
    uneven = model.layers % (pp * vpp) > 0
    both = uneven and (model.layers + 2) % (pp * vpp) == 0
    if line.trains_mtp and (model.mtp or (uneven and not both)):
        beside = model.mtp + 1 if model.mtp else 0
        fewer = -(model.layers + beside) % (pp * vpp) + beside
        fullest = (model.layers + fewer) // pp
        if fullest > fewer:
            assumed.add("stages")
            return {"last_stage_layers": fullest - fewer}
    if both:
        assumed.add("stages")
        return {"account_for_embedding": True, "account_for_loss": True}
    return {}


def _expert_degrees(run: Run, tp: int, pp: int, moe: bool, line: Framework, assumed: set[str]) -> dict[str, int]:
    """ep and etp as published. Where the ranks of a stage do not divide into such groups, etp 1 and the largest ep that
    does divide them: some sources count the ranks of the pipeline or of replicas in ep."""
    if not moe:
        return {"ep": 1, "etp": 1}
    ep, etp, ranks = run.ep or 1, _etp(run, tp, line, assumed), (run.gpus or 1) // pp
    if ranks % (ep * etp):
        assumed.update(("ep", "etp"))
        etp = 1
        ep = next(size for size in range(min(ep, ranks), 0, -1) if ranks % size == 0)
    return {"ep": ep, "etp": etp}


def _etp(run: Run, tp: int, line: Framework, assumed: set[str]) -> int:
    """As published; else what Megatron-Core makes of none, the tensor-parallel ranks, where its own or NeMo's rows do
    not say (arguments.py, --expert-tensor-parallel-size, from memory); Megatron-Bridge's recipes set 1 (read)."""
    if run.etp is not None:
        return run.etp
    assumed.add("etp")
    return tp if line.experts_share_tp or (run.ep or 1) == 1 else 1


def _recompute(run: Run, line: Framework, blocks: int, assumed: set[str]) -> Recompute:
    """As stated, of a pipeline rank's `blocks`."""
    kind = recompute_kind(run)
    if line.policies and kind != "none" and stated_policy(run) is not None:
        return Recompute(kind="full")  # but for what the policy keeps
    if kind == "unknown":
        assumed.add("recompute")
        return Recompute()
    text = (run.recompute or "").lower()
    some = blocks_recomputed(run, blocks)
    if kind != "none" and some is not None:
        return Recompute(kind="full", layers=some)
    if kind == "full":
        return Recompute(kind="full")
    if kind == "none":
        return Recompute()
    if load_runtime(line.runtime).selective_by_operation:
        return Recompute(kind="selective")
    modules: list[RecomputeModule] = [name for name in RECOMPUTE_MODULES if re.search(rf"\b{name}\b", text)]
    return Recompute(kind="selective", modules=tuple(modules))


def _overlap(run: Run, model: ModelSpec, line: Framework, assumed: set[str]) -> Overlap:
    """What runs beside compute: as listed where the source lists it, else by the framework's line."""
    text = run.overlap or ""
    listed = line.overlap == "listed" and bool(text)
    if not listed and (run.dp != 1 or run.tp != 1):
        assumed.add("overlap")
    # nanotron reduces from hooks without ZeRO, and after backward with it.
    on = line.overlap != "off" and not (line.overlap == "reduce" and zero_of(run, line)[0])
    on = on and dated(run) >= line.overlaps_since and not (line.overlap == "hooks" and (run.pp or 1) > 1)
    none = _NONE_OVERLAPS.search(text) is not None
    # Papers name a run by its techniques, in the notes.
    named = said(r"\btp[-_ ](?:comm[-_ ])?overlap|\basync ?tp\b", f"{text}; {run.notes or ''}")
    # NeMo's recipes for adapters overlap tensor parallelism in 8 bit only (finetune_llama3_70b.py of its
    # scripts/performance/llm, read at 002556137f).
    plain = trains_adapters(run) and precision_of(run, line)[0] not in QUANTISED
    plain = plain or (model.is_moe and not line.mixtures_overlap_tp)
    usual_param = None if on and line.overlap not in ("reduce", "hooks") else False
    return Overlap(
        grad=not none and (said(_GRADIENTS_OVERLAP, text) if listed else on),
        param=False if none else said(_PARAMETERS_OVERLAP, text) if listed else usual_param,
        tp=named or (line.overlap == "on" and not none and (run.tp or 1) > 1 and run.sp != 0 and not plain),
        ep="overlap-moe-expert-parallel-comm" in text
        or "moe_a2a_overlap=True" in options_of(run, line)
        or DUALPIPE.search(f"{run.framework} {run.notes}") is not None,
    )
