"""Faults that published trainers have had, committed on purpose: the matrix has to catch each of them.

A fault is committed by replacing something of the trainer in this process, before the ranks are forked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from fivefold.train import build, trainer
from fivefold.train.loss import IGNORED
from fivefold.train.mesh import Mesh
from fivefold.train.parallel import context, tensor
from fivefold.train.parallel.split_backward import Owed
from fivefold.train.trainer import Trainer

Options = dict[str, Any]


class Fault(NamedTuple):
    """caught: options of a row that fails. unseen: of one that nearly everybody runs, and that passes all the same."""

    name: str
    commit: Callable[[pytest.MonkeyPatch], None]
    caught: Options
    unseen: Options


def _no_reduction_over_cp(patch: pytest.MonkeyPatch) -> None:
    """Gradients are reduced over the data-parallel ranks, of which there is one."""
    group = Mesh.group

    def dp_only(self: Mesh, axis: str) -> Any:
        return group(self, "dp" if axis == "replicate" else axis)

    patch.setattr(Mesh, "group", dp_only)


def _not_divided_by_accumulation(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch's loss is a mean of its own, and they are summed."""
    count = trainer.global_valid_tokens
    patch.setattr(trainer, "global_valid_tokens", lambda labels, group: _mean(count, list(labels), group))


def _mean(count: Callable[..., int], labels: list[torch.Tensor], group: Any) -> int:
    return max(count(labels, group) // len(labels), 1)


def _mean_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by its own valid tokens, and ranks are averaged."""

    def local(labels: Any, group: Any) -> int:
        own = sum(int((label != IGNORED).sum()) for label in labels)
        return max(own, 1) * (1 if group is None else group.size())

    patch.setattr(trainer, "global_valid_tokens", local)


def _tied_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """The norm counts the embedding on the first and on the last stage."""
    counted = Trainer._counted

    def both(self: Trainer, piece: Any) -> bool:
        return counted(self, piece._replace(name="embed_tokens.weight") if piece.name == "lm_head.weight" else piece)

    patch.setattr(Trainer, "_counted", both)


def _copies_counted_often(patch: pytest.MonkeyPatch) -> None:
    """The norm counts what every rank of tp holds once per rank."""
    patch.setattr(trainer, "copies", lambda tensor, tp: 1)


def _kv_replicas_go_their_own_way(patch: pytest.MonkeyPatch) -> None:
    partial = tensor.partial_gradients

    def without(model: Any, mesh: Mesh, sequence_parallel: bool) -> dict[str, Any]:
        found = partial(model, mesh, sequence_parallel)
        return {name: group for name, group in found.items() if "k_proj" not in name and "v_proj" not in name}

    patch.setattr(tensor, "partial_gradients", without)


def _layout_dependent_weights(patch: pytest.MonkeyPatch) -> None:
    initialise = build.initialise

    def by_rank(module: Any, spec: Any, seed: int, coordinates: Any) -> None:
        initialise(module, spec, seed + coordinates["pp"][0], coordinates)

    patch.setattr(build, "initialise", by_rank)


def _positions_of_the_part(patch: pytest.MonkeyPatch) -> None:
    """Every part of the sequence begins at position 0."""
    split = context.split

    def from_zero(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        part = split(x, *arguments, **options)
        return torch.arange(len(part)) if x.dim() == 1 else part

    patch.setattr(context, "split", from_zero)


def _layers_dropped(patch: pytest.MonkeyPatch) -> None:
    """Stages are equally deep, and what does not divide is left out."""
    decoder = build.Decoder

    def shallow(spec: Any, layers: range, *arguments: Any, **options: Any) -> Any:
        return decoder(spec, layers[: spec.layers // 2], *arguments, **options)

    patch.setattr(build, "Decoder", shallow)


def _tied_gradient_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trainer, "_sum_tied", lambda self: None)


def weight_gradients_past_the_hooks(patch: pytest.MonkeyPatch) -> None:
    """A split backward adds to .grad without the hooks that sum over the replicas (pytorch#144530)."""

    def quietly(self: Owed) -> None:
        for part in self._parts:
            wanted: Any = part.parameters
            if wanted:
                torch.autograd.grad(part.starts, wanted, part.gradients, allow_unused=True)
        self._parts.clear()

    patch.setattr(Owed, "pay", quietly)


_TIED = {"model": "tied"}
FAULTS: tuple[Fault, ...] = (
    Fault("gradients-not-reduced-over-cp-at-dp-1", _no_reduction_over_cp, {"cp": 2, "zero": 0}, {"dp": 2, "zero": 0}),
    Fault(
        "loss-not-divided-by-accumulation",
        _not_divided_by_accumulation,
        {"micro_batches": 4},
        {"micro_batches": 1, "micro_batch": 4},
    ),
    Fault("mean-of-the-ranks-means", _mean_of_ranks, {"cp": 2}, {"cp": 2, "masks": "full"}),
    Fault("norm-counts-tied-embedding-twice", _tied_counted_twice, {"pp": 2, **_TIED}, {"pp": 2}),
    Fault("norm-counts-copies-over-tp", _copies_counted_often, {"tp": 2}, {"dp": 2}),
    Fault("kv-replicas-not-summed", _kv_replicas_go_their_own_way, {"tp": 2, "model": "mqa"}, {"tp": 2}),
    Fault("weights-drawn-by-layout", _layout_dependent_weights, {"pp": 2}, {"tp": 2}),
    Fault("positions-of-a-part-from-zero", _positions_of_the_part, {"cp": 2}, {"dp": 2}),
    Fault("layers-dropped", _layers_dropped, {"pp": 2, "layers": 3}, {"pp": 2, "layers": 4}),
    Fault("tied-gradients-not-summed", _tied_gradient_not_summed, {"pp": 2, **_TIED}, {"dp": 2, **_TIED}),
)
