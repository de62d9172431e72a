"""Rules of fivefold's own trainer. The trainer itself refuses by them (fivefold.train.refuse), so this is the one list.

Not expressible in a layout: fp64, in which proofs are run, and how a run's precision replaces the plan's.
"""

from __future__ import annotations

import numpy as np

from fivefold.layout.columns import Bools, Columns, Ints
from fivefold.layout.features import PHRASES
from fivefold.layout.mixers import softmax_attention
from fivefold.layout.rules.common import accounted, uneven
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Holds, Rule
from fivefold.model.spec import Attention

_ONLY = ("fivefold",)


# What the trainer runs beyond Llama's blocks; what it does not run and has a rule of its own below.
_TRAINED = frozenset({"window", "qk-norm", "learned-positions", "layernorm-without-bias"})
_SAID_ELSEWHERE = frozenset(
    {
        "experts",
        "shared-experts",
        "expert-bias",
        "router-bias",
        "shared-expert-gate",
        "latent-experts",
        "mixed-feed",
        "latent-attention",
        "mtp",
    }
)


def untrained(x: Context) -> list[str]:
    """What the model has that the trainer does not run, in words; what the model computes and no size shows in its own
    words."""
    missing = x.features - _TRAINED - _SAID_ELSEWHERE
    words = [phrase for name, phrase in PHRASES.items() if name in missing and name != "peculiar"]
    return [*words, *(x.model.peculiar if "peculiar" in missing else ())]


def _kv_heads(c: Columns, x: Context) -> Holds:
    held: Holds = True
    for kv in x.kv_heads:
        held = held & ((kv % c.tp == 0) | (c.tp % kv == 0))
    return held


def _heads_alike(c: Columns, x: Context) -> Holds:
    mixers = [softmax_attention(block.mixer) for block in x.model.kinds]
    return len({(mixer.head_dim, mixer.rope) for mixer in mixers if isinstance(mixer, Attention)}) <= 1


def _between(c: Columns, x: Context) -> tuple[Ints, Ints]:
    """Blocks and chunks between an asked-for first and last rank."""
    ranks = c.pp - (c.first_stage_layers != 0) - (c.last_stage_layers != 0)
    return x.layers - c.first_stage_layers - c.last_stage_layers, ranks * c.vpp


def _uneven_counts(c: Columns, x: Context) -> Holds:
    """Every block is somewhere, and every chunk has one."""
    asked = uneven(c)
    if not asked.any():
        return True
    blocks, chunks = _between(c, x)
    ends = ((c.first_stage_layers == 0) | (c.first_stage_layers >= c.vpp)) & (
        (c.last_stage_layers == 0) | (c.last_stage_layers >= c.vpp)
    )
    return ~asked | (c.pp == 1) | (ends & np.where(chunks > 0, blocks >= chunks, blocks == 0))


def _no_empty_chunk(c: Columns, x: Context) -> Bools:
    """In an equal split the last stages have the least, and the ends less where embedding and head count as a block."""
    stages = np.maximum(c.pp * c.vpp, 1)
    counted = x.layers + c.account_for_embedding.astype(np.int64) + c.account_for_loss
    first = -(-counted // stages) - c.account_for_embedding
    last = counted // stages - c.account_for_loss
    return uneven(c) | (c.pp == 1) | ((counted // stages >= 1) & (first >= 1) & (last >= 1))


FIVEFOLD: tuple[Rule, ...] = (
    Rule(
        id="fivefold-experts",
        option="MODEL",
        field=None,
        runtimes=_ONLY,
        holds=lambda c, x: not x.is_moe,
        message="{model} has routed experts, which the trainer does not run yet. Choose a dense model, or plan it for "
        "another runtime.",
        source="fivefold.train.model",
    ),
    Rule(
        id="fivefold-latent-attention",
        option="MODEL",
        field=None,
        runtimes=_ONLY,
        holds=lambda c, x: not x.has_mla,
        message="{model} has latent attention, which the trainer does not run yet. Choose a model with grouped-query "
        "attention, or plan it for another runtime.",
        source="fivefold.train.model",
    ),
    Rule(
        id="fivefold-features",
        option="MODEL",
        field=None,
        runtimes=_ONLY,
        holds=lambda c, x: not untrained(x),
        message="{model} has what the trainer does not run: {untrained}. Choose another model, or plan this one for "
        "another runtime.",
        source="fivefold.train.model",
    ),
    Rule(
        id="fivefold-mtp",
        option="--mtp",
        field=None,
        values=lambda c, x: [0],
        runtimes=_ONLY,
        holds=lambda c, x: x.model.mtp == 0,
        message="{model} has {mtp} multi-token-prediction modules, which the trainer does not run yet. Leave --mtp "
        "out.",
        source="fivefold.train.model",
    ),
    Rule(
        id="fivefold-heads-alike",
        option="MODEL",
        field=None,
        runtimes=_ONLY,
        holds=_heads_alike,
        message="{model} has blocks of different head sizes or position embeddings, and the trainer has one rotary "
        "table for all blocks.",
        source="fivefold.train.model",
    ),
    Rule(
        id="fivefold-kv-heads",
        moot_after=("heads-tp",),
        option="--tp",
        field="tp",
        runtimes=_ONLY,
        holds=_kv_heads,
        message="--tp {tp} and the {kv_heads} key/value heads have to divide one another: else some rank would hold "
        "the keys of a head in part.",
        source="fivefold.train.parallel.tensor",
    ),
    Rule(
        id="fivefold-uneven-needs-pp",
        option="--first-stage-layers",
        field="first_stage_layers",
        others=("last_stage_layers",),
        runtimes=_ONLY,
        holds=lambda c, x: ~uneven(c) | (c.pp > 1),
        message="A number of blocks for the first or last stage needs a pipeline, and --pp is 1.",
        source="fivefold.layout.stages",
    ),
    Rule(
        id="fivefold-uneven-counts",
        moot_after=("v-shape-uneven",),
        option="--first-stage-layers",
        field="first_stage_layers",
        others=("last_stage_layers", "pp"),
        runtimes=_ONLY,
        holds=_uneven_counts,
        message="The first and the last stage leave {middle_layers} of {layers} blocks for {middle_ranks} other ranks "
        "of {vpp} chunks; every chunk needs a block and every block a chunk.",
        source="fivefold.layout.stages",
    ),
    Rule(
        id="fivefold-account-needs-even",
        option="--account-for-embedding",
        field="account_for_embedding",
        others=("account_for_loss",),
        runtimes=_ONLY,
        holds=lambda c, x: ~accounted(c) | (~uneven(c) & (c.pp > 1)),
        message="Counting the embedding or the head as a block goes with an equal split over a pipeline: --pp above 1 "
        "and no block count for the first or last stage.",
        source="fivefold.layout.stages",
    ),
    Rule(
        id="fivefold-empty-chunk",
        option="--pp",
        field="pp",
        others=("vpp",),
        runtimes=_ONLY,
        holds=_no_empty_chunk,
        message="{layers} blocks leave some of the pp {pp} · vpp {vpp} stages without a block, which the trainer does "
        "not run.",
        source="fivefold.train.engine",
    ),
    Rule(
        id="fivefold-overlap-ep",
        option="--overlap-ep",
        field="overlap_ep",
        runtimes=_ONLY,
        holds=lambda c, x: ~c.overlap_ep,
        message="The trainer has no expert parallelism to overlap. Plan it with --no-overlap-ep.",
        source="fivefold.train",
    ),
    Rule(
        id="fivefold-grad-dtype",
        option="--grad-dtype",
        field=None,
        values=lambda c, x: ["fp32"],
        runtimes=_ONLY,
        holds=lambda c, x: x.work.grad_dtype == "fp32" or x.work.precision == "bf16",
        message="bf16 gradients go with bf16 compute, not with {precision}.",
        source="fivefold.train.precision",
    ),
    Rule(
        id="fivefold-frozen",
        moot_after=("lora-runtime",),
        option="--lora-rank",
        field=None,
        values=lambda c, x: [],
        runtimes=_ONLY,
        holds=lambda c, x: x.work.trained == "all",
        message="The trainer trains every weight, and this workload freezes them beside adapters. Plan it for another "
        "runtime.",
        source="fivefold.train.optimizer",
    ),
)
