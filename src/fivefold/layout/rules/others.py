"""Rules of the runtimes that are described by what they lack: nanotron, and DeepSpeed with Megatron's layers."""

from __future__ import annotations

from fivefold.layout.rules.common import A2A
from fivefold.layout.rules.rule import Rule

OTHERS: tuple[Rule, ...] = (
    Rule(
        id="nanotron-cp",
        option="--cp",
        field="cp",
        runtimes=("nanotron",),
        holds=lambda c, x: c.cp == 1,
        message="--cp {cp}: nanotron has no context parallelism. Shard long sequences with --tp instead.",
        source="nanotron 0.5, ParallelismArgs: dp, pp, tp and expert_parallel_size (from memory)",
    ),
    Rule(
        id="nanotron-experts",
        option="MODEL",
        field=None,
        runtimes=("nanotron",),
        holds=lambda c, x: not x.is_moe,
        message="{model} has experts; nanotron's mixtures of experts are an example and not modelled here.",
        source="nanotron 0.5, examples/moe (from memory)",
    ),
    Rule(
        id="deepspeed-cp-kind",
        option="--cp-kind",
        field="cp_kind",
        others=("cp",),
        runtimes=("deepspeed", "deepspeed-zero"),
        holds=lambda c, x: (c.cp == 1) | (c.cp_kind == A2A),
        message="DeepSpeed shards sequences by exchanging heads (Ulysses), not in a ring: choose --cp-kind a2a.",
        source="DeepSpeed sequence/layer.py, DistributedAttention (from memory)",
    ),
    Rule(
        id="deepspeed-zero-pp",
        option="--pp",
        field="pp",
        runtimes=("deepspeed-zero",),
        holds=lambda c, x: c.pp == 1,
        message="--pp {pp}: DeepSpeed's ZeRO 2 and 3 go with no pipeline. Choose --pp 1, or --runtime deepspeed.",
        source="DeepSpeed runtime/pipe/engine.py: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
    ),
)
