"""The closed formulas of the literature beside the op-by-op estimate, and a sentence on where they part.

The formulas are fivefold.model.simple's; the exact figures are the estimate's own and its ledger's.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fivefold.cluster import Cluster, dp_limit
from fivefold.estimate.kernel import Kernel, Problem
from fivefold.estimate.result import Estimate
from fivefold.layout.columns import Columns
from fivefold.layout.features import PHRASES, features
from fivefold.layout.layout import Layout, ResolvedLayout
from fivefold.layout.mixers import softmax_attention
from fivefold.layout.workload import Workload
from fivefold.model import ModelSpec, attention_widths, count_params, simple
from fivefold.model.spec import Attention, Experts
from fivefold.runtime import load_runtime

_STATES = ("weights", "gradients", "master", "optimizer")
_RECIPES = {"fp32": "fp32-gradients", "bf16": "bf16-gradients"}


class SimpleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity, by a formula and exactly. unit: "parameters", "bytes", "flops", "tokens" or "ratio"."""

    quantity: str
    formula: str
    simple: float
    exact: float
    unit: str
    parting: str


def simple_view(
    model: ModelSpec, cluster: Cluster, work: Workload, layout: Layout, runtime: str, estimate: Estimate
) -> tuple[SimpleRow, ...]:
    """The rows for one estimate; empty when its layout breaks a rule and so has no exact side."""
    if estimate.memory is None or estimate.step is None:
        return ()
    kernel = Kernel(
        Problem(model, cluster, work, load_runtime(runtime)), Columns.from_layouts([layout], cluster.gpus, work)
    )
    rows = [
        _parameters(model, estimate),
        _states(model, work, estimate),
        _layer(model, work, estimate.layout, kernel),
        _stage(model, work, estimate),
        _flops(model, work, estimate, causal=False),
        _flops(model, work, estimate, causal=True),
    ]
    if estimate.layout.pp > 1:
        rows.append(_bubble(estimate))
    if cluster.gpus > 1:
        rows.append(_break_even(cluster, estimate, work))
    return tuple(rows)


def _parameters(model: ModelSpec, estimate: Estimate) -> SimpleRow:
    return SimpleRow(
        quantity="parameters",
        formula="h v + L (12 h^2 + 13 h) + 2 h",
        simple=simple.parameters(model.layers, model.hidden, model.vocab),
        exact=estimate.params.total,
        unit="parameters",
        parting=_unlike_gpt(model) or "the model is GPT-like: the same but for a position table",
    )


_OTHER_MIXERS = frozenset(
    {"latent-attention", "gated-delta-net", "mamba", "mamba2", "side-by-side", "one-sublayer-blocks"}
)


def _unlike_gpt(model: ModelSpec) -> str:
    """What of the model the GPT formula does not know."""
    block = model.kinds[-1]
    mixer, feed = block.mixer, block.feed
    found: list[str] = []
    attention = softmax_attention(mixer)
    if isinstance(attention, Attention) and attention.kv_heads < attention.heads:
        found.append(f"{attention.kv_heads} KV heads for {attention.heads}")
    found += [phrase for name, phrase in PHRASES.items() if name in features(model) & _OTHER_MIXERS]
    if isinstance(feed, Experts):
        found.append(f"{feed.num_experts} experts")
    elif feed is not None and (feed.gated or feed.ffn != 4 * model.hidden):
        found.append(f"{'a gated' if feed.gated else 'a'} feed-forward of {feed.ffn / model.hidden:.3g} h")
    if not model.tied_embeddings:
        found.append("an output head of its own")
    return f"the model has {', '.join(found)}" if found else ""


def _states(model: ModelSpec, work: Workload, estimate: Estimate) -> SimpleRow:
    """Weights, gradients, master and optimizer on the fullest stage."""
    layout, memory = estimate.layout, estimate.memory
    held = memory.stages[memory.peak_stage].breakdown if memory else {}
    parts = simple.state_bytes(estimate.params.total / (layout.tp * layout.pp), _RECIPES[work.grad_dtype])
    sharded = {0: (), 1: ("master", "optimizer"), 2: ("gradients", "master", "optimizer"), 3: _STATES}[layout.zero]
    ranks = max(layout.dp_shard, 1)
    total = sum(parts[name] / (ranks if name in sharded else 1) for name in _STATES)
    reason = "stages hold embedding and head unevenly, and the vocabulary is padded"
    if model.is_moe:
        reason += "; experts are split by EP and sharded over their own ranks, not by TP"
    if work.optimizer != "adamw":
        reason += f"; the formula is Adam's, not {work.optimizer}'s"
    return SimpleRow(
        quantity="states per GPU",
        formula=f"P / (tp pp) x ({_per_parameter(work, sharded, ranks)})",
        simple=total,
        exact=sum(held.get(name, 0) for name in _STATES),
        unit="bytes",
        parting=reason,
    )


def _per_parameter(work: Workload, sharded: tuple[str, ...], ranks: int) -> str:
    table = simple.STATE_BYTES[_RECIPES[work.grad_dtype]]
    whole = sum(size for name, size in table.items() if name not in sharded)
    split = sum(size for name, size in table.items() if name in sharded)
    return " + ".join([str(whole)] * bool(whole) + [f"{split} / {ranks}"] * bool(split))


def _variant(layout: ResolvedLayout) -> simple.ActivationVariant:
    """The formula of Korthikanti et al. for this layout."""
    if layout.recompute.kind == "full":
        return "full-sp" if layout.sequence_parallel else "full"
    if layout.recompute.kind == "selective":
        if layout.tp == 1:
            return "selective"
        return "tp-sp-selective" if layout.sequence_parallel else "tp-selective"
    if layout.tp == 1:
        return "none"
    return "tp-sp" if layout.sequence_parallel else "tp"


def _layer_bytes(model: ModelSpec, work: Workload, layout: ResolvedLayout) -> float:
    attention = softmax_attention(model.kinds[-1].mixer)
    heads = attention.heads if attention is not None else 0
    s = -(-work.seq_len // layout.cp)
    return simple.activation_bytes_per_layer(s, layout.micro_batch, model.hidden, heads, layout.tp, _variant(layout))


_ACTIVATIONS_PART = (
    "fused attention keeps no s x s matrix and there is no dropout mask; KV heads, gate and fusion change the rest"
)


def _layer(model: ModelSpec, work: Workload, layout: ResolvedLayout, kernel: Kernel) -> SimpleRow:
    """Activations that one block (the model's last kind) keeps of one micro-batch."""
    kept = kernel.variants.saved if layout.recompute.kind == "none" else kernel.variants.kept
    return SimpleRow(
        quantity="activations of a layer",
        formula=_FORMULAS[_variant(layout)] + (", s / cp" if layout.cp > 1 else ""),
        simple=_layer_bytes(model, work, layout),
        exact=float(np.floor(kept[0, kernel.blocks - 1])),
        unit="bytes",
        parting=_ACTIVATIONS_PART,
    )


_FORMULAS: dict[str, str] = {
    "none": "s b h (34 + 5 a s / h)",
    "tp": "s b h (10 + 24 / t + 5 a s / h t)",
    "tp-sp": "s b h (34 + 5 a s / h) / t",
    "selective": "34 s b h",
    "tp-selective": "s b h (10 + 24 / t)",
    "tp-sp-selective": "34 s b h / t",
    "full": "2 s b h",
    "full-sp": "2 s b h / t",
}


def _stage(model: ModelSpec, work: Workload, estimate: Estimate) -> SimpleRow:
    """Activations that the first stage holds at its peak."""
    layout = estimate.layout
    held = (
        float(layout.num_micro_batches)
        if layout.schedule == "afab"
        else simple.in_flight(layout.pp, layout.num_micro_batches, 0, layout.vpp)
    )
    blocks = model.layers / layout.pp
    exact = estimate.memory.stages[0].breakdown.get("activations", 0) if estimate.memory else 0
    return SimpleRow(
        quantity="activations of stage 0",
        formula=f"a layer x {blocks:g} layers x {held:.3g} micro-batches in flight",
        simple=_layer_bytes(model, work, layout) * blocks * held,
        exact=exact,
        unit="bytes",
        parting="as a layer; the exact count adds the working set, the embedding's output and uneven stages",
    )


def _flops(model: ModelSpec, work: Workload, estimate: Estimate, *, causal: bool) -> SimpleRow:
    """Model FLOPs of a step; the parameters are those of matrix products: no look-up, but the head."""
    counts = count_params(model)
    used = counts.active - counts.embedding + (model.hidden * model.vocab if model.tied_embeddings else 0)
    widths = [(run.count, sum(attention_widths(run.block.mixer)) / 2) for run in model.runs]
    width = sum(layers * each for layers, each in widths) / model.layers
    exact = estimate.flops_per_token.causal if causal else estimate.flops_per_token.noncausal
    return SimpleRow(
        quantity=f"FLOPs of a step, {'causal' if causal else 'noncausal'}",
        formula="tokens x (6 P + 12 L a d s" + (" / 2)" if causal else ")"),
        simple=simple.compute_flops(
            used, work.tokens_per_batch, model.layers, round(width), work.seq_len, causal=causal
        ),
        exact=exact * work.tokens_per_batch,
        unit="flops",
        parting="norms and biases are parameters without matrix products"
        + ("; windowed layers attend less" if _windowed(model) else "")
        + ("; states have products of their own" if features(model) & _STATES_MIXERS else ""),
    )


_STATES_MIXERS = frozenset({"gated-delta-net", "mamba", "mamba2", "side-by-side"})


def _windowed(model: ModelSpec) -> bool:
    return not features(model).isdisjoint(("window", "chunked-attention", "sparse-attention"))


def _bubble(estimate: Estimate) -> SimpleRow:
    layout = estimate.layout
    parts = estimate.step.breakdown_s if estimate.step else {}
    busy = sum(parts.get(name, 0.0) for name in ("compute", "host", "recompute", "tp", "cp", "ep"))
    return SimpleRow(
        quantity="bubble over busy time",
        formula="(p - 1) / m" + (" / v" if layout.vpp > 1 else ""),
        simple=simple.bubble_fraction(layout.pp, layout.num_micro_batches, layout.vpp),
        exact=parts.get("bubble", 0.0) / busy if busy else 0.0,
        unit="ratio",
        parting="stages differ: on the slowest one the bubble is what the others leave it to wait",
    )


def _break_even(cluster: Cluster, estimate: Estimate, work: Workload) -> SimpleRow:
    """Tokens per GPU and step from which pure data parallelism hides its reduction."""
    step = estimate.step
    achieved = step.tokens_per_s_per_gpu * estimate.flops_per_token.hardware if step else 0.0
    limit = dp_limit(cluster, achieved)
    return SimpleRow(
        quantity="tokens per GPU that DP needs",
        formula="achieved FLOP/s / link bytes/s",
        simple=limit.tokens_first_order,
        exact=limit.tokens_with_latency,
        unit="tokens",
        parting=f"the ring's latency; this step has {work.tokens_per_batch / cluster.gpus:,.0f} tokens per GPU",
    )
