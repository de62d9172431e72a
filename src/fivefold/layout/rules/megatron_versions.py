"""What older releases of Megatron-Core lack, by the release that brought it.

Releases are those of Megatron-LM's CHANGELOG.md, read at 0a296d15ed, unless the source says "from memory".
"""

from __future__ import annotations

from collections.abc import Callable

from fivefold.layout.columns import CORE_ATTENTION_MASK, Columns
from fivefold.layout.rules.common import A2A, accounted, uneven
from fivefold.layout.rules.context import Context, Version
from fivefold.layout.rules.rule import Holds, Rule

_LOG = "Megatron-LM CHANGELOG.md, read at 0a296d15ed"


def _folded(c: Columns, x: Context) -> Holds:
    """Before parallel folding, experts were cut by TP, and spread over the data-parallel ranks alone."""
    return (c.etp == c.tp) & (c.dp % c.ep == 0) if x.is_moe else True


def _lacks(
    name: str,
    option: str,
    field: str | None,
    before: Version,
    holds: Callable[[Columns, Context], Holds],
    message: str,
    source: str = _LOG,
) -> Rule:
    return Rule(
        id=f"megatron-{name}-version",
        option=option,
        field=field,
        runtimes=("megatron",),
        before=before,
        holds=holds,
        message=message,
        source=source,
        values=None if field else lambda c, x: [],
    )


MEGATRON_VERSIONS: tuple[Rule, ...] = (
    _lacks("experts", "MODEL", None, (0, 4), lambda c, x: not x.is_moe,
           "{model} has experts, which came with core 0.4."),
    _lacks("latent", "MODEL", None, (0, 10), lambda c, x: not x.has_mla,
           "{model} has latent attention, which came with core 0.10."),
    _lacks("mtp", "--mtp", None, (0, 12), lambda c, x: x.model.mtp == 0,
           "Multi-token prediction came with core 0.12."),
    _lacks("cp", "--cp", "cp", (0, 4), lambda c, x: c.cp == 1,
           "--cp {cp}: context parallelism came with core 0.4."),
    _lacks("cp-experts", "--cp", "cp", (0, 8), lambda c, x: c.cp == 1 if x.is_moe else True,
           "--cp {cp}: context parallelism of models with experts came with core 0.8."),
    _lacks("cp-kind", "--cp-kind", "cp_kind", (0, 10), lambda c, x: (c.cp == 1) | (c.cp_kind != A2A),
           "All-to-all context parallelism came with core 0.10.", "Megatron-Core cp_comm_type, from memory"),
    _lacks("folding", "--etp", "etp", (0, 10), _folded,
           "Before core 0.10 experts are cut by tp ({tp}, so --etp {tp}) and spread over the {dp} data-parallel ranks, "
           "which --ep {ep} has to divide: parallel folding came then."),
    _lacks("uneven", "--first-stage-layers", "first_stage_layers", (0, 9), lambda c, x: ~uneven(c),
           "Uneven first and last stages came with core 0.9."),
    _lacks("uneven-chunks", "--vpp", "vpp", (0, 11), lambda c, x: ~uneven(c) | (c.vpp == 1),
           "Uneven stages with interleaving came with core 0.11."),
    _lacks("account", "--account-for-embedding", "account_for_embedding", (0, 11),
           lambda c, x: ~accounted(c),
           "Counting embedding and head in the split came with core 0.11.", "Megatron-LM arguments, from memory"),
    _lacks("modules", "--recompute-modules", "recompute_modules", (0, 13),
           lambda c, x: (c.recompute_modules == 0) | (c.recompute_modules == CORE_ATTENTION_MASK),
           "Selective recomputation of named modules came with core 0.13; before, it is the attention core."),
    _lacks("replicas-experts", "--dp-replicate", "dp_replicate", (0, 13),
           lambda c, x: c.dp_replicate == 1 if x.is_moe else True,
           "Several optimizer instances (--dp-replicate {dp_replicate}) with experts came with core 0.13."),
    _lacks("overlap-tp", "--overlap-tp", "overlap_tp", (0, 5), lambda c, x: ~c.overlap_tp,
           "Overlap of tensor-parallel communication came with core 0.5.", "Megatron-LM arguments, from memory"),
)  # fmt: skip
