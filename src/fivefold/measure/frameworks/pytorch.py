"""PyTorch's own sharding and replicas, the trainers around them, and nanotron."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.measure.frameworks.line import Framework

# FlashAttention's cross-entropy (csrc/xentropy, from memory): a kernel that reads 16-bit logits for the largest and
# again for the sum, and one that reads them and writes their gradient.
_XENTROPY = {"loss_moved_bytes": (4.0, 4.0), "loss_bytes_per_logit": 4}
# FSDP1 that reduces in 16 bit: gradients of the flat parameter's views are concatenated (2 read, 2 written), and only
# the reduced shard is cast.
_SIXTEEN_BIT_SCATTER = {"scatter_copy_bytes": 4.0}

# FullyShardedDataParallel, and what lines around it have in common.
_FSDP1 = Framework(
    starts=("fsdp", "pytorch"),
    runtime="deepspeed",
    sharded="fsdp1",
    zero=3,
    changes_sharded=_SIXTEEN_BIT_SCATTER,
    sharded_grad_dtype="bf16",
    source="FullyShardedDataParallel: accelerate's default is fsdp_version 1, and torch.distributed.fsdp had no "
    "fully_shard before PyTorch 2.6 (from memory); it reduces in the parameters' type where nothing else is said "
    "(PyTorch documentation, MixedPrecision), and transformers' Trainer and llama-recipes' bfSixteen ask for that",
)

LINES: tuple[Framework, ...] = (
    Framework(
        starts=("torchtitan",),
        runtime="torchtitan",
        zero=3,
        pipeline_fills=True,
        quantised={"changes": {"quantised_parameters": True}},
        source="torchtitan's configuration: fully_shard with reshard after forward; as many micro-batches as stages; "
        "its docs/float8.md (06fe2901ed) gathers parameters in 8 bit",
    ),
    Framework(
        starts=("llm-foundry", "composer", "mosaic"),
        runtime="torchtitan",
        stands_in=True,
        zero=3,
        kernel="fa1",
        changes={"gather_copy_bytes": 0.0, "backward_gathers_wait": True, **_SIXTEEN_BIT_SCATTER, **_XENTROPY},
        source="the tables are of 2023 and FlashAttention 1 (from memory), but those of H100, for which its benchmarks "
        "install FlashAttention 2 (submit_benchmarks.py, gpu-flash2, read); Composer's FSDP is FULL_SHARD with "
        "backward_prefetch BACKWARD_POST (FSDPConfig, read), which overlaps scatters and no gathers in backward "
        "(PyTorch documentation, BackwardPrefetch, from memory; its order is wrong too, PyTorch issue 108190); its "
        "loss is FlashAttention's unless a configuration says torch_crossentropy (modeling_mpt.py, loss_fn, read)",
    ),
    Framework(
        starts=("nanotron", "picotron"),
        runtime="nanotron",
        zero=1,
        overlap="reduce",
        tuned="winner of a sweep",
        source="nanotron 0.5 and the Ultra-Scale Playbook",
    ),
    Framework(
        starts=("fsdp2", "olmo-core", "open_lm"),
        runtime="deepspeed",
        sharded="fsdp",
        zero=3,
        source="fully_shard over every rank; without it plain PyTorch replicas, as deepspeed's",
    ),
    _FSDP1,
    replace(
        _FSDP1,
        starts=("olmo",),
        changes_sharded={},
        sharded_grad_dtype="fp32",
        source="FullyShardedDataParallel that reduces in fp32: FSDPPrecision mixed (olmo/config.py, 8cefe6a; that its "
        "models were trained so is from memory)",
    ),
    replace(
        _FSDP1,
        starts=("accelerate", "hf ", "transformers", "axolotl", "llama-factory"),
        recomputes_in_part=False,
        source="as fsdp, around transformers' models, whose gradient_checkpointing_enable knows all blocks or none "
        "(from memory)",
    ),
    Framework(
        starts=("ddp",),
        runtime="deepspeed",
        sharded="fsdp1",
        zero=0,
        source="DistributedDataParallel around plain PyTorch: gradients all-reduced beside backward",
    ),
    replace(
        _FSDP1,
        starts=("litgpt", "lit-gpt", "lightning"),
        changes_sharded={"adamw_update_bytes": 0.0, **_SIXTEEN_BIT_SCATTER},
        source="litgpt's pretrain.py: AdamW is fused on GPUs; Fabric's FSDPStrategy reduces in the parameters' type "
        "(both from memory)",
    ),
)
