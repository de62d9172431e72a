"""Recomputation of activations in backward, applied to a model from outside; numbers stay the same to the bit.

full: a block keeps its input only (Chen et al. 2016, arXiv 1604.06174), all blocks or the first N of a stage.
selective: named parts of a block keep their input only: the attention core (Korthikanti et al. 2022, arXiv
2205.05198), the feed-forward network, or the norms, whose outputs are dropped once the layers after them have run.

By torch.utils.checkpoint without re-entry, which stops recomputing at the last tensor that backward needs. No random
state is kept: the masks of dropout are functions of where a number stands, and `contexts` brings that back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fivefold.errors import FivefoldError
from fivefold.layout import Recompute
from fivefold.train.dropout import Contexts
from fivefold.train.model import Attention, Block, Core, Decoder

_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def apply(model: Decoder, recompute: Recompute, layers: int | None = None, contexts: Contexts | None = None) -> None:
    """Make the blocks of a stage recompute as told. After the other axes: what they replaced is then inside.

    layers: how many of this stage's blocks with kind "full", by default recompute.layers (which counts a pipeline
    rank's blocks: with several chunks per rank the caller passes each chunk's share); more than it has means all.
    contexts: asked in each forward for what to enter around it and around its recomputation; None: nothing.
    Raises FivefoldError for modules that dense blocks do not have.
    """
    blocks = [cast(Block, block) for block in model.layers.values()]
    if recompute.kind == "full":
        count = recompute.layers if layers is None else layers
        for block in blocks if count is None else blocks[:count]:
            _keep_input_only(block, contexts or noop_context_fn)
        return
    if recompute.kind == "selective":
        modules = recompute.modules or ("core_attn",)
        for name in modules:
            if name not in _SELECTIVE:
                raise FivefoldError(
                    f"The trainer's dense blocks have no '{name}' to recompute.",
                    code="recompute-modules-model",
                    option="--recompute-modules",
                    value=name,
                    legal=list(_SELECTIVE),
                )
        for block in blocks:
            for name in modules:
                _SELECTIVE[name](block)


def _keep_input_only(module: nn.Module, contexts: Contexts = noop_context_fn) -> None:
    module.forward = partial(_checkpoint, module.forward, context_fn=contexts)


class _RecomputedCore:
    """An attention core whose log-sum-exp, scores and merged blocks are not kept."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        return cast(Tensor, _checkpoint(self.core, q, k, v, causal))


def _core_attention(block: Block) -> None:
    attention = cast(Attention, block.self_attn)
    attention.core = _RecomputedCore(attention.core)


def _feed_forward(block: Block) -> None:
    _keep_input_only(block.mlp)


def _norms(block: Block) -> None:
    _drop_output(block.input_layernorm, block.self_attn)
    _drop_output(block.post_attention_layernorm, block.mlp)


_SELECTIVE: dict[str, Callable[[Block], None]] = {
    "core_attn": _core_attention,
    "mlp": _feed_forward,
    "layernorm": _norms,
}


def _drop_output(norm: nn.Module, consumer: nn.Module) -> None:
    """Free the norm's output once `consumer`, whose first argument it is, has run; fill it again when a gradient
    reaches the consumer's output.

    A checkpoint around the norm would not do: its output is an input of the layers after it, which save it.
    """

    forward = norm.forward
    latest: list[tuple[Tensor, Tensor]] = []  # the norm's last output and its input

    def remember(module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> None:
        latest[:] = [(out, arguments[0])]

    def after(module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> None:
        normed, source = latest.pop()
        if normed is not arguments[0] or not out.requires_grad:
            return
        storage = normed.untyped_storage()
        size = storage.size()
        storage.resize_(0)

        def refill(grad: Tensor) -> None:
            if storage.size():
                return
            with torch.no_grad():
                again = forward(source)
            storage.resize_(size)
            # Through the storage, since to autograd the tensor never changed.
            storage.copy_(again.untyped_storage())

        out.register_hook(refill)

    norm.register_forward_hook(remember)
    consumer.register_forward_hook(after)
