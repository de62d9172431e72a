"""Rules of every runtime on linear attention and state spaces: what their heads, groups and states let an axis cut.

Megatron-Core's are core/ssm/mamba_mixer.py (read at 00bebb45b9), core/ssm/mamba_context_parallel.py and
core/ssm/gated_delta_net.py (both read at 00caa53af3).
"""

from __future__ import annotations

import numpy as np

from fivefold.layout.columns import Columns
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Holds, Rule

# Whose Mamba 2 exchanges heads for sequence under context parallelism.
_MAMBA2_CP = ("megatron", "megatron-fsdp")
_NO_CP = frozenset({"gated-delta-net", "mamba"})
_MAMBA2 = frozenset({"mamba2", "side-by-side"})


def _mamba2_cp_groups(c: Columns, x: Context) -> Holds:
    local = np.maximum(x.state_groups // c.tp, 1)
    return (c.cp == 1) | (c.cp % local == 0) | (local % c.cp == 0)


MIXERS: tuple[Rule, ...] = (
    Rule(
        id="state-heads-tp",
        option="--tp",
        field="tp",
        holds=lambda c, x: not x.state_heads or x.state_heads % c.tp == 0,
        message="--tp {tp} does not divide the {state_heads} heads or channels of the model's linear attention or "
        "state space.",
        source="Megatron-Core mamba_mixer: nheads % tp; gated_delta_net divides key and value heads",
    ),
    Rule(
        id="state-groups-tp",
        option="--tp",
        field="tp",
        holds=lambda c, x: not x.state_groups or x.state_groups % c.tp == 0,
        message="--tp {tp} does not divide the {state_groups} groups of heads that share B and C in Mamba 2; a rank "
        "needs whole groups.",
        source="Megatron-Core mamba_mixer: ngroups % tp",
    ),
    Rule(
        id="linear-attention-cp",
        option="--cp",
        field="cp",
        holds=lambda c, x: True if _NO_CP.isdisjoint(x.features) else c.cp == 1,
        message="{model} has gated delta nets or Mamba 1, whose state runs through the whole sequence: no framework "
        "here splits it over --cp {cp}.",
        source="Megatron-Core gated_delta_net, which leaves context parallelism to do; Mamba 1 is in none",
    ),
    Rule(
        id="state-space-cp",
        option="--cp",
        field="cp",
        holds=lambda c, x: x.profile.name in _MAMBA2_CP or _MAMBA2.isdisjoint(x.features) or c.cp == 1,
        message="{model} has state spaces, whose state runs through the whole sequence: {runtime} does not split them "
        "over --cp {cp}. Megatron-Core does, by exchanging heads for sequence.",
        source="Megatron-Core mamba_context_parallel; none elsewhere (from memory)",
    ),
    Rule(
        id="state-space-cp-heads",
        option="--cp",
        field="cp",
        others=("tp",),
        holds=lambda c, x: (
            True if _MAMBA2.isdisjoint(x.features) else (c.cp == 1) | (x.state_heads % (c.tp * c.cp) == 0)
        ),
        message="Context parallelism gives each rank whole heads of a state space: tp {tp} · cp {cp} has to divide the "
        "{state_heads} heads.",
        source="Megatron-Core mamba_context_parallel: nheads % (tp · cp)",
    ),
    Rule(
        id="state-space-cp-groups",
        option="--cp",
        field="cp",
        holds=lambda c, x: True if _MAMBA2.isdisjoint(x.features) else _mamba2_cp_groups(c, x),
        message="--cp {cp} and the groups of one TP rank ({state_groups} over tp {tp}) have to divide one another: "
        "each rank has whole groups, or a group is copied to all ranks with heads of it.",
        source="Megatron-Core mamba_context_parallel: ngroups/tp % cp or cp % (ngroups/tp)",
    ),
)
