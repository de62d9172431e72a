"""DeepSpeed: Megatron-DeepSpeed, and Megatron-LM before Transformer Engine (2020 to 2022), whose modules are plain
PyTorch with a few fused kernels and add gradients to the accumulator by a kernel; and ZeRO 2 and 3, with AutoTP."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.runtime.megatron import PROFILE as MEGATRON
from fivefold.runtime.torchtitan import PROFILE as TORCHTITAN

# vTrain's steps are sums of traces of one block, embedding and head alone on an A100, under CUPTI (docs/accuracy.md).
_LAUNCH = (
    "fit: vTrain's trace of a block of hidden 1,024 at micro-batch 1 and tp 1 on an A100: 3.0 ms, 34 operations, "
    "over the 1.4 of its host"
)

PROFILE = replace(
    MEGATRON,
    name="deepspeed",
    versions="Megatron-DeepSpeed with DeepSpeed 0.5 to 0.18",
    oldest=(0, 5),
    newest=(0, 18),
    aliases=("megatron-deepspeed",),
    other_zero_stages="ZeRO 2 and 3 are --runtime deepspeed-zero.",
    optimizers=("adamw",),
    precisions=("bf16", "fp16"),
    schedules=("1f1b",),
    attention_kernels=("fa2",),
    norms_fused_into_linears=False,
    fp8_saves_inputs=False,
    fused_glu=False,
    cached_wgrad_buffers=False,
    head_wgrad_placeholder=False,
    wgrad_bytes=12,
    bf16_wgrad_bytes=20,
    bf16_all_reduces=True,
    grad_buckets=500_000_000,
    grad_bucket_growth=0,
    first_rank_buckets=False,
    shared_buckets=(1,),
    offloads_in_backward=True,
    gradients_checked=False,
    gradients_scaled=False,
    loss_moved_bytes=(38, 14),
    tp_beside_dgrad_hidden=0.0,
    tp_overlap_hidden=0.0,
    ep_overlap_hidden=0.0,
    step_overhead_s=0.00143,
    launch_host_s=0.643e-4,
    time_spread=0.065,
    sources={
        **MEGATRON.sources,
        "weight_bytes": "fp16 weights and fp32 masters (Rajbhandari et al. 2020, section 3.1)",
        "schedules": "DeepSpeed runtime/pipe/schedule.py: TrainSchedule is 1F1B",
        "attention_kernels": "from memory: --use-flash-attn calls the flash-attn package",
        "fp8_saves_inputs": "no fp8",
        "fused_glu": "from memory: its SwiGLU is PyTorch's silu and product",
        "loss_moved_bytes": (
            "Megatron-LM mpu/cross_entropy.py, from memory: one fp32 PyTorch kernel each for cast, maximum, "
            "subtraction, exponential, sum and division; scaling and cast backward"
        ),
        "wgrad_bytes": "from memory: ZeRO's hooks add each gradient to a flat buffer",
        "bf16_wgrad_bytes": (
            "DeepSpeed runtime/bf16_optimizer.py, update_hp_grads: each gradient, which the product wrote (2), is cast "
            "to fp32 (6) and the copy added to the accumulator (12)"
        ),
        "bf16_all_reduces": (
            "DeepSpeed runtime/pipe/engine.py, _bf16_reduce_grads: buffered_allreduce_fallback over the fp32 gradients"
        ),
        "grad_buckets": "DeepSpeed's reduce_bucket_size: 5e8 elements; its engine.py reduces as many at a time without",
        "grad_bucket_growth": "the same, however many replicas",
        "shared_buckets": (
            "DeepSpeed runtime/zero/stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads and "
            "average_tensor, read at 02aa38c3a5: one bucket a dtype, cut by process group when it is full; without "
            "ZeRO engine.py, _get_gradients_for_reduction (007cca6a2f) keeps them apart"
        ),
        "offloads_in_backward": "ZeRO-Offload (Ren et al. 2021, from memory): gradients leave as they are made",
        "gradients_checked": "only its optimizer of fp16 looks at them",
        "gradients_scaled": (
            "not counted: DeepSpeed's allreduce_bucket multiplies 16-bit buckets after the sum (from memory), 4 bytes "
            "of each parameter once a step"
        ),
        "tp_beside_dgrad_hidden": "from memory: asynchronous tensor-parallel all-reduce came with Megatron-LM 3.0",
        "tp_in_step": "as megatron: the same links and library",
        "tp_overlap_hidden": "no such switch",
        "ep_overlap_hidden": "no such switch",
        "workspace_bytes": "as megatron: the same libraries",
        "fragmentation": "as megatron",
        "step_overhead_s": "fit: what is left of vTrain's single-node A100 steps without their blocks, over 1.4",
        "launch_host_s": _LAUNCH,
        "time_spread": "as megatron",
    },
)
# ZeRO-2 and 3: DeepSpeed's own sharding, which gathers module by module as FSDP does.
SHARDED = replace(
    TORCHTITAN,
    name="deepspeed-zero",
    versions="0.5 to 0.18",
    oldest=(0, 5),
    newest=(0, 18),
    aliases=("zero-3", "deepspeed-autotp"),
    other_zero_stages="ZeRO 0 and 1 are --runtime deepspeed.",
    optimizers=("adamw",),
    precisions=("bf16", "fp16"),
    checkpoint_stops_early=False,
    sharded_weight_bytes=2,
    unfused_norms=True,
    norms_kept_fp32=True,
    scores_kept_fp32=True,
    selective_by_operation=False,
    sharded_loss_bytes_per_logit=0,
    sharded_loss_moved_bytes=(0, 0),
    gathered_inputs_kept=False,
    pipeline_keeps_whole_gradients=False,
    gather_copy_bytes=0,
    scatter_copy_bytes=4,
    tp_overlap_hidden=0.0,
    launch_host_s=0.643e-4,
    sources={
        **TORCHTITAN.sources,
        "weight_bytes": "Rajbhandari et al. 2020, section 5.3: parameters stay sharded, the gathered copy is 16-bit",
        "sharded_weight_bytes": (
            "DeepSpeed's estimate_zero3_model_states_mem_needs: 18 bytes per parameter over the ranks (1.08 GB for 60M "
            "parameters on one), so 16-bit parts beside the fp32 ones"
        ),
        "unfused_norms": "it trains transformers' models as they are: LlamaRMSNorm, apply_rotary_pos_emb (from memory)",
        "norms_kept_fp32": "likewise",
        "scores_kept_fp32": "transformers' eager_attention_forward: softmax in fp32, then cast (from memory)",
        "prefetch_blocks": "DeepSpeed documentation: stage3_prefetch_bucket_size gathers ahead of use",
        "gather_copy_bytes": "from memory: parameters are views of the gathered buffer",
        "experts_in_block": "DeepSpeed runtime/zero/stage3.py: a bucket has one process group (IPGBucketZ3), and only "
        "experts that are spread have another",
        "scatter_copy_bytes": "from memory: each gradient is copied into the bucket that is reduced",
        "loss_bytes_per_logit": "as fsdp: transformers' models",
        "loss_moved_bytes": "as fsdp: transformers' models",
        "checkpoint_stops_early": "from memory: DeepSpeed's own checkpointing recomputes whole blocks",
        "tp_overlap_hidden": "no such switch",
        "launch_host_s": _LAUNCH,
    },
)
