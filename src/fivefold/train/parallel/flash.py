"""Attention over a block of keys, with the log-sum-exp that lets blocks be merged; forward and backward by hand.

Tensors are [batch, heads, seq, head_dim] (kv_heads for keys and values, which divides heads); log-sum-exp is
[batch, heads, seq], in fp64 for fp64 and else fp32. Backward takes the output and log-sum-exp of the whole row of
keys, of which `key` may be a part: then the gradients of all parts add up (Liu et al. 2023, arXiv 2310.01889).
Queries and keys are equally many where `causal`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor


class Kernel(Protocol):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Output like query, and log-sum-exp."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients: ...


class CpuFlash:
    """PyTorch's flash attention on CPUs: any floating type, any head size, grouped heads. Checked on torch 2.13."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return Gradients(*backward(grad, query, key, value, out, lse, 0.0, causal))


class CudaFlash:
    """FlashAttention-2 as PyTorch ships it for GPUs: half precision, head sizes that 8 divides and 256 at most.

    Keys and values are repeated for grouped heads. The arguments are those of torch 2.13's schema; no GPU was at hand
    to run it.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        key, value = _repeat(key, query), _repeat(value, query)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
        return out, lse[..., : query.shape[2]]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        many_keys, many_values = _repeat(key, query), _repeat(value, query)
        unused = torch.empty(0, dtype=torch.int64, device=query.device)  # dropout's random state
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            many_keys,
            many_values,
            out,
            lse.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            unused,
            unused,
        )
        return Gradients(grads[0], _fold(grads[1], key), _fold(grads[2], key))


class Math:
    """The formulas, with the whole matrix of scores: on any device and type, for memory quadratic in the sequence."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, causal)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        return (weights @ _repeat(value, query).to(weights.dtype)).to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        weights = (self._scores(query, key, causal) - lse[..., None]).exp()
        exact, scale = weights.dtype, query.shape[-1] ** -0.5
        grad, out = grad.to(exact), out.to(exact)
        grad_weights = grad @ _repeat(value, query).to(exact).transpose(-1, -2)
        grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * scale
        grad_key = _fold(grad_scores.transpose(-1, -2) @ query.to(exact), key)
        grad_value = _fold(weights.transpose(-1, -2) @ grad, value)
        grad_query = grad_scores @ _repeat(key, query).to(exact)
        return Gradients(grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype))

    def _scores(self, query: Tensor, key: Tensor, causal: bool) -> Tensor:
        exact = accumulation_dtype(query)
        scores = query.to(exact) @ _repeat(key, query).to(exact).transpose(-1, -2) * query.shape[-1] ** -0.5
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores


def kernel_for(query: Tensor) -> Kernel:
    """The fastest kernel that takes this tensor's device, type and head size."""
    if query.device.type == "cpu":
        return CpuFlash()
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type == "cuda" and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256:
        return CudaFlash()
    return Math()


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """In which blocks are added: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _repeat(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for every query head."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _fold(grad: Tensor, key: Tensor) -> Tensor:
    """The gradient of repeated keys or values, summed over the repetitions."""
    return grad.unflatten(1, (key.shape[1], -1)).sum(2)
