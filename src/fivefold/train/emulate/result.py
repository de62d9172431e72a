"""What an emulated rank says: memory, FLOPs, collectives, what each block keeps for backward."""

from __future__ import annotations

from typing import Any

import msgspec

from fivefold.layout import ResolvedLayout


class PhasePeak(msgspec.Struct, frozen=True, kw_only=True):
    """The most bytes that were held while a phase ran; the breakdown, by category, sums to them.

    phase: build (the trainer made and its optimizer's states), forward, backward (with the reductions inside it),
    exchange (between pipeline stages), reduce (what is left of the reductions, norms), optimizer, gather. in_flight:
    forward passes of a stage (micro-batches, times chunks) of which activations were held. None for a phase in which
    nothing happened.
    """

    phase: str
    peak_bytes: int | None
    in_flight: int | None
    breakdown: dict[str, int] | None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step, the states of the optimizer held from its start; the build's own peak is only in phases.

    resting_bytes: before the step, resting: by category.
    """

    peak_bytes: int
    peak_phase: str
    in_flight: int
    breakdown: dict[str, int]
    resting_bytes: int
    resting: dict[str, int]
    phases: list[PhasePeak]


class SavedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One storage that autograd keeps. name: "input" of the unit, or the part of it that made the tensor and the
    operator. bytes: of the whole storage. shape, dtype: of the first tensor in it that was saved."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class SavedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward pass keeps for backward in units that keep the same: embedding, blocks of a kind, head, loss.

    unit: "block", or the module's name; "shared" is what several units use and the first one counts (rotary tables).
    kind: index among the model's kinds of blocks, None for others. layers: the blocks. bytes: of one of them.
    Parameters are not counted. A storage counts where it is saved first: the input of a block in that block.
    """

    unit: str
    kind: int | None
    layers: list[int]
    bytes: int
    tensors: list[SavedTensor]


class Products(msgspec.Struct, frozen=True, kw_only=True):
    """Equal matrix products. shape: (m, k, n), behind a batch if there is one; of attention (batch, heads, queries,
    keys, head_dim). flops: of all of them. unit: as in SavedUnit, None in backward."""

    name: str
    phase: str
    unit: str | None
    shape: tuple[int, ...]
    count: int
    flops: float


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step of this rank, as executed. recompute: forward again in backward, not counted in backward."""

    forward: float
    backward: float
    recompute: float
    convention: str
    products: list[Products]

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recompute


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """Equal collectives of one step. ranks: of the group. payload_bytes, sent_bytes: of one (fivefold.train.traffic's
    conventions). phase: of the step in which they are started."""

    axis: str
    grid: str
    collective: str
    ranks: int
    count: int
    payload_bytes: int
    bytes_sent_per_rank: float
    phase: str


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank on tensors without values.

    coordinates: this rank's place by axis. micro_batches: of the step. seconds_s, cpu_s: the emulation took, by the
    clock and of this process's CPU time. host_peak_bytes: the largest resident set of this process until now, whatever
    it did before.
    """

    model: str
    rank: int
    world: int
    coordinates: dict[str, int]
    layout: ResolvedLayout
    precision: str
    grad_dtype: str
    optimizer: str
    seq_len: int
    micro_batches: int
    memory: Memory
    saved: list[SavedUnit]
    flops: Flops
    collectives: list[Collective]
    notes: list[str]
    seconds_s: float
    cpu_s: float
    host_peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self), "layout": self.layout.to_dict()}
