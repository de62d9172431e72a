"""PyTorch's own sharding: FSDP2 (`fully_shard`), also as accelerate sets it up, and FSDP1
(`FullyShardedDataParallel`)."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.runtime.torchtitan import PROFILE as TORCHTITAN

# FSDP2 with PyTorch's own parallel axes around it, and modules as transformers writes them.
PROFILE = replace(
    TORCHTITAN,
    name="fsdp",
    versions="PyTorch 2.4 to 2.13",
    oldest=(2, 4),
    newest=(2, 13),
    aliases=("fsdp2",),
    selective_by_operation=False,
    attention_kernels=("cudnn", "fa2"),
    repeats_keys_and_values=False,
    unfused_norms=True,
    norms_kept_fp32=True,
    adamw_update_bytes=80,
    quantised_gathers=False,
    scores_kept_fp32=True,
    sources={
        **TORCHTITAN.sources,
        "fused_glu": "eager modules of Llama's kind: silu, product and projection save four tensors of the "
        "intermediate size",
        "attention_kernels": "PyTorch prefers cuDNN's kernel on Hopper and Blackwell since its wheels of 2.11, with a "
        "cuDNN past 9.15; before, FlashAttention-2 (sdp_utils.cpp; huggingface/transformers pull request 48163)",
        "repeats_keys_and_values": "transformers' sdpa_attention.py: enable_gqa since PyTorch 2.5 (from memory)",
        "input_gradient_bytes": "transformers' q_proj, k_proj, v_proj and gate_proj, up_proj: as torchtitan",
        "experts_in_block": "one fully_shard per decoder layer, as torchtitan's",
        "adamw_update_bytes": "torch/optim/adam.py _multi_tensor_adam, PyTorch's default (pytorch/pytorch pull request "
        "95241): decay 8, first moment 12, second 8 and 12, its root 8, correction 8, eps 8, step 16 (from memory)",
        "unfused_norms": "transformers' LlamaRMSNorm and apply_rotary_pos_emb, as its modules run without a compiler",
        "norms_kept_fp32": "transformers LlamaRMSNorm: cast to fp32, square, mean, product, cast back (from memory)",
        "scores_kept_fp32": "transformers' eager_attention_forward: softmax in fp32, then cast (from memory)",
        "loss_bytes_per_logit": "as torchtitan, where the model's outputs are gone when backward starts",
        "loss_moved_bytes": "as torchtitan: transformers 5.24's loss_utils.py casts the logits and shifts the labels",
        "tp_overlap_hidden": "as torchtitan: PyTorch's asynchronous TP",
        "step_overhead_s": "as torchtitan",
    },
)
# FSDP2 as accelerate and transformers' Trainer set it up, with transformers' own models.
ACCELERATE = replace(
    PROFILE,
    name="accelerate",
    versions="accelerate 1.10 to 1.15",
    oldest=(1, 10),
    newest=(1, 15),
    aliases=("transformers", "hf-trainer"),
    optimizers=("adamw", "sgd", "adafactor", "adamw8bit"),
    precisions=("bf16",),
    schedules=("1f1b",),
    tp_overlap_hidden=0.0,
    adamw_update_bytes=0.0,
    loss_moved_bytes=(28, 26),
    sources={
        **PROFILE.sources,
        "adamw_update_bytes": "transformers' training_args.py: adamw_torch_fused with PyTorch 2.8 and later",
        "loss_bytes_per_logit": "as fsdp: transformers' Trainer drops outputs before backward (from memory)",
        "loss_moved_bytes": "as fsdp, and accelerate's prepare_model casts the logits that come with the loss "
        "to fp32 too, whatever reads them (convert_outputs_to_fp32, 6)",
        "schedules": "no pipeline goes with it; 1f1b is what one stage runs",
        "tp_overlap_hidden": "no such switch",
    },
)
# FSDP1: the same shards, flattened; blocks freed on another stream than they were used on cannot be reused at once.
FSDP1 = replace(
    PROFILE,
    name="fsdp1",
    versions="PyTorch 1.12 to 2.13",
    oldest=(1, 12),
    newest=(2, 13),
    aliases=(),
    optimizers=("adamw", "sgd", "adafactor", "adamw8bit"),
    precisions=("bf16", "fp16"),
    schedules=("1f1b",),
    gather_copy_bytes=0,
    scatter_copy_bytes=10,
    fragmentation=0.13,
    tp_overlap_hidden=0.0,
    sources={
        **PROFILE.sources,
        "weight_bytes": "PyTorch documentation, FullyShardedDataParallel with MixedPrecision: fp32 flat shards, the "
        "gathered copy is 16-bit",
        "fragmentation": "fsdp's, and 7% more for recordStream: torchtitan docs/fsdp.md, Llama 7B on 8 H100",
        "gather_copy_bytes": "parameters are views of the gathered flat one",
        "scatter_copy_bytes": "gradients of the views are concatenated (4), and cast to fp32 (6)",
        "schedules": "no pipeline goes with it here; 1f1b is what one stage runs",
        "tp_overlap_hidden": "no such switch",
        "prefetch_blocks": "PyTorch documentation: limit_all_gathers lets two gathers be in flight",
    },
)
