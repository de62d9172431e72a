"""Megatron-LM / Megatron-Core with Transformer Engine: fused layers, flash attention, distributed optimizer."""

from fivefold.runtime.profile import Profile

_MIB = 1024**2

PROFILE = Profile(
    name="megatron",
    versions="core 0.12 to 0.17",
    oldest=(0, 12),
    newest=(0, 17),
    aliases=("megatron-lm", "megatron-core", "mcore"),
    sharding="distributed_optimizer",
    weight_bytes=2,
    optimizers=("adamw", "sgd", "muon"),
    precisions=("bf16", "fp16", "fp8", "mxfp8", "nvfp4"),
    zero_stages=(0, 1),
    other_zero_stages="Stages 2 and 3 are --runtime megatron-fsdp.",
    schedules=("1f1b", "interleaved"),
    attention_kernels=("cudnn", "aiter"),
    vocab_multiple=128,
    norms_fused_into_linears=True,
    fp8_saves_inputs=True,
    fused_glu=True,
    cached_wgrad_buffers=True,
    head_wgrad_placeholder=True,
    quantised_gathers=True,
    loss_bytes_per_logit=6,
    loss_moved_bytes=(38, 14),
    workspace_bytes=60 * _MIB,
    context_bytes=640 * _MIB,
    nccl_bytes_per_group=128 * _MIB,
    fragmentation=0.065,
    grad_buckets=40_000_000,
    first_rank_buckets=True,
    gradients_checked=True,
    gradients_scaled=True,
    prefetch_blocks=0,
    tp_beside_dgrad_hidden=1.0,
    tp_beside_wgrad_hidden=0.0,
    tp_in_step=1.2,
    tp_overlap_hidden=0.7,
    checkpoint_stops_early=False,
    ep_overlap_hidden=0.8,
    expert_extras_apart=True,
    experts_padded=True,
    stretched_rotary_apart=True,
    step_overhead_s=0.008,
    launch_host_s=1.25e-4,
    op_host_s=1.35e-5,
    group_launch_host_s=1e-5,
    dispatch_host_s=1.25e-3,
    time_spread=0.065,
    tie_spread=0.04,
    sources={
        "weight_bytes": (
            "bf16 model weights; fp32 master in the optimizer (Megatron-Core distributed optimizer "
            "documentation: 6 + 12/d bytes per parameter with fp32 gradients)"
        ),
        "schedules": "Megatron-Core pipeline_parallel/schedules, d98e8a64dd: get_forward_backward_func knows no other",
        "attention_kernels": (
            "Transformer Engine prefers cuDNN's fused attention on Hopper and later (from memory); on AMD AITER's "
            "assembly kernels where NVTE_CK_USES_BWD_V3=1, as AMD's training guides set it (Primus docs, read)"
        ),
        "vocab_multiple": "Megatron-LM argument make-vocab-size-divisible-by, default 128",
        "cached_wgrad_buffers": (
            "Transformer Engine with fused weight-gradient accumulation hands autograd one cached "
            "placeholder per weight shape; agrees with 27 single-node B200 rows to 1%"
        ),
        "norms_fused_into_linears": "Megatron-Core layer specs: TELayerNormColumnParallelLinear",
        "fp8_saves_inputs": "Transformer Engine's linear modules save the quantised input (from memory)",
        "quantised_gathers": (
            "Transformer Engine module/linear.py and base.py, read at 0004dbd023: a column-parallel layer's input and "
            "a row-parallel one's incoming gradient, are cast first, then gathered"
        ),
        "loss_bytes_per_logit": "Megatron-Core vocab-parallel cross-entropy: bf16 logits and an fp32 copy",
        "loss_moved_bytes": (
            "Megatron-Core tensor_parallel/cross_entropy.py, read at 00611e6eeb: one fp32 kernel each for cast (6), "
            "maximum (4), subtraction (8), exponential (8), sum (4) and division (8); scaling (8) and cast (6) "
            "backward. --cross-entropy-loss-fusion is off by default"
        ),
        "workspace_bytes": (
            "fit: constant left over in the single-node B200 allocations of published Megatron-LM runs "
            "(llama3-70b-12L and llama3-405b-4L, 8 layouts)"
        ),
        "fragmentation": "fit: largest reserved over allocated in the same rows; the smallest is 1.028",
        "context_bytes": "from memory: CUDA context with loaded kernels on H100, about 0.5 to 0.7 GiB",
        "nccl_bytes_per_group": "from memory: NCCL channel buffers of one communicator, about 0.1 GiB",
        "grad_buckets": "Megatron-LM: bucket size max(40,000,000, 1,000,000 x dp) elements",
        "first_rank_buckets": (
            "Megatron-Core distributed_data_parallel.py, read at 001199898c: no buckets where the pipeline rank is not "
            "0, nor in the model chunks after the first, for which Megatron-LM's training.py disables them"
        ),
        "gradients_checked": "Megatron-Core's param_and_grad_buffer.py, start_grad_sync: the norm of each bucket, "
        "unless --no-check-for-nan-in-loss-and-grad",
        "gradients_scaled": "the same: bucket.grad_data *= gradient_scaling_factor, unless --ddp-average-in-collective",
        "tp_beside_dgrad_hidden": "Korthikanti et al. 2022, section 4.2.2: the repeated all-gather is overlapped",
        "tp_in_step": (
            "fit, with nothing hidden beside wgrad, each source alike by mean absolute log error: rows with tensor "
            "parallelism of SimuMax ask for 1.1, dgxc 1.3, Megatron-Bridge 1.0, papers 1.25, nanotron 1.1, vTrain 1.3"
        ),
        "tp_overlap_hidden": "from memory: Transformer Engine userbuffers hide most but not all of the gathers",
        "ep_overlap_hidden": "from memory: Megatron-Core batch-level overlap of expert exchanges",
        "expert_extras_apart": (
            "Megatron-Core's TEGroupedMLP._apply_bias, and the clamps before the compiled kernel in fused_bias_geglu.py"
        ),
        "experts_padded": "Megatron-Core's TEGroupedMLP.forward: quantization_padding and quantization_unpadding",
        "stretched_rotary_apart": "Megatron-Core's rope_utils.py: Transformer Engine's kernel takes no mscale",
        "step_overhead_s": "from memory: host work between steps, some milliseconds",
        "launch_host_s": (
            "fit: steps of Megatron-LM's functional tests (12 blocks of hidden 512, tp 1 to 4, H100); agrees with the "
            "5 ms a block of one node's runs at tp 8"
        ),
        "op_host_s": "TransformerEngine issue 2053: one linear layer of PyTorch's, forward, on a DGX H100",
        "group_launch_host_s": (
            "from memory: Transformer Engine's grouped linear calls cuBLAS once per expert, about 10 us; fused, "
            "64 of them take 3.3 ms on GB200, or 6 us each over its host's 1.4 (TransformerEngine issue 2897)"
        ),
        "dispatch_host_s": (
            "fit, half of 2.5 ms: what a block of experts takes longer than a dense one, measured less predicted, in "
            "four pairs of Megatron-LM's functional tests that differ in the experts (1.3 to 4.4 ms; H100 and GB200)"
        ),
        "time_spread": "fit: interval score of all runtimes' judged runs, beside estimate/doubt.py (docs/accuracy.md)",
        "tie_spread": "median error of the ratio of two layouts of one problem, rounded (docs/decisions/0005-ties.md)",
    },
)
