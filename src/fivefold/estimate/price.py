"""From a ledger to seconds and bytes per micro-batch: what each owner takes in forward, backward and recomputation.

Each collective runs on a second stream: it is exposed, or hidden behind the matrix product that its framework runs
beside it, or (ring attention) behind attention itself. Only what is left over is charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from fivefold.cluster import Cluster, collective_seconds, load_curve_of
from fivefold.cluster.compute import (
    Kind,
    Precision,
    attention_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    streaming_seconds,
)
from fivefold.cluster.groups import Placement, place
from fivefold.estimate.ledger import Column, Exchange, Ledger, Stream, Weight
from fivefold.estimate.shard import Shard
from fivefold.layout.columns import RECOMPUTE_MODULES
from fivefold.runtime import Profile

_KINDS: tuple[Kind, ...] = ("fwd", "dgrad", "wgrad")
OWNERS = ("compute", "tp", "cp", "ep")
_OWNER_OF_AXIS = {"tp": 1, "cp": 2, "ep": 3, "etp": 3}


@dataclass(slots=True, frozen=True)
class Cost:
    """One ledger priced on K keys. O owners, M recomputation modules.

    forward, backward: [O, K] seconds. recompute: [M, O, K] seconds if that module alone is recomputed.
    saved_bytes: [K]; dropped_bytes: [M, K] of them if that module is recomputed; input_bytes: [K] kept by full
    recomputation. working_bytes: [K] largest backward working set. logits_bytes: [K].
    dense, expert: [K] parameter elements per rank; matrix, factored likewise for Muon and Adafactor.
    wgrad_mixer, wgrad_feed: [K] cached gradient placeholders by sublayer. newton_schulz: [K] FLOPs of Muon's update.
    flops: [K] executed forward, module_flops: [M, K].
    exchanges: every collective with its exposed seconds, [K]. full: [O, K] seconds of recomputing everything.
    """

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    saved_bytes: np.ndarray
    dropped_bytes: np.ndarray
    input_bytes: np.ndarray
    working_bytes: np.ndarray
    logits_bytes: np.ndarray
    dense: np.ndarray
    expert: np.ndarray
    matrix: np.ndarray
    factored: np.ndarray
    wgrad_mixer: np.ndarray
    wgrad_feed: np.ndarray
    newton_schulz: np.ndarray
    flops: np.ndarray
    module_flops: np.ndarray
    exchanges: tuple[tuple[Exchange, np.ndarray], ...]
    full: np.ndarray


class Pricer:
    """Prices ledgers of one set of keys on one cluster."""

    def __init__(self, cluster: Cluster, runtime: Profile, precision: Precision, shard: Shard) -> None:
        self.cluster = cluster
        self.gpu = cluster.gpu
        self.curve = load_curve_of(cluster)
        self.runtime = runtime
        self.attention_kernel = next((name for name in runtime.attention_kernels if name in self.curve.attention), None)
        self.precision: Precision = precision
        self.shard = shard
        self.placements: dict[str, Placement] = {
            "tp": place(cluster, shard.tp, np.ones_like(shard.tp)),
            "cp": place(cluster, shard.cp, shard.tp),
            "etp": place(cluster, shard.etp, np.ones_like(shard.etp)),
            "ep": place(cluster, shard.ep, shard.etp),
        }

    def product_flops_per_s(self) -> float:
        """FLOP/s of large 16-bit matrix products inside a step."""
        precision = "fp16" if self.precision == "fp16" else "bf16"
        peak = self.gpu.peak_flops_per_s[precision]
        return peak * self.curve.efficiency["fwd"] * self.curve.precision[precision] / self.curve.in_step

    def price(self, ledger: Ledger) -> Cost:
        keys, modules = len(self.shard), len(RECOMPUTE_MODULES)
        forward = np.zeros((len(OWNERS), keys))
        backward = np.zeros((len(OWNERS), keys))
        recompute = np.zeros((modules, len(OWNERS), keys))
        flops = np.zeros(keys)
        module_flops = np.zeros((modules, keys))
        gemm_passes, skipped = self._gemms(ledger, forward, backward, recompute, flops, module_flops)
        attend_passes = self._attention(ledger, forward, backward, recompute, flops, module_flops)
        self._streams(ledger, forward, backward, recompute)
        exchanges = self._exchanges(ledger, forward, backward, recompute, gemm_passes, attend_passes)
        dropped = np.zeros((modules, keys))
        for index, module in enumerate(RECOMPUTE_MODULES):
            dropped[index] = ledger.total([row.bytes for row in ledger.saved if _belongs(row.module, module)])
        working = ledger.stack([row.bytes for row in ledger.working])
        weights = ledger.weights
        return Cost(
            forward=forward,
            backward=backward,
            recompute=recompute,
            saved_bytes=ledger.total([row.bytes for row in ledger.saved]),
            dropped_bytes=dropped,
            input_bytes=ledger.total([ledger.input_bytes]),
            working_bytes=working.max(axis=0) if len(working) else np.zeros(keys),
            logits_bytes=ledger.total([ledger.logits_bytes]),
            dense=ledger.total([row.elements for row in weights if not row.expert]),
            expert=ledger.total([row.elements for row in weights if row.expert]),
            matrix=ledger.total([row.elements for row in weights if row.matrix]),
            factored=ledger.total([row.elements if row.factored is None else row.factored for row in weights]),
            wgrad_mixer=_placeholders(ledger, "mixer"),
            wgrad_feed=_placeholders(ledger, "feed"),
            newton_schulz=ledger.total([_newton_schulz(row) for row in weights if row.matrix]),
            flops=flops,
            module_flops=module_flops,
            exchanges=exchanges,
            full=forward - np.concatenate([skipped[None], np.zeros((len(OWNERS) - 1, keys))]),
        )

    # ---------------------------------------------------------------- compute

    def _gemms(self, ledger, forward, backward, recompute, flops, module_flops):
        """Charges matrix products. Returns their backward times by (name, gradient), for what hides behind them, and
        the forward time that a checkpoint which stops early does not repeat."""
        passes: dict[tuple[str, str], np.ndarray] = {}
        skipped = np.zeros(len(self.shard))
        for grouped in (False, True):
            rows = [row for row in ledger.gemms if row.grouped is grouped]
            if not rows:
                continue
            m, n, k = (ledger.stack([getattr(row, size) for row in rows]) for size in "mnk")
            groups = ledger.stack([row.groups for row in rows])
            seconds = {kind: self._gemm_seconds(m, n, k, groups, kind, grouped) for kind in _KINDS}
            work = 2 * m * n * k * groups
            flops += work.sum(axis=0)
            forward[0] += seconds["fwd"].sum(axis=0)
            backward[0] += seconds["dgrad"].sum(axis=0) + seconds["wgrad"].sum(axis=0)
            for index, row in enumerate(rows):
                passes[row.name, "dgrad"] = seconds["dgrad"][index]
                passes[row.name, "wgrad"] = seconds["wgrad"][index]
                if row.ends_block and self.runtime.checkpoint_stops_early:
                    skipped += seconds["fwd"][index]
                for bit in _modules(row.module):
                    recompute[bit, 0] += seconds["fwd"][index]
                    module_flops[bit] += work[index]
        return passes, skipped

    def _gemm_seconds(self, m, n, k, groups, kind: Kind, grouped: bool) -> np.ndarray:
        if kind == "dgrad":
            n, k = k, n
        elif kind == "wgrad":
            m, n, k = (n, k, m)
        if grouped:
            alone = grouped_gemm_seconds(self.curve, self.gpu, groups, m, n, k, self.precision, kind)
        else:
            alone = gemm_seconds(self.curve, self.gpu, m, n, k, self.precision, kind)
        return self.curve.in_step * alone

    def _attention(self, ledger, forward, backward, recompute, flops, module_flops) -> tuple[np.ndarray, np.ndarray]:
        keys = len(self.shard)
        total = np.zeros(keys), np.zeros(keys)
        # Attention stays in 16 bit under every recipe.
        precision = "fp16" if self.precision == "fp16" else "bf16"
        for row in ledger.attends:
            work = np.broadcast_to(np.asarray(row.flops, dtype=float), (keys,))
            ahead, back = (
                self.curve.in_step
                * attention_seconds(
                    self.curve,
                    self.gpu,
                    flops_,
                    row.seq,
                    row.head_dim,
                    precision,
                    backward=side,
                    kernel=self.attention_kernel,
                )
                for flops_, side in ((work, False), (2.5 * work, True))  # flash attention's backward: five products
            )
            flops += work
            forward[0] += ahead
            backward[0] += back
            for bit in _modules("core_attn"):
                recompute[bit, 0] += ahead
                module_flops[bit] += work
            total = total[0] + ahead, total[1] + back
        return total

    def _streams(self, ledger, forward, backward, recompute) -> None:
        rows = ledger.streams
        if not rows:
            return
        ahead, back = (self._stream_seconds(ledger, rows, side) for side in ("forward", "backward"))
        ahead, back = self.curve.in_step * ahead, self.curve.in_step * back
        forward[0] += ahead.sum(axis=0)
        backward[0] += back.sum(axis=0)
        for index, row in enumerate(rows):
            bits = set(_modules(row.module))
            if row.also:
                bits |= set(_modules(row.also))
            for bit in bits:
                recompute[bit, 0] += ahead[index]

    def _stream_seconds(self, ledger: Ledger, rows: list[Stream], side: str) -> np.ndarray:
        """[rows, K] seconds of one pass; an operation that a key does not have launches nothing."""
        size = ledger.stack([getattr(row, f"{side}_bytes") for row in rows])
        kernels = np.array([[getattr(row, f"{side}_kernels")] for row in rows]) * (size > 0)
        return streaming_seconds(self.curve, self.gpu, size, kernels)

    # ---------------------------------------------------------------- communication

    def _exchanges(self, ledger, forward, backward, recompute, gemm_passes, attend_passes):
        """Charges what is exposed of every collective to its owner; returns them with their exposed seconds."""
        exposed: list[tuple[Exchange, np.ndarray]] = []
        beside_share = {"dgrad": self.runtime.tp_beside_dgrad_hidden, "wgrad": self.runtime.tp_beside_wgrad_hidden}
        hidden = {"tp": self.runtime.tp_overlap_hidden, "ep": self.runtime.ep_overlap_hidden}
        overlap = {"tp": self.shard.overlap_tp, "ep": self.shard.overlap_ep}
        for row, seconds in self.exchange_seconds(ledger):
            if row.behind is not None:
                share = beside_share[row.behind[1]]
                beside = share * np.minimum(seconds, gemm_passes[row.behind])
                seconds = np.where(self.shard.overlap_tp, seconds * (1 - hidden["tp"]), seconds - beside)
            elif row.op == "send":
                steps = np.asarray(row.ring_steps)
                beside = attend_passes[0 if row.when == "forward" else 1] * steps / (steps + 1)
                seconds = np.maximum(seconds - beside, 0)
            elif row.axis in overlap:
                seconds = np.where(overlap[row.axis], seconds * (1 - hidden[row.axis]), seconds)
            if row.axis == "tp":
                seconds = self.runtime.tp_in_step * seconds
            owner = _OWNER_OF_AXIS[row.axis]
            if row.when == "forward":
                forward[owner] += seconds
                for bit in _modules(row.module):
                    recompute[bit, owner] += seconds
            else:
                backward[owner] += seconds
            exposed.append((row, seconds))
        return tuple(exposed)

    def exchange_seconds(self, ledger: Ledger) -> list[tuple[Exchange, np.ndarray]]:
        """Every collective with its unhidden time, [K]; one cost call per axis and operation."""
        groups: dict[tuple[str, str], list[Exchange]] = {}
        for row in ledger.exchanges:
            groups.setdefault((row.axis, row.op), []).append(row)
        out: list[tuple[Exchange, np.ndarray]] = []
        for (axis, op), rows in groups.items():
            size = ledger.stack([row.bytes for row in rows])
            seconds = collective_seconds(self.cluster, op, size, self.placements[axis])
            seconds = np.where(size > 0, seconds, 0.0)
            if op == "send":
                seconds = seconds * ledger.stack([row.ring_steps for row in rows])
            out += zip(rows, seconds, strict=True)
        return out


# What a recomputation module covers besides its own name: recomputing the whole MoE layer re-runs its activation.
_COVERS = {"moe": ("moe", "moe_act")}


def _belongs(module: str, recomputed: str) -> bool:
    return module in _COVERS.get(recomputed, (recomputed,))


@cache
def _modules(module: str) -> tuple[int, ...]:
    """Indices of the recomputation modules that re-run operations of `module`."""
    return tuple(index for index, name in enumerate(RECOMPUTE_MODULES) if _belongs(module, name))


def _placeholders(ledger: Ledger, part: str) -> np.ndarray:
    """[K] bytes of one 16-bit placeholder per distinct matrix of a sublayer; equal experts share one."""
    return ledger.total([2 * row.elements / row.copies for row in ledger.weights if row.matrix and row.part == part])


def _newton_schulz(row: Weight) -> Column:
    """FLOPs of Muon's five Newton-Schulz iterations on a matrix of m x n, m <= n: each makes X Xt, its square and their
    sum times X, 4 m^2 n + 2 m^3 (Jordan et al. 2024). m follows from the elements and from rows plus columns."""
    if row.factored is None:
        return 0.0
    size, around = row.elements / row.copies, row.factored / row.copies
    m = (around - np.sqrt(np.maximum(around * around - 4 * size, 0))) / 2
    return 5 * row.copies * (4 * m * size + 2 * m**3)
