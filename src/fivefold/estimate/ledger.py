"""The ledger: one block's shard under many layouts at once, as a table of operations.

A Ledger has K columns, one per distinct key (tp, sequence parallelism, cp, ep, etp, micro-batch...), and rows for
weights, matrix products, attention, bandwidth-bound operations, collectives, tensors saved for backward and backward
working sets. FLOPs and traffic are sums over it, memory is a scan over it, time is what `price` makes of it. Logits,
expert permutation and gathered inputs are rows like any other.

Every quantity is an array of shape [K] or a number that broadcasts to it. Bytes, elements and FLOPs are per rank and
per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Column = np.ndarray | int | float
Module = Literal[
    "core_attn", "mlp", "moe", "layernorm", "moe_act", "mla_up_proj", "shared_experts", "mixer", "head"
]  # fmt: skip
Axis = Literal["tp", "cp", "ep", "etp"]
Pass = Literal["forward", "backward"]


@dataclass(slots=True, frozen=True)
class Weight:
    """A parameter tensor's shard: `elements` per rank. matrix: a 2-D hidden matrix, which Muon orthogonalises.

    copies: tensors of this shape in the row (local experts). factored: row and column counts summed over them,
    None for a vector.
    part: the sublayer whose shape it has, for placeholders that equal shapes share.
    """

    name: str
    elements: Column
    expert: bool = False
    matrix: bool = True
    factored: Column | None = None
    copies: Column = 1
    part: Literal["mixer", "feed"] = "mixer"


@dataclass(slots=True, frozen=True)
class Gemm:
    """[m, k] x [k, n], `groups` times (grouped over experts; m is the rows of one group).

    ends_block: nothing that backward needs comes after it, so a checkpoint that stops early does not run it again.
    sixteen_bit: stays in 16 bit under recipes that quantise products.
    comes_quantised: whether its input, and the gradient of its output, are quantised by the kernel that makes them.
    adapter: of an adapter, whose weight is trained where the model's are frozen.
    input_shared, gradient_shared: ranks that each quantise their share of the input, of the output's gradient, before
        it is gathered; 1 where this rank quantises all of it.
    waits: 1 where the weight's gradient can be computed apart from the input's, by a schedule that splits the backward.
    """

    name: str
    module: Module
    m: Column
    n: Column
    k: Column
    groups: Column = 1
    grouped: bool = False
    ends_block: bool = False
    waits: Column = 1
    input_shared: Column = 1
    gradient_shared: Column = 1
    sixteen_bit: bool = False
    adapter: bool = False
    comes_quantised: tuple[bool, bool] = (False, False)


@dataclass(slots=True, frozen=True)
class Attend:
    """Attention's core: `flops` of the two forward products as executed. With a flash kernel these are the causal and
    windowed pairs only; without one, whole squares of scores, `scores` of them, pass through memory. kernels: as many
    flash kernels as a ring has steps."""

    name: str
    flops: Column
    seq: Column
    head_dim: int
    scores: Column = 0
    kernels: Column = 1


@dataclass(slots=True, frozen=True)
class Scan:
    """Kernels that carry a state along the sequence: `flops` of the forward pass, bytes and kernels of each.

    head_dim: of keys, for the rate of the matrix products; None where there are none and the multiply-adds are the
    vector units'.
    """

    name: str
    module: Module
    flops: Column
    forward_bytes: Column
    backward_bytes: Column
    head_dim: int | None
    forward_kernels: int
    backward_kernels: int


@dataclass(slots=True, frozen=True)
class Stream:
    """A bandwidth-bound operation: bytes moved through device memory and kernels launched in each pass.

    also: a second, narrower recomputation module that re-runs this operation alone.
    groups: where kernels are launched once for each of some groups (by_group), how many there are.
    host_ops: PyTorch's own operations that the host issues in each pass, where a framework makes it of them.
    """

    name: str
    module: Module
    forward_bytes: Column
    backward_bytes: Column
    forward_kernels: int = 1
    backward_kernels: int = 1
    host_ops: tuple[int, int] | None = None
    also: Module | None = None
    groups: Column = 1
    by_group: bool = False


@dataclass(slots=True, frozen=True)
class Exchange:
    """A collective on one axis. `behind`: the matrix product (its name and gradient) that hides it, if any.

    ring_steps: for ring attention, how many transfers follow each other; they hide behind `Attend`. ends_block: as of a
    Gemm. times: as many of them follow each other, outside a ring. copied: bytes that a copy before or after it moves,
    which nothing hides.
    relayed: where tokens are sent once to a rank, and between nodes once to a node: bytes of one copy of every
    token, and the experts that each goes to.
    """

    name: str
    axis: Axis
    op: str
    bytes: Column
    when: Pass
    behind: tuple[str, Literal["dgrad", "wgrad"]] | None = None
    ring_steps: Column = 1
    times: int = 1
    module: Module = "mixer"
    ends_block: bool = False
    copied: Column = 0
    relayed: tuple[Column, int] | None = None


@dataclass(slots=True, frozen=True)
class Saved:
    """A tensor kept from forward to backward."""

    name: str
    module: Module
    bytes: Column


@dataclass(slots=True, frozen=True)
class Working:
    """Bytes alive at one point of backward beyond what is saved; the largest of them counts.

    first: at this point none of the piece's weights has handed on its gradient yet.
    """

    name: str
    bytes: Column
    first: bool = False


@dataclass(slots=True)
class Ledger:
    """Rows by kind for one block kind or stage item. `input_bytes` is what full recomputation keeps; `owed_bytes` what
    is held beside the saved tensors while only the gradients of weights are owed, negative where less is."""

    name: str
    keys: int
    input_bytes: Column = 0
    weights: list[Weight] = field(default_factory=list)
    gemms: list[Gemm] = field(default_factory=list)
    attends: list[Attend] = field(default_factory=list)
    scans: list[Scan] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    working: list[Working] = field(default_factory=list)
    logits_bytes: Column = 0
    owed_bytes: Column = 0
    adapters: list[Weight] = field(default_factory=list)

    def stack(self, columns: list[Column]) -> np.ndarray:
        """[len(columns), K] float array."""
        out = np.empty((len(columns), self.keys))
        for row, column in enumerate(columns):
            out[row] = column
        return out

    def total(self, columns: list[Column]) -> np.ndarray:
        """Sum over rows, [K]."""
        return self.stack(columns).sum(axis=0) if columns else np.zeros(self.keys)
