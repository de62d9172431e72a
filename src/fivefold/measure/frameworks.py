"""What each published framework does where a row does not say: one line of data per framework.

Nothing here reads a row's performance. Defaults are those of the framework's own documentation or example scripts;
"from memory" where the document was not opened.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from fivefold.layout.workload import QUANTISED
from fivefold.measure.runs import Run
from fivefold.measure.spellings import usual_name, zero_in_name
from fivefold.measure.words import precision_in_words


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """One published framework.

    starts: how its name starts, in lower case.
    runtime, sharded: the profiles that predict it with ZeRO 0 and 1, and with fully sharded parameters; before_te: with
        rows older than Transformer Engine. stands_in: those profiles describe another framework.
    zero: ZeRO stage where none is stated.
    unfused_until: rows dated before this year and month ran attention without a flash kernel; "9999" for all rows.
    drops_out: whether models without a gated feed-forward, as GPT-3, are trained with dropout where nothing says so;
        those of the years before flash kernels were.
    kernel: the flash-attention kernel where it is not the profile's, as named in the GPU's curve.
    vocab: where it is not stated and does not follow from the model's shape.
    lists_ties: rows that untie embedding and head list the option, and others have them tied.
    sequence_parallel: whether tensor parallelism brings it where that is not stated.
    pipeline_fills: a pipeline cuts the local batch into as many micro-batches as stages where none is stated.
    recomputes_in_part: whether some of a rank's blocks are recomputed without others where a row does not say which.
    policies: of frameworks that checkpoint every block under a policy, those of its recipes by their names in
        policies.py, the one that keeps most first; a row that states none has the first that fits, the last where none
        does.
    shard_nodes: nodes that its recipes shard parameters over where replicas lie beside them, the fewest first; a row
        that does not say has the first that hold it, the last where none do.
    interleaves: chunks per pipeline rank at most where they are not stated.
    changes: numbers of the profile that its recipes set otherwise. since, newer: from that year and month on these too.
        before: numbers of the profile of before_te; `newer` are of that one too where there is one. changes_sharded:
        with fully sharded parameters.
    quantised, half: fields of this line that rows with 8-bit or narrower recipes have otherwise, and that rows in fp16
        dated before `since` have.
    precision: where not stated. grad_dtype: gradients as they are accumulated and reduced ("bf16": in 16 bit);
        sharded_grad_dtype: the same of fully sharded parameters.
    overlap: "listed" where what a row that lists its overlap does not list was off, "on" for recipes that switch
        everything on, "grad" for gradients and parameters, "reduce" for gradients only, "hooks" for these only and not
        behind a pipeline, "off" for none. overlaps_since: rows dated before this year and month reduced gradients after
        backward.
    tuned: how a published number was come by where the framework's vendor publishes it, "" if plainly measured.
    packs_documents: mean tokens of the documents that its fine-tuning recipes pack into a sequence; None: none.
    trains_mtp: whether its recipes train the modules of multi-token prediction that a model has.
    source: where the defaults are from.
    """

    starts: tuple[str, ...]
    runtime: str
    sharded: str = "torchtitan"
    before_te: str = ""
    stands_in: bool = False
    zero: int = 1
    unfused_until: str = ""
    drops_out: bool = False
    kernel: str = ""
    vocab: int | None = None
    lists_ties: bool = False
    sequence_parallel: bool = True
    pipeline_fills: bool = False
    recomputes_in_part: bool = True
    policies: tuple[str, ...] = ()
    shard_nodes: tuple[int, ...] = (1,)
    interleaves: int = 1
    changes: dict[str, Any] = {}
    since: str = "9999"
    newer: dict[str, Any] = {}
    before: dict[str, Any] = {}
    changes_sharded: dict[str, Any] = {}
    quantised: dict[str, Any] = {}
    half: dict[str, Any] = {}
    precision: Literal["bf16", "fp16"] = "bf16"
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    sharded_grad_dtype: Literal["fp32", "bf16"] = "fp32"
    overlap: Literal["listed", "on", "grad", "reduce", "hooks", "off"] = "grad"
    overlaps_since: str = ""
    tuned: str = ""
    packs_documents: float | None = None
    trains_mtp: bool = False
    source: str = "from memory"


# Transformer Engine's modules came to Megatron-LM at the end of 2022 (from memory).
_TRANSFORMER_ENGINE = "2022-12"
# FlashAttention's first release; before it every framework materialised the scores (Dao et al. 2022, May 2022; in
# Megatron-LM behind a switch since 2023, from memory).
_FLASH_USUAL = "2023-01"

# Megatron-LM's DistributedDataParallel reduced the whole buffer after backward (megatron/model/distributed.py, read at
# 01d65bde50, of 2023); --overlap-grad-reduce came with what is megatron/core/distributed now (the month from memory).
_GRADIENTS_OVERLAP = "2023-10"
# Megatron-LM 3.0: gradient accumulation fused into the products (from memory), and collectives that run beside the
# products of the input's and of the weight's gradient (megatron/mpu/layers.py, read at 02bb1f5c86).
_FUSED_ACCUMULATION = {"wgrad_bytes": 8, "tp_beside_dgrad_hidden": 1.0, "tp_beside_wgrad_hidden": 1.0}
# Without --accumulate-allreduce-grads-in-fp32, which bf16 alone implies, Megatron-LM accumulates and reduces gradients
# in the parameters' own type (arguments.py and the same file); its fused accumulation of 2022 needed fp32 ones.
_HALF_GRADIENTS = {"grad_dtype": "bf16"}
# Its optimizer before Transformer Engine (megatron/optimizer/optimizer.py, read at 007644155d).
_SEPARATE_UPDATE = {"separate_update": True}
# DeepSpeed's optimizer of bf16, which Megatron-LM lacks: before Transformer Engine one profile predicts both.
_NO_BF16_OPTIMIZER = {"bf16_wgrad_bytes": 0, "bf16_all_reduces": False}
# Transformer Engine's cross-entropy: two kernels that read 16-bit logits, the second of which leaves their gradient in
# place, and one that scales it (transformer_engine common/triton/cross_entropy.py, from memory).
_FUSED_LOSS = {"loss_moved_bytes": (6.0, 4.0), "loss_bytes_per_logit": 2}

# Fine-tuning "uses SQuAD 1.1, and the inputs are packed to 4096 tokens" (NeMo docs/source/performance/
# performance_summary.md, read at 070a0bb168; packed_sequence=True in Megatron-Bridge's llama3_llm_finetune.py, read at
# 0b928cd33d): a paragraph of 120 words with a question and an answer, in tokens and with their prompt (from memory).
_SQUAD_TOKENS = 200.0

# FlashAttention's cross-entropy (csrc/xentropy, from memory): a kernel that reads 16-bit logits for the largest and
# again for the sum, and one that reads them and writes their gradient.
_XENTROPY = {"loss_moved_bytes": (4.0, 4.0), "loss_bytes_per_logit": 4}

# What XLA makes of a step: it drops what backward does not need, its programs run without a host between operations,
# and a weight's gradient is a product that writes 16 bit, as wide as the weight that was cast for it. Collectives of
# tensor parallelism run beside nothing, even with measured latencies (MaxText issue 1005).
_XLA = {
    "checkpoint_stops_early": True,
    "launch_host_s": 0.0,
    "op_host_s": 0.0,
    "group_launch_host_s": 0.0,
    "wgrad_bytes": 2,
    "tp_beside_dgrad_hidden": 0.0,
}
_SIXTEEN_BIT_GRADIENTS = (
    "gathers and scatters move BF16 weights and gradients (JAX-Toolbox docs/GPU_performance.md, read at 0f87cf9208)"
)

FRAMEWORKS: tuple[Framework, ...] = (
    Framework(
        starts=("megatron-deepspeed", "megatron+deepspeed", "megatron deepspeed", "deepspeed megatron"),
        runtime="deepspeed",
        sharded="deepspeed-zero",
        zero=0,
        sequence_parallel=False,
        unfused_until="9999",
        drops_out=True,
        recomputes_in_part=False,
        precision="fp16",
        overlap="off",
        source="Megatron-DeepSpeed's GPT examples: --fp16, no --use-flash-attn, --checkpoint-activations for all "
        "blocks or none (from memory)",
    ),
    Framework(
        starts=("hf trainer + deepspeed", "deepspeed", "zero"),
        runtime="deepspeed",
        sharded="deepspeed-zero",
        zero=3,
        precision="fp16",
        unfused_until=_FLASH_USUAL,
        source="DeepSpeed's documentation: ZeRO is the reason to use it (from memory)",
    ),
    Framework(
        starts=("megatron-bridge", "nemo"),
        runtime="megatron",
        sharded="megatron-fsdp",
        grad_dtype="bf16",
        changes={"quantised_weight_bytes": 2},
        interleaves=12,
        since="2025-02",
        newer={**_FUSED_LOSS, "fused_permutation": True},
        changes_sharded={"registered_buffers": True},
        overlap="on",
        tuned="vendor's recipe",
        packs_documents=_SQUAD_TOKENS,
        trains_mtp=True,
        source="NeMo and Megatron-Bridge recipes: overlaps on, grad_reduce_in_fp32=False, fp8 weights (from memory); "
        "their pretraining recipes interleave with one to four blocks a chunk (NeMo 24.07's performance summary); "
        "cross_entropy_fusion_impl='te' and moe_permute_fusion=True (read; since when from memory); nccl_ub=True with "
        "Megatron-FSDP (Megatron-Bridge's recipes for Llama 3 on H100 and GB300, read); mtp_num_layers = 1 in those "
        "for DeepSeek-V3 and Qwen3-Next and 2 in Nemotron 3 Super's provider (read)",
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
        starts=("megatron-core",), runtime="megatron", sharded="megatron-fsdp", overlap="on", unfused_until=_FLASH_USUAL
    ),
    Framework(
        starts=("megatron-lm ci",),
        runtime="megatron",
        sharded="megatron-fsdp",
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
        before=_NO_BF16_OPTIMIZER | _SEPARATE_UPDATE,
        overlap="listed",
        overlaps_since=_GRADIENTS_OVERLAP,
        unfused_until=_FLASH_USUAL,
        since="2022-04",
        newer=_FUSED_ACCUMULATION,
        half=_HALF_GRADIENTS,
        quantised={"grad_dtype": "bf16", "changes": {"quantised_weight_bytes": 2}},
        source="Megatron-LM arguments.py: overlaps are opt-in; its examples ask for the distributed optimizer, in 8 "
        "bit also for --fp8-param-gather and --grad-reduce-in-bf16 (examples/llama/train_llama3_8b_h100_fp8.sh)",
    ),
    Framework(
        starts=("fsdp of megatron",),
        runtime="megatron",
        sharded="megatron-fsdp",
        zero=3,
        overlap="grad",
        source="Megatron-FSDP: --data-parallel-sharding-strategy optim_grads_params (from memory)",
    ),
    Framework(starts=("primus",), runtime="megatron", sharded="megatron-fsdp", stands_in=True, tuned="vendor's recipe"),
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
        changes={"gather_copy_bytes": 0.0, "scatter_copy_bytes": 4.0, **_XENTROPY},  # FSDP1, reducing in 16 bit
        source="the tables are of 2023 and FlashAttention 1 (from memory), but those of H100, for which its benchmarks "
        "install FlashAttention 2 (submit_benchmarks.py, gpu-flash2, read); Composer's FSDP is FULL_SHARD; the loss is "
        "FlashAttention's unless a configuration says torch_crossentropy (modeling_mpt.py, loss_fn, read)",
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
        starts=("maxtext",),
        runtime="megatron-fsdp",
        sharded="megatron-fsdp",
        stands_in=True,
        zero=3,
        recomputes_in_part=False,
        policies=("minimal_flash", "save_qkv_proj", "full"),
        shard_nodes=(1, 16),
        sharded_grad_dtype="bf16",
        changes=_XLA,
        tuned="vendor's recipe",
        source="its GPU configurations: minimal_flash for 7B and 8B (configs/models/gpu/llama2_7b.yml, llama3_8b.yml), "
        "save_qkv_proj and 16 nodes for 70B (configs/a3/llama_2_70b/bf16/128vm.sh, 3a8163225f; dgxc-benchmarking's "
        "maxtext/configure.sh, 0b71cfda51), one node for 7B (configs/a3/llama_2_7b/128vm.sh), full for 405B and by "
        "default (llama3.1_405b.yml, base.yml); most scan over blocks, and one policy holds for all; "
        f"{_SIXTEEN_BIT_GRADIENTS}",
    ),
    Framework(
        starts=("paxml",),
        runtime="megatron-fsdp",
        sharded="megatron-fsdp",
        stands_in=True,
        zero=3,
        recomputes_in_part=False,
        policies=("save_dot_only", "save_qkv_out_proj", "save_nothing"),
        shard_nodes=(1, 16),
        sharded_grad_dtype="bf16",
        changes=_XLA,
        overlap="off",
        tuned="vendor's recipe",
        source="dgxc-benchmarking's paxml_mod_configs.py and configure.sh (paxml, 143b90dd91): SAVE_DOT_ONLY and one "
        "node for 5B, SAVE_QKV_OUT_PROJ and 16 nodes for 175B; praxis saves nothing by default. Their container is of "
        "March 2024: until July XLA ran collectives of scanned blocks under such policies on compute's own stream "
        "(openxla/xla issue 14397), and the recipe leaves double buffering and measured latencies off; "
        f"{_SIXTEEN_BIT_GRADIENTS}",
    ),
    Framework(
        starts=("axlearn",),
        runtime="megatron-fsdp",
        sharded="megatron-fsdp",
        stands_in=True,
        zero=3,
        recomputes_in_part=False,
        policies=("minimal_flash", "save_dot_with_context_except_mlp"),
        shard_nodes=(1, 16),
        sharded_grad_dtype="bf16",
        changes=_XLA,
        source="axlearn's experiments/text/gpt/common.py, update_model_remat_config: with flash attention what "
        "build_remat_spec names of attention and of the feed-forward, later of attention alone (read; the names, "
        "projections, context and both linear layers, from memory); fuji.py, 01ebc3ff2c: 8 GPUs of H100 for 7B, 128 "
        "for 70B",
    ),
    Framework(
        starts=("levanter",),
        runtime="megatron-fsdp",
        sharded="megatron-fsdp",
        stands_in=True,
        zero=3,
        recomputes_in_part=False,
        policies=("full",),
        sharded_grad_dtype="bf16",
        changes=_XLA,
        source="models/llama.py, 02be56f672: gradient_checkpointing=True",
    ),
    Framework(
        starts=("easylm",),
        runtime="megatron-fsdp",
        sharded="megatron-fsdp",
        stands_in=True,
        zero=3,
        unfused_until="9999",
        recomputes_in_part=False,
        policies=("full",),
        sharded_grad_dtype="bf16",
        changes=_XLA,
        source="models/llama/llama_model.py, 134105f0f9: remat_block='nothing_saveable'; scan_attention=False, which "
        "materialises the scores",
    ),
    Framework(
        starts=("jax",),
        runtime="megatron-fsdp",
        sharded="megatron-fsdp",
        stands_in=True,
        zero=3,
        recomputes_in_part=False,
        sharded_grad_dtype="bf16",
        changes=_XLA,
        source="an FSDP mesh (from memory), as MaxText's",
    ),
    Framework(
        starts=("colossal",),
        runtime="deepspeed",
        sharded="deepspeed-zero",
        stands_in=True,
        zero=0,
        sequence_parallel=False,
        unfused_until=_FLASH_USUAL,
        grad_dtype="bf16",
        source="plugins around transformers' models, in plain PyTorch with few fused kernels; HybridParallelPlugin's "
        "enable_sequence_parallelism is off; zero/low_level keeps gradients in the parameters' dtype beside fp32 "
        "masters (from memory)",
    ),
    Framework(
        starts=("libai", "oneflow"),
        runtime="megatron",
        before_te="deepspeed",
        stands_in=True,
        zero=0,
        unfused_until=_FLASH_USUAL,
    ),
    Framework(
        starts=("gpt-neox", "neox"),
        runtime="deepspeed",
        sharded="deepspeed-zero",
        recomputes_in_part=False,
        precision="fp16",
        sequence_parallel=False,
        half=_HALF_GRADIENTS,
        overlap="hooks",
        unfused_until=_FLASH_USUAL,
        source="GPT-NeoX configs/20B.yml, read at 252ddc522f: Megatron's layers, DeepSpeed's ZeRO-1 with overlap_comm, "
        "fp16; DeepSpeed reduces from hooks in the last micro-batch's backward, its pipeline engine after it, and its "
        "optimizer gathers parameters; sequence parallelism came in 2024 (from memory)",
    ),
    Framework(
        starts=("fsdp2", "olmo-core", "open_lm"),
        runtime="deepspeed",
        sharded="fsdp",
        zero=3,
        source="fully_shard over every rank; without it plain PyTorch replicas, as deepspeed's",
    ),
    Framework(
        starts=("fsdp", "pytorch", "accelerate", "hf ", "transformers", "axolotl", "llama-factory", "olmo"),
        runtime="deepspeed",
        sharded="fsdp1",
        zero=3,
        source="FullyShardedDataParallel: accelerate's default is fsdp_version 1, and torch.distributed.fsdp had no "
        "fully_shard before PyTorch 2.6 (from memory)",
    ),
    Framework(
        starts=("ddp",),
        runtime="deepspeed",
        sharded="fsdp1",
        zero=0,
        source="DistributedDataParallel around plain PyTorch: gradients all-reduced beside backward",
    ),
    Framework(
        starts=("litgpt", "lit-gpt", "lightning"),
        runtime="deepspeed",
        sharded="fsdp1",
        zero=3,
        changes_sharded={"adamw_update_bytes": 0.0},
        source="litgpt's pretrain.py: AdamW is fused on GPUs (from memory)",
    ),
)
# A framework that no line names: its degrees say which kind of profile is nearest.
OTHER = Framework(
    starts=("",),
    runtime="megatron",
    before_te="deepspeed",
    stands_in=True,
    unfused_until=_FLASH_USUAL,
    source="nearest kind of framework",
)


def framework_of(run: Run) -> Framework:
    """The line of a row's framework, by its usual name or by another spelling; OTHER where none is known."""
    name = usual_name(run.framework or "", run.notes or "")
    if name == "deepspeed" and (run.tp or 1) * (run.pp or 1) > 1:  # whose 3D parallelism is Megatron's
        name = "megatron-deepspeed"
    if name == "nemo" and dated(run) < _TRANSFORMER_ENGINE:  # Megatron-LM's layers, by way of Apex (from memory)
        name = "megatron"
    line = next((line for line in FRAMEWORKS if name.startswith(line.starts)), OTHER)
    kind, _ = precision_of(run, line)
    half = kind == "fp16" and dated(run) < line.since
    return msgspec.structs.replace(line, **(line.quantised if kind in QUANTISED else line.half if half else {}))


def precision_of(run: Run, line: Framework) -> tuple[str, bool]:
    """(kind of precision, whether it is stated); where none is, what the published words name, or the line's."""
    if run.precision_kind not in (None, "unknown"):
        return str(run.precision_kind), True
    return precision_in_words(run.precision or "") or line.precision, False


def is_before_te(run: Run, line: Framework) -> bool:
    """Whether a row is of before Transformer Engine, and predicted with the profile of that time."""
    return bool(line.before_te) and dated(run) < _TRANSFORMER_ENGINE


def zero_of(run: Run, line: Framework) -> tuple[int, bool]:
    """(ZeRO stage, whether it is stated).

    Megatron's distributed optimizer scatters the sums of gradients, which papers call ZeRO-2 (MegaScale); what shards
    gradients between micro-batches has a line of its own, and behind a pipeline no framework does whose default is
    less (DeepSpeed refuses it).
    """
    named = min(run.zero, 3) if run.zero is not None else zero_in_name(run.framework or "")
    if named is None and line.zero == 3 and line.runtime == "deepspeed":  # whose configuration files say the stage
        named = zero_in_name(run.notes or "")
    if named is not None:
        whole = line.zero < 2 and (line.runtime == "megatron" or (run.pp or 1) > 1)
        return (1 if named == 2 and whole else named), True
    if run.dist_opt is not None and line.zero < 2:
        return run.dist_opt, True
    if is_before_te(run, line):
        return 0, False
    if line.zero > 1 and line.runtime != line.sharded and (run.pp or 1) > 1:
        return 1, False  # DeepSpeed and FSDP1 refuse to shard gradients or parameters behind a pipeline
    return line.zero, False


def runtime_of(run: Run, line: Framework) -> tuple[str, bool]:
    """(profile, whether it stands in for another framework)."""
    zero, _ = zero_of(run, line)
    profile = line.sharded if zero >= 2 else line.runtime
    if zero < 2 and is_before_te(run, line):
        return line.before_te, True
    return profile, line.stands_in


def has_sequence_parallelism(run: Run, line: Framework) -> bool:
    """Whether a tensor-parallel row shards sequences too where it does not say so."""
    return line.sequence_parallel and not is_before_te(run, line)


def dated(run: Run) -> str:
    """Year and month of a row, "YYYY-MM"; containers such as 25.09 count as 2025-09, "9998" where nothing is said."""
    text = run.source_date or ""
    found = re.search(r"(20\d\d)(?:[-/.](\d\d)(?!\d))?", text)
    if found:
        return f"{found[1]}-{found[2] or '12'}"
    container = re.search(r"(?<![\d.])v?(2\d)\.(0[1-9]|1[0-2])(?!\d)", f"{text} {run.framework or ''}")
    return f"20{container[1]}-{container[2]}" if container else "9998"
