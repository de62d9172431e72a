"""Applying the rules: a mask over a million layouts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.columns import Columns
from fivefold.layout.rows import rows_of
from fivefold.layout.rules.adapters import ADAPTERS
from fivefold.layout.rules.choices import CHOICES
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.deepspeed import DEEPSPEED
from fivefold.layout.rules.degrees import DEGREES
from fivefold.layout.rules.documents import DOCUMENTS
from fivefold.layout.rules.fivefold import FIVEFOLD
from fivefold.layout.rules.fsdp import FSDP
from fivefold.layout.rules.megatron import MEGATRON
from fivefold.layout.rules.megatron_versions import MEGATRON_VERSIONS
from fivefold.layout.rules.mixers import MIXERS
from fivefold.layout.rules.models import MODELS
from fivefold.layout.rules.nanotron import NANOTRON
from fivefold.layout.rules.offload import OFFLOAD
from fivefold.layout.rules.overlaps import OVERLAPS
from fivefold.layout.rules.rule import Rule
from fivefold.layout.rules.torchtitan import TORCHTITAN

RULES: tuple[Rule, ...] = (
    *DEGREES,
    *MIXERS,
    *CHOICES,
    *OFFLOAD,
    *ADAPTERS,
    *DOCUMENTS,
    *OVERLAPS,
    *MEGATRON,
    *MEGATRON_VERSIONS,
    *TORCHTITAN,
    *FSDP,
    *FIVEFOLD,
    *MODELS,
    *NANOTRON,
    *DEEPSPEED,
)

_WORTH_GATHERING = 0.6


def rules_for(context: Context) -> tuple[Rule, ...]:
    """The rules that the context's runtime and version have, in the order they are applied."""
    return tuple(rule for rule in RULES if rule.applies(context))


# A degree of zero breaks a range rule; the quotients by it that other rules still compute on its row mean nothing.
no_division_warnings = np.errstate(divide="ignore", invalid="ignore")


@no_division_warnings
def valid_mask(columns: Columns, context: Context) -> NDArray[np.bool_]:
    """Which rows would start: bool array [n], True exactly where `violations` of the row is empty.

    Rules are applied one after the other to the rows that are left.
    """
    index: NDArray[np.int64] | None = None
    rows = rows_of(columns)
    alive = np.ones(len(columns), dtype=np.bool_)
    for rule in rules_for(context):
        held = rule.holds(rows, context)
        if isinstance(held, (bool, np.bool_)):
            if held:
                continue
            return np.zeros(len(columns), dtype=np.bool_)
        alive &= held
        # Gathering the remaining rows costs about as much as one rule, so it has to leave out a good part of them.
        if np.count_nonzero(alive) < _WORTH_GATHERING * len(alive):
            kept = np.flatnonzero(alive)
            index = kept if index is None else index[kept]
            rows = rows_of(columns, index)
            alive = np.ones(len(index), dtype=np.bool_)
            if not len(index):
                break
    if index is None:
        return alive
    mask = np.zeros(len(columns), dtype=np.bool_)
    mask[index[alive]] = True
    return mask
