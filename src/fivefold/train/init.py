"""Initial weights that do not depend on the layout.

Each full tensor is drawn by a generator of its own, seeded by a hash of (seed, name), and then sliced: whoever holds
a part of a tensor holds the same numbers as one process would. The price is that a rank draws whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import cast

import torch
from torch import nn

from fivefold.errors import FivefoldError
from fivefold.model import ModelSpec, Tensor, padded_vocab
from fivefold.train.model import tensor_table

STD = 0.02  # of every matrix (GPT-2, Radford et al. 2019; Llama's and Megatron's default, from memory)
Coordinates = Mapping[str, tuple[int, int]]  # axis -> (index, size); an absent axis has one rank
WHOLE: Coordinates = {}


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for the stream `name`, the same on every machine and in every process."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def full_tensor(tensor: Tensor, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The whole tensor on the CPU: norms one, biases zero, matrices normal(0, STD).

    Drawn in fp32 and cast, so that all precisions start from the same numbers.
    """
    if tensor.name.endswith("bias"):
        return torch.zeros(tensor.shape, dtype=dtype)
    if len(tensor.shape) == 1:
        return torch.ones(tensor.shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed_of(seed, tensor.name))
    return torch.empty(tensor.shape).normal_(0.0, STD, generator=generator).to(dtype)


def shard_of(full: torch.Tensor, tensor: Tensor, coordinates: Coordinates = WHOLE) -> torch.Tensor:
    """The part of `full` that the rank at `coordinates` (Mesh.coordinates) holds, a view where it can be.

    The rows of a vocab tensor are padded with zeros up to a multiple of tp. Raises FivefoldError where a dimension
    does not divide, and for experts, which the trainer does not run.
    """
    index, size = coordinates.get("tp", (0, 1))
    dimension, part, parts = part_of(tensor, index, size)
    if tensor.split == "vocab":
        extra = padded_vocab(full.shape[0], size) - full.shape[0]
        full = torch.cat((full, full.new_zeros((extra, *full.shape[1:])))) if extra else full
    if full.shape[dimension] % parts:
        raise FivefoldError(
            f"{tensor.name}: dimension {dimension} of {tuple(full.shape)} does not divide over {parts} ranks of tp.",
            code="indivisible-tensor",
            option="--tp",
            value=size,
        )
    return full.chunk(parts, dim=dimension)[part]


def initialise(module: nn.Module, spec: ModelSpec, seed: int = 0, coordinates: Coordinates = WHOLE) -> None:
    """Fill every parameter of `module`, a Decoder with any axes applied, with its part of the initial weights."""
    table = tensor_table(spec)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(shard_of(full_tensor(table[name], seed), table[name], coordinates))


def part_of(tensor: Tensor, index: int, size: int) -> tuple[int, int, int]:
    """(dimension, which part, of how many) for rank `index` of `size` on the tp axis."""
    if tensor.grid == "expert":
        raise FivefoldError(f"{tensor.name}: the trainer does not run experts.", code="model-not-trainable")
    if tensor.split == "replicated" or size == 1:
        return 0, 0, 1
    if tensor.split == "kv":
        parts = min(size, tensor.kv_heads)
        # Consecutive ranks hold the same part, so that a rank's queries find their own keys (Megatron-Core).
        return 0, index * parts // size, parts
    return cast(int, {"column": 0, "vocab": 0, "row": 1}[tensor.split]), index, size
