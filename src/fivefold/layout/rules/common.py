"""What several rule files share: codes of the closed sets, and small quantities of a layout."""

from __future__ import annotations

import numpy as np

from fivefold.layout.columns import Bools, Columns, Ints
from fivefold.layout.layout import (
    CHUNKS,
    CP_KINDS,
    RECOMPUTE_KINDS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    V_SHAPED,
)
from fivefold.layout.rules.context import Context
from fivefold.model.spec import Experts

A2A = CP_KINDS.index("a2a")
INTERLEAVED = SCHEDULES.index("interleaved")
DUALPIPEV = SCHEDULES.index("dualpipev")
SELECTIVE = RECOMPUTE_KINDS.index("selective")
FULL = RECOMPUTE_KINDS.index("full")
MODULE_BIT: dict[str, int] = {name: 1 << bit for bit, name in enumerate(RECOMPUTE_MODULES)}


# By the code of a schedule.
FEWEST_CHUNKS = np.array([CHUNKS[name][0] for name in SCHEDULES])
MOST_CHUNKS = np.array([CHUNKS[name][1] or np.iinfo(np.int64).max for name in SCHEDULES])
IS_V = np.array([name in V_SHAPED for name in SCHEDULES])


def runs_schedule(c: Columns, x: Context) -> Bools:
    """Rows whose schedule the runtime has."""
    return np.array([name in x.profile.schedules for name in SCHEDULES])[c.schedule]


def without_a2a(c: Columns) -> Bools:
    """Rows that no all-to-all context parallelism concerns."""
    return (c.cp == 1) | (c.cp_kind != A2A)


def kv_divides(c: Columns, x: Context) -> Bools | bool:
    """Rows in which tp divides every block's number of key/value heads."""
    held: Bools | bool = True
    for kv in x.kv_heads:
        held = held & (kv % c.tp == 0)
    return held


def kv_shares(c: Columns, x: Context) -> list[Ints]:
    """For each distinct number of KV heads, how many one TP rank holds: at least one, replicated where tp is larger."""
    return [np.maximum(kv // c.tp, 1) for kv in x.kv_heads]


def accounted(c: Columns) -> Bools:
    """Rows in which the embedding or the head takes a block's place."""
    return c.account_for_embedding | c.account_for_loss


def uneven(c: Columns) -> Bools:
    """Rows that ask for a number of blocks on the first or the last rank."""
    return (c.first_stage_layers != 0) | (c.last_stage_layers != 0)


def counted_layers(c: Columns, x: Context) -> Ints:
    """Blocks, and the embedding and the head where they count as one in the pipeline split."""
    return x.layers + c.account_for_embedding.astype(np.int64) + c.account_for_loss


def largest_stage(c: Columns, x: Context) -> Ints:
    """Blocks on the fullest pipeline rank of an even split with optional first and last counts."""
    first, last = np.maximum(c.first_stage_layers, 0), np.maximum(c.last_stage_layers, 0)
    middle = np.maximum(c.pp - (first > 0) - (last > 0), 1)
    return np.maximum(np.maximum(first, last), -(-(counted_layers(c, x) - first - last) // middle))


def modules_possible(x: Context) -> int:
    """Mask of the recompute modules that the model has."""
    present = {
        "core_attn": True,
        "layernorm": x.has_mla or x.is_moe or not x.profile.norms_fused_into_linears,
        "mlp": x.has_dense_feed,
        "moe": x.is_moe,
        "moe_act": x.is_moe,
        "shared_experts": any(isinstance(kind.feed, Experts) and kind.feed.shared_ffn > 0 for kind in x.model.kinds),
        "mla_up_proj": x.has_mla,
    }
    return sum(MODULE_BIT[name] for name, there in present.items() if there)
