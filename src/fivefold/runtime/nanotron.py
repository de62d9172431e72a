"""nanotron 0.5 as the Ultra-Scale Playbook ran it: flash-attn 2, its own tensor-parallel layers, ZeRO-1, 1F1B."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.runtime.megatron import PROFILE as MEGATRON

PROFILE = replace(
    MEGATRON,
    name="nanotron",
    versions="0.4 to 0.5",
    oldest=(0, 4),
    newest=(0, 5),
    aliases=(),
    optimizers=("adamw",),
    precisions=("bf16",),
    zero_stages=(0, 1),
    other_zero_stages="",
    schedules=("afab", "1f1b"),
    attention_kernels=("fa2",),
    vocab_multiple=1,
    norms_fused_into_linears=False,
    fp8_saves_inputs=False,
    fused_glu=False,
    cached_wgrad_buffers=False,
    head_wgrad_placeholder=False,
    loss_bytes_per_logit=8,
    gather_buffers=2,
    replica_bucket_bytes=2,
    micro_batch_grad_bytes=2,
    sharded_reduced_at_once=True,
    whole_clip_bytes=12,
    loss_moved_bytes=(38, 14),
    wgrad_bytes=12,
    grad_buckets=0,
    first_rank_buckets=False,
    shared_buckets=(0,),
    gradients_checked=False,
    gradients_scaled=False,
    tp_beside_dgrad_hidden=1.0,
    tp_beside_wgrad_hidden=1.0,
    fragmentation=0.28,
    states_fragment=False,
    tp_overlap_hidden=0.5,
    ep_overlap_hidden=0.0,
    launch_host_s=0.643e-4,
    unpack_host_s=1e-5,
    time_spread=0.065,
    sources={
        **MEGATRON.sources,
        "weight_bytes": "nanotron's bf16 parameters beside fp32 accumulators and masters (FP32GradientAccumulator)",
        "schedules": "nanotron parallel/pipeline_parallel/engine.py: AllForwardAllBackward, OneForwardOneBackward",
        "attention_kernels": "nanotron calls the flash-attn package, version 2 (from memory)",
        "fp8_saves_inputs": "fp8 is not in its released trainer (from memory)",
        "loss_bytes_per_logit": (
            "nanotron models/llama.py and parallel/tensor_parallel/functional.py: fp32 logits beside the fp32 softmax, "
            "which becomes its own gradient in place"
        ),
        "gather_buffers": (
            "nanotron parallel/tensor_parallel/functional.py: column-parallel layers gather their inputs, row-parallel "
            "ones their outputs' gradients into one MemoryBuffer each (tp_recompute_allgather, on by default)"
        ),
        "replica_bucket_bytes": "nanotron trainer.py: DistributedDataParallel around bf16 parameters without ZeRO",
        "micro_batch_grad_bytes": (
            "nanotron optim/gradient_accumulator.py: bf16 gradients are added to the fp32 ones after the whole backward"
        ),
        "sharded_reduced_at_once": (
            "nanotron trainer.py: _init_model wraps no DistributedDataParallel around sharded states with fp32 "
            "accumulation; training_step says reduce_scatter=False: one all-reduce of the fp32 gradients after backward"
        ),
        "whole_clip_bytes": (
            "nanotron optim/clip_grads.py: with an accumulator the norm reads (4) and the clipping scales (8) all fp32 "
            "gradients, sharded states or not"
        ),
        "loss_moved_bytes": (
            "nanotron parallel/tensor_parallel/functional.py, one fp32 PyTorch kernel an operation: cast, maximum, "
            "subtraction, exponential, sum, division; scaling and cast backward"
        ),
        "gradients_checked": "nothing looks at them",
        "gradients_scaled": "nanotron optim/gradient_accumulator.py: the collective takes the average",
        "wgrad_bytes": "FP32GradientAccumulator adds each bf16 gradient to an fp32 buffer after backward made it",
        "shared_buckets": "nanotron trainer.py, _init_model, read at 004a89cae0: one DistributedDataParallel, of all",
        "tp_overlap_hidden": "from memory: tp_linear_async_communication gathers beside a part of the product",
        "tp_beside_dgrad_hidden": (
            "nanotron parallel/tensor_parallel/functional.py: column-parallel layers gather beside dgrad"
        ),
        "tp_beside_wgrad_hidden": "the same file: and scatter beside wgrad, for which it waits last",
        "tp_in_step": "as megatron: the same links and library",
        "workspace_bytes": "as megatron: the same libraries",
        "fragmentation": (
            "fit: the Ultra-Scale Playbook's largest micro-batches of 3.57B with tensor and without sequence "
            "parallelism (3, 8, 12, 16 and 20, each within one sequence), without expandable segments and with tensors "
            "that communication streams hold on to"
        ),
        "states_fragment": (
            "nanotron optim/gradient_accumulator.py: masters and gradients are one flat buffer each, allocated before "
            "the first step and never freed; PyTorch's allocator gives large buffers segments of their own"
        ),
        "unpack_host_s": (
            "nanotron optim/zero.py, _all_gather_params, and distributed.py, all_gather_coalesced: every rank's slice "
            "of every tensor is cut, flattened and copied back by a kernel of its own. Python's part of it took 4 us "
            "on the CPU of a desktop's pace, a launch as much again (from memory), a cloud's host a quarter longer"
        ),
        "launch_host_s": "as deepspeed: modules of plain PyTorch",
        "time_spread": "as megatron",
    },
)
# The main branch of April 2026 (2411b022): ring attention for Qwen2 models; what it keeps and moves is the same.
MAIN = replace(PROFILE, versions="2026.4 to 2026.12 (the main branch, by month)", oldest=(2026, 4), newest=(2026, 12))
