"""Rules of DeepSpeed: its pipeline with Megatron's layers (`deepspeed`), and ZeRO 2 and 3 (`deepspeed-zero`) with
Ulysses sequence parallelism and AutoTP tensor parallelism.

"edaa72212" stands for a list of checks made from that revision (August 2026). Not expressible in a layout, so left to
the exporters: elasticity beside explicit batch keys, fp16 and bf16 both, allreduce operations, position ids.
"""

from __future__ import annotations

from fivefold.layout.columns import CORE_ATTENTION_MASK, Columns
from fivefold.layout.rules.common import A2A, kv_divides, runs_schedule
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Holds, Rule

_BOTH = ("deepspeed", "deepspeed-zero")
_ZERO = ("deepspeed-zero",)


def _ep(c: Columns, x: Context) -> Holds:
    return (c.ep == 1) | (c.dp % c.ep == 0) if x.is_moe else True


DEEPSPEED: tuple[Rule, ...] = (
    Rule(
        id="deepspeed-cp-kind",
        option="--cp-kind",
        field="cp_kind",
        others=("cp",),
        runtimes=_BOTH,
        holds=lambda c, x: (c.cp == 1) | (c.cp_kind == A2A),
        message="DeepSpeed shards sequences by exchanging heads (Ulysses), not in a ring: choose --cp-kind a2a.",
        source="DeepSpeed sequence/layer.py, DistributedAttention (from memory)",
    ),
    Rule(
        id="deepspeed-zero-pp",
        option="--pp",
        field="pp",
        runtimes=_ZERO,
        holds=lambda c, x: c.pp == 1,
        message="--pp {pp}: DeepSpeed's ZeRO 2 and 3 go with no pipeline. Choose --pp 1, or --runtime deepspeed.",
        source="DeepSpeed runtime/pipe/engine.py: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
    ),
    Rule(
        id="deepspeed-kv-heads",
        moot_after=("heads-tp",),
        option="--tp",
        field="tp",
        runtimes=_BOTH,
        holds=kv_divides,
        message="--tp {tp} does not divide the {kv_heads} key/value heads, which DeepSpeed's tensor parallelism does "
        "not replicate.",
        source="DeepSpeed issue 7259, a maintainer's word on AutoTP; edaa72212",
    ),
    Rule(
        id="deepspeed-autotp-zero3",
        option="--zero",
        field="zero",
        others=("tp",),
        runtimes=_ZERO,
        holds=lambda c, x: (c.zero != 3) | (c.tp == 1),
        message="AutoTP (--tp {tp}) trains with ZeRO 0 to 2, not with --zero 3.",
        source="DeepSpeed tutorial 'Automatic Tensor Parallelism (Training)': ZeRO stage 0, 1 or 2; edaa72212",
    ),
    Rule(
        id="deepspeed-autotp-version",
        option="--tp",
        field="tp",
        runtimes=_ZERO,
        before=(0, 16),
        holds=lambda c, x: c.tp == 1,
        message="--tp {tp}: AutoTP trains since DeepSpeed 0.16.",
        source="DeepSpeed blogs/huggingface-tp: deepspeed >= 0.16.4",
    ),
    Rule(
        id="deepspeed-autotp-sp",
        option="--sequence-parallel",
        field="sp",
        runtimes=_ZERO,
        holds=lambda c, x: ~c.sp,
        message="AutoTP all-reduces after each pair of products; it has no sequence parallelism between them. Choose "
        "--no-sequence-parallel.",
        source="DeepSpeed module_inject, LinearAllreduce (from memory)",
    ),
    Rule(
        id="deepspeed-ulysses-zero3",
        option="--zero",
        field="zero",
        others=("cp",),
        runtimes=_ZERO,
        before=(0, 17),
        holds=lambda c, x: (c.zero != 3) | (c.cp == 1),
        message="Ulysses (--cp {cp}) with --zero 3 stops at a parameter gather in this version; ZeRO 2 works.",
        source="DeepSpeed issue 6582 (September 2024); 0.17 brought Ulysses with ZeRO-3 (from memory: ALST)",
    ),
    Rule(
        id="deepspeed-ep",
        moot_after=("world-divides", "experts-ep"),
        option="--ep",
        field="ep",
        runtimes=_BOTH,
        holds=_ep,
        message="--ep {ep} has to divide the {dp} data-parallel ranks: DeepSpeed cuts its expert groups from them.",
        source="DeepSpeed edaa72212: ep_size no more than DP, world divided by it",
    ),
    Rule(
        id="deepspeed-recompute-modules",
        option="--recompute-modules",
        field="recompute_modules",
        runtimes=("deepspeed",),
        holds=lambda c, x: (c.recompute_modules == 0) | (c.recompute_modules == CORE_ATTENTION_MASK),
        message="Selective recomputation is that of the attention core here; modules cannot be named.",
        source="Megatron-DeepSpeed arguments.py: --recompute-granularity, without modules (from memory)",
    ),
    Rule(
        id="schedule-runtime",
        option="--schedule",
        field="schedule",
        others=("vpp",),
        runtimes=(*_BOTH, "nanotron", "accelerate", "fsdp1"),
        holds=runs_schedule,
        message="{runtime} does not run schedule {schedule}; it has {schedules}.",
        source="DeepSpeed runtime/pipe/schedule.py; nanotron parallel/pipeline_parallel/engine.py",
    ),
)
