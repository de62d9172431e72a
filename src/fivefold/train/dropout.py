"""Dropout whose masks do not know the layout, applied to a model from outside: on the embeddings, and on what attention
and feed-forward network add to the residual stream (GPT-2's embd_pdrop and resid_pdrop). Attention weights are not
dropped: no fused attention could take the mask.

Whether a number is dropped is a hash of (seed, step, place of the sample in the global batch, position, layer, site,
channel), so a rank computes the part of the mask that it needs, backward and recomputation compute it again, and no
mask or random state is kept. The same on CPUs and GPUs, being whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fivefold.errors import FivefoldError
from fivefold.train.init import seed_of
from fivefold.train.model import Block, Decoder

_POSITIONS = 2**32  # more than any sequence has
# Of the finalisers "splitmix64" (Steele, Lea and Flood 2014, Stafford's variant 13) and "lowbias32" (Wellons 2018),
# from memory; tests/train/test_dropout.py looks at what they give.
_MIX_64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_MIX_32 = ((16, 0x7FEB352D), (15, 0x846CA68B))  # the high bits decide, so the last shift is left out


class Draw(NamedTuple):
    """What a mask depends on beside its site. tokens: [batch, seq], a number of each token in the step. key: the
    step's."""

    tokens: Tensor
    key: str


class Dropout:
    """Of one pipeline stage.

    rate: share of the numbers that become zero; the others grow to keep the mean. part: (index, ranks) of the sequence
    that this rank's residual stream holds under sequence parallelism.
    Raises FivefoldError for a rate that is not in [0, 1).
    """

    def __init__(self, rate: float, seed: int, part: tuple[int, int] = (0, 1)) -> None:
        if not 0 <= rate < 1:
            raise FivefoldError(
                f"--dropout {rate:g} is not possible: it is the share of the numbers that become zero, 0 or more and "
                "below 1.",
                code="bad-dropout",
                option="--dropout",
                value=rate,
                legal="0 to below 1",
            )
        self.rate, self._seed, self._part = rate, seed, part
        self._draws: list[Draw] = []
        self._now: Draw | None = None

    def apply(self, model: Decoder) -> None:
        """Drop in every forward of the stage from now on."""
        for number, block in model.layers.items():
            each = cast(Block, block)
            each.self_attn.register_forward_hook(partial(self._after, f"layers.{number}.attention"))
            each.mlp.register_forward_hook(partial(self._after, f"layers.{number}.feed_forward"))
        if model.embed_tokens is not None:
            first = next(iter(model.layers.values()))
            # Learned positions are added to the embeddings outside of any module: here both are there.
            first.register_forward_pre_hook(lambda _, inputs: (self._dropped("embedding", inputs[0]), *inputs[1:]))

    def begin(self, step: int, tokens: Sequence[Tensor]) -> None:
        """A step with these micro-batches: of each the numbers of its tokens (token_numbers), [batch, seq]."""
        index, ranks = self._part
        key = f"{self._seed}/{step}"
        self._draws = [Draw(numbers.chunk(ranks, dim=1)[index], key) for numbers in tokens]

    def start(self, micro_batch: int) -> None:
        """The next forward is this micro-batch's."""
        self._now = self._draws[micro_batch]

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For torch.utils.checkpoint: around this forward, and around its recomputation, which needs the same masks
        when other micro-batches have been there since."""
        return nullcontext(), self._again(self._now)

    @contextmanager
    def _again(self, then: Draw | None) -> Iterator[None]:
        now, self._now = self._now, then
        try:
            yield
        finally:
            self._now = now

    def _after(self, site: str, _module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        return self._dropped(site, out)

    def _dropped(self, site: str, x: Tensor) -> Tensor:
        if self._now is None:
            raise RuntimeError("a stage with dropout ran outside a step")
        rows = token_hashes(self._now, site)
        return cast(Tensor, _Drop.apply(x, rows, _hash64(torch.arange(x.shape[-1], device=x.device), site), self.rate))


def token_numbers(samples: range, positions: Tensor) -> Tensor:
    """[samples, seq] int64: a number of its own for each token. samples: places in the global batch. positions: [seq]
    or [samples, seq], where in the sequence the tokens stand."""
    rows = torch.tensor(list(samples), dtype=torch.int64, device=positions.device)
    return rows[:, None] * _POSITIONS + positions


def token_hashes(draw: Draw, site: str) -> Tensor:
    """[batch, seq] int32, the tokens' share in the masks of one site in one step."""
    return _hash64(draw.tokens, f"{draw.key}/{site}")


def kept(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """The mask, bool: rows [...] and columns [channels], hashes both, give [..., channels]; True with 1 - rate."""
    mixed = rows[..., None] + columns
    for shift, factor in _MIX_32:
        mixed ^= (mixed >> shift).bitwise_and_(2 ** (32 - shift) - 1)  # the shift drags the sign along
        mixed *= _signed(factor, 32)
    return mixed >= round(rate * 2**32) - 2**31


class _Drop(torch.autograd.Function):
    """x * mask / (1 - rate); x [batch, seq, channels]. Backward makes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.rate = rate
        return (x * kept(rows, columns, rate)).div_(1 - rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, columns = ctx.saved_tensors
        return (grads[0] * kept(rows, columns, ctx.rate)).div_(1 - ctx.rate), None, None, None


def _hash64(numbers: Tensor, stream: str) -> Tensor:
    """int32 hashes of int64 numbers, of a stream of their own."""
    mixed = numbers ^ seed_of(0, stream)
    for shift, factor in _MIX_64:
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor, 64)
    return (mixed >> 32).to(torch.int32)


def _signed(value: int, bits: int) -> int:
    """The same bits as a signed number."""
    return value - 2**bits if value >= 2 ** (bits - 1) else value


Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
