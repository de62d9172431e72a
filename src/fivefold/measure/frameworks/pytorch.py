"""PyTorch's own sharding and replicas, the trainers around them, and nanotron."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.measure.frameworks.line import FLASH_USUAL, Era, Framework
from fivefold.runtime import load_runtime

# FlashAttention's cross-entropy (csrc/xentropy/xentropy_kernel.cu, read at 383caa67b5): a kernel that reads 16-bit
# logits for the largest and again for the sum, and one that reads them and writes their gradient. A block of 1,024
# threads has a row; those of GPT-NeoX's vocabulary that a GPU works on at once, 22 MB on an A100, are in its cache when
# they are read again.
_XENTROPY = (2.0, 4.0)
# After a micro-batch's backward Composer updates the model's training metrics with its logits (trainer.py,
# _train_microbatch and _eval_train_metrics); llm-foundry's are LanguageCrossEntropy and LanguagePerplexity unless
# use_train_metrics is false (modeling_mpt.py, read at 0085285a95), which its benchmarks never say
# (submit_benchmarks.py, read at 51652eae71). Each is torch.nn.CrossEntropyLoss under autocast. That takes the
# log-softmax in 16 bit (4, sweeps as above) and casts it to fp32 (6), for PyTorch's cross_entropy_loss asks for the
# logits' own type, which autocast leaves alone (traced with 2.13).
_COMPOSER_METRICS = 2 * (4.0 + 6.0)
_FOUNDRY_LOSS = {"loss_moved_bytes": (_XENTROPY[0], _XENTROPY[1] + _COMPOSER_METRICS), "loss_bytes_per_logit": 4}
# What transformers' models and training loops around plain PyTorch do where the profile is another framework's.
_CROSS_ENTROPY = {
    "loss_moved_bytes": load_runtime("fsdp").loss_moved_bytes,
    "loss_bytes_per_logit": load_runtime("fsdp").loss_bytes_per_logit,
}
# Its trainer copies all logits but the last position's (4), takes their loss under autocast (8, and 6 to cast) and goes
# the same way back: zeros for one element (4), cast (6), log-softmax (8), a cleared gradient that the others are copied
# into (6). The largest moment is backward's: log-softmax in 16 bit and in fp32, and its gradient.
_OLMO_LOSS = {"loss_moved_bytes": (18.0, 24.0), "loss_bytes_per_logit": 10}
# Until transformers 4.50 or so (the month from memory) the cast logits were shifted against their labels: a copy of all
# but the last position's (8), a cleared gradient and a copy into it (12).
_SHIFTED_LOGITS = {"loss_moved_bytes": (30.0, 38.0)}
_SHIFTED_UNTIL = "2025-04"
# FSDP1 that reduces in 16 bit: gradients of the flat parameter's views are concatenated (2 read, 2 written), and only
# the reduced shard is cast.
_SIXTEEN_BIT_SCATTER = {"scatter_copy_bytes": 4.0}
_FOUNDRY = {"gather_copy_bytes": 0.0, "backward_gathers_wait": True, **_SIXTEEN_BIT_SCATTER, **_FOUNDRY_LOSS}
# Its amp_fp8 puts Transformer Engine's linear layers into the blocks (fc_type te; from memory), whose kernels cast once
# and keep the cast input; what FSDP gathers stays in 16 bit.
_TRANSFORMER_ENGINE = {"compiled_casts": False, "quantised_gathers": False, "fp8_saves_inputs": True}

# torchtitan's main branch at the latest (runtime/torchtitan.py, MAIN), and PyTorch 2.11 (the month from memory), have
# cuDNN's attention. A row that does not say when it ran is taken to be of before.
_TORCHTITAN_CUDNN, _PYTORCH_CUDNN, _UNDATED = "2026-03", "2026-04", "9998"
_BEFORE_CUDNN = {"attention_kernels": ("fa2",)}
_ERAS = (Era(until=_PYTORCH_CUDNN, changes=_BEFORE_CUDNN), Era(since=_UNDATED, changes=_BEFORE_CUDNN))
_TORCHTITAN_ERAS = (
    # Its AdamW became one kernel with its pull request 881.
    Era(until="2025-03", changes={"adamw_update_bytes": load_runtime("fsdp").adamw_update_bytes}),
    # PyTorch's own RMS norm became one kernel with 2.9 (from memory).
    Era(until="2025-10", changes={"unfused_norms": True}),
    Era(
        since=_TORCHTITAN_CUDNN,
        until=_UNDATED,
        changes={"attention_kernels": ("cudnn", "fa2"), "repeats_keys_and_values": False},
    ),
)

# FullyShardedDataParallel, and what lines around it have in common.
_FSDP1 = Framework(
    starts=("fsdp", "pytorch"),
    pytorch=True,
    runtime="deepspeed",
    sharded="fsdp1",
    zero=3,
    stage_in_notes=True,
    eras=_ERAS,
    changes=_CROSS_ENTROPY,
    changes_sharded=_SIXTEEN_BIT_SCATTER,
    sharded_grad_dtype="bf16",
    source="FullyShardedDataParallel: accelerate's default is fsdp_version 1, and torch.distributed.fsdp had no "
    "fully_shard before PyTorch 2.6 (from memory); it reduces in the parameters' type where nothing else is said "
    "(PyTorch documentation, MixedPrecision), and transformers' Trainer and llama-recipes' bfSixteen ask for that",
)

_NANOTRON = Framework(
    starts=("nanotron",),
    runtime="nanotron",
    zero=1,
    overlap="reduce",
    logs_reserved_gib=True,
    tuned="winner of a sweep",
    source="nanotron 0.5 and the Ultra-Scale Playbook. Its benchmark mode logs max_memory_allocated and "
    'max_memory_reserved over 1024**3 as "GB" (helpers.py, log_throughput), and its published table does not say which '
    "it shows: that two of its rows, alike but for 16 and 32 replicas without ZeRO, differ by 5% is what segments do "
    "and allocations cannot",
)

LINES: tuple[Framework, ...] = (
    Framework(
        starts=("torchtitan",),
        pytorch=True,
        runtime="torchtitan",
        eras=_TORCHTITAN_ERAS,
        zero=3,
        pipeline_fills=True,
        quantised={"changes": {"quantised_parameters": True}},
        source="torchtitan's configuration: fully_shard with reshard after forward; as many micro-batches as stages; "
        "its docs/float8.md (06fe2901ed) gathers parameters in 8 bit",
    ),
    Framework(
        starts=("llm-foundry", "composer", "mosaic"),
        pytorch=True,
        runtime="torchtitan",
        stands_in=True,
        zero=3,
        kernel="fa1",
        changes=_FOUNDRY,
        compiles_quantised=False,
        quantised={"changes": {**_FOUNDRY, **_TRANSFORMER_ENGINE}},
        source="the tables are of 2023 and FlashAttention 1 (from memory), but those of H100, for which its benchmarks "
        "install FlashAttention 2 (submit_benchmarks.py, gpu-flash2, read); Composer's FSDP is FULL_SHARD with "
        "backward_prefetch BACKWARD_POST (FSDPConfig, read), which overlaps scatters and no gathers in backward "
        "(PyTorch documentation, BackwardPrefetch, from memory; its order is wrong too, PyTorch issue 108190); its "
        "loss is FlashAttention's unless a configuration says torch_crossentropy (modeling_mpt.py, loss_fn, read)",
    ),
    _NANOTRON,
    replace(
        _NANOTRON,
        starts=("picotron",),
        logs_reserved_gib=False,
        source="as nanotron; it logs memory_reserved over 1e9 (picotron's train.py, from memory)",
    ),
    Framework(
        starts=("fsdp2", "olmo-core", "open_lm"),
        piped_as="torchtitan",
        pytorch=True,
        runtime="deepspeed",
        sharded="fsdp",
        zero=3,
        stage_in_notes=True,
        eras=_ERAS,
        changes=_CROSS_ENTROPY,
        source="fully_shard over every rank; without it plain PyTorch replicas, as deepspeed's",
    ),
    replace(_FSDP1, piped_as="torchtitan"),
    replace(
        _FSDP1,
        starts=("olmo",),
        changes=_OLMO_LOSS,
        changes_sharded={},
        sharded_grad_dtype="fp32",
        source="FullyShardedDataParallel that reduces in fp32: FSDPPrecision mixed (olmo/config.py, 8cefe6a; that its "
        "models were trained so is from memory); fused_loss, FlashAttention's, is off by default (from memory)",
    ),
    replace(
        _FSDP1,
        starts=("accelerate", "hf ", "transformers", "axolotl", "llama-factory"),
        recomputes_in_part=False,
        eras=(*_ERAS, Era(until=_SHIFTED_UNTIL, changes=_SHIFTED_LOGITS)),
        changes=_CROSS_ENTROPY | {"loss_moved_bytes": load_runtime("accelerate").loss_moved_bytes},
        source="as fsdp, around transformers' models, whose gradient_checkpointing_enable knows all blocks or none "
        "(from memory)",
    ),
    Framework(
        starts=("metaseq",),
        runtime="megatron",
        stands_in=True,
        zero=3,
        sequence_parallel=False,
        unfused_until=FLASH_USUAL,
        source="FairScale's FullyShardedDataParallel around Megatron-LM's tensor parallelism (Zhang et al. 2022, 2.4)",
    ),
    Framework(
        starts=("ddp",),
        pytorch=True,
        eras=_ERAS,
        changes=_CROSS_ENTROPY,
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
