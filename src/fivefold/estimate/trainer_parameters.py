"""The parameters of one rank of fivefold's trainer, and the buckets and units in which their gradients are reduced.

As fivefold.train.parallel.bucket, data and sharded make them: under ZeRO-0 to 2 flat buckets of consecutive
parameters, the last ones first, under ZeRO-3 one unit per module that a stage calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from fivefold.layout.layout import ResolvedLayout
from fivefold.layout.stages import homes
from fivefold.model import ModelSpec, Tensor, model_tensors, padded_vocab

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_PER_HEAD = ("q_norm.weight", "k_norm.weight")


class Parameter(NamedTuple):
    """One parameter of a rank. numel: of the part that it has."""

    name: str
    numel: int
    tensor: Tensor


class Bucket(NamedTuple):
    """Parameters whose gradients are reduced together. padded: elements, a multiple of the ranks that shard it."""

    parameters: tuple[Parameter, ...]
    padded: int

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    def part(self, ranks: int) -> int:
        """Elements that each of the ranks owns."""
        return self.padded // ranks

    def owned(self, index: int, ranks: int) -> dict[str, int]:
        """Elements of each parameter in the part of rank `index`; parameters that lie elsewhere are left out."""
        first, last = index * self.part(ranks), (index + 1) * self.part(ranks)
        found: dict[str, int] = {}
        offset = 0
        for parameter in self.parameters:
            shared = min(offset + parameter.numel, last) - max(offset, first)
            if shared > 0:
                found[parameter.name] = shared
            offset += parameter.numel
        return found


def stage_parameters(model: ModelSpec, layout: ResolvedLayout, pipeline_rank: int) -> list[list[Parameter]]:
    """Per chunk of a pipeline rank its parameters, in the order of the trainer's modules."""
    where = homes(layout.pp, layout.vpp, layout.schedule)[pipeline_rank]
    stages = [(stage, *blocks) for stage, blocks in zip(where, layout.stages[pipeline_rank], strict=True)]
    return parameters_of(model, stages, layout.pp * layout.vpp - 1, layout.tp)


def parameters_of(
    model: ModelSpec, stages: Sequence[tuple[int, int, int]], last: int, tp: int
) -> list[list[Parameter]]:
    """The same by (virtual stage, first block, last block + 1) of each chunk. last: the model's last virtual stage."""
    tensors = list(model_tensors(model))
    by_name = {tensor.name: tensor for tensor in tensors}
    out: list[list[Parameter]] = []
    for stage, first, end in stages:
        held = [tensor for tensor in tensors if _on(tensor.name, stage == 0, stage == last, first, end)]
        if stage == last and model.tied_embeddings and stage != 0:
            held.append(replace(by_name[EMBEDDING], name=HEAD))
        out.append([Parameter(tensor.name, _numel(tensor, tp), tensor) for tensor in held])
    return out


def _on(name: str, is_first: bool, is_last: bool, first: int, end: int) -> bool:
    part, _, rest = name.partition(".")
    if part == "layers":
        return first <= int(rest.partition(".")[0]) < end
    return is_first if part.startswith("embed_") else is_last


def _numel(tensor: Tensor, tp: int) -> int:
    shape = list(tensor.shape)
    if tensor.split == "vocab":
        shape[0] = padded_vocab(shape[0], tp) // tp
    elif tensor.split == "kv":
        shape[0] //= min(tp, tensor.kv_heads)
    elif tensor.split in ("column", "row"):
        shape[tensor.split == "row"] //= tp
    return prod(shape)


def buckets_of(parameters: list[Parameter], zero: int, shards: int, numel: int, tied: bool) -> list[Bucket]:
    """The buckets of one stage, numel elements or more each, or ZeRO-3's units; a tied embedding and its copy have a
    bucket of their own. shards: ranks that share a bucket."""
    if zero == 3:
        return [_bucket(unit, shards) for unit in _units(parameters)]
    alone = {EMBEDDING, HEAD} if tied else set()
    return [_bucket(group, shards) for group in _grouped(parameters[::-1], numel, alone)]


def _bucket(parameters: Iterable[Parameter], ranks: int) -> Bucket:
    held = tuple(parameters)
    total = sum(parameter.numel for parameter in held)
    return Bucket(held, -(-total // ranks) * ranks)


def _grouped(parameters: list[Parameter], numel: int, alone: set[str]) -> Iterator[list[Parameter]]:
    group: list[Parameter] = []
    for parameter in parameters:
        if parameter.name in alone:
            yield [parameter]
            continue
        group.append(parameter)
        if sum(each.numel for each in group) >= numel:
            yield group
            group = []
    if group:
        yield group


def _units(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Embedding, position table, each block, final norm and head by themselves, in the order of forward."""
    units: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        units.setdefault(unit_of(parameter.name), []).append(parameter)
    return list(units.values())


def unit_of(name: str) -> str:
    """The module that a stage calls and that has the parameter."""
    first, _, rest = name.partition(".")
    return f"layers.{rest.partition('.')[0]}" if first == "layers" else first


def is_partial(parameter: Parameter, layout: ResolvedLayout) -> bool:
    """Whether its gradient on a rank is one term of a sum over all of tp: it sees the rank's tokens or heads only."""
    whole = parameter.tensor.split == "replicated"
    return layout.tp > 1 and whole and (layout.sequence_parallel or parameter.name.endswith(_PER_HEAD))


def copies(parameter: Parameter, tp: int) -> int:
    """How many ranks of tp hold the same part of a parameter of KV heads, 1 for all others."""
    return max(tp // parameter.tensor.kv_heads, 1) if parameter.tensor.split == "kv" else 1
