"""What recomputation runs again and what it leaves in place: the rules that a ledger's price and the account of one
layout have in common.

modules: names of layout.RECOMPUTE_MODULES, those that selective recomputation drops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from fivefold.estimate import by_operation
from fivefold.estimate.ledger import Column, Exchange, Gemm, Ledger
from fivefold.layout.layout import RECOMPUTE_MODULES, RecomputeKind
from fivefold.layout.workload import Workload
from fivefold.runtime import Profile

# What a recomputation module covers besides its own name: recomputing the whole MoE layer re-runs its activation.
COVERS = {"moe": ("moe", "moe_act", "shared_experts")}
# Attention's core in Profile.checkpoint_keeps, and what is saved of it.
CORE, _KEPT_OF_CORE = "core_attention", ("attention_output", "log_sum_exp")


def belongs(module: str, recomputed: str) -> bool:
    """Whether an operation or a tensor of `module` is dropped with the module `recomputed`."""
    return module in COVERS.get(recomputed, (recomputed,))


@cache
def modules_with(module: str) -> tuple[int, ...]:
    """Indices in RECOMPUTE_MODULES of those that re-run operations of `module`."""
    return tuple(index for index, name in enumerate(RECOMPUTE_MODULES) if belongs(module, name))


def by_operations(runtime: Profile, ledger: Ledger) -> bool:
    """Whether selective recomputation of this piece chooses single operations, whatever module is named."""
    return runtime.selective_by_operation and bool(ledger.attends or ledger.scans)


def stops_before(runtime: Profile, row: Gemm | Exchange) -> bool:
    """Whether the recomputation of a block or module has ended before this operation, whose output nothing needs."""
    return row.ends_block and runtime.checkpoint_stops_early


def run_again(ledger: Ledger, runtime: Profile) -> Ledger:
    """The ledger without the operations that recomputing the whole piece leaves out."""
    keeps = runtime.checkpoint_keeps
    return replace(
        ledger,
        gemms=[row for row in ledger.gemms if not (row.name in keeps or stops_before(runtime, row))],
        attends=[] if CORE in keeps else ledger.attends,
        exchanges=[row for row in ledger.exchanges if not stops_before(runtime, row)],
    )


def runs_again(row: Exchange, ledger: Ledger, runtime: Profile, kind: RecomputeKind, modules: Iterable[str]) -> bool:
    """Whether recomputation runs a collective again."""
    if row.when != "forward" or kind == "none":
        return False
    if kind == "selective" and by_operations(runtime, ledger):
        return by_operation.gathers_again(row)
    named = kind == "full" or any(belongs(row.module, each) for each in modules)
    return named and not stops_before(runtime, row)


def kept_beside_input(ledger: Ledger, runtime: Profile, work: Workload) -> list[Column]:
    """Bytes of what full recomputation keeps beside a block's input. Backward has no use for the output of the product
    that ends the block."""
    keeps, size = runtime.checkpoint_keeps, work.compute_bytes
    products = [size * row.m * row.n * row.groups for row in ledger.gemms if row.name in keeps and not row.ends_block]
    core = [row.bytes for row in ledger.saved if row.name in _KEPT_OF_CORE] if CORE in keeps else []
    return [*products, *core]
