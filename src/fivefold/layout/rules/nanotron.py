"""Rules of nanotron. Releases 0.4 and 0.5 are from memory; the main branch of April 2026 is 2411b022, of which a list
of checks was made (nanotron@2026.4)."""

from __future__ import annotations

from fivefold.layout.columns import Bools, Columns
from fivefold.layout.rules.common import A2A, accounted, kv_divides, uneven
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Rule
from fivefold.layout.stages import stage_weights

_ONLY = ("nanotron",)
_CP_SINCE = (2026, 4)
_BUILD = "nanotron models/base.py, build_model; models/llama.py, get_block_compute_costs"


def _head_beside_blocks(c: Columns, x: Context) -> Bools:
    """Rows in which the blocks pass the shares of all stages but the last, which then has the head and the loss."""
    block, head = stage_weights(x.model)
    return (c.pp == 1) | (c.pp * head < x.layers * block + head)


NANOTRON: tuple[Rule, ...] = (
    Rule(
        id="nanotron-cp",
        option="--cp",
        field="cp",
        runtimes=_ONLY,
        before=_CP_SINCE,
        holds=lambda c, x: c.cp == 1,
        message="--cp {cp}: nanotron 0.5 has no context parallelism. Shard long sequences with --tp instead.",
        source="nanotron 0.5, ParallelismArgs: dp, pp, tp and expert_parallel_size (from memory)",
    ),
    Rule(
        id="nanotron-cp-kind",
        option="--cp-kind",
        field="cp_kind",
        runtimes=_ONLY,
        since=_CP_SINCE,
        holds=lambda c, x: (c.cp == 1) | (c.cp_kind != A2A),
        message="nanotron's context parallelism is ring attention (p2p), not all-to-all.",
        source="nanotron 2411b022, Qwen2's ring attention",
    ),
    Rule(
        id="nanotron-kv-heads",
        moot_after=("heads-tp",),
        option="--tp",
        field="tp",
        runtimes=_ONLY,
        holds=kv_divides,
        message="--tp {tp} has to divide the {kv_heads} key/value heads, which nanotron does not replicate.",
        source="nanotron 2411b022 config.py and attention: key/value heads >= tp and a multiple of it",
    ),
    Rule(
        id="nanotron-uneven",
        option="--first-stage-layers",
        field="first_stage_layers",
        others=("last_stage_layers",),
        runtimes=_ONLY,
        holds=lambda c, x: ~uneven(c),
        message="nanotron splits blocks over stages by their parameters and the head's, and takes no count for the "
        "first or last stage.",
        source=_BUILD,
    ),
    Rule(
        id="nanotron-account",
        option="--account-for-embedding",
        field="account_for_embedding",
        others=("account_for_loss",),
        runtimes=_ONLY,
        holds=lambda c, x: ~accounted(c),
        message="nanotron always counts the head by its parameters and never the embedding; the switches are "
        "Megatron's.",
        source=_BUILD,
    ),
    Rule(
        id="nanotron-head",
        option="--pp",
        field="pp",
        runtimes=_ONLY,
        holds=_head_beside_blocks,
        message="--pp {pp}: the head weighs more than a stage's share of the parameters, so that nanotron puts the "
        "loss on a stage of its own and sends it the logits, which is not modelled.",
        source=_BUILD,
    ),
    Rule(
        id="nanotron-ep",
        option="--ep",
        field="ep",
        runtimes=_ONLY,
        holds=lambda c, x: c.ep == 1,
        message="--ep {ep}: nanotron asks tp · cp · dp · pp to be the world and then lays out ranks with ep beside "
        "them, so ep above 1 does not start.",
        source="nanotron 2411b022 parallel/context.py",
    ),
    Rule(
        id="nanotron-experts",
        option="MODEL",
        field=None,
        runtimes=_ONLY,
        holds=lambda c, x: not x.is_moe,
        message="{model} has experts; nanotron's mixtures of experts are an example and not modelled here.",
        source="nanotron 0.5, examples/moe (from memory)",
    ),
)
