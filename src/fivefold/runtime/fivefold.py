"""fivefold's own trainer (fivefold.train): what it keeps and moves, as the tests of agreement measure it.

The two profiles differ by the device that the trainer runs on: `fivefold@cuda`, which `fivefold` alone means, and
`fivefold@cpu`.
"""

from __future__ import annotations

from msgspec.structs import replace

from fivefold import __version__
from fivefold.runtime.profile import DeviceTensor, Profile

_MIB = 1024**2
_RELEASE: tuple[int, int] = tuple(int(part) for part in __version__.split(".")[:2])  # type: ignore[assignment]

# What the trainer saves on a GPU and not, or otherwise, on a CPU. Everything else is one autograd.Function on both
# (fivefold.train.ops), or the same operator with the same saved tensors.
CUDA_TENSORS: tuple[DeviceTensor, ...] = (
    DeviceTensor(
        name="mean and inverse deviation of a layer norm",
        field="layernorm_statistic_bytes",
        cpu="in the dtype of the input",
        here="fp32, 4 bytes each",
        source="PyTorch aten/src/ATen/native/cuda/layer_norm_kernel.cu: statistics in the accumulation type (from "
        "memory)",
    ),
    DeviceTensor(
        name="random state of flash attention",
        field="attention_state_bytes",
        cpu="none",
        here="seed and offset, 16 bytes, and one unused 8-byte tensor per call",
        source="PyTorch aten _scaled_dot_product_flash_attention returns rng_state and unused (schema of 2.13)",
    ),
)

PROFILE = Profile(
    name="fivefold",
    versions=".".join(map(str, _RELEASE)),
    oldest=_RELEASE,
    newest=_RELEASE,
    device="cuda",
    device_tensors=CUDA_TENSORS,
    layernorm_statistic_bytes=4,
    attention_state_bytes=24,
    sharding="buckets",
    weight_bytes=2,
    optimizers=("adamw", "sgd"),
    precisions=("bf16", "fp16", "fp32"),
    zero_stages=(0, 1, 2, 3),
    schedules=("afab", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"),
    attention_kernels=("fa2",),
    vocab_multiple=1,
    norms_fused_into_linears=False,
    fp8_saves_inputs=False,
    fused_glu=True,
    cached_wgrad_buffers=False,
    head_wgrad_placeholder=False,
    loss_bytes_per_logit=10,
    loss_moved_bytes=(22, 22),
    sharded_loss_moved_bytes=(30, 14),
    workspace_bytes=60 * _MIB,
    context_bytes=640 * _MIB,
    nccl_bytes_per_group=128 * _MIB,
    fragmentation=0.06,
    grad_buckets=25 * _MIB // 4,
    grad_bucket_growth=0,
    prefetch_blocks=1,
    tp_beside_dgrad_hidden=1.0,
    tp_beside_wgrad_hidden=0.0,
    tp_in_step=1.2,
    tp_overlap_hidden=0.0,
    checkpoint_stops_early=True,
    ep_overlap_hidden=0.0,
    step_overhead_s=0.015,
    time_spread=0.25,
    tie_spread=0.04,
    sources={
        "weight_bytes": "fivefold/train/precision.py: bf16 parameters beside fp32 master weights",
        "schedules": "fivefold/train/parallel/pipeline.py executes every schedule of fivefold/schedule",
        "attention_kernels": "PyTorch scaled_dot_product_attention ships FlashAttention-2 (from memory)",
        "layernorm_statistic_bytes": CUDA_TENSORS[0].source,
        "attention_state_bytes": CUDA_TENSORS[1].source,
        "fp8_saves_inputs": "the trainer has no fp8",
        "loss_bytes_per_logit": "fivefold/train/loss.py and parallel/vocabulary.py: bf16 logits, fp32 copy and softmax",
        "loss_moved_bytes": "fivefold/train/loss.py: PyTorch's log-softmax as torchtitan's; backward exponential (8), "
        "product (8) and cast (6)",
        "sharded_loss_moved_bytes": "fivefold/train/parallel/vocabulary.py: cast (6), maximum (4), subtraction (8), "
        "exponential (8), sum (4); backward product (8) and cast (6)",
        "workspace_bytes": "as megatron: the same libraries",
        "context_bytes": "from memory: CUDA context with loaded kernels on H100, about 0.5 to 0.7 GiB",
        "nccl_bytes_per_group": "from memory: NCCL channel buffers of one communicator, about 0.1 GiB",
        "fragmentation": "as torchtitan: the same allocator; not measured",
        "grad_buckets": "fivefold/train/parallel/data.py: BUCKET_BYTES of fp32 gradients",
        "grad_bucket_growth": "the same, however many replicas",
        "tp_beside_dgrad_hidden": "fivefold/train/parallel/tensor.py: the repeated gather runs beside the product",
        "tp_in_step": "as megatron: the same links and library",
        "tp_overlap_hidden": "fivefold/train/parallel/overlap.py; what it hides on GPUs is not measured",
        "step_overhead_s": "from memory: host work between steps, some milliseconds",
        "time_spread": "not validated: no run of the trainer on GPUs is in the table; wider than any other runtime",
        "tie_spread": "as megatron",
    },
)

# On a CPU nothing lies beside the tensors: no context, no communicators' buffers, no allocator that rounds up.
_CPU = replace(
    PROFILE,
    device="cpu",
    device_tensors=(),
    layernorm_statistic_bytes=0,
    attention_state_bytes=0,
    workspace_bytes=0,
    context_bytes=0,
    nccl_bytes_per_group=0,
    fragmentation=0.0,
)
BY_DEVICE: dict[str, Profile] = {"cuda": PROFILE, "cpu": _CPU}
