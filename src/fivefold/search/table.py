"""Tables of layouts in the making: columns by option, crossed with each other and thinned, rows staying aligned."""

from __future__ import annotations

import numpy as np

Ints = np.ndarray  # of whole numbers or booleans; an index may be positions or a mask
Table = dict[str, Ints]


def crossed(table: Table, where: Ints | None = None, **new: Ints) -> Table:
    """Every row of the table beside every row of `new`, whose columns belong together.

    where: mask [rows of the table, rows of `new`] of the pairs to keep, None for all.
    """
    if where is not None:
        ours, theirs = np.nonzero(where)
        return {**kept(table, ours), **kept(new, theirs)}
    rows = len(next(iter(table.values())))
    width = len(next(iter(new.values())))
    out = {name: np.repeat(column, width) for name, column in table.items()}
    return {**out, **{name: np.tile(column, rows) for name, column in new.items()}}


def kept(table: Table, index: Ints) -> Table:
    """The rows at `index`: positions, or a mask."""
    return {name: column[index] for name, column in table.items()}


def stacked(parts: list[Table]) -> Table:
    """The rows of several tables, one after the other; a part may be empty."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class NotYetKnownError(Exception):
    """A rule asked for an option that the table does not have yet."""


class Known:
    """The columns of a table in the making, and what follows from them, as rules read them."""

    def __init__(self, columns: Table) -> None:
        self._columns = columns

    @classmethod
    def of(cls, table: Table, world: int, batch: int) -> Known:
        columns = dict(table)
        if {"tp", "cp", "pp"} <= columns.keys():
            columns["dp"] = world // (columns["tp"] * columns["cp"] * columns["pp"])
            if "micro_batch" in columns:
                columns["num_micro_batches"] = batch // np.maximum(columns["micro_batch"] * columns["dp"], 1)
        if {"etp", "ep", "pp"} <= columns.keys():
            columns["edp"] = world // (columns["etp"] * columns["ep"] * columns["pp"])
        return cls(columns)

    def __getattr__(self, name: str) -> Ints:
        try:
            return self._columns[name]
        except KeyError:
            raise NotYetKnownError(name) from None
