"""Megatron-DeepSpeed, and Megatron-LM before Transformer Engine (2020 to 2022): modules of plain PyTorch with a few
fused kernels, gradients added to the accumulator by a kernel of their own."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.runtime.megatron import PROFILE as MEGATRON
from fivefold.runtime.torchtitan import PROFILE as TORCHTITAN

_LAUNCH = "fit: vTrain's single-node A100 runs, blocks of hidden 1,024 at micro-batch 1 and tp 1: 3.0 ms, 34 operations"

PROFILE = replace(
    MEGATRON,
    name="deepspeed",
    versions="Megatron-DeepSpeed with DeepSpeed 0.5 to 0.18",
    oldest=(0, 5),
    newest=(0, 18),
    aliases=("megatron-deepspeed",),
    optimizers=("adamw",),
    precisions=("bf16", "fp16"),
    schedules=("1f1b",),
    attention_kernels=("fa2",),
    norms_fused_into_linears=False,
    fp8_saves_inputs=False,
    cached_wgrad_buffers=False,
    head_wgrad_placeholder=False,
    wgrad_bytes=12,
    loss_moved_bytes=(38, 14),
    tp_beside_dgrad_hidden=0.0,
    tp_overlap_hidden=0.0,
    ep_overlap_hidden=0.0,
    step_overhead_s=0.002,
    launch_host_s=0.9e-4,
    time_spread=0.13,
    sources={
        **MEGATRON.sources,
        "weight_bytes": "fp16 weights and fp32 masters (Rajbhandari et al. 2020, section 3.1)",
        "schedules": "DeepSpeed runtime/pipe/schedule.py: TrainSchedule is 1F1B",
        "attention_kernels": "from memory: --use-flash-attn calls the flash-attn package",
        "fp8_saves_inputs": "no fp8",
        "loss_moved_bytes": (
            "Megatron-LM mpu/cross_entropy.py, from memory: one fp32 PyTorch kernel each for cast, maximum, "
            "subtraction, exponential, sum and division; scaling and cast backward"
        ),
        "wgrad_bytes": "from memory: ZeRO's hooks add each gradient to a flat buffer",
        "tp_beside_dgrad_hidden": "from memory: asynchronous tensor-parallel all-reduce came with Megatron-LM 3.0",
        "tp_in_step": "as megatron: the same links and library",
        "tp_overlap_hidden": "no such switch",
        "ep_overlap_hidden": "no such switch",
        "workspace_bytes": "as megatron: the same libraries",
        "fragmentation": "as megatron",
        "step_overhead_s": "fit: vTrain's single-node A100 runs, what is left of a step without its blocks",
        "launch_host_s": _LAUNCH,
        "time_spread": "as torchtitan: plain PyTorch",
    },
)
# ZeRO-2 and 3: DeepSpeed's own sharding, which gathers module by module as FSDP does.
SHARDED = replace(
    TORCHTITAN,
    name="deepspeed-zero",
    versions="0.5 to 0.18",
    oldest=(0, 5),
    newest=(0, 18),
    aliases=("zero-3",),
    optimizers=("adamw",),
    precisions=("bf16", "fp16"),
    checkpoint_stops_early=False,
    selective_by_operation=False,
    tp_overlap_hidden=0.0,
    launch_host_s=0.9e-4,
    sources={
        **TORCHTITAN.sources,
        "weight_bytes": "Rajbhandari et al. 2020, section 5.3: parameters stay sharded, the gathered copy is 16-bit",
        "prefetch_blocks": "DeepSpeed documentation: stage3_prefetch_bucket_size gathers ahead of use",
        "checkpoint_stops_early": "from memory: DeepSpeed's own checkpointing recomputes whole blocks",
        "tp_overlap_hidden": "no such switch",
        "launch_host_s": _LAUNCH,
    },
)
