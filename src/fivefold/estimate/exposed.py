"""What nothing hides of the collectives inside a piece.

Each runs on a second stream: it is exposed, or hidden behind the matrix product that its framework runs beside it, or
(ring attention) behind attention itself. Only what is left over counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_NO_TIME = np.finfo(float).tiny


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
        busy: tuple[np.ndarray, np.ndarray],
    ) -> tuple[tuple[Exchange, np.ndarray], ...]:
        """Every collective with its exposed seconds, [K].

        products: [K] seconds of backward's products by (name, gradient); attention, and busy, all that a piece
        computes: [K] forward and backward.
        """
        copies = self.runtime.sequence_second or self.runtime.ring_gathers
        beside = self._beside_attention(attention)
        unhidden = [(row, alone, self._unhidden(row, alone, products, beside)) for row, alone in self.alone(ledger)]
        out = []
        for row, seconds in self._beside_no_more_than(busy, unhidden):
            if row.axis in _SLOWER_IN_STEP:
                seconds = self.runtime.tp_in_step * seconds
            if copies and np.any(row.copied):
                copied = streaming_seconds(self.curve, self.cluster.gpu, row.copied, np.asarray(row.copied) > 0)
                seconds = seconds + self.curve.in_step * copied
            out.append((row, seconds))
        return tuple(out)

    def _beside_no_more_than(
        self, busy: tuple[np.ndarray, np.ndarray], rows: list[tuple[Exchange, np.ndarray, np.ndarray]]
    ) -> Iterator[tuple[Exchange, np.ndarray]]:
        """Collectives with what is exposed of them, of which overlap hides a share, but no more seconds than there are
        of compute: TP's of each pass, EP's, which run beside another micro-batch's other pass, of both together."""
        if not (np.any(self.shard.overlap_tp) or np.any(self.shard.overlap_ep)):
            yield from ((row, exposed) for row, _, exposed in rows)
            return
        forward, backward = (seconds / self.runtime.tp_in_step for seconds in busy)
        room = {
            ("tp", "forward"): (self.shard.overlap_tp, forward),
            ("tp", "backward"): (self.shard.overlap_tp, backward),
            ("ep", "forward"): (self.shard.overlap_ep, forward + backward),
        }

        def place(row: Exchange) -> tuple[str, str]:
            return row.axis, "forward" if row.axis == "ep" else row.when

        hidden = dict.fromkeys(room, np.zeros(1))
        for row, alone, exposed in rows:
            if place(row) in room:
                hidden[place(row)] = hidden[place(row)] + (alone - exposed)
        shares = {
            at: np.where(on, most / np.maximum(np.maximum(hidden[at], most), _NO_TIME), 1.0)
            for at, (on, most) in room.items()
        }
        for row, alone, exposed in rows:
            share = shares.get(place(row), np.ones(1))
            yield row, np.where(share < 1, alone - share * (alone - exposed), exposed)

    def _unhidden(
        self,
        row: Exchange,
        seconds: np.ndarray,
        products: Mapping[tuple[str, str], np.ndarray],
        attention: dict[tuple[str, str], np.ndarray],
    ) -> np.ndarray:
        """What is exposed of a collective beside products and attention; of the latter's seconds it takes its part."""
        runtime, shard = self.runtime, self.shard
        if row.behind is not None:
            shares = {"dgrad": runtime.tp_beside_dgrad_hidden, "wgrad": runtime.tp_beside_wgrad_hidden}
            lasts = products[row.behind] / runtime.tp_in_step  # beside it the collective gets so far
            beside = shares[row.behind[1]] * np.minimum(seconds, lasts)
            return np.where(shard.overlap_tp, seconds * (1 - runtime.tp_overlap_hidden), seconds - beside)
        if row.axis == "cp" and (row.when, row.op) in attention:
            hidden = np.minimum(seconds, attention[row.when, row.op])
            attention[row.when, row.op] = attention[row.when, row.op] - hidden  # the next one has the rest
            return seconds - hidden
        if row.axis == "tp":
            return np.where(shard.overlap_tp, seconds * (1 - runtime.tp_overlap_hidden), seconds)
        if row.axis == "ep":
            return np.where(shard.overlap_ep, seconds * (1 - runtime.ep_overlap_hidden), seconds)
        return seconds

    def _beside_attention(self, attention: tuple[np.ndarray, np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
        """[K] seconds of attention that run while a ring moves, by pass and operation: beside a gather its first step,
        whose keys are there, beside sends the other ones."""
        if self.runtime.ring_waits:
            return {}
        cp = self.shard.cp
        return {
            (when, op): attend * share
            for when, attend in zip(("forward", "backward"), attention, strict=True)
            for op, share in (("send", (cp - 1) / cp), ("all_gather", 1 / cp))
        }

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
