"""torchtitan: PyTorch FSDP2 (`fully_shard`), eager, one group per block. The release 0.2, and the main branch since the
models were rewritten in 2026 (read at b5bcd76c6), which is named by year and month: torchtitan@2026.8."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.runtime.profile import Profile

_MIB = 1024**2

PROFILE = Profile(
    name="torchtitan",
    versions="0.2 with PyTorch 2.9 to 2.13",
    oldest=(0, 2),
    newest=(0, 2),
    aliases=(),
    sharding="fully_sharded",
    weight_bytes=0,
    optimizers=("adamw", "sgd", "adafactor", "muon", "adamw8bit"),
    precisions=("bf16", "fp8", "mxfp8"),
    zero_stages=(2, 3),
    schedules=("afab", "1f1b", "interleaved"),
    attention_kernels=("fa2",),
    vocab_multiple=1,
    norms_fused_into_linears=False,
    fp8_saves_inputs=False,
    fused_glu=False,
    input_gradient_bytes=6,
    cached_wgrad_buffers=False,
    head_wgrad_placeholder=False,
    loss_bytes_per_logit=12,
    sharded_loss_bytes_per_logit=16,
    loss_moved_bytes=(22, 26),
    sharded_loss_moved_bytes=(38, 38),
    gathered_inputs_kept=True,
    quantised_gathers=True,
    compiled_casts=True,
    sequence_second=True,
    repeats_keys_and_values=True,
    ring_gathers=True,
    gather_copy_bytes=4,
    scatter_copy_bytes=6,
    pipeline_keeps_whole_gradients=True,
    workspace_bytes=60 * _MIB,
    context_bytes=640 * _MIB,
    nccl_bytes_per_group=128 * _MIB,
    fragmentation=0.06,
    grad_buckets=0,
    experts_in_block=True,
    prefetch_blocks=1,
    tp_beside_dgrad_hidden=0.0,
    tp_beside_wgrad_hidden=0.0,
    tp_in_step=1.2,
    tp_overlap_hidden=0.0,
    checkpoint_stops_early=True,
    selective_by_operation=True,
    ep_overlap_hidden=0.0,
    step_overhead_s=0.015,
    launch_host_s=0.6e-4,
    time_spread=0.065,
    tie_spread=0.04,
    sources={
        "weight_bytes": (
            "PyTorch documentation, fully_shard with MixedPrecisionPolicy: parameters, gradients and states "
            "stay sharded in fp32, the gathered copy is bf16"
        ),
        "schedules": "torchtitan pipeline_parallel, read at 02ef790c79, without those that split the backward: "
        "fully_shard gives wrong gradients under them (measured on PyTorch 2.13)",
        "attention_kernels": "torchtitan models/attention.py: FlashAttention-2, which PyTorch ships, before all others "
        "below compute capability 10, cuDNN's kernel from there on (pull request 1196)",
        "fused_glu": (
            "torchtitan's FeedForward in eager mode: silu, product and projection save four tensors of the "
            "intermediate size"
        ),
        "fp8_saves_inputs": "torchao float8 linear saves the high-precision input for backward",
        "prefetch_blocks": (
            "PyTorch documentation, fully_shard: the next block is gathered while the current one computes"
        ),
        "experts_in_block": "torchtitan models/llama4/infra/parallelize.py, apply_fsdp, read at 05a6cb3895: only with "
        "expert parallelism are experts a unit of their own, over their own mesh",
        "loss_bytes_per_logit": (
            "eager cross-entropy, in backward: fp32 log-softmax, its gradient and the logits' in fp32. The 16-bit "
            "logits are gone by then (del pred in torchtitan's forward_backward_step), their fp32 copy since forward"
        ),
        "sharded_loss_bytes_per_logit": (
            "PyTorch distributed/tensor/parallel/loss.py: in backward fp32 log-softmax, its gradient before and after "
            "the softmax is added, and the product with the loss's gradient"
        ),
        "loss_moved_bytes": (
            "PyTorch aten SoftMax.cu (000cace5a4) and Loss.cu (00e3254d33): cast to fp32 (6); a row of more than "
            "12,256 does not fit shared memory, so that cunn_SoftMaxForward reads it for its maximum, its sum and its "
            "output (16). Backward clears a gradient for the one element (4), cunn_SoftMaxBackward sums it and reads "
            "it again with the log-softmax (16), cast (6)"
        ),
        "sharded_loss_moved_bytes": (
            "PyTorch distributed/tensor/parallel/loss.py (02eef6b8b6), a kernel an operation: cast (6), maximum (4), "
            "subtraction (8), exponential (8), sum (4), subtraction (8); backward zeros (4), exponential (8), sum of "
            "both (12), product (8), cast (6)"
        ),
        "quantised_gathers": "torchao float8_tensor_parallel.py, read at 0e0fba8f69: operands with tensor-wise scales "
        "are cast before the all-gather, in both passes",
        "input_gradient_bytes": "torchtitan's models/llama/model.py: wq, wk, wv and w1, w3 are layers of their own; "
        "autograd adds what they give pair by pair (read 4, write 2)",
        "compiled_casts": "torchao float8_linear.py and float8_ops.py (024fe94fd8, 067a632078) under torch.compile; "
        "rates in estimate/casts.py",
        "sequence_second": (
            "torchtitan's plan shards dimension 1 (llama3/infra/parallelize.py, read at 018740b7aa); PyTorch 2.13's "
            "_functional_collectives.py then chunks and concatenates around a collective over dimension 0, while the "
            "fused products of its asynchronous TP take strided shards"
        ),
        "ring_gathers": (
            "PyTorch 2.13 _context_parallel/_attention.py: rotation by all-gather is the default, gradients of keys "
            "and values are accumulated and sent in fp32; torchtitan's repeat_kv (models/llama/model.py, 0199cbc1ba)"
        ),
        "repeats_keys_and_values": "torchtitan's models/llama/model.py, repeat_kv (0199cbc1ba)",
        "gathered_inputs_kept": "DTensor layers keep the replicated input that autograd saw",
        "gather_copy_bytes": "PyTorch foreach_all_gather_copy_out: 16-bit parameters, read and written",
        "scatter_copy_bytes": "PyTorch foreach_reduce_scatter_copy_in: 16-bit gradients read, fp32 written",
        "pipeline_keeps_whole_gradients": (
            "PyTorch FSDPParam.to_accumulated_grad_if_needed: without synchronisation, whole gradients in reduce_dtype"
        ),
        "workspace_bytes": "as megatron: the same libraries",
        "fragmentation": "from memory: reserved over allocated of eager FSDP2 runs",
        "context_bytes": "from memory: CUDA context with loaded kernels on H100, about 0.5 to 0.7 GiB",
        "nccl_bytes_per_group": "from memory: NCCL channel buffers of one communicator, about 0.1 GiB",
        "tp_beside_dgrad_hidden": "eager DTensor waits for each collective",
        "tp_in_step": "as megatron: the same links and library",
        "selective_by_operation": "torchtitan distributed/activation_checkpoint.py, per-op mode (from memory)",
        "checkpoint_stops_early": "PyTorch documentation, torch.utils.checkpoint: non-reentrant, early stop by default",
        "tp_overlap_hidden": (
            "fit: six pairs of torchtitan's published runs with and without asynchronous TP (Llama 3 8B, 70B and 405B, "
            "tp 8); what it gains there is the copies of sequence_second (0.1% in the mean is left)"
        ),
        "step_overhead_s": "from memory: host work between steps, some milliseconds",
        "launch_host_s": "from memory: torch.compile, or eager PyTorch's own modules: half of megatron",
        "time_spread": "as megatron",
        "tie_spread": "as megatron",
    },
)
# The main branch counts tokens instead of sequences since August; but for attention's, what it keeps and moves is the
# same.
MAIN = replace(
    PROFILE,
    versions="2026.3 to 2026.12 (the main branch, by month)",
    oldest=(2026, 3),
    newest=(2026, 12),
    attention_kernels=("cudnn", "fa2"),
    repeats_keys_and_values=False,
    sources={
        **PROFILE.sources,
        "attention_kernels": "torchtitan models/common/attention.py, ScaledDotProductAttentionWrapper (003bb42ab6)",
        "repeats_keys_and_values": "the same: enable_gqa",
    },
)
