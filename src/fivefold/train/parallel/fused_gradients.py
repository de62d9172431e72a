"""Weight gradients of linear layers, added to the gradient buffer by the matrix product that makes them.

Without it a product writes a gradient and another pass adds it to the buffer, once per micro-batch: two more trips
through memory than the work needs. (Megatron-LM has it as gradient_accumulation_fusion.) The gradient is never in
`.grad` then; autograd still calls the parameter's hook after it, with no gradient, which counts the arrival. This is
for layers whose weight has one use, for schedules that run a backward whole, and where gradients are accumulated in the
dtype that computes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

# (weight [out, in], rows [n, out], rows [n, in]): add the first transposed times the second to the weight's gradient.
AddProduct = Callable[[nn.Parameter, Tensor, Tensor], None]


def fuse(module: nn.Module, add: AddProduct) -> None:
    """Make the plain linear layers of `module` give their weights' gradients to `add`, one call per backward."""
    uses: Counter[Tensor] = Counter(p for each in module.modules() for p in each.parameters(recurse=False))
    for layer in module.modules():
        if type(layer) is nn.Linear and uses[layer.weight] == 1:
            layer.forward = partial(_linear, layer, add)


def _linear(layer: nn.Linear, add: AddProduct, input: Tensor) -> Tensor:
    return _Linear.apply(input, layer.weight, layer.bias, add)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, add: AddProduct) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.biased, ctx.add = weight, bias is not None, add
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        # Before the weight's gradient, whose arrival may give the weight's memory back.
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        ctx.add(ctx.weight, rows, x.flatten(0, -2))
        return grad_x, None, rows.sum(0) if ctx.biased else None, None
