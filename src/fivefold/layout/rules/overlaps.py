"""Rules of what hides communication and launches: a switch that a framework does not have is refused, not ignored."""

from __future__ import annotations

from fivefold.layout.rules.common import FULL
from fivefold.layout.rules.rule import Rule

# Whose switch for TP is real where the share that it hides is 0: fivefold's own, which was not measured on any device
# yet, and asynchronous TP, which leaves out copies.
_SWITCHES = ("fivefold", "torchtitan", "fsdp")
_GRAPHS = ("megatron",)
_DEEPEP = ("megatron", "megatron-fsdp")
_DROPOUT = ("megatron", "megatron-fsdp", "deepspeed")

OVERLAPS: tuple[Rule, ...] = (
    Rule(
        id="overlap-tp-runtime",
        option="--overlap-tp",
        field="overlap_tp",
        holds=lambda c, x: ~c.overlap_tp | (x.profile.tp_overlap_hidden > 0 or x.profile.name in _SWITCHES),
        message="{runtime} has no overlap of TP communication with compute beyond what is priced anyway.",
        source="the runtime's profile, tp_overlap_hidden; PyTorch's asynchronous TP",
    ),
    Rule(
        id="overlap-ep-runtime",
        option="--overlap-ep",
        field="overlap_ep",
        holds=lambda c, x: ~c.overlap_ep | (x.profile.ep_overlap_hidden > 0),
        message="{runtime} has no overlap of expert exchanges with compute.",
        source="the runtime's profile, ep_overlap_hidden",
    ),
    Rule(
        id="moe-dispatcher-runtime",
        option="--moe-dispatcher",
        field=None,
        values=lambda c, x: ["alltoall"],
        holds=lambda c, x: x.work.moe_dispatcher == "alltoall" or x.profile.name in _DEEPEP,
        message="{runtime} as modelled moves tokens by all-to-all, not by {moe_dispatcher}.",
        source="Megatron-LM --moe-enable-deepep with the flex dispatcher; the others not known to (from memory)",
    ),
    Rule(
        id="moe-dispatcher-experts",
        option="--moe-dispatcher",
        field=None,
        values=lambda c, x: ["alltoall"],
        holds=lambda c, x: True if x.work.moe_dispatcher == "alltoall" else (c.ep > 1) if x.is_moe else False,
        message="--moe-dispatcher {moe_dispatcher} is for experts on several ranks (--ep above 1), which this is not.",
        source="definition",
    ),
    Rule(
        id="dropout-runtime",
        option="--dropout",
        field=None,
        values=lambda c, x: [False],
        holds=lambda c, x: not x.work.dropout or x.profile.name in _DROPOUT,
        message="{runtime} as modelled trains without dropout.",
        source="Megatron-LM --hidden-dropout and --attention-dropout; what the others pretrain has none (from memory), "
        "and fivefold plans without the masks of its trainer's dropout",
    ),
    Rule(
        id="cuda-graphs-runtime",
        option="--cuda-graphs",
        field=None,
        values=lambda c, x: [False],
        holds=lambda c, x: not x.work.cuda_graphs or x.profile.name in _GRAPHS,
        message="{runtime} as modelled replays no CUDA graphs of whole blocks.",
        source="Megatron-LM --enable-cuda-graph; the others have no such switch for training (from memory)",
    ),
    Rule(
        id="cuda-graphs-dense",
        option="--cuda-graphs",
        field=None,
        values=lambda c, x: [False],
        holds=lambda c, x: not (x.work.cuda_graphs and x.is_moe),
        message="Blocks with experts have shapes that change with the routing, so that only parts of them go into CUDA "
        "graphs, which is not modelled.",
        source="Megatron-Core cuda_graph_scope: attn, moe_router, ... instead of whole blocks",
    ),
    Rule(
        id="cuda-graphs-recompute",
        option="--recompute",
        field="recompute_kind",
        holds=lambda c, x: c.recompute_kind != FULL if x.work.cuda_graphs else True,
        message="Full recomputation does not go with CUDA graphs.",
        source="Megatron-Core transformer_config: CUDA graphs with recompute_granularity full are refused",
    ),
)
