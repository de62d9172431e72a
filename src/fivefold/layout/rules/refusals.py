"""Why one layout is refused: each broken rule in the user's words, with the values that would obey it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.errors import FivefoldError
from fivefold.layout.columns import ALL_LAYERS, DEGREES, SWITCHES, Columns, default_schedule, modules_of
from fivefold.layout.divisors import divisors
from fivefold.layout.layout import CP_KINDS, RECOMPUTE_KINDS, RECOMPUTE_MODULES, SCHEDULES, Layout
from fivefold.layout.rules.common import counted_layers, largest_stage, modules_possible
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.engine import no_division_warnings, rules_for, valid_mask
from fivefold.layout.rules.fivefold import untrained
from fivefold.layout.rules.models import unsupported
from fivefold.layout.rules.rule import Rule, Violation

# The user's flag behind each column that a rule may blame.
OPTIONS: dict[str, str] = {
    "tp": "--tp",
    "cp": "--cp",
    "cp_kind": "--cp-kind",
    "pp": "--pp",
    "vpp": "--vpp",
    "ep": "--ep",
    "etp": "--etp",
    "dp_replicate": "--dp-replicate",
    "zero": "--zero",
    "sp": "--sequence-parallel",
    "micro_batch": "--micro-batch",
    "schedule": "--schedule",
    "recompute_kind": "--recompute",
    "recompute_layers": "--recompute-layers",
    "recompute_modules": "--recompute-modules",
    "first_stage_layers": "--first-stage-layers",
    "last_stage_layers": "--last-stage-layers",
    "account_for_embedding": "--account-for-embedding",
    "account_for_loss": "--account-for-loss",
    "overlap_grad": "--overlap-grad",
    "overlap_param": "--overlap-param",
    "overlap_tp": "--overlap-tp",
    "overlap_ep": "--overlap-ep",
}
# Columns whose default follows another's value: they follow it too when a legal value of that one is looked for.
_FOLLOWS: dict[str, tuple[str, ...]] = {
    "tp": ("sp",),
    "vpp": ("schedule",),
    "zero": ("overlap_param",),
    "overlap_grad": ("overlap_param",),
}
_WORK_VALUES: dict[str, str] = {
    "--global-batch": "gbs",
    "--seq-len": "seq",
    "--optimizer": "optimizer",
    "--precision": "precision",
    "--grad-dtype": "grad_dtype",
    "--moe-imbalance": "imbalance",
    "--offload": "offload",
    "--moe-dispatcher": "moe_dispatcher",
    "--cuda-graphs": "cuda_graphs",
    "--dropout": "dropout",
    "--document-length": "document_length",
    "--lora-rank": "lora_rank",
    "--lora-targets": "lora_targets",
    "--base-precision": "base_precision",
    "--mtp": "mtp",
    "MODEL": "model",
}


@no_division_warnings
def violations(layout: Columns | Layout, context: Context) -> list[Violation]:
    """Every rule that one layout breaks, empty when it would start.

    layout: a Layout, or Columns with exactly one row. When a range rule is broken only those are reported, since the
    rest could not be computed.
    """
    if isinstance(layout, Layout):
        layout = Columns.from_layouts([layout], context.world, context.work)
    if len(layout) != 1:
        raise FivefoldError(f"violations explains one layout at a time, not {len(layout)}; use valid_mask for many.")
    broken = [rule for rule in rules_for(context) if not np.all(rule.holds(layout, context))]
    ids = {rule.id for rule in broken}
    told = [rule for rule in broken if rule.gate] or [rule for rule in broken if ids.isdisjoint(rule.moot_after)]
    return [_violation(rule, layout, context) for rule in told]


def legal_values(rule: Rule, field: str, row: Columns, context: Context) -> list[Any]:
    """Values of `field` that obey `rule`, the rest of the one-row columns unchanged.

    Those that make the whole layout valid, where any does.
    """
    candidates = _candidates(field, row, context)
    base = {
        name: getattr(row, name)[0]
        for name in OPTIONS
        if name not in _FOLLOWS.get(field, ()) or not _default(name, row)
    }
    if row.zero[0] == 0 and row.dp_shard[0] * row.dp_replicate[0] == row.dp[0] * row.cp[0]:
        base["dp_replicate"] = np.int64(1)
    base[field] = np.asarray(candidates)
    trials = Columns.build(context.world, context.work, **base)
    obeying = np.broadcast_to(rule.holds(trials, context), len(trials))
    valid = obeying & valid_mask(trials, context)
    chosen = valid if valid.any() else obeying
    return [_word(field, value) for value, legal in zip(candidates, chosen.tolist(), strict=True) if legal]


def _default(name: str, row: Columns) -> bool:
    """Whether the column has the value that follows from the others by default."""
    by_default = {
        "sp": row.tp > 1,
        "schedule": default_schedule(row.vpp),
        "overlap_param": (row.zero >= 1) & row.overlap_grad,
    }
    return bool(getattr(row, name)[0] == by_default[name][0])


def _candidates(field: str, row: Columns, x: Context) -> list[int]:
    if field in ("tp", "cp", "pp", "ep", "etp", "dp_replicate"):
        return divisors(x.world)
    if field in ("first_stage_layers", "last_stage_layers"):
        return [0, *range(1, x.layers + 1)]
    if field == "recompute_layers":
        return [ALL_LAYERS, *range(1, int(largest_stage(row, x)[0]) + 1)]
    if field == "recompute_modules":
        possible = modules_possible(x)
        return [0, *(1 << bit for bit in range(len(RECOMPUTE_MODULES)) if possible >> bit & 1)]
    closed = {
        "vpp": list(range(1, x.layers + 1)),
        "micro_batch": divisors(x.work.global_batch),
        "zero": [0, 1, 2, 3],
        "cp_kind": list(range(len(CP_KINDS))),
        "schedule": list(range(len(SCHEDULES))),
        "recompute_kind": list(range(len(RECOMPUTE_KINDS))),
    }
    return closed.get(field, [0, 1])  # what is left are the switches


def _word(field: str, code: Any) -> Any:
    """A column's value as the user writes it."""
    words = {"cp_kind": CP_KINDS, "schedule": SCHEDULES, "recompute_kind": RECOMPUTE_KINDS}.get(field)
    if words is not None:
        return words[code]
    if field == "recompute_modules":
        return ",".join(modules_of(code)) or None
    if field in SWITCHES:
        return bool(code)
    if field == "recompute_layers":
        return None if code == ALL_LAYERS else code
    if field in ("first_stage_layers", "last_stage_layers"):
        return {0: None, -1: 0}.get(code, code)
    return code


def _violation(rule: Rule, row: Columns, context: Context) -> Violation:
    numbers = _numbers(row, context)
    option, field = _blamed(rule, row, context)
    if field is None:
        value = numbers[_WORK_VALUES[option]]
        legal = rule.values(row, context) if rule.values else []
    else:
        value = _word(field, getattr(row, field)[0].item())
        legal = legal_values(rule, field, row, context)
    message = rule.message.format(**numbers, value=value)
    shown = [item for item in legal if item is not None]
    if shown:
        message += f" Legal for {option} here: {_listed(shown)}."
    if rule.silent:
        message += f" Some versions of {context.profile.name} accept this silently and train something else."
    return Violation(
        id=rule.id,
        option=option,
        value=value,
        legal=legal,
        message=message,
        source=rule.source,
        runtimes=list(rule.runtimes),
        silent=rule.silent,
    )


def _blamed(rule: Rule, row: Columns, context: Context) -> tuple[str, str | None]:
    """The option to name: the rule's own, or another one in use that could be changed to obey it alone."""
    if rule.field is None or not rule.others:
        return rule.option, rule.field
    in_use = [name for name in (rule.field, *rule.others) if getattr(row, name)[0] != (name in DEGREES)]
    for name in in_use:
        if legal_values(rule, name, row, context):
            return OPTIONS[name], name
    name = in_use[0] if in_use else rule.field
    return OPTIONS[name], name


def _listed(values: list[Any], most: int = 12) -> str:
    words = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _numbers(row: Columns, x: Context) -> dict[str, Any]:
    """What a message can name: every column of the row in the user's words, and the model's and workload's numbers."""
    numbers: dict[str, Any] = {
        name: _word(name, getattr(row, name)[0].item())
        for name in ("dp", "edp", "dp_shard", "num_micro_batches", *OPTIONS)
    }
    ends = [max(int(count[0]), 0) for count in (row.first_stage_layers, row.last_stage_layers)]
    numbers |= {
        "m": numbers["num_micro_batches"],
        "sharding_ranks": numbers["dp"] * numbers["cp"],
        "interleaved_unit": numbers["micro_batch"] * numbers["dp"] * numbers["pp"],
        "counted_layers": int(counted_layers(row, x)[0]),
        "layers_per_rank": int(counted_layers(row, x)[0]) // max(numbers["pp"], 1),
        "largest_stage": int(largest_stage(row, x)[0]),
        "middle_layers": x.layers - sum(ends),
        "middle_ranks": numbers["pp"] - sum(count > 0 for count in ends),
        "model": x.model.name,
        "hidden": x.model.hidden,
        "heads": x.heads,
        "kv_heads": "/".join(str(kv) for kv in x.kv_heads),
        "state_heads": x.state_heads,
        "state_groups": x.state_groups,
        "untrained": ", ".join(untrained(x)),
        "head_widths": "/".join(str(width) for width in x.head_widths),
        "layers": x.layers,
        "experts": x.experts,
        "dense_ffn": x.dense_ffn,
        "expert_ffn": x.expert_ffn,
        "positions": x.model.learned_positions,
        "mtp": x.model.mtp,
        "world": x.world,
        "scale_up": x.scale_up_size,
        "seq": x.work.seq_len,
        "gbs": x.work.global_batch,
        "optimizer": x.work.optimizer,
        "precision": x.work.precision,
        "grad_dtype": x.work.grad_dtype,
        "imbalance": x.work.moe_imbalance,
        "offload": x.work.offload.words,
        "moe_dispatcher": x.work.moe_dispatcher,
        "cuda_graphs": x.work.cuda_graphs,
        "dropout": x.work.dropout,
        "document_length": x.work.document_length,
        "lora_rank": x.work.lora.rank if x.work.lora else None,
        "lora_targets": ",".join(x.work.lora.targets) if x.work.lora else None,
        "base_precision": x.work.base_precision,
        "runtime": x.profile.name,
        "zero_stages": ", ".join(str(stage) for stage in x.profile.zero_stages),
        "zero_elsewhere": f" {x.profile.other_zero_stages}" if x.profile.other_zero_stages else "",
        "schedules": ", ".join(x.profile.schedules),
        "unsupported": " and ".join(unsupported(x)),
        "gpus_per_node": x.gpus_per_node,
        "micro_tokens": numbers["micro_batch"] * x.work.seq_len,
    }
    return numbers
