"""The table of Megatron-LM's options that reading and writing share: each option, its kind, and the field it sets.

Names, kinds, choices and defaults: Megatron-LM megatron/training/arguments.py, read at 000c4ac24f (0.15 era). A field
is what fivefold calls the same thing; options without one are in option_names.py. Writing goes from field to option
through OPTION_OF, reading from option to field through OPTIONS.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from fivefold.interop.megatron import option_names

Kind = Literal["flag", "off", "int", "float", "text", "texts", "ints", "bool"]
Effect = Literal["priced", "neutral", "unmodelled", "refused"]

ARGUMENTS = "Megatron-LM megatron/training/arguments.py, read at 000c4ac24f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of the command line.

    kind: "flag" is set by being there, "off" clears a default of on by being there, "bool" has a --no- twin; the others
        take one value, or with a plural any number.
    field: what it sets in fivefold, "model.layers"; None for the rest.
    default: what Megatron-LM takes without it; None for none.
    effect: "priced"; "neutral" changes neither memory, time nor whether it starts; "unmodelled" changes a figure that
        leaves it out; "refused": with it the run is another one than fivefold can price.
    why: for the last two, a sentence.
    """

    name: str
    kind: Kind
    field: str | None = None
    default: Any = None
    choices: tuple[str, ...] = ()
    effect: Effect = "neutral"
    why: str = ""

    @property
    def key(self) -> str:
        """The option as argparse and the YAML files call it: tensor_model_parallel_size."""
        return self.name.removeprefix("--").replace("-", "_")


def _p(name: str, kind: Kind, field: str, default: Any = None, choices: str = "") -> Option:
    return Option(
        name=f"--{name}", kind=kind, field=field, default=default, choices=tuple(choices.split()), effect="priced"
    )


# The options that a layout, a workload or a model is made of, in the order of arguments.py's groups.
PRICED: tuple[Option, ...] = (
    _p("num-layers", "int", "model.layers"),
    _p("hidden-size", "int", "model.hidden"),
    _p("ffn-hidden-size", "int", "model.ffn"),
    _p("num-attention-heads", "int", "model.heads"),
    _p("kv-channels", "int", "model.head_dim"),
    _p("group-query-attention", "flag", "model.grouped_queries"),
    _p("num-query-groups", "int", "model.kv_heads", 1),
    _p("window-size", "text", "model.window"),
    _p("window-attn-skip-freq", "text", "model.window_skip"),
    _p("max-position-embeddings", "int", "model.max_position"),
    _p("position-embedding-type", "text", "model.positions", "learned_absolute",
       "learned_absolute rope mrope relative none yarn"),
    _p("use-rotary-position-embeddings", "flag", "model.rope"),
    _p("no-position-embedding", "off", "model.position_embedding"),
    _p("make-vocab-size-divisible-by", "int", "model.vocab_multiple", 128),
    _p("normalization", "text", "model.norm", "LayerNorm", "LayerNorm RMSNorm"),
    _p("squared-relu", "flag", "model.squared_relu"),
    _p("swiglu", "flag", "model.swiglu"),
    _p("quick-geglu", "flag", "model.quick_geglu"),
    _p("untie-embeddings-and-output-weights", "flag", "model.untied"),
    _p("disable-bias-linear", "off", "model.bias"),
    _p("add-qkv-bias", "flag", "model.qkv_bias"),
    _p("qk-layernorm", "flag", "model.qk_norm"),
    _p("mtp-num-layers", "int", "model.mtp"),
    _p("vocab-size", "int", "model.vocab"),
    _p("padded-vocab-size", "int", "model.padded_vocab"),
    _p("tokenizer-type", "text", "model.tokenizer_type"),
    _p("tokenizer-model", "text", "model.tokenizer_model"),
    _p("vocab-extra-ids", "int", "model.vocab_extra", 0),
    _p("multi-latent-attention", "flag", "model.mla"),
    _p("q-lora-rank", "int", "model.q_lora_rank"),
    _p("kv-lora-rank", "int", "model.kv_lora_rank", 32),
    _p("qk-head-dim", "int", "model.qk_nope_head_dim", 128),
    _p("qk-pos-emb-head-dim", "int", "model.qk_rope_head_dim", 64),
    _p("v-head-dim", "int", "model.v_head_dim", 128),
    _p("num-experts", "int", "model.experts"),
    _p("moe-layer-freq", "text", "model.moe_layers", "1"),
    _p("moe-ffn-hidden-size", "int", "model.moe_ffn"),
    _p("moe-shared-expert-intermediate-size", "int", "model.shared_ffn"),
    _p("moe-router-topk", "int", "model.top_k", 2),
    _p("seq-length", "int", "work.seq_len"),
    _p("global-batch-size", "int", "work.global_batch"),
    _p("rampup-batch-size", "ints", "work.ramp"),
    _p("train-iters", "int", "work.train_iters"),
    _p("train-samples", "int", "work.train_samples"),
    _p("optimizer", "text", "work.optimizer", "adam", "adam sgd muon dist_muon"),
    _p("moe-enable-deepep", "flag", "work.deepep"),
    _p("optimizer-cpu-offload", "flag", "work.offload_optimizer"),
    _p("optimizer-offload-fraction", "float", "work.offload_fraction", 1.0),
    _p("overlap-cpu-optimizer-d2h-h2d", "flag", "work.offload_overlap"),
    _p("cpu-offloading-num-layers", "int", "work.offload_layers", 0),
    _p("fp16", "flag", "work.fp16"),
    _p("bf16", "flag", "work.bf16"),
    _p("fp8-format", "text", "work.fp8", None, "e4m3 hybrid"),
    _p("fp8-recipe", "text", "work.fp8_recipe", "delayed", "tensorwise delayed mxfp8 blockwise custom"),
    _p("fp4-format", "text", "work.fp4", None, "e2m1"),
    _p("attention-backend", "text", "work.attention", "auto", "flash fused unfused local auto"),
    _p("hidden-dropout", "float", "work.dropout", 0.1),
    _p("grad-reduce-in-bf16", "flag", "work.bf16_gradients"),
    _p("accumulate-allreduce-grads-in-fp32", "flag", "work.fp32_gradients"),
    _p("micro-batch-size", "int", "layout.micro_batch"),
    _p("tensor-model-parallel-size", "int", "layout.tp", 1),
    _p("pipeline-model-parallel-size", "int", "layout.pp", 1),
    _p("context-parallel-size", "int", "layout.cp", 1),
    _p("cp-comm-type", "texts", "layout.cp_kind", ("p2p",)),
    _p("expert-model-parallel-size", "int", "layout.ep", 1),
    _p("expert-tensor-parallel-size", "int", "layout.etp"),
    _p("num-layers-per-virtual-pipeline-stage", "int", "layout.layers_per_chunk"),
    _p("num-virtual-stages-per-pipeline-rank", "int", "layout.vpp"),
    _p("microbatch-group-size-per-virtual-pipeline-stage", "int", "layout.group"),
    _p("decoder-first-pipeline-num-layers", "int", "layout.first_stage_layers"),
    _p("decoder-last-pipeline-num-layers", "int", "layout.last_stage_layers"),
    _p("account-for-embedding-in-pipeline-split", "flag", "layout.account_for_embedding"),
    _p("account-for-loss-in-pipeline-split", "flag", "layout.account_for_loss"),
    _p("pipeline-model-parallel-layout", "text", "layout.stage_text"),
    _p("no-overlap-p2p-communication", "off", "layout.overlap_p2p"),
    _p("use-distributed-optimizer", "flag", "layout.zero"),
    _p("use-megatron-fsdp", "flag", "layout.fsdp"),
    _p("use-custom-fsdp", "flag", "layout.custom_fsdp"),
    _p("data-parallel-sharding-strategy", "text", "layout.sharding", "no_shard",
       "no_shard optim optim_grads optim_grads_params"),
    _p("num-distributed-optimizer-instances", "int", "layout.dp_replicate", 1),
    _p("sequence-parallel", "flag", "layout.sequence_parallel"),
    _p("recompute-activations", "flag", "layout.recompute_activations"),
    _p("recompute-granularity", "text", "layout.recompute_kind", None, "full selective"),
    _p("recompute-method", "text", "layout.recompute_method", None, "uniform block"),
    _p("recompute-num-layers", "int", "layout.recompute_layers"),
    _p("recompute-modules", "texts", "layout.recompute_modules"),
    _p("moe-layer-recompute", "flag", "layout.recompute_moe"),
    _p("overlap-grad-reduce", "flag", "layout.overlap_grad"),
    _p("overlap-param-gather", "flag", "layout.overlap_param"),
    _p("tp-comm-overlap", "flag", "layout.overlap_tp"),
    _p("overlap-moe-expert-parallel-comm", "flag", "layout.overlap_ep"),
)  # fmt: skip

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        *(
            Option(name=name, kind=kind, effect="neutral")  # type: ignore[arg-type]
            for kind, names in option_names.NEUTRAL.items()
            for name in names.split()
        ),
        *(
            Option(name=name, kind=kind, effect=effect, why=why)  # type: ignore[arg-type]
            for effect, rows in (("unmodelled", option_names.UNMODELLED), ("refused", option_names.REFUSED))
            for name, kind, why in rows
        ),
        *PRICED,
    )
}
OPTION_OF: dict[str, Option] = {option.field: option for option in PRICED if option.field}
BY_KEY: dict[str, Option] = {option.key: option for option in OPTIONS.values()}

# An option of this kind makes a command a training launch rather than a tool of the repository.
DEFINING: frozenset[str] = frozenset(
    f"--{name}"
    for name in (
        "num-layers",
        "hidden-size",
        "micro-batch-size",
        "global-batch-size",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "use-checkpoint-args",
        "yaml-cfg",
    )
)


def near_options(name: str) -> list[str]:
    """Options spelled like an unknown one, the nearest first."""
    dashed = name.replace("_", "-")
    if dashed in OPTIONS:
        return [dashed]
    return get_close_matches(dashed[:80], OPTIONS, n=2, cutoff=0.8)
