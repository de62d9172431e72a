"""The operations of a block that PyTorch would do in many passes: norm, rotary embedding, gated activation.

Each is one node for autograd, the same on CPUs and GPUs, and saves what its docstring says and nothing else, so that
a layout's activation memory is a property of the model and not of a backend's decompositions. What is cheap to compute
again from what is saved is computed again in backward. None has a second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

_aten = torch.ops.aten
_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def _once(backward: _Backward) -> _Backward:
    """once_differentiable, which hides the signature from type checkers."""
    return cast(_Backward, once_differentiable(backward))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

    x: [..., width]. Computed in at least fp32 and rounded once. Saves x, the weight, and one number per row.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = _at_least_fp32(x)
        width = x.shape[-1]
        mean_square = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(width)
        inverse_rms = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (exact * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        exact, grad, scale = _at_least_fp32(x), _at_least_fp32(grads[0]), _at_least_fp32(weight)
        width = x.shape[-1]
        # Both sums over grad * x are products of the one matrix with a vector.
        products = (grad * exact).reshape(-1, width)
        grad_weight = inverse_rms.flatten() @ products
        along = (products @ scale).view_as(inverse_rms).mul_(inverse_rms.pow(3)).div_(width)
        grad_x = (grad * scale).mul_(inverse_rms).addcmul_(exact, along, value=-1)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _Rotate(torch.autograd.Function):
    """A rotation's transpose is the rotation by the opposite angle, so backward needs the table alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of each head of x, [batch, seq, heads, head_dim], by their angles.

    cos, sin: [batch or 1, seq, 1, head_dim / 2], constants (Su et al. 2021, arXiv 2104.09864). Saves the table only.
    """
    return _Rotate.apply(x, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (new_first, new_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    return out


class Activation(NamedTuple):
    """An elementwise activation; called with a second tensor, act(gate) * up (Shazeer 2020, arXiv 2002.05202).

    value: x -> act(x), saves x only. gradient: (gradient of act(x), x) -> gradient of x.
    Gated, gate and up (like each other) are saved; act(gate) is computed again in backward.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        return self.value(x) if up is None else _Gated.apply(x, up, self)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act.value(gate).mul_(up)

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate = ctx.act.gradient(grads[0] * up, gate)
        return grad_gate, ctx.act.value(gate).mul_(grads[0]), None


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(F.silu, _aten.silu_backward),
    "gelu": Activation(F.gelu, _aten.gelu_backward),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")),
    "relu": Activation(F.relu, partial(_aten.threshold_backward, threshold=0)),
}


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
