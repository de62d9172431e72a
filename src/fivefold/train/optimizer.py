"""The optimizer: AdamW or SGD on the pieces that this rank owns, learning-rate schedules, norm and clipping.

Matrices decay, norms and biases do not. Each element of the model counts once in the gradient norm, whichever and
however many ranks hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.train.parallel.bucket import Piece


class Cosine(msgspec.Struct, frozen=True, kw_only=True, tag="cosine"):
    """Linear warm-up over `warmup` steps, then half a cosine down to `floor` of the peak at step `total`
    (Loshchilov and Hutter 2017, arXiv 1608.03983)."""

    total: int
    warmup: int = 0
    floor: float = 0.1

    def factor(self, step: int) -> float:
        """Of the peak learning rate, at step 0, 1, ...; after `total` it stays at the floor."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = min((step - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class WarmupStableDecay(msgspec.Struct, frozen=True, kw_only=True, tag="wsd"):
    """Linear warm-up, a constant part, then linear decay to `floor` over the last `decay` of `total` steps
    (Hu et al. 2024, arXiv 2404.06395, from memory)."""

    total: int
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = self.total - step
        if left >= self.decay:
            return 1.0
        return self.floor + (1 - self.floor) * max(left, 0) / self.decay


class Constant(msgspec.Struct, frozen=True, kw_only=True, tag="constant"):
    """The peak learning rate at every step."""

    def factor(self, step: int) -> float:
        return 1.0


Schedule = Cosine | WarmupStableDecay | Constant


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How weights are updated.

    betas, eps, decay: of AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101); decay is decoupled for SGD too.
    clip: largest norm of the gradient, None for no clipping.
    """

    kind: Literal["adamw", "sgd"] = "adamw"
    rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    clip: float | None = 1.0
    schedule: Schedule = Constant()


def decays(piece: Piece) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return piece.parameter.dim() >= 2


class Optimizer:
    """Updates the master weights of `pieces` by their gradients. An empty list of pieces is fine.

    Raises FivefoldError for an optimizer that the trainer does not run.
    """

    def __init__(self, pieces: Sequence[Piece], recipe: Recipe) -> None:
        self.recipe = recipe
        self._pieces = list(pieces)
        groups = [
            {"params": [p.master for p in self._pieces if decays(p) == decaying], "weight_decay": decay}
            for decaying, decay in ((True, recipe.decay), (False, 0.0))
        ]
        self._torch = _torch_optimizer([group for group in groups if group["params"]], recipe)

    def step(self, step: int, gradient_factor: float = 1.0) -> float:
        """Update with the learning rate of step 0, 1, ...; gradients are first multiplied by gradient_factor (one over
        the loss scale, times the clipping). Returns the learning rate."""
        rate = self.recipe.rate * self.recipe.schedule.factor(step)
        if self._torch is None:
            return rate
        for group in self._torch.param_groups:
            group["lr"] = rate
        if gradient_factor != 1.0:
            for piece in self._pieces:
                piece.gradient.mul_(gradient_factor)
        for piece in self._pieces:
            piece.master.grad = piece.gradient.to(piece.master.dtype)  # the same tensor where the dtype is
        if self.recipe.kind == "sgd":
            self._decay_decoupled(rate)
        self._torch.step()
        for piece in self._pieces:
            piece.master.grad = None
        return rate

    def _decay_decoupled(self, rate: float) -> None:
        """torch's SGD would add the decay to the gradient."""
        for piece in self._pieces:
            if decays(piece) and self.recipe.decay:
                piece.master.mul_(1 - rate * self.recipe.decay)

    def state_tensors(self) -> list[Tensor]:
        """What it keeps of past gradients; nothing before its first step."""
        states = [] if self._torch is None else self._torch.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def state_dict(self) -> dict:
        return {} if self._torch is None else self._torch.state_dict()

    def load_state_dict(self, state: dict) -> None:
        if self._torch is not None:
            self._torch.load_state_dict(state)


def _torch_optimizer(groups: list[dict], recipe: Recipe) -> torch.optim.Optimizer | None:
    if not groups:
        return None
    if recipe.kind == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, eps=recipe.eps, fused=True)
    if recipe.kind == "sgd":
        return torch.optim.SGD([{"params": group["params"]} for group in groups], lr=recipe.rate, fused=True)
    raise FivefoldError(
        f"The trainer does not run the optimizer {recipe.kind!r}: choose adamw or sgd.",
        code="optimizer-not-trainable",
        option="--optimizer",
        value=recipe.kind,
        legal=["adamw", "sgd"],
    )


def squared_norm(pieces: Iterable[Piece], counted: Callable[[Piece], bool]) -> Tensor:
    """Sum of squares, in fp64, of the gradients of those pieces that this rank counts; to be summed over the world."""
    gradients = [piece.gradient for piece in pieces if counted(piece)]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    return norms.double().square().sum()


def clip_factor(norm: float, clip: float | None) -> float:
    """What to multiply gradients of this norm by; torch.nn.utils.clip_grad_norm_'s convention, 1e-6 in the divisor."""
    return 1.0 if clip is None else min(clip / (norm + 1e-6), 1.0)
