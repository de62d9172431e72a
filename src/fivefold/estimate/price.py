"""From a ledger to seconds and bytes per micro-batch: what each owner takes in forward, backward and recomputation.
Of collectives, what nothing hides (fivefold.estimate.exposed)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from msgspec.structs import replace

from fivefold.cluster import Cluster, load_curve_of
from fivefold.cluster.apart import slowest
from fivefold.cluster.compute import streaming_seconds
from fivefold.cluster.curve import Precision
from fivefold.cluster.groups import Placement, place
from fivefold.estimate import by_operation
from fivefold.estimate.exposed import ExchangePricer
from fivefold.estimate.kernels import core_seconds, launch_seconds
from fivefold.estimate.ledger import Column, Exchange, Ledger, Stream, Weight
from fivefold.estimate.products import ProductPricer, Products, backward_passes
from fivefold.estimate.recomputed import (
    CORE,
    belongs,
    by_operations,
    kept_beside_input,
    modules_with,
    run_again,
    stops_before,
)
from fivefold.estimate.scans import scan_seconds
from fivefold.estimate.shard import Shard
from fivefold.layout.columns import RECOMPUTE_MODULES, Columns
from fivefold.layout.grids import group
from fivefold.layout.workload import Workload
from fivefold.runtime import Profile

_SELECTIVE = RECOMPUTE_MODULES.index("core_attn")  # what selective recomputation is where no module is named
# compute: matrix products, attention and scans. memory: operations bound by the GPU's memory. host: what the host needs
# beyond the GPU to launch a piece's operations.
COMMUNICATION = ("tp", "cp", "ep")
OWNERS = ("compute", *COMMUNICATION, "memory", "host")
_COMPUTE, _MEMORY, _HOST = (OWNERS.index(name) for name in ("compute", "memory", "host"))
_OWNER_OF_AXIS = {axis: OWNERS.index("ep" if axis == "etp" else axis) for axis in (*COMMUNICATION, "etp")}

Priced = tuple[tuple[Exchange, np.ndarray], ...]  # collectives with what is exposed of each, [K] seconds


@dataclass(slots=True, frozen=True)
class Cost:
    """One ledger priced on K keys. O owners, M recomputation modules.

    forward, backward: [O, K] seconds. weight_grad: [K] of backward's compute, what a schedule that splits the backward
    can put off. recompute: [M, O, K] seconds if that module alone is recomputed.
    saved_bytes: [K]; dropped_bytes: [M, K] of them if that module is recomputed; input_bytes: [K] kept by full
    recomputation, the block's input and what checkpoint_keeps names. working_bytes: [K] largest backward working set.
    logits_bytes: [K].
    dense, expert: [K] parameter elements per rank; matrix, factored likewise for Muon and Adafactor.
    wgrad_mixer, wgrad_feed: [K] cached gradient placeholders by sublayer. newton_schulz: [K] FLOPs of Muon's update.
    flops: [K] executed forward, module_flops: [M, K].
    exchanges: every collective with its exposed seconds, [K]. full: [O, K] seconds of recomputing everything, and
    full_flops: [K] its FLOPs.
    """

    forward: np.ndarray
    backward: np.ndarray
    weight_grad: np.ndarray
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
    exchanges: Priced
    full: np.ndarray
    full_flops: np.ndarray


@dataclass(slots=True)
class _Sums:
    """What rows add up to while a ledger is priced: the fields of Cost by these names, and what full recomputation
    skips of forward, [O, K] seconds and [K] FLOPs."""

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    dropped_bytes: np.ndarray
    flops: np.ndarray
    module_flops: np.ndarray
    skipped: np.ndarray
    skipped_flops: np.ndarray

    @classmethod
    def nothing(cls, keys: int) -> _Sums:
        owners, modules = len(OWNERS), len(RECOMPUTE_MODULES)
        return cls(
            forward=np.zeros((owners, keys)),
            backward=np.zeros((owners, keys)),
            recompute=np.zeros((modules, owners, keys)),
            dropped_bytes=np.zeros((modules, keys)),
            flops=np.zeros(keys),
            module_flops=np.zeros((modules, keys)),
            skipped=np.zeros((owners, keys)),
            skipped_flops=np.zeros(keys),
        )


class Pricer:
    """Prices ledgers of one set of keys on one cluster."""

    def __init__(self, cluster: Cluster, runtime: Profile, work: Workload, shard: Shard) -> None:
        self.cluster = cluster
        self.gpu = cluster.gpu
        curve = load_curve_of(cluster)
        self.curve = replace(curve, in_step=curve.in_step * slowest(cluster.gpus))
        self.runtime = runtime
        self.attention_kernel = next((name for name in runtime.attention_kernels if name in self.curve.attention), None)
        # Attention beside fp32 products, on GPUs older than bf16.
        self.sixteen_bit: Precision = work.sixteen_bit if work.sixteen_bit in self.gpu.peak_flops_per_s else "fp16"
        self.products = ProductPricer(self.curve, self.gpu, runtime, work)
        self.work = work
        self.graphs = work.cuda_graphs
        self.shard = shard
        # Keys have the columns of these axes, by the same names.
        self.placements: dict[str, Placement] = {
            axis: place(cluster, *group(cast(Columns, shard), axis)) for axis in ("tp", "cp", "etp", "ep")
        }
        self.exchanges = ExchangePricer(cluster, self.curve, runtime, shard, self.placements)

    def product_flops_per_s(self) -> float:
        """FLOP/s of large 16-bit matrix products inside a step."""
        peak = self.gpu.peak_flops_per_s[self.sixteen_bit]
        return peak * self.curve.efficiency["fwd"] * self.curve.precision[self.sixteen_bit] / self.curve.in_step

    def price(self, ledger: Ledger) -> Cost:
        sums = _Sums.nothing(len(self.shard))
        products = list(self.products.of(ledger))
        exchanges = self._passes(ledger, products, sums)
        for index, module in enumerate(RECOMPUTE_MODULES):
            sums.dropped_bytes[index] = ledger.total([row.bytes for row in ledger.saved if belongs(row.module, module)])
        if by_operations(self.runtime, ledger):
            self._by_operation(ledger, products, exchanges, sums)
        working = ledger.stack([row.bytes for row in ledger.working])
        return Cost(
            forward=sums.forward,
            backward=sums.backward,
            weight_grad=sum((_waiting(ledger, each) for each in products), start=np.zeros(ledger.keys)),
            recompute=sums.recompute,
            saved_bytes=ledger.total([row.bytes for row in ledger.saved]),
            dropped_bytes=sums.dropped_bytes,
            input_bytes=ledger.total([ledger.input_bytes, *kept_beside_input(ledger, self.runtime, self.work)]),
            working_bytes=working.max(axis=0) if len(working) else np.zeros(ledger.keys),
            logits_bytes=ledger.total([ledger.logits_bytes]),
            flops=sums.flops,
            module_flops=sums.module_flops,
            exchanges=exchanges,
            full=sums.forward - sums.skipped,
            full_flops=sums.flops - sums.skipped_flops,
            **_of_weights(ledger),
        )

    def _passes(self, ledger: Ledger, products: list[Products], sums: _Sums) -> Priced:
        """Charges every operation to its owner; the collectives with their exposed seconds."""
        for each in products:
            self._gemms(each, sums)
            self._count(each, sums)
        attend_passes = self._attention(ledger, sums)
        if CORE in self.runtime.checkpoint_keeps:
            sums.skipped[_COMPUTE] += attend_passes[0]
            sums.skipped_flops += ledger.total([row.flops for row in ledger.attends])
        self._scans(ledger, sums)
        self._streams(ledger, sums)
        busy = sums.forward.sum(axis=0), sums.backward.sum(axis=0)
        exchanges = self.exchanges.of(ledger, backward_passes(products), attend_passes, busy)
        for row, seconds in exchanges:
            self._charge(row, seconds, sums)
        self._wait_for_launches(ledger, sums)
        return exchanges

    def _by_operation(self, ledger: Ledger, products: list[Products], exchanges: Priced, sums: _Sums) -> None:
        """Selective recomputation where the runtime chooses single operations. It knows no modules: whatever is named,
        one policy holds for the block."""
        for by_module in (sums.recompute, sums.dropped_bytes, sums.module_flops):
            by_module[:] = 0.0
        again, flops = sums.recompute[_SELECTIVE], sums.module_flops[_SELECTIVE]
        kept = ledger.total(list(by_operation.kept(ledger)))
        sums.dropped_bytes[_SELECTIVE] = ledger.total([row.bytes for row in ledger.saved]) - kept
        shares = {row.name: share for row, share in zip(ledger.gemms, by_operation.redone(ledger), strict=True)}
        for each in products:
            share = ledger.stack([shares[row.name] for row in each.rows])
            again[_COMPUTE] += (share * each.alone["fwd"]).sum(axis=0)
            again[_MEMORY] += (share * each.beside["fwd"]).sum(axis=0)
            flops += (share * each.flops).sum(axis=0)
        if ledger.streams:
            seconds = self._stream_seconds(ledger, ledger.streams, "forward").sum(axis=0)
            again[_MEMORY] += self.curve.in_step * seconds
        for row in ledger.scans:
            ahead, _ = scan_seconds(self.curve, self.gpu, ledger, row, self.sixteen_bit)
            again[_COMPUTE] += self.curve.in_step * ahead
        again[_OWNER_OF_AXIS["tp"]] = sum(seconds for row, seconds in exchanges if by_operation.gathers_again(row))

    # ---------------------------------------------------------------- compute

    def _gemms(self, products: Products, sums: _Sums) -> None:
        """Charges matrix products to compute, and what comes with them to memory."""
        for owner, seconds in ((_COMPUTE, products.alone), (_MEMORY, products.beside)):
            sums.forward[owner] += seconds["fwd"].sum(axis=0)
            sums.backward[owner] += seconds["dgrad"].sum(axis=0) + seconds["wgrad"].sum(axis=0)
            for row, ahead in zip(products.rows, seconds["fwd"], strict=True):
                if stops_before(self.runtime, row):
                    sums.skipped[owner] += ahead
                    continue
                if owner == _COMPUTE and row.name in self.runtime.checkpoint_keeps:
                    sums.skipped[owner] += ahead  # what quantises its input runs again, for the gradient of its weight
                for bit in modules_with(row.module):
                    sums.recompute[bit, owner] += ahead

    def _count(self, products: Products, sums: _Sums) -> None:
        sums.flops += products.flops.sum(axis=0)
        for row, work in zip(products.rows, products.flops, strict=True):
            if stops_before(self.runtime, row):
                sums.skipped_flops += work
                continue
            if row.name in self.runtime.checkpoint_keeps:
                sums.skipped_flops += work
            for bit in modules_with(row.module):
                sums.module_flops[bit] += work

    def _attention(self, ledger: Ledger, sums: _Sums) -> tuple[np.ndarray, np.ndarray]:
        """Charges attention's cores; their [K] seconds forward and backward."""
        keys = len(self.shard)
        total = np.zeros(keys), np.zeros(keys)
        for row in ledger.attends:
            work = np.broadcast_to(np.asarray(row.flops, dtype=float), (keys,))
            alone = core_seconds(self.curve, self.gpu, row, work, self.work, self.sixteen_bit, self.attention_kernel)
            ahead, back = (self.curve.in_step * seconds for seconds in alone)
            sums.flops += work
            sums.forward[_COMPUTE] += ahead
            sums.backward[_COMPUTE] += back
            for bit in modules_with("core_attn"):
                sums.recompute[bit, _COMPUTE] += ahead
                sums.module_flops[bit] += work
            total = total[0] + ahead, total[1] + back
        return total

    def _scans(self, ledger: Ledger, sums: _Sums) -> None:
        """Charges linear attention and state spaces; no module recomputes them alone."""
        for row in ledger.scans:
            sums.flops += row.flops
            ahead, back = scan_seconds(self.curve, self.gpu, ledger, row, self.sixteen_bit)
            sums.forward[_COMPUTE] += self.curve.in_step * ahead
            sums.backward[_COMPUTE] += self.curve.in_step * back

    def _streams(self, ledger: Ledger, sums: _Sums) -> None:
        rows = ledger.streams
        if not rows:
            return
        ahead, back = (self._stream_seconds(ledger, rows, side) for side in ("forward", "backward"))
        ahead, back = self.curve.in_step * ahead, self.curve.in_step * back
        sums.forward[_MEMORY] += ahead.sum(axis=0)
        sums.backward[_MEMORY] += back.sum(axis=0)
        for index, row in enumerate(rows):
            bits = set(modules_with(row.module))
            if row.also:
                bits |= set(modules_with(row.also))
            for bit in bits:
                sums.recompute[bit, _MEMORY] += ahead[index]

    def _stream_seconds(self, ledger: Ledger, rows: list[Stream], side: str) -> np.ndarray:
        """[rows, K] seconds of one pass; an operation that a key does not have launches nothing."""
        size = ledger.stack([getattr(row, f"{side}_bytes") for row in rows])
        kernels = np.array([[getattr(row, f"{side}_kernels")] for row in rows]) * (size > 0)
        if any(row.by_group for row in rows):
            kernels = kernels * np.maximum(ledger.stack([row.groups for row in rows]), 1)
        return streaming_seconds(self.curve, self.gpu, size, kernels)

    def _wait_for_launches(self, ledger: Ledger, sums: _Sums) -> None:
        """Charges what the host needs beyond the GPU to launch a piece's operations one by one.

        Forward, and when that is repeated, the host reads counts of tokens before it goes on, and the GPU has nothing
        to do meanwhile.
        """
        if not self.runtime.launch_host_s or self.graphs:
            return
        routed = any(row.grouped for row in ledger.gemms)
        slower = self.cluster.host_work_ratio
        waits = self.runtime.dispatch_host_s if routed else 0.0
        again = sums.forward - sums.skipped
        for side, times in (("forward", sums.forward), ("backward", sums.backward)):
            host = slower * launch_seconds(ledger, self.runtime, self.placements, self.work, side)
            beside, alone = (0.0, waits) if side == "forward" else (waits, 0.0)
            times[_HOST] += np.maximum(host + beside - times.sum(axis=0), 0.0) + alone
        if np.any(sums.skipped):
            # What recomputation leaves out nobody launches either.
            host = slower * launch_seconds(run_again(ledger, self.runtime), self.runtime, self.placements, self.work)
            sums.skipped[_HOST] = sums.forward[_HOST] - (np.maximum(host - again.sum(axis=0), 0.0) + waits)
        for bit in modules_with("moe"):
            sums.recompute[bit, _HOST] += waits

    def _charge(self, row: Exchange, seconds: np.ndarray, sums: _Sums) -> None:
        """Charges what is exposed of a collective to its owner."""
        owner = _OWNER_OF_AXIS[row.axis]
        if row.when == "backward":
            sums.backward[owner] += seconds
            return
        sums.forward[owner] += seconds
        if stops_before(self.runtime, row):
            sums.skipped[owner] += seconds
            return
        for bit in modules_with(row.module):
            sums.recompute[bit, owner] += seconds


def _waiting(ledger: Ledger, products: Products) -> np.ndarray:
    """[K] seconds of weight gradients that can wait."""
    return (ledger.stack([row.waits for row in products.rows]) * products.seconds("wgrad")).sum(axis=0)


def _of_weights(ledger: Ledger) -> dict[str, np.ndarray]:
    """Cost's columns of parameters and of what the optimizer does with them."""
    weights = ledger.weights
    return {
        "dense": ledger.total([row.elements for row in weights if not row.expert]),
        "expert": ledger.total([row.elements for row in weights if row.expert]),
        "matrix": ledger.total([row.elements for row in weights if row.matrix]),
        "factored": ledger.total([row.elements if row.factored is None else row.factored for row in weights]),
        "wgrad_mixer": _placeholders(ledger, "mixer"),
        "wgrad_feed": _placeholders(ledger, "feed"),
        "newton_schulz": ledger.total([_newton_schulz(row) for row in weights if row.matrix]),
    }


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
