"""Values of options that the search, a check of a launch and the reasons for a plan all try: one list for all of them,
so that a check never misses what a search would have found."""

from __future__ import annotations

from typing import Any

from fivefold.layout.layout import SCHEDULES, SPLIT_BACKWARD, RecomputeModule
from fivefold.model.spec import Experts, LatentAttention, ModelSpec

# Schedules that split the backward are priced by the event simulator, thousands of times slower than by a sweep, so
# they are searched when they are pinned.
SEARCHED_SCHEDULES = tuple(name for name in SCHEDULES if name not in SPLIT_BACKWARD)
# Fields of a Layout. Another number of stages gives up the uneven ones that were chosen for this number.
EVEN_STAGES: dict[str, Any] = {
    "first_stage_layers": None,
    "last_stage_layers": None,
    "account_for_embedding": False,
    "account_for_loss": False,
}

Parts = tuple[RecomputeModule, ...]
# The attention core is Megatron's default; under fused attention it frees little.
_DENSE_PARTS: tuple[Parts, ...] = (("core_attn",), ("layernorm",), ("mlp",), ("layernorm", "mlp"))
_EXPERT_PARTS: tuple[Parts, ...] = (
    ("core_attn",),
    ("layernorm",),
    ("moe_act",),
    ("layernorm", "moe_act"),
    ("moe",),
)
_LATENT_PARTS: tuple[Parts, ...] = (("mla_up_proj",), ("layernorm", "moe_act", "mla_up_proj"))


def recompute_parts(model: ModelSpec) -> list[Parts]:
    """The sets of named parts of a block that selective recomputation is tried with, for the blocks of this model."""
    parts = [*(_EXPERT_PARTS if model.is_moe else _DENSE_PARTS)]
    if any(isinstance(block.mixer, LatentAttention) for block in model.kinds):
        parts += [part for part in _LATENT_PARTS if model.is_moe or "moe_act" not in part]
    return parts


def fewest_experts(model: ModelSpec) -> int:
    """Experts of the block that has fewest, which expert parallelism has to divide; 1 without experts."""
    return min((kind.feed.num_experts for kind in model.kinds if isinstance(kind.feed, Experts)), default=1)
