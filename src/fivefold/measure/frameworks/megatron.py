"""Megatron-LM, what is built on it, and what it stands in for."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.measure.frameworks.line import FLASH_USUAL, HALF_GRADIENTS, Framework

# Megatron-LM's DistributedDataParallel reduced the whole buffer after backward (megatron/model/distributed.py, read at
# 01d65bde50, of 2023); --overlap-grad-reduce came with what is megatron/core/distributed now (the month from memory).
_GRADIENTS_OVERLAP = "2023-10"
# Megatron-LM 3.0: gradient accumulation fused into the products (from memory), and collectives that run beside the
# products of the input's and of the weight's gradient (megatron/mpu/layers.py, read at 02bb1f5c86).
_FUSED_ACCUMULATION = {"wgrad_bytes": 8, "tp_beside_dgrad_hidden": 1.0, "tp_beside_wgrad_hidden": 1.0}
# Its optimizer before Transformer Engine (megatron/optimizer/optimizer.py, read at 007644155d).
_SEPARATE_UPDATE = {"separate_update": True, "gradients_scaled": False}
# DeepSpeed's optimizer of bf16, which Megatron-LM lacks: before Transformer Engine one profile predicts both.
_NO_BF16_OPTIMIZER = {"bf16_wgrad_bytes": 0, "bf16_all_reduces": False}
# Transformer Engine's cross-entropy: two kernels that read 16-bit logits, the second of which leaves their gradient in
# place, and one that scales it (transformer_engine common/triton/cross_entropy.py, from memory).
_FUSED_LOSS = {"loss_moved_bytes": (6.0, 4.0), "loss_bytes_per_logit": 2}
# Fine-tuning "uses SQuAD 1.1, and the inputs are packed to 4096 tokens" (NeMo docs/source/performance/
# performance_summary.md, read at 070a0bb168; packed_sequence=True in Megatron-Bridge's llama3_llm_finetune.py, read at
# 0b928cd33d): a paragraph of 120 words with a question and an answer, in tokens and with their prompt (from memory).
_SQUAD_TOKENS = 200.0

_NEMO = Framework(
    starts=("nemo",),
    older_as="megatron",  # its layers, by way of Apex (from memory)
    runtime="megatron",
    sharded="megatron-fsdp",
    grad_dtype="bf16",
    changes={"quantised_weight_bytes": 2, "gradients_checked": False, "gradients_scaled": False},
    interleaves=12,
    since="2025-02",
    newer={**_FUSED_LOSS, "fused_permutation": True},
    changes_sharded={"registered_buffers": True},
    overlap="on",
    experts_share_tp=True,
    has_recipes=True,
    tuned="vendor's recipe",
    packs_documents=_SQUAD_TOKENS,
    trains_mtp=True,
    source="NeMo and Megatron-Bridge recipes: overlaps on, grad_reduce_in_fp32=False, fp8 weights (from memory); "
    "average_in_collective=True, and check_for_nan_in_grad=False for their performance (read); "
    "their pretraining recipes interleave with one to four blocks a chunk (NeMo 24.07's performance summary); "
    "cross_entropy_fusion_impl='te' and moe_permute_fusion=True (read; since when from memory); nccl_ub=True with "
    "Megatron-FSDP (Megatron-Bridge's recipes for Llama 3 on H100 and GB300, read); mtp_num_layers = 1 in those "
    "for DeepSeek-V3 and Qwen3-Next and 2 in Nemotron 3 Super's provider (read)",
)

LINES: tuple[Framework, ...] = (
    _NEMO,
    replace(
        _NEMO,
        starts=("megatron-bridge",),
        older_as="",
        states_chunks=True,
        experts_share_tp=False,
        mixtures_overlap_tp=False,
        options_unlisted=True,
        source=f"{_NEMO.source}; Megatron-Bridge's own: its tables have a column of virtual stages, its recipes set "
        "expert_tensor_parallel_size 1 and overlap no tensor parallelism for mixtures (tp_comm_overlap=False in "
        "deepseek_v3.py and kimi_k2.py, no comm_overlap in h100/qwen3_moe.py and nemotron_3_super.py, read)",
    ),
    Framework(
        starts=("deepseek", "hai-llm", "hai llm"),
        runtime="megatron",
        sharded="megatron-fsdp",
        stands_in=True,
        changes={"tokens_sent_once": True, "fused_permutation": True},
        trains_mtp=True,
        source="DeepSeek-V3 report, 3.2: kernels of their own send a token once to a node and hand it on over NVLink",
    ),
    Framework(
        starts=("megatron-core",),
        runtime="megatron",
        sharded="megatron-fsdp",
        experts_share_tp=True,
        overlap="on",
        unfused_until=FLASH_USUAL,
    ),
    Framework(
        starts=("megatron-lm ci",),
        runtime="megatron",
        sharded="megatron-fsdp",
        experts_share_tp=True,
        zero=0,
        overlap="listed",
        drops_out=True,
        vocab=50_257,
        lists_ties=True,
        source="functional tests of Megatron-LM, which keep its default --hidden-dropout 0.1 but for models like Llama "
        "and DeepSeek's and share GPT-2's byte pairs (some of their model_config.yaml were read)",
    ),
    Framework(
        starts=("megatron",),
        runtime="megatron",
        before_te="deepspeed",
        sharded="megatron-fsdp",
        experts_share_tp=True,
        before=_NO_BF16_OPTIMIZER | _SEPARATE_UPDATE,
        overlap="listed",
        overlaps_since=_GRADIENTS_OVERLAP,
        unfused_until=FLASH_USUAL,
        since="2022-04",
        newer=_FUSED_ACCUMULATION,
        half=HALF_GRADIENTS,
        quantised={"grad_dtype": "bf16", "changes": {"quantised_weight_bytes": 2}},
        source="Megatron-LM arguments.py: overlaps are opt-in; its examples ask for the distributed optimizer, in 8 "
        "bit also for --fp8-param-gather and --grad-reduce-in-bf16 (examples/llama/train_llama3_8b_h100_fp8.sh)",
    ),
    Framework(
        starts=("fsdp of megatron",),
        runtime="megatron",
        sharded="megatron-fsdp",
        experts_share_tp=True,
        zero=3,
        overlap="grad",
        source="Megatron-FSDP: --data-parallel-sharding-strategy optim_grads_params (from memory)",
    ),
    Framework(
        starts=("primus",),
        runtime="megatron",
        sharded="megatron-fsdp",
        stands_in=True,
        experts_share_tp=True,
        tuned="vendor's recipe",
    ),
    Framework(
        starts=("libai", "oneflow"),
        runtime="megatron",
        before_te="deepspeed",
        stands_in=True,
        zero=0,
        unfused_until=FLASH_USUAL,
    ),
)
