"""Rules of Megatron-LM and Megatron-Core.

"read" names revisions of which the code was opened; d98e8a64dd (August 2026) stands for a list of checks made from
that revision. Versions are Megatron-Core's; the exact release of a change is from memory where a comment says so.

Not expressible in a layout, so left to the exporters and launchers: CUDA_DEVICE_MAX_CONNECTIONS, checkpoint formats,
dispatcher and grouped-GEMM choice, PyTorch and Transformer Engine versions, CPU offloading, distribute-saved-
activations, hierarchical CP sizes, pipeline layout strings, microbatch group sizes,
evaluation batches, torch-FSDP2 and Megatron-FSDP modes, fine-tuning and packing (Bridge), and what an exporter sets by
itself: kv_channels, max_position_embeddings for rotary models, padded vocabulary, pipeline dtype.
"""

from __future__ import annotations

import numpy as np

from fivefold.layout.columns import Columns, Ints
from fivefold.layout.rules.common import (
    FULL,
    MODULE_BIT,
    SELECTIVE,
    accounted,
    counted_layers,
    kv_divides,
    kv_shares,
    runs_schedule,
    uneven,
    without_a2a,
)
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Holds, Rule

_ONLY = ("megatron", "megatron-fsdp")
_CONFIG = "Megatron-Core transformer_config"
_KV_REPLICATION_SINCE = (0, 16)  # from memory; a 0.14-0.15 transformer_config was read and has only kv % tp
_EP_OVERLAP_SINCE = (0, 14)  # from memory


def _kv_replicated(c: Columns, x: Context) -> Holds:
    held: Holds = True
    for kv in x.kv_heads:
        held = held & ((kv % c.tp == 0) | (c.tp % kv == 0))
    return held


def _a2a_kv(c: Columns, x: Context) -> Holds:
    free = without_a2a(c)
    if free.all():
        return True
    fits: Holds = True
    for share in kv_shares(c, x):
        fits = fits & (share % c.cp == 0)
    return free | fits


def _middle(c: Columns, x: Context) -> tuple[Ints, Ints]:
    """Blocks and ranks between an asked-for first and last stage."""
    ranks = c.pp - (c.first_stage_layers != 0) - (c.last_stage_layers != 0)
    return x.layers - c.first_stage_layers - c.last_stage_layers, ranks


def _uneven_counts(c: Columns, x: Context) -> Holds:
    if not uneven(c).any():
        return True
    blocks, ranks = _middle(c, x)
    positive = (c.first_stage_layers >= 0) & (c.last_stage_layers >= 0)
    shared = np.where(ranks > 0, (blocks > 0) & (blocks % np.maximum(ranks, 1) == 0), blocks == 0)
    return ~uneven(c) | (c.pp == 1) | (positive & shared)


def _uneven_chunks(c: Columns, x: Context) -> Holds:
    if not uneven(c).any():
        return True
    blocks, ranks = _middle(c, x)
    middle = blocks // np.maximum(ranks, 1)
    chunked = (c.first_stage_layers % c.vpp == 0) & (c.last_stage_layers % c.vpp == 0) & (middle % c.vpp == 0)
    return ~uneven(c) | chunked


def _fp8_tokens(c: Columns, x: Context) -> Holds:
    if x.work.precision != "fp8":
        return True
    ranks = c.cp * np.where(c.sp, c.tp, 1)
    return (c.micro_batch * x.work.seq_len // np.maximum(ranks, 1)) % 16 == 0


MEGATRON: tuple[Rule, ...] = (
    Rule(
        id="megatron-layers-pp",
        option="--pp",
        field="pp",
        runtimes=_ONLY,
        silent=True,
        holds=lambda c, x: uneven(c) | (counted_layers(c, x) % c.pp == 0),
        message="--pp {pp} does not divide the {counted_layers} blocks. Give --first-stage-layers or "
        "--last-stage-layers so that "
        "the others are equal.",
        source="Megatron-LM arguments.py, read at 000c4ac24f; earlier revisions dropped the remaining "
        "layers (30 layers "
        "at PP4 trained as 28)",
    ),
    Rule(
        id="megatron-layers-vpp",
        moot_after=("megatron-layers-pp",),
        option="--vpp",
        field="vpp",
        others=("pp",),
        runtimes=_ONLY,
        silent=True,
        holds=lambda c, x: uneven(c) | (counted_layers(c, x) // c.pp % c.vpp == 0),
        message="--vpp {vpp} does not divide the {layers_per_rank} blocks of a pipeline rank.",
        source="Megatron-LM arguments.py, read at 000c4ac24f; earlier revisions dropped layers (80 at PP16 VP2 as 64)",
    ),
    Rule(
        id="megatron-account-needs-even",
        option="--account-for-embedding",
        field="account_for_embedding",
        others=("account_for_loss",),
        runtimes=_ONLY,
        holds=lambda c, x: ~accounted(c) | (~uneven(c) & (c.pp > 1)),
        message="Counting the embedding or the head as a block goes with an equal split over a pipeline: "
        "--pp above 1 and "
        "no block count for the first or last stage.",
        source=f"{_CONFIG}, read (0.14 to 0.17 era); at --pp 1 it would do nothing",
    ),
    Rule(
        id="megatron-uneven-needs-pp",
        option="--first-stage-layers",
        field="first_stage_layers",
        others=("last_stage_layers",),
        runtimes=_ONLY,
        silent=True,
        holds=lambda c, x: ~uneven(c) | (c.pp > 1),
        message="A number of blocks for the first or last stage needs a pipeline, and --pp is 1.",
        source="Megatron-LM, before d98e8a64dd: a last-stage count of k at PP1 trained k layers",
    ),
    Rule(
        id="megatron-uneven-counts",
        option="--first-stage-layers",
        field="first_stage_layers",
        others=("last_stage_layers", "pp"),
        runtimes=_ONLY,
        holds=_uneven_counts,
        message="The first and the last stage leave {middle_layers} of {layers} blocks for {middle_ranks} other ranks; "
        "they have to be positive and share equally.",
        source=f"{_CONFIG}, read (0.14 to 0.17 era)",
    ),
    Rule(
        id="megatron-uneven-chunks",
        moot_after=("megatron-uneven-counts",),
        option="--vpp",
        field="vpp",
        others=("first_stage_layers", "last_stage_layers"),
        runtimes=_ONLY,
        holds=_uneven_chunks,
        message="--vpp {vpp} has to divide the blocks of the first ({first_stage_layers}), last "
        "({last_stage_layers}) and "
        "every other pipeline rank.",
        source=f"{_CONFIG}, read (0.14 to 0.15 era)",
    ),
    Rule(
        id="megatron-kv-heads",
        moot_after=("heads-tp",),
        option="--tp",
        field="tp",
        runtimes=_ONLY,
        since=_KV_REPLICATION_SINCE,
        holds=_kv_replicated,
        message="--tp {tp} and the {kv_heads} key/value heads have to divide one another.",
        source="Megatron-Core d98e8a64dd: kv_groups % TP or TP % kv_groups",
    ),
    Rule(
        id="megatron-kv-heads-exact",
        moot_after=("heads-tp",),
        option="--tp",
        field="tp",
        runtimes=_ONLY,
        before=_KV_REPLICATION_SINCE,
        holds=kv_divides,
        message="--tp {tp} does not divide the {kv_heads} key/value heads, and this version does not replicate them.",
        source=f"{_CONFIG}, read (0.14 to 0.15 era): num_query_groups is a multiple of TP",
    ),
    Rule(
        id="megatron-moe-needs-sp",
        option="--sequence-parallel",
        field="sp",
        runtimes=_ONLY,
        holds=lambda c, x: c.sp | (c.tp == 1) if x.is_moe else True,
        message="With --tp {tp}, experts need sequence parallelism.",
        source="Megatron-Core d98e8a64dd: the MoE layer raises in training with TP and without SP",
    ),
    Rule(
        id="megatron-cp-a2a-seq",
        option="--cp",
        field="cp",
        runtimes=_ONLY,
        holds=lambda c, x: without_a2a(c) | (x.work.seq_len % (2 * c.cp) == 0),
        message="2 · cp = 2 · {cp} has to divide the sequence length {seq}: the batch is cut into two chunks per rank "
        "whatever the kind of context parallelism.",
        source="Megatron-LM d98e8a64dd: seq % (2·CP)",
    ),
    Rule(
        id="megatron-cp-a2a-kv-heads",
        option="--cp",
        field="cp",
        runtimes=_ONLY,
        holds=_a2a_kv,
        message="All-to-all context parallelism gives each rank whole KV heads: cp {cp} has to divide the KV "
        "heads of one "
        "TP rank ({kv_heads} over tp {tp}).",
        source="Transformer Engine context_parallel, from memory: heads and GQA groups of a rank divide by "
        "CP under a2a",
    ),
    Rule(
        id="megatron-schedule",
        option="--schedule",
        field="schedule",
        runtimes=_ONLY,
        holds=runs_schedule,
        message="Megatron has 1F1B and interleaved 1F1B, and no schedule {schedule}.",
        source="Megatron-Core pipeline_parallel/schedules, d98e8a64dd: get_forward_backward_func knows no other",
    ),
    Rule(
        id="megatron-muon",
        option="--zero",
        field="zero",
        runtimes=("megatron",),
        holds=lambda c, x: c.zero == 0 if x.work.optimizer == "muon" else True,
        message="Megatron's muon does not run on the distributed optimizer; its own sharded form is not modelled.",
        source="Megatron-LM arguments, from memory",
    ),
    Rule(
        id="megatron-muon-overlap",
        option="--overlap-grad",
        field="overlap_grad",
        runtimes=("megatron",),
        since=(0, 16),
        before=(0, 17),
        holds=lambda c, x: ~c.overlap_grad if x.work.optimizer == "muon" else True,
        message="Muon came to core 0.16 without overlap of the gradients' reduction, and its command line refuses "
        "it: add --no-overlap-grad.",
        source="Megatron-LM arguments.py of early 2026, read: validate_args asserts not overlap_grad_reduce; pull "
        "request 3524, of February 2026, takes that out",
    ),
    Rule(
        id="megatron-grad-dtype",
        option="--grad-dtype",
        field=None,
        values=lambda c, x: ["fp32"],
        runtimes=_ONLY,
        silent=True,
        holds=lambda c, x: not (x.work.precision == "fp16" and x.work.grad_dtype == "bf16"),
        message="Gradients are reduced in bf16 only when training in bf16.",
        source="Megatron-LM arguments.py, read at 000c4ac24f: grad_reduce_in_bf16 is read only under bf16",
    ),
    Rule(
        id="megatron-overlap-tp-domain",
        option="--overlap-tp",
        field="overlap_tp",
        runtimes=_ONLY,
        holds=lambda c, x: ~c.overlap_tp | (c.tp <= x.scale_up_size),
        message="TP overlap writes into the other ranks' buffers, which needs all {tp} of them in one "
        "scale-up domain of "
        "{scale_up} GPUs.",
        source="Transformer Engine userbuffers, from memory",
    ),
    Rule(
        id="megatron-overlap-ep-version",
        option="--overlap-ep",
        field="overlap_ep",
        runtimes=_ONLY,
        before=_EP_OVERLAP_SINCE,
        holds=lambda c, x: ~c.overlap_ep,
        message="This version has no overlap of the expert exchange.",
        source="Megatron-Core releases, from memory",
    ),
    Rule(
        id="megatron-overlap-ep-vpp",
        option="--overlap-ep",
        field="overlap_ep",
        others=("vpp",),
        runtimes=_ONLY,
        holds=lambda c, x: ~c.overlap_ep | (c.pp == 1) | (c.vpp > 1),
        message="Overlapping the expert exchange in a pipeline (--pp {pp}) needs interleaving, --vpp 2 or more.",
        source=f"{_CONFIG}, read (0.14 to 0.15 era)",
    ),
    Rule(
        id="megatron-overlap-ep-recompute",
        option="--overlap-ep",
        field="overlap_ep",
        others=("recompute_kind",),
        runtimes=_ONLY,
        holds=lambda c, x: (
            ~c.overlap_ep
            | (
                (c.recompute_kind != FULL)
                & ((c.recompute_kind != SELECTIVE) | (c.recompute_modules & MODULE_BIT["moe"] == 0))
            )
        ),
        message="Overlapping the expert exchange does not go with full recompute or with recompute of the module moe.",
        source=f"{_CONFIG}, read (0.14 to 0.15 era); the module moe: d98e8a64dd",
    ),
    Rule(
        id="megatron-overlap-ep-mtp",
        option="--overlap-ep",
        field="overlap_ep",
        others=("pp",),
        runtimes=_ONLY,
        holds=lambda c, x: ~c.overlap_ep | (c.pp > 1) if x.model.mtp == 1 else ~c.overlap_ep if x.model.mtp else True,
        message="Overlapping the expert exchange allows one multi-token-prediction module, in a pipeline; {model} has "
        "{mtp}, and --pp is {pp}.",
        source=f"{_CONFIG}, read (0.14 to 0.15 era); the pipeline: read in 0.16.1",
    ),
    Rule(
        id="megatron-fp8-tokens",
        option="--micro-batch",
        field="micro_batch",
        runtimes=_ONLY,
        holds=_fp8_tokens,
        message="FP8 training needs a multiple of 16 tokens per rank: micro-batch {micro_batch} · {seq} "
        "tokens over "
        "cp {cp} and, with SP, tp {tp} is not.",
        source="Transformer Engine fp8 shape check (leading dimensions % 8, last % 16; backward needs 16 in both: pull "
        "request 317), d98e8a64dd list",
    ),
)
