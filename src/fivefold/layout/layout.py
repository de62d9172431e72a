"""Layout: how the work is split over the GPUs. Two grids over one world and one pipeline.

The dense grid is (tp, cp, dp, pp), the expert grid (etp, ep, edp, pp); ranks run in Megatron's order
tp-cp-ep-dp-pp, the first varying fastest. A Layout holds what a user chooses; what follows from it and
from the world size (dp, edp, micro-batches, stages) is in ResolvedLayout, which `resolve` makes.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

CpKind = Literal["p2p", "a2a"]
ScheduleKind = Literal["afab", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]
RecomputeKind = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "moe", "layernorm", "moe_act", "mla_up_proj", "shared_experts"]

# Their words in order, which is that of the codes in Columns: code i is the i-th word, a module is bit i of a mask.
CP_KINDS: tuple[CpKind, ...] = get_args(CpKind)
SCHEDULES: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
RECOMPUTE_KINDS: tuple[RecomputeKind, ...] = get_args(RecomputeKind)
RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)

# Of each schedule, the chunks per pipeline rank that it runs: fewest and most (None: as many as there are blocks).
CHUNKS: dict[ScheduleKind, tuple[int, int | None]] = {
    "afab": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, None),
    "zb-h1": (1, 1),
    "zbv": (2, 2),
    "dualpipev": (2, 2),
}
# Schedules whose second chunks lie on the ranks in reverse order, so that the first rank holds first and last stage.
V_SHAPED: frozenset[str] = frozenset({"zbv", "dualpipev"})
# Schedules that compute the gradients of weights apart from those of inputs.
SPLIT_BACKWARD: frozenset[str] = frozenset({"zb-h1", "zbv", "dualpipev"})


class Recompute(msgspec.Struct, frozen=True, kw_only=True):
    """Which activations are recomputed in backward.

    layers: with kind "full", how many blocks of each pipeline rank are recomputed (None: all).
    modules: with kind "selective", the named parts of a block whose inner activations are dropped; none named means
        the attention core, as in Korthikanti et al. 2022.
    """

    kind: RecomputeKind = "none"
    layers: int | None = None
    modules: tuple[RecomputeModule, ...] = ()


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Which communication runs beside compute: gradient reduction, parameter gather, TP and EP exchanges.

    param: None means on exactly when there is a gather to hide (zero >= 1) and gradients overlap too; a resolved
    layout always holds True or False.
    """

    grad: bool = True
    param: bool | None = None
    tp: bool = False
    ep: bool = False


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What a user chooses; None means "by the default", which resolve() fills in.

    cp_kind: "p2p" is ring attention (balanced zigzag), "a2a" is Ulysses.
    dp_replicate: HSDP: sharded inside dp_shard = dp·cp / dp_replicate ranks, replicated dp_replicate times.
    sequence_parallel: None means on exactly when tp > 1.
    schedule: None means "interleaved" when vpp > 1, else "1f1b". CHUNKS says which schedule runs which vpp.
    first_stage_layers, last_stage_layers: blocks on the first and last pipeline stage, None for even stages.
    account_for_embedding, account_for_loss: in an even split the embedding, the head count as one block each, so that
        the first, the last virtual stage has one block less (Megatron's ...-in-pipeline-split).
    """

    tp: int = 1
    cp: int = 1
    cp_kind: CpKind = "p2p"
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp_replicate: int = 1
    zero: int = 1
    sequence_parallel: bool | None = None
    micro_batch: int = 1
    schedule: ScheduleKind | None = None
    recompute: Recompute = Recompute()
    overlap: Overlap = Overlap()
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False


class ResolvedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The contract's `layout` object: every degree and every default filled in.

    stages: per pipeline rank, per chunk, the block range [first, last).
    """

    tp: int
    cp: int
    cp_kind: CpKind
    pp: int
    vpp: int
    ep: int
    etp: int
    dp: int
    edp: int
    dp_shard: int
    dp_replicate: int
    zero: int
    sequence_parallel: bool
    micro_batch: int
    num_micro_batches: int
    schedule: ScheduleKind
    stages: tuple[tuple[tuple[int, int], ...], ...]
    recompute: Recompute
    overlap: Overlap

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)
