"""From a layout to the stages that one rank holds, with every axis applied in its order."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from fivefold.layout import ResolvedLayout
from fivefold.model import ModelSpec
from fivefold.schedule.registry import SCHEDULES, placement
from fivefold.train.data import Batch
from fivefold.train.dropout import Dropout
from fivefold.train.init import initialise
from fivefold.train.loss import CrossEntropy, cross_entropy_sum
from fivefold.train.mesh import Group, Mesh
from fivefold.train.model import Decoder
from fivefold.train.optimizer import Recipe
from fivefold.train.parallel import context, recompute, tensor
from fivefold.train.parallel.data import BUCKET_BYTES, DataParallel
from fivefold.train.parallel.pipeline import tied_pair
from fivefold.train.parallel.sharded import FullySharded
from fivefold.train.parallel.vocabulary import VocabCrossEntropy
from fivefold.train.precision import Precision, precision

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs beside the model and the layout.

    precision: fp64, fp32, bf16 or fp16. grad_dtype: as in Workload. seed: of the initial weights.
    bucket_bytes: of gradients, per bucket of the data-parallel reduction. dropout: see fivefold.train.dropout.
    """

    precision: str = "bf16"
    grad_dtype: str = "fp32"
    recipe: Recipe = Recipe()
    seed: int = 0
    device: str = "cpu"
    bucket_bytes: int = BUCKET_BYTES
    dropout: float = 0.0

    @property
    def policy(self) -> Precision:
        return precision(self.precision, self.grad_dtype)


class Stage(NamedTuple):
    """One chunk of this rank.

    virtual: its place in the model's order of stages. partial: names of parameters whose gradient is to be summed over
    another group than data's, with that group. dropout: None where nothing is dropped.
    """

    module: Decoder
    data: DataParallel | FullySharded
    virtual: int
    partial: dict[str, dist.ProcessGroup]
    dropout: Dropout | None = None


def build_stages(spec: ModelSpec, layout: ResolvedLayout, mesh: Mesh, setup: Setup) -> list[Stage]:
    """The stages of this rank, one per chunk, initialised. Collective: every rank makes its own.

    The order of the axes is a rule: tensor parallelism cuts the parameters while they are shapes on the meta device,
    context parallelism replaces the core that it left, recomputation wraps both, data parallelism takes what parameters
    there are then.
    """
    last = layout.pp * layout.vpp - 1
    where, rank = placement(layout.schedule), mesh.index("pp")
    recomputed = _recomputed(layout, rank)
    stages = []
    for chunk, (first, end) in enumerate(layout.stages[rank]):
        virtual = where.stage(rank, chunk, layout.pp)
        module = Decoder(
            spec, range(first, end), embedding=virtual == 0, head=virtual == last, device="meta",
            dtype=setup.policy.compute,
        )  # fmt: skip
        tensor.apply(module, mesh, layout.sequence_parallel, layout.overlap.tp)
        _allocate(module, setup.device)
        initialise(module, spec, setup.seed, mesh.coordinates)
        context.apply(module, mesh, layout.cp_kind)
        dropout = _dropout(layout, mesh, setup)
        recompute.apply(module, layout.recompute, recomputed[chunk], None if dropout is None else dropout.contexts)
        if dropout is not None:
            dropout.apply(module)
        data = _data_parallel(module, spec, layout, mesh, setup)
        partial = tensor.partial_gradients(module, mesh, layout.sequence_parallel)
        stages.append(Stage(module, data, virtual, partial, dropout))
    return stages


def _recomputed(layout: ResolvedLayout, rank: int) -> list[int | None]:
    """Of each chunk, how many of its blocks recompute, None for all: the layout counts a rank's first ones, whichever
    chunk they are in."""
    left, counts = layout.recompute.layers, []
    for first, end in layout.stages[rank]:
        counts.append(left)
        left = None if left is None else max(left - (end - first), 0)
    return counts


def _allocate(module: Decoder, device: str) -> None:
    """Give the parameters memory. PyTorch gives each module its own, so a tied head is tied again."""
    module.to_empty(device=device)
    if module.spec.tied_embeddings and module.embed_tokens is not None and module.lm_head is not None:
        module.lm_head.weight = module.embed_tokens.weight


def _dropout(layout: ResolvedLayout, mesh: Mesh, setup: Setup) -> Dropout | None:
    if not setup.dropout:
        return None
    part = (mesh.index("tp"), mesh.size("tp")) if layout.sequence_parallel else (0, 1)
    return Dropout(setup.dropout, setup.seed, part)


def _data_parallel(
    module: Decoder, spec: ModelSpec, layout: ResolvedLayout, mesh: Mesh, setup: Setup
) -> DataParallel | FullySharded:
    """What sums the stage's gradients over the replicas and shards what the layout's ZeRO stage says."""
    overlap = {"overlap_grad": layout.overlap.grad, "overlap_param": bool(layout.overlap.param)}
    whole = layout.pp == 1 or not SCHEDULES[layout.schedule].splits_backward
    if layout.zero == 3:
        return FullySharded(
            module, mesh, setup.policy, rounds=layout.num_micro_batches, whole_backward=whole, **overlap
        )
    return DataParallel(
        module,
        mesh,
        setup.policy,
        zero=layout.zero,
        rounds=layout.num_micro_batches,
        bucket_bytes=setup.bucket_bytes,
        alone=frozenset({EMBEDDING, HEAD}) if spec.tied_embeddings else frozenset(),
        whole_backward=whole,
        **overlap,
    )


def cross_entropy_of(spec: ModelSpec, mesh: Mesh) -> CrossEntropy:
    """The summed cross-entropy of the logits that a rank has: all, or its part of the vocabulary."""
    if mesh.group("tp") is None:
        return cross_entropy_sum
    return VocabCrossEntropy(mesh, spec.vocab)


def local_batch(batch: Batch, layout: ResolvedLayout, mesh: Mesh, device: str) -> Batch:
    """The part of a micro-batch's sequences that this rank of cp works on, on the device."""
    if mesh.size("cp") > 1:
        parts = (context.split(x, mesh, layout.cp_kind, dim=-1) for x in batch)
        batch = Batch(*parts)
    return Batch(*(x.to(torch.device(device)) for x in batch))


def tied_group(spec: ModelSpec, layout: ResolvedLayout, mesh: Mesh) -> Group:
    """The two ranks that hold the tied embedding on different stages; None on other ranks and where there is one.

    Both ranks call this at the same point of their set-up, since it may make a group.
    """
    pair = tied_pair(placement(layout.schedule), layout.pp, layout.vpp) if spec.tied_embeddings else None
    if pair is None or mesh.index("pp") not in pair:
        return None
    return mesh.subgroup(tuple(sorted(mesh.members("pp")[place] for place in pair)))
