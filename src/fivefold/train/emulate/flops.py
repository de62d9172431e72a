"""FLOPs of operators: a product of (m, k) by (k, n) is 2 m k n.

A product with a vector is not counted: like the norms that take it, it is bandwidth and no arithmetic.
PyTorch's own counter misses the CPU's flash attention. Attention is charged as its kernel computes it: forward the
scores and the product with the values, backward the scores once more and four products, five in all. A causal mask
halves the score matrix (s / 2 keys per query, as fivefold.model.flops counts causal FLOPs); any other mask, a sliding
window's, saves the kernel nothing and is charged the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fivefold.errors import FivefoldError

_aten = torch.ops.aten


class Product(NamedTuple):
    """name: of the operator. shape: (m, k, n), behind the batch where there is one; of attention (batch, heads,
    queries, keys, head_dim)."""

    name: str
    shape: tuple[int, ...]
    flops: float


def product_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    """The matrix products of one operator, None where it has none.

    Raises FivefoldError for an operator that is one by its name and has no rule here, so that none is left out.
    """
    packet = func._overloadpacket
    rule = _RULES.get(packet)
    if rule is not None:
        return rule(args, kwargs)
    if func.namespace == "aten" and not _PRODUCTS.isdisjoint(packet.__name__.split("_")):
        raise FivefoldError(
            f"The trainer used {func.name()}, whose FLOPs the emulation does not know. Report it with the command.",
            code="unknown-product",
            value=func.name(),
        )
    return None


def _mm(a: Any, b: Any, name: str) -> Product | None:
    *batch, m, k = a.shape
    n = b.shape[-1]
    if m == 1 or n == 1:
        return None
    shape = (*batch, m, k, n)
    flops = 2.0
    for size in shape:
        flops *= size
    return Product(name, shape, flops)


def _attention(query: Any, key: Any, causal: bool, products: int, name: str) -> Product:
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    pairs = queries * keys / 2 if causal else queries * keys
    return Product(name, (batch, heads, queries, keys, width), products * 2.0 * batch * heads * pairs * width)


def _forward(args: Sequence[Any], kwargs: dict[str, Any]) -> Product:
    causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    return _attention(args[0], args[1], causal, 2, "flash_attention")


def _backward(args: Sequence[Any], kwargs: dict[str, Any]) -> Product:
    causal = args[7] if len(args) > 7 else kwargs.get("is_causal", False)
    return _attention(args[1], args[2], causal, 5, "flash_attention_backward")


# Words of which an operator that multiplies matrices has one in its name.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "attention", "convolution"})

_RULES: dict[Any, Callable[[Sequence[Any], dict[str, Any]], Product | None]] = {
    _aten.mm: lambda args, _: _mm(args[0], args[1], "mm"),
    _aten.addmm: lambda args, _: _mm(args[1], args[2], "addmm"),
    _aten.addmm_: lambda args, _: _mm(args[1], args[2], "addmm"),
    _aten.bmm: lambda args, _: _mm(args[0], args[1], "bmm"),
    _aten.baddbmm: lambda args, _: _mm(args[1], args[2], "baddbmm"),
    _aten.baddbmm_: lambda args, _: _mm(args[1], args[2], "baddbmm"),
    _aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
