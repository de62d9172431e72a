"""One training step of one rank: forward and backward over the micro-batches, sums over the axes, the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fivefold.errors import FivefoldError
from fivefold.layout import ResolvedLayout
from fivefold.model import ModelSpec
from fivefold.model import Tensor as TensorSpec
from fivefold.train.build import EMBEDDING, HEAD, Setup, build_stages, cross_entropy_of, local_batch, tied_group
from fivefold.train.data import Batch, sample_indices
from fivefold.train.dropout import token_numbers
from fivefold.train.engine import Engine, engine_for
from fivefold.train.loss import TokenLoss, global_valid_tokens
from fivefold.train.mesh import Mesh, all_reduce
from fivefold.train.model import tensor_table
from fivefold.train.optimizer import Optimizer, clip_factor, squared_norm
from fivefold.train.parallel.bucket import Piece, sum_pieces
from fivefold.train.parallel.tensor import copies
from fivefold.train.precision import LossScale


class StepResult(NamedTuple):
    """What a step did, the same on every rank.

    loss: mean over the valid tokens of the global batch. grad_norm: before clipping, of the whole model.
    valid_tokens: of the global batch. skipped: whether fp16 gradients overflowed and nothing was updated.
    """

    loss: float
    grad_norm: float
    rate: float
    valid_tokens: int
    skipped: bool


class Trainer:
    """A layout on this rank, ready to step.

    engine: how stages run, by default as the layout says. Every rank makes its Trainer.
    """

    def __init__(
        self, spec: ModelSpec, layout: ResolvedLayout, mesh: Mesh, setup: Setup, engine: Engine | None = None
    ) -> None:
        self.spec, self.layout, self.mesh, self.setup = spec, layout, mesh, setup
        self.stages = build_stages(spec, layout, mesh, setup)
        self.engine: Engine = engine or engine_for(self.stages, layout, mesh)
        self.optimizer = Optimizer(self.pieces, setup.recipe)
        self.scale = LossScale(setup.policy.scaled)
        self._cross_entropy = cross_entropy_of(spec, mesh)
        self._table = tensor_table(spec)
        self._tied_group = tied_group(spec, layout, mesh)

    @property
    def pieces(self) -> list[Piece]:
        """All that this rank's optimizer updates; of a tied embedding that it holds twice, both."""
        return [piece for stage in self.stages for piece in stage.data.pieces]

    def step(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Train on the micro-batches of this rank's replica (whole sequences; Synthetic.micro_batches gives them).

        step: 0, 1, ..., for the learning rate and for dropout. Raises FivefoldError, on every rank, when the gradient
        is not finite.
        """
        loss, norm, valid = self.gradients(batches, step)
        if not math.isfinite(norm) and not self.scale.enabled:
            raise FivefoldError(
                f"The gradient of step {step} is not finite (loss {loss}): the run has diverged. Lower the learning "
                "rate, warm up longer, or look at the data of this step.",
                code="diverged",
                option="rate",
                value=norm,
            )
        rate = self.update(step, norm)
        return StepResult(loss, norm, rate, valid, skipped=not math.isfinite(norm))

    def update(self, step: int, norm: float) -> float:
        """Clip by `norm` and update the weights, or skip the step where fp16 gradients overflowed. Returns the learning
        rate. Parameters have their new values at the next forward, or after wait()."""
        overflow = not math.isfinite(norm)
        rate = 0.0
        if not overflow:
            rate = self.optimizer.step(step, clip_factor(norm, self.setup.recipe.clip) / self.scale.value)
        self.scale.update(overflow)
        for stage in self.stages:
            stage.data.reset() if overflow else stage.data.gather()
        return rate

    def gradients(self, batches: Sequence[Batch], step: int = 0) -> tuple[float, float, int]:
        """Forward and backward: (loss, gradient norm, valid tokens). The pieces then hold the gradient of the whole
        global batch, times the loss scale; it stays until the optimizer has stepped. step: for dropout."""
        local = [local_batch(batch, self.layout, self.mesh, self.setup.device) for batch in batches]
        self._begin_dropout(step, local)
        valid = global_valid_tokens((batch.labels for batch in local), self.mesh.group("dp_cp"))
        loss = TokenLoss(valid, self._cross_entropy, self.scale.value)
        mine = self.engine.run(local, loss)
        for stage in self.stages:
            stage.data.finish()
            sum_pieces(stage.data.pieces, stage.partial)
        self._sum_tied()
        # Every rank of tp has the whole loss of its tokens.
        mine = mine if self.mesh.index("tp") == 0 else torch.zeros_like(mine)
        totals = torch.stack((mine.double(), squared_norm(self.pieces, self._counted).to(mine.device)))
        total_loss, squares = all_reduce(totals, self.mesh.world_group).tolist()
        return total_loss, math.sqrt(squares) / self.scale.value, valid

    def _begin_dropout(self, step: int, local: Sequence[Batch]) -> None:
        dropouts = [stage.dropout for stage in self.stages if stage.dropout is not None]
        if not dropouts:
            return
        places = sample_indices(0, self.layout, self.mesh.index("dp"))  # in the global batch, as in every step
        numbers = [token_numbers(rows, batch.positions) for rows, batch in zip(places, local, strict=True)]
        for dropout in dropouts:
            dropout.begin(step, numbers)

    def _sum_tied(self) -> None:
        """Give the embedding of the first and the head of the last stage the sum of both gradients, when they are one
        tensor: over the two pipeline ranks that hold them, or between two chunks of one rank."""
        embedding = [p for p in self.stages[0].data.pieces if p.name == EMBEDDING]
        head = [p for p in self.stages[-1].data.pieces if p.name == HEAD]
        if not self.spec.tied_embeddings or not (embedding or head):
            return
        if self._tied_group is not None:
            sum_pieces([*embedding, *head], {EMBEDDING: self._tied_group, HEAD: self._tied_group})
            return
        for first, last in zip(embedding, head, strict=False):
            last.gradient.add_(first.gradient)
            first.gradient.copy_(last.gradient)

    def _counted(self, piece: Piece) -> bool:
        """Whether this rank is the one that counts the piece in the norm, among all that hold it."""
        if self.mesh.index("replicate"):
            return False
        if piece.name == HEAD and self.spec.tied_embeddings:
            return False  # counted as the embedding of the first stage
        same = copies(self._table[piece.name], self.mesh.size("tp"))
        return self.mesh.index("tp") % same == 0

    def tensor(self, name: str) -> TensorSpec:
        """The full tensor behind a parameter's name on this rank."""
        return self._table[name]

    def wait(self) -> None:
        """Wait until every parameter has its updated value, to read weights outside a step."""
        for stage in self.stages:
            stage.data.wait()
