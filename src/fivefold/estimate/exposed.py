"""What nothing hides of the collectives inside a piece.

Each runs on a second stream: it is exposed, or hidden behind the matrix product that its framework runs beside it, or
(ring attention) behind attention itself. Only what is left over counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fivefold.cluster import Cluster, collective_seconds, dispatch_seconds
from fivefold.cluster.compute import streaming_seconds
from fivefold.cluster.curve import Curve
from fivefold.cluster.groups import Placement
from fivefold.estimate.ledger import Exchange, Ledger
from fivefold.estimate.shard import Shard
from fivefold.runtime import Profile

# Axes of whose collectives Profile.tp_in_step says how much slower they are inside a step.
_SLOWER_IN_STEP = ("tp", "ep", "etp")


@dataclass(slots=True, frozen=True)
class ExchangePricer:
    """Prices the collectives of ledgers. placements: where the groups of each axis lie, K keys."""

    cluster: Cluster
    curve: Curve
    runtime: Profile
    shard: Shard
    placements: Mapping[str, Placement]

    def of(
        self,
        ledger: Ledger,
        products: Mapping[tuple[str, str], np.ndarray],
        attention: tuple[np.ndarray, np.ndarray],
    ) -> tuple[tuple[Exchange, np.ndarray], ...]:
        """Every collective with its exposed seconds, [K].

        products: [K] seconds of backward's products by (name, gradient); attention: [K] forward and backward.
        """
        copies = self.runtime.sequence_second or self.runtime.ring_gathers
        out = []
        for row, alone in self.alone(ledger):
            seconds = self._unhidden(row, alone, products, attention)
            if row.axis in _SLOWER_IN_STEP:
                seconds = self.runtime.tp_in_step * seconds
            if copies and np.any(row.copied):
                copied = streaming_seconds(self.curve, self.cluster.gpu, row.copied, np.asarray(row.copied) > 0)
                seconds = seconds + self.curve.in_step * copied
            out.append((row, seconds))
        return tuple(out)

    def _unhidden(
        self,
        row: Exchange,
        seconds: np.ndarray,
        products: Mapping[tuple[str, str], np.ndarray],
        attention: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        runtime, shard = self.runtime, self.shard
        if row.behind is not None:
            shares = {"dgrad": runtime.tp_beside_dgrad_hidden, "wgrad": runtime.tp_beside_wgrad_hidden}
            beside = shares[row.behind[1]] * np.minimum(seconds, products[row.behind])
            return np.where(shard.overlap_tp, seconds * (1 - runtime.tp_overlap_hidden), seconds - beside)
        if row.axis == "cp" and row.op in ("send", "all_gather"):
            attend = attention[0 if row.when == "forward" else 1]
            return seconds if runtime.ring_waits else np.maximum(seconds - attend * self._beside_ring(row), 0)
        if row.axis == "tp":
            return np.where(shard.overlap_tp, seconds * (1 - runtime.tp_overlap_hidden), seconds)
        if row.axis == "ep":
            return np.where(shard.overlap_ep, seconds * (1 - runtime.ep_overlap_hidden), seconds)
        return seconds

    def _beside_ring(self, row: Exchange) -> np.ndarray:
        """The share of attention that runs while a ring moves: its other steps, beside a gather the first alone."""
        steps = np.asarray(row.ring_steps)
        return steps / (steps + 1) if row.op == "send" else 1 / self.shard.cp

    def alone(self, ledger: Ledger) -> list[tuple[Exchange, np.ndarray]]:
        """Every collective with its unhidden time, [K]; one cost call per axis and operation."""
        groups: dict[tuple[str, str], list[Exchange]] = {}
        out: list[tuple[Exchange, np.ndarray]] = []
        for row in ledger.exchanges:
            if row.relayed is None:
                groups.setdefault((row.axis, row.op), []).append(row)
                continue
            token_bytes, choices = row.relayed
            seconds = dispatch_seconds(self.cluster, token_bytes, choices, self.placements[row.axis])
            out.append((row, np.where(np.asarray(row.bytes) > 0, seconds, 0.0)))
        for (axis, op), rows in groups.items():
            size = ledger.stack([row.bytes for row in rows])
            seconds = collective_seconds(self.cluster, op, size, self.placements[axis])
            seconds = np.where(size > 0, seconds, 0.0)
            if op == "send":
                seconds = seconds * ledger.stack([row.ring_steps for row in rows])
            if any(row.times > 1 for row in rows):
                seconds = seconds * np.array([[row.times] for row in rows])
            out += zip(rows, seconds, strict=True)
        return out
