"""What runs on DeepSpeed or looks like it: Megatron-DeepSpeed, GPT-NeoX, Colossal-AI."""

from __future__ import annotations

from fivefold.measure.frameworks.line import FLASH_USUAL, HALF_GRADIENTS, Framework

LINES: tuple[Framework, ...] = (
    Framework(
        starts=("megatron-deepspeed", "megatron+deepspeed", "megatron deepspeed", "deepspeed megatron"),
        runtime="deepspeed",
        sharded="deepspeed-zero",
        zero=0,
        shards_to_fit=True,
        sequence_parallel=False,
        unfused_until="9999",
        drops_out=True,
        recomputes_in_part=False,
        precision="fp16",
        overlap="off",
        source="Megatron-DeepSpeed's GPT examples: --fp16, no --use-flash-attn, --checkpoint-activations for all "
        "blocks or none (from memory)",
    ),
    Framework(
        starts=("hf trainer + deepspeed", "deepspeed", "zero"),
        split_as="megatron-deepspeed",  # whose the layers of its 3D parallelism are
        runtime="deepspeed",
        sharded="deepspeed-zero",
        zero=3,
        zero_of_mixtures=2,  # "MoE not supported with Stage 3" (deepspeed/runtime/engine.py, from memory)
        stage_in_notes=True,
        recomputes_in_part=False,
        precision="fp16",
        unfused_until=FLASH_USUAL,
        source="DeepSpeed's documentation: ZeRO is the reason to use it; its models are transformers' and Megatron's, "
        "which checkpoint all blocks or none (from memory)",
    ),
    Framework(
        starts=("gpt-neox", "neox"),
        runtime="deepspeed",
        sharded="deepspeed-zero",
        recomputes_in_part=False,
        precision="fp16",
        sequence_parallel=False,
        half=HALF_GRADIENTS,
        overlap="hooks",
        unfused_until=FLASH_USUAL,
        source="GPT-NeoX configs/20B.yml, read at 252ddc522f: Megatron's layers, DeepSpeed's ZeRO-1 with overlap_comm, "
        "fp16; DeepSpeed reduces from hooks in the last micro-batch's backward, its pipeline engine after it, and its "
        "optimizer gathers parameters; sequence parallelism came in 2024 (from memory)",
    ),
    Framework(
        starts=("colossal",),
        runtime="deepspeed",
        sharded="deepspeed-zero",
        stands_in=True,
        zero=0,
        shards_to_fit=True,
        sequence_parallel=False,
        unfused_until=FLASH_USUAL,
        grad_dtype="bf16",
        source="plugins around transformers' models, in plain PyTorch with few fused kernels; HybridParallelPlugin's "
        "enable_sequence_parallelism is off; zero/low_level keeps gradients in the parameters' dtype beside fp32 "
        "masters (from memory)",
    ),
)
