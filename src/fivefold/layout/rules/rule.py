"""A rule is data: who has it, what it demands of columns of layouts, and what to tell the user who broke it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fivefold.layout.columns import Columns
from fivefold.layout.rules.context import Context, Version

Holds = NDArray[np.bool_] | bool
Values = Callable[[Columns, Context], list[Any]]


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """The contract's `rule` object: one rule that one layout breaks.

    option: the user's own flag. value: what it is now. legal: what it could be, the rest of the layout unchanged;
    empty when no value of this option alone helps. silent: the runtime would start, and compute something else.
    """

    id: str
    option: str
    value: Any
    legal: list[Any]
    message: str
    source: str
    runtimes: list[str]
    silent: bool = False

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One demand on a layout.

    id: stable name. option: the user's flag that breaks it, e.g. "--tp".
    field: the column behind that flag; None when the flag belongs to the workload or the cluster.
    others: further columns that can break it; the first one in use (above 1) that has a legal value takes the blame.
    runtimes: "*" for all, else names or aliases that have the rule.
    since, before: versions of the runtime that have it, half-open; None for no bound. Unversioned plans are for the
        newest version of the profile that the name alone means.
    silent: the runtime accepts the layout and computes something else, which is an error here all the same.
    gate: when broken, the rules after it make no sense and are not reported.
    moot_after: ids of rules that make this one pointless to report when they are broken too.
    holds: (columns, context) to a boolean array [n], True where obeyed, or to one bool for all rows.
    message: format string; knows every column's value, the model's and workload's numbers, and `value`.
    values: candidates for a legal value, by (one-row columns, context); None for the option's usual candidates.
        For options without a column, exactly the legal values.
    source: where the rule is written, and which version was read.
    """

    id: str
    option: str
    field: str | None
    holds: Callable[[Columns, Context], Holds]
    message: str
    source: str
    others: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ("*",)
    since: Version | None = None
    before: Version | None = None
    silent: bool = False
    gate: bool = False
    moot_after: tuple[str, ...] = ()
    values: Values | None = None

    def applies(self, context: Context) -> bool:
        """Whether the context's runtime and version have this rule."""
        names = {"*", context.profile.name, context.alias}
        if names.isdisjoint(self.runtimes):
            return False
        version = context.version_parts or context.profile.newest
        return (self.since is None or version >= self.since) and (self.before is None or version < self.before)
