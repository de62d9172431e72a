"""Rules of every runtime on the degrees: the arithmetic of two grids, of the batch, and of what each axis cuts.

Columns are written `c`, the context `x`. Rules that refuse most of a blind search come first: later ones then see
fewer rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fivefold.layout.columns import Columns
from fivefold.layout.rules.common import A2A, kv_shares, without_a2a
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Holds, Rule

ARITHMETIC = "arithmetic of the two grids: world = tp·cp·dp·pp = etp·ep·edp·pp"


def _range_rule(field: str, option: str, low: int, high: Callable[[Context], int], high_text: str) -> Rule:
    def holds(c: Columns, x: Context) -> Holds:
        column = getattr(c, field)
        return (column >= low) & (column <= high(x))

    return Rule(
        id=f"{field.replace('_', '-')}-range",
        option=option,
        field=field,
        gate=True,
        holds=holds,
        message=f"{option} {{value}} is out of range: it has to be {low} to {high_text}.",
        source="definition of the degree",
    )


def _world(x: Context) -> int:
    return x.world


RANGES: tuple[Rule, ...] = (
    _range_rule("tp", "--tp", 1, _world, "the {world} GPUs"),
    _range_rule("cp", "--cp", 1, _world, "the {world} GPUs"),
    _range_rule("pp", "--pp", 1, _world, "the {world} GPUs"),
    _range_rule("ep", "--ep", 1, _world, "the {world} GPUs"),
    _range_rule("etp", "--etp", 1, _world, "the {world} GPUs"),
    _range_rule("dp_replicate", "--dp-replicate", 1, _world, "the {world} GPUs"),
    _range_rule("vpp", "--vpp", 1, lambda x: x.layers, "the {layers} blocks"),
    _range_rule("micro_batch", "--micro-batch", 1, lambda x: x.work.global_batch, "the global batch of {gbs}"),
    _range_rule("zero", "--zero", 0, lambda x: 3, "3"),
)


def _a2a_kv(c: Columns, x: Context) -> Holds:
    free = without_a2a(c)
    if free.all():
        return True
    fits: Holds = True
    for share in kv_shares(c, x):
        fits = fits & ((share % c.cp == 0) | (c.cp % share == 0))
    return free | fits


def _whole_batches(c: Columns, x: Context) -> list[Any]:
    unit = int(c.micro_batch[0] * max(int(c.dp[0]), 1))
    below = x.work.global_batch // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def _whole_sequences(c: Columns, x: Context) -> list[Any]:
    unit = int(c.cp[0] * c.tp[0])
    if c.cp[0] > 1 and unit % (2 * int(c.cp[0])):
        unit *= 2
    below = x.work.seq_len // unit * unit
    return [length for length in (below, below + unit) if length > 0]


DEGREES: tuple[Rule, ...] = (
    *RANGES,
    Rule(
        id="world-divides",
        option="--tp",
        field="tp",
        others=("pp", "cp"),
        holds=lambda c, x: x.world % (c.tp * c.cp * c.pp) == 0,
        message="tp {tp} · cp {cp} · pp {pp} does not divide the {world} GPUs, so there is no whole number "
        "of replicas.",
        source=ARITHMETIC,
    ),
    Rule(
        id="global-batch-divides",
        moot_after=("world-divides",),
        option="--global-batch",
        field=None,
        values=_whole_batches,
        holds=lambda c, x: x.work.global_batch % np.maximum(c.micro_batch * c.dp, 1) == 0,
        message="The global batch of {gbs} sequences is not a multiple of micro-batch {micro_batch} · dp {dp}.",
        source="Megatron-LM num_microbatches_calculator (read at 00caa53af3); DeepSpeed edaa72212 has the same",
    ),
    Rule(
        id="heads-tp",
        option="--tp",
        field="tp",
        holds=lambda c, x: x.heads % c.tp == 0,
        message="--tp {tp} does not divide the {heads} attention heads.",
        source="Megatron-Core transformer_config; torchtitan b5bcd76c6 (n_heads); nanotron 2411b022",
    ),
    Rule(
        id="ep-needs-experts",
        option="--ep",
        field="ep",
        holds=lambda c, x: True if x.is_moe else c.ep == 1,
        message="--ep {ep} spreads experts, and {model} has none.",
        source="Megatron-Core transformer_config: num_moe_experts must be set to use expert parallelism",
    ),
    Rule(
        id="etp-needs-experts",
        option="--etp",
        field="etp",
        holds=lambda c, x: True if x.is_moe else c.etp == 1,
        message="--etp {etp} splits experts, and {model} has none.",
        source=ARITHMETIC,
    ),
    Rule(
        id="expert-world-divides",
        option="--ep",
        field="ep",
        others=("etp", "pp"),
        holds=lambda c, x: x.world % (c.etp * c.ep * c.pp) == 0 if x.is_moe else True,
        message="etp {etp} · ep {ep} · pp {pp} does not divide the {world} GPUs, which the experts' grid has to fill.",
        source="Megatron-Core parallel_state, d98e8a64dd: world size over ETP·EP·PP",
    ),
    Rule(
        id="experts-ep",
        option="--ep",
        field="ep",
        holds=lambda c, x: x.experts % c.ep == 0 if x.is_moe else True,
        message="--ep {ep} does not divide the {experts} experts.",
        source="Megatron-Core transformer_config, d98e8a64dd; torchtitan b5bcd76c6; DeepSpeed edaa72212",
    ),
    Rule(
        id="expert-ffn-etp",
        option="--etp",
        field="etp",
        holds=lambda c, x: x.expert_ffn % c.etp == 0 if x.is_moe else True,
        message="--etp {etp} does not divide the experts' intermediate size of {expert_ffn}.",
        source="Megatron-Core tensor_parallel, d98e8a64dd: an output size divides by the expert TP size",
    ),
    Rule(
        id="ffn-tp",
        option="--tp",
        field="tp",
        holds=lambda c, x: x.dense_ffn % c.tp == 0 if x.dense_ffn else True,
        message="--tp {tp} does not divide the intermediate size of {dense_ffn} (dense feed-forward or "
        "shared experts).",
        source="Megatron-Core tensor_parallel, d98e8a64dd ('X is not divisible by Y'); nanotron 2411b022",
    ),
    Rule(
        id="hidden-tp",
        option="--tp",
        field="tp",
        holds=lambda c, x: x.model.hidden % c.tp == 0,
        message="--tp {tp} does not divide the hidden size of {hidden}.",
        source="Megatron-Core tensor_parallel, d98e8a64dd ('X is not divisible by Y')",
    ),
    Rule(
        id="sequence-parallel-needs-tp",
        option="--sequence-parallel",
        field="sp",
        holds=lambda c, x: ~c.sp | (c.tp > 1),
        message="Sequence parallelism splits the sequence over the TP ranks, and --tp is 1.",
        source="Megatron-Core model_parallel_config, d98e8a64dd (its command line turns SP off with a warning instead)",
    ),
    Rule(
        id="sequence-parallel-seq",
        moot_after=("heads-tp", "hidden-tp"),
        option="--seq-len",
        field=None,
        values=lambda c, x: _whole_sequences(c, x),
        holds=lambda c, x: ~c.sp | (x.work.seq_len % (c.cp * c.tp) == 0),
        message="Sequence parallelism needs a sequence length ({seq}) that cp {cp} · tp {tp} divides.",
        source="Megatron-LM d98e8a64dd: (seq/CP) % TP, which fails only once the job runs",
    ),
    Rule(
        id="cp-ring-seq",
        option="--cp",
        field="cp",
        holds=lambda c, x: (c.cp == 1) | (c.cp_kind == A2A) | (x.work.seq_len % (2 * c.cp) == 0),
        message="Ring attention balances the causal mask by two chunks per rank: 2 · cp = 2 · {cp} has to divide the "
        "sequence length {seq}.",
        source="Megatron-LM d98e8a64dd: seq % (2·CP); nanotron 2411b022 ring attention",
    ),
    Rule(
        id="cp-a2a-seq",
        option="--cp",
        field="cp",
        holds=lambda c, x: without_a2a(c) | (x.work.seq_len % c.cp == 0),
        message="--cp {cp} does not divide the sequence length {seq}.",
        source="DeepSpeed edaa72212, Ulysses",
    ),
    Rule(
        id="cp-a2a-heads",
        option="--cp",
        field="cp",
        holds=lambda c, x: without_a2a(c) | (x.heads % (c.tp * c.cp) == 0),
        message="All-to-all context parallelism gives each rank whole heads: tp {tp} · cp {cp} has to divide the "
        "{heads} attention heads.",
        source="DeepSpeed edaa72212, Ulysses; NVIDIA's documentation of cp_comm_type a2a",
    ),
    Rule(
        id="cp-a2a-kv-heads",
        option="--cp",
        field="cp",
        holds=_a2a_kv,
        message="All-to-all context parallelism needs cp {cp} and the KV heads of one TP rank ({kv_heads} "
        "over tp {tp}) "
        "to divide one another.",
        source="DeepSpeed edaa72212, Ulysses: kv % SP or SP % kv",
    ),
    Rule(
        id="cp-window",
        option="--cp-kind",
        field="cp_kind",
        others=("cp",),
        holds=lambda c, x: (c.cp == 1) | (c.cp_kind == A2A) if x.has_window else True,
        message="{model} has sliding-window attention, which ring context parallelism does not do; only a2a does.",
        source="Transformer Engine context_parallel: a sliding window needs a2a or all_gather (quoted in a third "
        "party's notes; not opened)",
    ),
    Rule(
        id="learned-positions",
        option="--seq-len",
        field=None,
        values=lambda c, x: [x.model.learned_positions],
        holds=lambda c, x: not x.model.learned_positions or x.work.seq_len <= x.model.learned_positions,
        message="{model} has a learned table of {positions} positions, too few for sequences of {seq}.",
        source="Megatron-LM d98e8a64dd: max_position_embeddings >= seq_length",
    ),
)
