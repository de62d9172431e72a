"""Tensor and sequence parallelism: linear layers cut by columns and by rows, applied to a model from outside.

The cut is Megatron's (Shoeybi et al. 2019, arXiv 1909.08053): query, key, value, gate and up projections by columns,
output and down projections by rows, so that a block communicates twice in forward and twice in backward. Which
parameter is cut how is the tensor table's `split`. Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198)
keeps [batch, seq / tp, hidden] between the linear layers: an all-gather before, a reduce-scatter after.

Column layers that share an input are one operation: one gather, one reduction of the input's gradient. Only the
rank's part of a gathered input is saved; backward gathers it again beside the product for the input's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from fivefold.errors import FivefoldError
from fivefold.model import Tensor as TensorSpec
from fivefold.train.init import shard_of
from fivefold.train.mesh import Group, Mesh
from fivefold.train.model import Attention, Decoder, FeedForward, tensor_table
from fivefold.train.parallel.collectives import (
    reduce_partial,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
)
from fivefold.train.parallel.overlap import gathered_products, row_product
from fivefold.train.parallel.vocabulary import VocabEmbedding

_Kind = TypeVar("_Kind", "ColumnLinear", "RowLinear")


class Collectives(NamedTuple):
    """Between whom a layer communicates and how. overlap: in pieces beside its products, with sequence parallelism."""

    group: Group
    sequence_parallel: bool
    overlap: bool = False


class _Columns(torch.autograd.Function):
    """y_i = x W_i^T + b_i for several column-cut layers on one input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Collectives, count: int, *parameters: Tensor | None):
        weights, biases = cast(Sequence[Tensor], parameters[:count]), parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.sequence_parallel, ctx.biased = how.group, how.sequence_parallel, [b is not None for b in biases]
        if how.overlap and how.group is not None:
            return tuple(gathered_products(x, how.group, [w.t() for w in weights], biases)[0])
        whole = start_gather(x, how.group).wait() if how.sequence_parallel else x
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        group, scattered = ctx.group, ctx.sequence_parallel
        gathered = start_gather(x, group if scattered else None)  # beside the product for the input's gradient
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        whole = gathered.wait().flatten(0, -2)
        grad_x = grad_x.unflatten(0, grads[0].shape[:-1])
        reduced = (start_reduce_scatter if scattered else start_all_reduce)(grad_x, group)
        grad_w = [grad.t() @ whole for grad in flat]  # beside that reduction
        grad_b = [grad.sum(0) if biased else None for grad, biased in zip(flat, ctx.biased, strict=True)]
        return reduced.wait(), None, None, *grad_w, *grad_b


class ColumnLinear(nn.Module):
    """A linear layer of which this rank computes some of the output columns.

    [batch, seq, in] (with sequence parallelism [batch, seq / tp, in]) to [batch, seq, out / tp].
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, how: Collectives) -> None:
        super().__init__()
        self.weight, self.bias, self.how = weight, bias, how

    def forward(self, x: Tensor) -> Tensor:
        return column_linears(x, [self])[0]


def column_linears(x: Tensor, layers: Sequence[ColumnLinear]) -> tuple[Tensor, ...]:
    """The outputs of column-cut layers of one group on the same input."""
    parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers]
    return _Columns.apply(x, layers[0].how, len(layers), *parameters)


class RowLinear(nn.Module):
    """A linear layer of which this rank holds some of the input columns: its product is a term of a sum over ranks.

    [batch, seq, in / tp] to [batch, seq, out] (with sequence parallelism [batch, seq / tp, out]). The bias is whole
    on every rank and added once, after the sum.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, how: Collectives) -> None:
        super().__init__()
        self.weight, self.bias, self.how = weight, bias, how

    def forward(self, x: Tensor) -> Tensor:
        group, sequence_parallel, overlap = self.how
        if overlap and group is not None:
            out = row_product(x, self.weight, group)
        else:
            out = reduce_partial(F.linear(x, self.weight), group, sequence_parallel)
        return out if self.bias is None else out + self.bias


class SequencePositions(nn.Module):
    """A learned position table under sequence parallelism: positions [seq] or [batch, seq] to this rank's part of
    their embeddings, [seq / tp, hidden] or [batch, seq / tp, hidden]."""

    def __init__(self, weight: nn.Parameter, index: int, size: int) -> None:
        super().__init__()
        self.weight, self.index, self.size = weight, index, size

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions.chunk(self.size, dim=-1)[self.index], self.weight)


def apply(model: Decoder, mesh: Mesh, sequence_parallel: bool, overlap: bool = False) -> None:
    """Cut the model's parameters over the tp axis, in place, and replace the modules that then communicate.

    The model has whole parameters (on the meta device, shapes); afterwards each rank holds its part under the same
    name. Hidden states between stages become [batch, seq / tp, hidden] with sequence parallelism. Gradients that are
    partial then have to be summed: see partial_gradients. Nothing to do when tp is 1.
    overlap: the linear layers' gathers and reduce-scatters run in pieces beside their products; it needs sequence
    parallelism, without which there is none of them.
    Raises FivefoldError for degrees that do not divide.
    """
    size = mesh.size("tp")
    if size == 1:
        return
    _check(model, size)
    cut = _Cut(model, mesh, Collectives(mesh.group("tp"), sequence_parallel, overlap and sequence_parallel))
    for prefix, block in model.layers.items():
        name = f"layers.{prefix}"
        cut.attention(f"{name}.self_attn", cast(Attention, block.self_attn))
        cut.feed_forward(f"{name}.mlp", cast(FeedForward, block.mlp))
    cut.ends()
    partial_gradients(model, mesh, sequence_parallel)  # makes its groups now, when every rank is here


class _Cut:
    """Cuts one model: holds what every replacement needs."""

    def __init__(self, model: Decoder, mesh: Mesh, how: Collectives) -> None:
        self.model, self.mesh, self.how = model, mesh, how
        self.table = tensor_table(model.spec)

    def part(self, name: str, parameter: Tensor) -> nn.Parameter:
        shard = shard_of(parameter.detach(), self.table[name], self.mesh.coordinates)
        # A copy, so that the whole tensor is freed.
        return nn.Parameter(shard.clone(memory_format=torch.contiguous_format), parameter.requires_grad)

    def linear(self, kind: type[_Kind], name: str, layer: nn.Linear) -> _Kind:
        bias = None if layer.bias is None else self.part(f"{name}.bias", layer.bias)
        return kind(self.part(f"{name}.weight", layer.weight), bias, self.how)

    def attention(self, name: str, attention: Attention) -> None:
        columns = [self.linear(ColumnLinear, f"{name}.{p}", getattr(attention, p)) for p in _QKV]
        for projection, layer in zip(_QKV, columns, strict=True):
            attention.add_module(projection, layer)
        attention.project = _Together(columns)
        attention.add_module("o_proj", self.linear(RowLinear, f"{name}.o_proj", attention.o_proj))

    def feed_forward(self, name: str, feed: FeedForward) -> None:
        names = [p for p in ("gate_proj", "up_proj") if getattr(feed, p) is not None]
        columns = [self.linear(ColumnLinear, f"{name}.{p}", getattr(feed, p)) for p in names]
        for projection, layer in zip(names, columns, strict=True):
            feed.add_module(projection, layer)
        feed.expand = _Together(columns)
        feed.add_module("down_proj", self.linear(RowLinear, f"{name}.down_proj", feed.down_proj))

    def ends(self) -> None:
        """Embedding, learned positions and head, where this stage holds them."""
        model, index = self.model, self.mesh.index("tp")
        embedding: VocabEmbedding | None = None
        if model.embed_tokens is not None:
            weight = self.part("embed_tokens.weight", model.embed_tokens.weight)
            embedding = VocabEmbedding(weight, self.how.group, index, self.how.sequence_parallel)
            model.add_module("embed_tokens", embedding)
        if model.embed_positions is not None and self.how.sequence_parallel:
            table = cast(nn.Parameter, model.embed_positions.weight)
            model.add_module("embed_positions", SequencePositions(table, index, self.mesh.size("tp")))
        if model.lm_head is not None:
            head = self.linear(ColumnLinear, "lm_head", model.lm_head)
            if embedding is not None and model.spec.tied_embeddings:
                head.weight = embedding.weight
            model.add_module("lm_head", head)


_QKV = ("q_proj", "k_proj", "v_proj")


class _Together:
    """Stands in for Attention.project and FeedForward.expand: column layers of one input, in one operation."""

    def __init__(self, layers: Sequence[ColumnLinear]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return column_linears(x, self.layers)


def _check(model: Decoder, size: int) -> None:
    for block in model.layers.values():
        spec = cast(Attention, block.self_attn).spec
        if spec.kv_heads % size and size % spec.kv_heads:
            raise FivefoldError(
                f"{model.spec.name} has {spec.kv_heads} KV heads, and --tp {size} neither divides them nor is a "
                "multiple of them, so some rank would hold the keys of a head in part.",
                code="kv-heads-tp",
                option="--tp",
                value=size,
                legal=[n for n in range(1, spec.heads + 1) if not spec.heads % n and not max(n, spec.kv_heads) % n],
            )


# -------------------------------------------------------------------- gradients


def copies(tensor: TensorSpec, tp: int) -> int:
    """How many ranks of tp hold the same part of `tensor`: what a sum of squares over ranks counts it as."""
    if tensor.split == "replicated":
        return tp
    return max(tp // tensor.kv_heads, 1) if tensor.split == "kv" else 1


def partial_gradients(model: Decoder, mesh: Mesh, sequence_parallel: bool) -> dict[str, dist.ProcessGroup]:
    """The parameters whose gradient on this rank is one term of a sum, each with the group to sum it over.

    Query and key norms see this rank's heads; with sequence parallelism whole norms, biases of row layers and learned
    positions see this rank's tokens: both are summed over tp. A KV head that several ranks hold meets only each one's
    queries: summed over those ranks. Every rank has to call this in the same order, since it may make a group.
    """
    size, index, group = mesh.size("tp"), mesh.index("tp"), mesh.group("tp")
    if group is None:
        return {}
    table = tensor_table(model.spec)
    partial: dict[str, dist.ProcessGroup] = {}
    for name, _ in model.named_parameters():
        tensor = table[name]
        if tensor.split == "kv" and copies(tensor, size) > 1:
            first = index - index % copies(tensor, size)
            members = mesh.members("tp")[first : first + copies(tensor, size)]
            partial[name] = cast(dist.ProcessGroup, mesh.subgroup(members))
        elif tensor.split == "replicated" and (sequence_parallel or name.endswith(_PER_HEAD)):
            partial[name] = group
    return partial


_PER_HEAD = ("q_norm.weight", "k_norm.weight")
