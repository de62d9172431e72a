"""What one training framework does with bytes and with overlap, as data.

The same layout has different memory and time in different frameworks. A Profile holds those differences
as numbers and members of closed sets; each behaviour is implemented once, in the estimate room.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Sharding = Literal["distributed_optimizer", "fully_sharded", "buckets"]


class DeviceTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A saved tensor that is another one on this device than on a CPU. bytes: of the `field` of the profile that says
    so; cpu: what it is there."""

    name: str
    field: str
    cpu: str
    here: str
    source: str


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One framework and version range.

    versions: the range in words; oldest, newest: its first and last (major, minor). device: which one it
        describes, where a runtime has several.
    sharding: "distributed_optimizer" keeps whole low-precision weights and a whole gradient buffer on every
        rank and shards master weights and optimizer states (ZeRO-1); "fully_sharded" keeps fp32 shards of
        parameters, gradients and states and gathers one block at a time (FSDP2); "buckets" is fivefold's: flat buckets
        of parameters under ZeRO-0 to 2, one gathered unit per block under ZeRO-3.
    weight_bytes: resident bytes of one low-precision parameter; 0 where only fp32 shards are resident.
    other_zero_stages: where the framework has stages beyond zero_stages, the sentence that names their profile.
    schedules: pipeline schedules that it runs.
    device_tensors: where what is saved differs from the same runtime's on a CPU.
    attention_kernels: flash-attention kernels in order of preference, as named in the GPU's compute curve; where it has
        none of them its usual one runs.
    vocab_multiple: the vocabulary is padded to a multiple of this times tp; 1 means to a multiple of tp alone.
    norms_fused_into_linears: the norm before a dense projection is part of that linear layer.
    fp8_saves_inputs: under fp8 the quantised input of a linear is kept for backward instead of the input itself.
    layernorm_statistic_bytes: of the mean and of the inverse deviation that a layer norm saves per row; 0: as wide as
        its input.
    attention_state_bytes: what flash attention saves once per call beside its log-sum-exp.
    norms_kept_fp32: an RMSNorm keeps its input in fp32 and the normalised value, instead of its input alone.
    scores_kept_fp32: attention without a flash kernel keeps softmax's output in fp32 beside its 16-bit copy.
    sharded_weight_bytes: resident bytes of one parameter's 16-bit shard beside the fp32 one (fully_sharded, ZeRO-3).
    input_gradient_bytes: per element of an input and for each further one of the linear layers that read it, moved to
        add up their gradients: query, key and value, gate and up are layers of their own. 0: they are one.
    fused_glu: the gate's activation and product are one kernel that saves only its two inputs.
    cached_wgrad_buffers: the runtime keeps one low-precision placeholder per distinct weight shape as the
        gradient that it hands to autograd while the true one is accumulated in fp32 elsewhere.
    head_wgrad_placeholder: likewise for the output head, allocated during its backward only.
    loss_bytes_per_logit: bytes per logit alive at the worst moment of the loss.
    sharded_loss_bytes_per_logit: the same where tensor parallelism shards the vocabulary; 0: no different.
    gathered_inputs_kept: what sequence parallelism gathers for a linear layer is kept whole for backward, instead of
        being gathered again.
    quantised_gathers: under recipes that quantise products, each rank quantises its share of what sequence parallelism
        gathers for a linear layer, and that is gathered.
    quantised_parameters: under recipes that quantise, blocks' fully sharded parameters are quantised before they are
        gathered.
    scaled_by_row: 8-bit operands have a scale for every row, so that each of a linear layer's three products has both
        of its operands quantised for itself, weights among them.
    compiled_casts: 8-bit operands are quantised by kernels that a compiler writes: the largest value is looked for
        before the cast, and what lies transposed is written by kernels of less bandwidth.
    sequence_second: hidden states lie sequence after sequence, so that a gather over the sequence with more than one of
        them is copied into their order, and what is scattered over it is copied first; not where TP overlap is on.
    repeats_keys_and_values: keys and values of grouped heads are copied for every query head before attention.
    ring_gathers: ring attention gathers keys and values at once, in both passes, and sends their fp32 gradients
        around. ring_waits: what it moves is waited for where it starts, beside no attention.
    tokens_sent_once: of the experts that a token goes to, those of one rank get it in one copy, those of one node over
        the network too, and the kernel that sends it also puts it in their order (DeepEP and Hybrid-EP).
    fused_permutation: tokens are put in another order by one kernel each time, instead of two.
    expert_extras_apart: what few experts have runs as kernels of its own: the bias of their second projection, times
        the router's probability and expert by expert, and the clamps of the gate's inputs.
    experts_padded: under recipes that quantise, tokens are copied to where each expert's are a multiple of the block,
        and back, unless their dispatcher leaves them so.
    fused_experts: under recipes that quantise, a kernel makes the experts' first products, activates and quantises
        them, and another does the same backward.
    stretched_rotary_apart: rotary embeddings whose frequencies are stretched by yarn run operation by operation.
    gather_copy_bytes, scatter_copy_bytes: per parameter of a fully sharded unit, moved beside compute's own kernels to
        lay out what a gather brought, and what a scatter takes.
    backward_gathers_wait: parameters that are gathered again for backward are asked for after the gradients of the
        piece before, so that nothing hides them (FSDP1's BackwardPrefetch.BACKWARD_POST).
    registered_buffers: what fully sharded parameters move lies in buffers that NCCL knows, so that its kernels hold few
        multiprocessors and compute beside them is not slower.
    unfused_norms: RMS norms and rotary embeddings run as one fp32 kernel per operation.
    gather_buffers: buffers of a whole micro-batch's hidden state that sequence parallelism gathers into and that stay
        allocated.
    replica_bucket_bytes: per parameter, of gradient buckets beside the gradients where replicas share nothing (ZeRO-0).
    micro_batch_grad_bytes: per parameter, of one micro-batch's own gradients, which stay until its backward ends.
    pipeline_keeps_whole_gradients: fully sharded with a pipeline, gradients are whole until a step's last backward.
    sharded_reduced_at_once: with sharded states (ZeRO-1) one all-reduce after backward gives every rank the whole sum
        of the gradients, and parameters are gathered after the update, beside nothing.
    offloads_in_backward: with the optimizer in host memory, gradients are sent there beside the backward that makes
        them, not after it; as fully sharded ones are anyway.
    whole_clip_bytes: per parameter, moved by the norm and the clipping of gradients that a rank holds whole; 0: the
        norm reads its shard alone.
    expert_first_dim_padding: rows that each expert's batch is padded to.
    workspace_bytes: what libraries take inside the caching allocator (cuBLAS workspaces and the like).
    context_bytes: driver context and kernels, outside the allocator.
    nccl_bytes_per_group: buffers of one communicator, outside the allocator.
    fragmentation: reserved over allocated, minus 1. states_fragment: of everything; otherwise of what comes and goes
        within a step alone, beside states that are allocated once and lie in segments of their own.
    grad_buckets: parameters per gradient bucket (elements); the last bucket of a step cannot overlap.
    grad_bucket_growth: a bucket has no fewer parameters than this times dp.
    first_rank_buckets: the ranks of a pipeline after the first reduce their gradients in one piece, and so does the
        first rank those of its chunks after the first.
    shared_buckets: ZeRO stages under which experts fill the same buckets as the dense parameters around them; under
        the others each have buckets of their own.
    experts_in_block: experts that no parallelism spreads are gathered and scattered with the rest of their block
        (fully_sharded).
    prefetch_blocks: blocks whose parameters are gathered ahead of use (fully_sharded).
    pipeline_exchange_blocks: non-interleaved pipeline transfers stall the sender until received.
    tp_beside_dgrad_hidden, tp_beside_wgrad_hidden: share that is hidden of the TP collectives which linear layers start
        beside the matrix product of the input's, of the weight's gradient.
    tp_in_step: seconds of an exposed collective of tensor or expert parallelism inside a training step over the same
        collective alone: ranks arrive apart, and it competes with compute for multiprocessors and memory.
    tp_overlap_hidden: share of TP communication hidden where TP overlap is on.
    checkpoint_stops_early: recomputation of a whole block ends at the last tensor that backward needs, so that the
        block's last projection is not run again.
    checkpoint_keeps: operations of a block, by their names in its ledger, whose outputs full recomputation keeps beside
        the block's input: matrix products and "core_attention".
    selective_by_operation: selective recomputation that names no module keeps every second product of a block instead
        of leaving out the attention core.
    ep_overlap_hidden: share of EP all-to-all hidden where EP overlap is on.
    step_overhead_s: host work per step that no stream hides (data, logging, launch of the optimizer).
    wgrad_bytes: bytes moved per element of a weight gradient and micro-batch. 8 where the product reads and writes the
        fp32 accumulator itself; 12 where it writes 16 bit and another kernel adds that to the accumulator (8 where that
        is 16 bit wide). bf16_wgrad_bytes: the same in training in bf16, by another optimizer; 0: no different.
    gradients_checked: gradients that a rank holds whole are read for numbers that are none before they are reduced.
        gradients_scaled: they are divided by their replicas by a kernel, where there are any.
    separate_update: gradients are divided by the replicas, copied to fp32, unscaled and normed by kernels of their own
        before the update, and the master weights copied after it.
    adamw_update_bytes: per parameter, moved by an update of AdamW that takes a kernel for each of its operations; 0:
        one kernel reads and writes each tensor once.
    bf16_all_reduces: in bf16 that optimizer all-reduces gradients under ZeRO-1 instead of scattering them.
    quantised_weight_bytes: resident bytes of one parameter under 8-bit and narrower recipes: 4 is a 16-bit weight and
        two quantised copies, as it lies and transposed; 2 where the weight itself is kept quantised.
    loss_moved_bytes: bytes moved per logit by the loss, forward and backward: each sweep of a kernel over the logits or
        what became of them, since rows of a large vocabulary do not stay in a cache between two.
    sharded_loss_moved_bytes: the same where tensor parallelism shards the vocabulary; zeros: no different.
    launch_host_s: host work per operation of a ledger that is launched one by one; a block takes no less than its
        operations times this, because the GPU waits for them. 0 where graphs are replayed or it was not measured. It,
        the next two and step_overhead_s are a DGX H100's; other hosts multiply them (Cluster.host_work_ratio).
    op_host_s: the same for an operation of PyTorch's own where the framework's are larger; 0: no different.
    group_launch_host_s: the same for each further group of a grouped product, which is launched group by group.
    dispatch_host_s: the same for what a layer of experts does beside its operations in each pass: tokens counted by
        expert and rank, the counts read back, which the host waits for; of any host, as its source says.
    unpack_host_s: the same for each tensor and each rank that shards states, where parameters that were gathered after
        the update are laid out rank by rank and tensor by tensor; 0: they are gathered where they belong.
    time_spread: half-width of the 80% interval of a dense model's step time, relative, beside what the step spends on
        owners that are less sure (fivefold.estimate.doubt).
    tie_spread: median error of the ratio of two layouts' times on one problem; errors that both share cancel. Layouts
        nearer than this are ties: their order is as likely wrong as right.
    sources: where each number comes from.
    """

    name: str
    versions: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    aliases: tuple[str, ...] = ()
    device: str | None = None
    device_tensors: tuple[DeviceTensor, ...] = ()
    layernorm_statistic_bytes: int = 0
    attention_state_bytes: int = 0
    sharding: Sharding
    weight_bytes: int
    optimizers: tuple[str, ...]
    precisions: tuple[str, ...]
    zero_stages: tuple[int, ...]
    schedules: tuple[str, ...]
    attention_kernels: tuple[str, ...]
    vocab_multiple: int
    norms_fused_into_linears: bool
    fp8_saves_inputs: bool
    fused_glu: bool
    cached_wgrad_buffers: bool
    head_wgrad_placeholder: bool
    loss_bytes_per_logit: int
    loss_moved_bytes: tuple[float, float]
    workspace_bytes: int
    context_bytes: int
    nccl_bytes_per_group: int
    fragmentation: float
    grad_buckets: int
    prefetch_blocks: int
    tp_beside_dgrad_hidden: float
    tp_beside_wgrad_hidden: float
    tp_in_step: float
    tp_overlap_hidden: float
    checkpoint_stops_early: bool
    ep_overlap_hidden: float
    step_overhead_s: float
    checkpoint_keeps: tuple[str, ...] = ()
    selective_by_operation: bool = False
    other_zero_stages: str = ""
    input_gradient_bytes: float = 0.0
    norms_kept_fp32: bool = False
    scores_kept_fp32: bool = False
    sharded_weight_bytes: int = 0
    grad_bucket_growth: int = 1_000_000
    first_rank_buckets: bool = False
    shared_buckets: tuple[int, ...] = ()
    experts_in_block: bool = False
    sharded_loss_bytes_per_logit: int = 0
    gathered_inputs_kept: bool = False
    quantised_gathers: bool = False
    quantised_parameters: bool = False
    scaled_by_row: bool = False
    compiled_casts: bool = False
    sequence_second: bool = False
    repeats_keys_and_values: bool = False
    ring_gathers: bool = False
    ring_waits: bool = False
    tokens_sent_once: bool = False
    fused_permutation: bool = False
    expert_extras_apart: bool = False
    experts_padded: bool = False
    fused_experts: bool = False
    stretched_rotary_apart: bool = False
    gather_copy_bytes: float = 0.0
    scatter_copy_bytes: float = 0.0
    backward_gathers_wait: bool = False
    registered_buffers: bool = False
    unfused_norms: bool = False
    gather_buffers: int = 0
    states_fragment: bool = True
    replica_bucket_bytes: int = 0
    micro_batch_grad_bytes: int = 0
    pipeline_keeps_whole_gradients: bool = False
    sharded_reduced_at_once: bool = False
    offloads_in_backward: bool = False
    whole_clip_bytes: float = 0.0
    wgrad_bytes: float = 8
    bf16_wgrad_bytes: float = 0
    bf16_all_reduces: bool = False
    gradients_checked: bool = False
    gradients_scaled: bool = False
    separate_update: bool = False
    adamw_update_bytes: float = 0.0
    quantised_weight_bytes: float = 4
    sharded_loss_moved_bytes: tuple[float, float] = (0, 0)
    launch_host_s: float = 0.0
    op_host_s: float = 0.0
    group_launch_host_s: float = 0.0
    dispatch_host_s: float = 0.0
    unpack_host_s: float = 0.0
    time_spread: float
    tie_spread: float
    sources: dict[str, str]
