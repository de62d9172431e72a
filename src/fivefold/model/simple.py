"""The simple view: closed formulas of a GPT-like model, for reasoning on paper and for showing beside the exact count.

Symbols are those of Korthikanti et al. 2022 (arXiv 2205.05198): a attention heads, b micro-batch in sequences,
h hidden size, L layers, p pipeline stages, s sequence length, t tensor-parallel size, v vocabulary size, and m
micro-batches. Their limits: full multi-head attention, a feed-forward of 4h without gate, 16-bit activations with
dropout, attention that keeps its s x s matrix. The exact, op-by-op view is elsewhere in fivefold.
Numbers of equations, tables and sections are cited from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

from fivefold.errors import FivefoldError

T = TypeVar("T")

# Bytes per parameter in 16-bit mixed precision with Adam (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1, for
# the 16; Megatron-LM's fp32 gradients make 18; a 16-bit gradient and an fp32 copy of it make 20).
STATE_BYTES: dict[str, dict[str, int]] = {
    "bf16-gradients": {"weights": 2, "gradients": 2, "master": 4, "optimizer": 8},
    "fp32-gradients": {"weights": 2, "gradients": 4, "master": 4, "optimizer": 8},
    "bf16-and-fp32-gradients": {"weights": 2, "gradients": 6, "master": 4, "optimizer": 8},
}

ActivationVariant = Literal["none", "tp", "tp-sp", "selective", "tp-selective", "tp-sp-selective", "full", "full-sp"]
ACTIVATION_VARIANTS: tuple[ActivationVariant, ...] = (
    "none",
    "tp",
    "tp-sp",
    "selective",
    "tp-selective",
    "tp-sp-selective",
    "full",
    "full-sp",
)


def parameters(L: int, h: int, v: int) -> int:
    """h v + L (12 h^2 + 13 h) + 2 h: tied embedding, blocks with biases, final LayerNorm; no position table."""
    return h * v + L * (12 * h * h + 13 * h) + 2 * h


def state_bytes(parameters: float, recipe: str = "bf16-gradients") -> dict[str, float]:
    """Bytes of weights, gradients, master weights and optimizer, and their total; recipe is a key of STATE_BYTES."""
    per_parameter = _choose("recipe", recipe, STATE_BYTES)
    parts = {name: parameters * size for name, size in per_parameter.items()}
    return {**parts, "total": sum(parts.values())}


def activation_bytes_per_layer(
    s: int, b: int, h: int, a: int, t: int = 1, variant: ActivationVariant = "none"
) -> float:
    """Activation bytes that one layer keeps for backward (Korthikanti et al. 2022, Table 2 and equations 1-4).

    none             s b h (34 + 5 a s / h)
    tp               s b h (10 + 24 / t + 5 a s / (h t))
    tp-sp            s b h (34 + 5 a s / h) / t
    selective        34 s b h                     attention core recomputed
    tp-selective     s b h (10 + 24 / t)
    tp-sp-selective  34 s b h / t
    full             2 s b h                      only the layer's input; one layer's working set comes on top
    full-sp          2 s b h / t
    """
    score = 5 * a * s / h
    factors = {
        "none": 34 + score,
        "tp": 10 + (24 + score) / t,
        "tp-sp": (34 + score) / t,
        "selective": 34.0,
        "tp-selective": 10 + 24 / t,
        "tp-sp-selective": 34 / t,
        "full": 2.0,
        "full-sp": 2 / t,
    }
    if t > 1 and variant in ("none", "selective"):
        raise FivefoldError(
            f"variant = {variant!r} is for t = 1; with t = {t} take its tp or tp-sp form",
            code="bad-option",
            option="variant",
            value=variant,
            legal=[name for name in ACTIVATION_VARIANTS if name not in ("none", "selective")],
        )
    return s * b * h * _choose("variant", variant, factors)


def in_flight(p: int, m: int, stage: int = 0, vpp: int = 1) -> float:
    """Micro-batches whose activations a stage holds at its peak under 1F1B; interleaved: the first stage's only.

    1F1B: min(p - stage, m). Interleaved with vpp chunks per rank: p (1 + (p - 1) / (p vpp)) on stage 0.
    """
    if vpp == 1:
        return float(min(p - stage, m))
    if stage:
        raise FivefoldError(
            "the simple view has interleaved activations for the first stage only",
            code="bad-option",
            option="stage",
            value=stage,
            legal=[0],
        )
    return p * interleaving_factor(p, vpp)


def interleaving_factor(p: int, vpp: int) -> float:
    """How much more activation memory interleaving takes on stage 0 (Korthikanti et al. 2022, section 4.2.3)."""
    return 1 + (p - 1) / (p * vpp) if vpp > 1 else 1.0


def bubble_fraction(p: int, m: int, vpp: int = 1) -> float:
    """Idle over ideal time of 1F1B or AFAB, (p - 1) / m; interleaved ÷ vpp (Narayanan et al. 2021, section 2.2)."""
    return (p - 1) / (m * vpp)


def compute_flops(
    parameters: float, tokens: float, L: int = 0, attention_width: int = 0, s: int = 0, *, causal: bool = False
) -> float:
    """Model FLOPs of training on `tokens`: 6 P per token, and 12 L (heads head_dim) s for attention, halved if causal.

    parameters: without the input embedding's look-up, with the head. Leave L, attention_width and s out for 6 P alone.
    """
    attention = 12 * L * attention_width * s
    return tokens * (6 * parameters + (attention / 2 if causal else attention))


def gpt_model_flops(B: int, s: int, L: int, h: int, v: int) -> float:
    """FLOPs of a step over B sequences: 72 B L s h^2 (1 + s / 6h + v / 12hL) (Korthikanti et al. 2022, equation 7)."""
    return 72 * B * L * s * h * h * (1 + s / (6 * h) + v / (12 * h * L))


def gpt_hardware_flops(B: int, s: int, L: int, h: int, v: int, recompute: str = "none") -> float:
    """FLOPs that the hardware does in a step.

    selective: 72 B L s h^2 (1 + s / 3h + v / 12hL) as printed (Korthikanti et al. 2022, equation 8). It charges the
        recomputed attention core as a forward and a backward; its forward alone, 4 B L s^2 h, is a third of that.
    full: + every layer's forward, 96 B s L h^2 (1 + s / 6h + v / 16hL) (Narayanan et al. 2021, equation 3).
    """
    extra = {"none": 0.0, "selective": 12 * B * L * s * s * h, "full": 24 * B * L * s * h * h * (1 + s / (6 * h))}
    return gpt_model_flops(B, s, L, h, v) + _choose("recompute", recompute, extra)


def _choose(option: str, value: str, table: Mapping[str, T]) -> T:
    if value not in table:
        raise FivefoldError(
            f"{option} = {value!r} is not known; legal: {', '.join(table)}",
            code="bad-option",
            option=option,
            value=value,
            legal=list(table),
        )
    return table[value]
