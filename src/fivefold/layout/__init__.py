"""How the work is split: a Layout of degrees on a Workload, many of them as Columns, the groups of ranks on the dense
and the expert grid, the blocks of each pipeline stage, the rules that say which layouts a runtime would start, and the
arithmetic of batches and their ramp-up."""

from fivefold.layout.batch import (
    RampPlan,
    RampStep,
    RampUp,
    dp_headroom,
    global_batch_from_tokens,
    parse_count,
    parse_ramp_up,
    plan_ramp_up,
    unusual,
)
from fivefold.layout.columns import COLUMN_NAMES, Columns
from fivefold.layout.grids import AXES, DENSE_GRID, EXPERT_GRID, Group, group, group_members, rank_coordinates
from fivefold.layout.layout import (
    CHUNKS,
    CP_KINDS,
    RECOMPUTE_KINDS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    SPLIT_BACKWARD,
    V_SHAPED,
    Layout,
    Overlap,
    Recompute,
    ResolvedLayout,
)
from fivefold.layout.rules import RULES, Context, Rule, Violation, legal_values, rules_for, valid_mask, violations
from fivefold.layout.stages import blocks_per_stage, resolve, row_stages, split_policy, stage_ranges, stage_weights
from fivefold.layout.workload import Lora, Offload, Workload

__all__ = [
    "AXES",
    "CHUNKS",
    "COLUMN_NAMES",
    "CP_KINDS",
    "DENSE_GRID",
    "EXPERT_GRID",
    "RECOMPUTE_KINDS",
    "RECOMPUTE_MODULES",
    "RULES",
    "SCHEDULES",
    "SPLIT_BACKWARD",
    "V_SHAPED",
    "Columns",
    "Context",
    "Group",
    "Layout",
    "Lora",
    "Offload",
    "Overlap",
    "RampPlan",
    "RampStep",
    "RampUp",
    "Recompute",
    "ResolvedLayout",
    "Rule",
    "Violation",
    "Workload",
    "blocks_per_stage",
    "dp_headroom",
    "global_batch_from_tokens",
    "group",
    "group_members",
    "legal_values",
    "parse_count",
    "parse_ramp_up",
    "plan_ramp_up",
    "rank_coordinates",
    "resolve",
    "row_stages",
    "rules_for",
    "split_policy",
    "stage_ranges",
    "stage_weights",
    "unusual",
    "valid_mask",
    "violations",
]
