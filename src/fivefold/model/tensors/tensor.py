"""One parameter tensor, and the two parts that every module is made of: linears and norms."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal

import msgspec

from fivefold.errors import FivefoldError
from fivefold.model.spec import Norm

Split = Literal["replicated", "column", "row", "kv", "vocab", "expert_column", "expert_row", "expert_whole"]
Grid = Literal["dense", "expert"]


class Tensor(msgspec.Struct, frozen=True):
    """One parameter.

    shape: the whole, unsharded tensor.
    split: replicated    whole on every rank of tp;
           column        dimension 0 over tp;
           row           dimension 1 over tp;
           kv            dimension 0 over min(tp, kv_heads), each part held by tp / kv_heads ranks beyond that;
           vocab         dimension 0 over tp, after padding by the runtime;
           expert_column dimension 0 over ep and 1 over etp;
           expert_row    dimension 0 over ep and 2 over etp;
           expert_whole  dimension 0 over ep, whole on every rank of etp.
    kv_heads: heads that a kv tensor holds, 0 for the others.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    kv_heads: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def grid(self) -> Grid:
        """Whether the tensor's gradient is reduced on the dense or on the expert grid."""
        return "expert" if self.split.startswith("expert") else "dense"

    def prefixed(self, prefix: str) -> Tensor:
        return Tensor(prefix + self.name, self.shape, self.split, self.kv_heads)


def local_shape(tensor: Tensor, *, tp: int = 1, ep: int = 1, etp: int = 1) -> tuple[int, ...]:
    """The shape that one rank holds. A vocab tensor must be padded already (see padded_vocab).

    Raises FivefoldError where a dimension does not divide. That heads stay whole is a rule of the layout's.
    """
    parts = {
        "replicated": (),
        "column": (tp,),
        "row": (1, tp),
        "kv": (min(tp, tensor.kv_heads or 1),),
        "vocab": (tp,),
        "expert_column": (ep, etp),
        "expert_row": (ep, 1, etp),
        "expert_whole": (ep,),
    }[tensor.split]
    shape = list(tensor.shape)
    for dimension, ranks in enumerate(parts):
        if shape[dimension] % ranks:
            raise FivefoldError(
                f"{tensor.name}: dimension {dimension} of {tensor.shape} does not divide over {ranks} ranks",
                code="indivisible-tensor",
                value=ranks,
            )
        shape[dimension] //= ranks
    return tuple(shape)


def padded_vocab(vocab: int, multiple: int) -> int:
    """Rows of the embedding after padding up to a multiple (Megatron: --make-vocab-size-divisible-by x tp)."""
    return -(-vocab // multiple) * multiple


def norm(name: str, width: int, kind: Norm, bias: bool) -> Iterator[Tensor]:
    """The weight of a norm and its bias, whole on every rank; a fixed layernorm has neither."""
    if kind == "layernorm_fixed":
        return
    yield Tensor(f"{name}.weight", (width,), "replicated")
    if bias:
        yield Tensor(f"{name}.bias", (width,), "replicated")


def linear(name: str, out: int, into: int, split: Split, bias: bool = False, kv_heads: int = 0) -> Iterator[Tensor]:
    """A weight (out, into) and its bias, which a row-split linear adds after the reduction and so keeps whole."""
    yield Tensor(f"{name}.weight", (out, into), split, kv_heads)
    if bias:
        yield Tensor(f"{name}.bias", (out,), "replicated" if split == "row" else split, kv_heads)
