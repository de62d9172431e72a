"""Configuration keys as options: Megatron-LM's YAML, and the overrides of Megatron-Bridge and NeMo.

Most keys are an option's name with underscores (Megatron-Bridge documentation, "Megatron-LM to Megatron Bridge Guide";
Megatron-LM examples/gpt3/gpt_config.yaml, read at 07659f9f09). The table has those that are not. A key that names
neither is listed as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fivefold.interop.megatron.given import Given, Setting
from fivefold.interop.megatron.options import BY_KEY, OPTIONS, Option
from fivefold.interop.source import Field, Place

# Groups of a Megatron-Bridge ConfigContainer and of NeMo 2.0's llm.pretrain, in front of the first dot.
_GROUPS = """
    model train trainer optimizer optim ddp dataset data mixed_precision comm_overlap scheduler dist rng logger
    tokenizer checkpoint profiling peft strategy resume log language_model model_parallel validation
"""
GROUPS: frozenset[str] = frozenset(_GROUPS.split())
OVERRIDE = re.compile(r"\+{0,2}([a-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)

# Key (its last part) -> option. From Megatron-Core's TransformerConfig and DistributedDataParallelConfig field names.
_RENAMED: dict[str, str] = {
    "num_moe_experts": "--num-experts",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "layernorm_epsilon": "--norm-epsilon",
    "overlap_grad_sync": "--overlap-grad-reduce",
    "overlap_param_sync": "--overlap-param-gather",
    "micro_batch_size": "--micro-batch-size",
    "moe_layer_freq": "--moe-layer-freq",
    "use_custom_fsdp": "--use-megatron-fsdp",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "nccl_ub": "--use-nccl-ub",
}
# Older names, which are read and not written. NeMo 1: examples/nlp/language_modeling/conf/megatron_gpt_config.yaml,
# read at 000763d0c6.
_OLDER: dict[str, str] = {
    "sequence_length": "--seq-length",
    "encoder_seq_length": "--seq-length",
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "activations_checkpoint_num_layers": "--recompute-num-layers",
}
# Keys that are on where the option is off, and the other way round.
_INVERTED: dict[str, str] = {
    "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "add_bias_linear": "--disable-bias-linear",
    "bias": "--disable-bias-linear",
    "grad_reduce_in_fp32": "--grad-reduce-in-bf16",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "batch_p2p_comm": "",
}
# Keys that say nothing about size, time or validity. The rest of the unknown ones are listed.
_IGNORED = re.compile(
    r"_target_|_call_|.*(?:_func|_dtype|_dir|_path|_method|_context|_backend|_interval|_hook|_seed|_std|timers|_alpha"
    r"|_threshold)|batch_p2p_\w+|deallocate_pipeline_outputs|variable_seq_lengths|parallel_output|"
    r"scatter_embedding_sequence_parallel|enable_autocast|autocast_\w+|memory_efficient_layer_norm|persist_layer_norm|"
    r"barrier_with_L1_time|bias_\w+_fusion|masked_softmax_fusion|apply_rope_fusion|gradient_accumulation_fusion|"
    r"perform_initialization|async_tensor_model_parallel_allreduce|tp_comm_\w+|cpu_offloading\w*|fp8_\w+|fp4_\w+|"
    r"add_position_embedding|bert_binary_head|enable_one_logger|should_pad_vocab|use_gloo_process_groups|"
    r"num_microbatches_with_partial_activation_checkpoints|clone_scatter_output_in_embedding|moe_token_dropping|"
    r"max_steps|accelerator|name|plugins|callbacks|limit_\w+|log_every_n_steps|paths|num_sanity_val_steps"
)


def read_mapping(given: Given, tree: Mapping[str, Any], place_of: Callable[[str], Place]) -> dict[str, Any]:
    """A YAML file's keys as settings. Returns the leaves that are for the launch itself: nodes and devices."""
    leaves = dict(_leaves(tree, "", 0))
    for path, value in leaves.items():
        read_key(given, path, value, place_of(path))
    return leaves


def _leaves(tree: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < 12:
            yield from _leaves(value, f"{path}.", depth + 1)
        else:
            yield path, value


def read_key(given: Given, path: str, value: Any, place: Place) -> None:
    """One key with its value, as a setting of the option that it stands for."""
    last = path.rpartition(".")[2]
    if path in WORLD_KEYS or last in ("num_nodes", "devices"):
        return
    for name, special in _SPECIAL.items():
        if last == name or path == name or path.endswith(f".{name}"):
            for option, text in special(value):
                given.add(_setting(option, text, place))
            return
    if last in _INVERTED:
        if _INVERTED[last] and isinstance(_typed(value), bool):
            _switch(given, _INVERTED[last], not _typed(value), place)
        return
    option = OPTIONS.get(_RENAMED.get(last) or _OLDER.get(last, "")) or BY_KEY.get(last) or OPTIONS.get(path)
    if option is None:
        if value is not None and not _IGNORED.fullmatch(last):
            given.unknown.append(Setting(path[:80], (Field(str(value)[:200], place),), place))
        return
    _assign(given, option, _typed(value), place)


def _assign(given: Given, option: Option, value: Any, place: Place) -> None:
    if value is None:
        return
    if option.kind in ("flag", "off"):
        # A key of an option that clears a default says the opposite: add_bias_linear is in _INVERTED.
        _switch(given, option.name, bool(value), place)
        return
    if isinstance(value, (list, tuple)):
        listed = ",".join(str(each) for each in value[:8192])
        fields = [listed] if option.kind in ("text", "int", "float") else [str(each) for each in value[:256]]
        text = f"[{listed}]" if option.kind == "text" else None
        given.add(Setting(option.name, tuple(Field(each, place) for each in ([text] if text else fields)), place))
        return
    given.add(_setting(option.name, str(value), place))


def _switch(given: Given, option: str, on: bool, place: Place) -> None:
    given.add(Setting(option, (Field("true" if on else "false", place),), place))


def _setting(option: str, text: str, place: Place) -> Setting:
    return Setting(option, (Field(text, place),), place)


def _typed(value: Any) -> Any:
    """An override's text as YAML would read it, of the few kinds that options have."""
    if not isinstance(value, str):
        return value
    text = value.strip().strip("'\"")
    words = {"true": True, "false": False, "null": None, "none": None, "~": None}
    if text.lower() in words:
        return words[text.lower()]
    if text.startswith("[") and text.endswith("]") and "]" not in text[:-1]:
        return [each.strip().strip("'\"") for each in text[1:-1].split(",") if each.strip()]
    return text


def _activation(value: Any) -> list[tuple[str, str]]:
    text = str(value["_target_"] if isinstance(value, Mapping) and "_target_" in value else value).lower()
    return [("--swiglu", "true")] if any(word in text for word in ("swiglu", "silu")) else []


def _precision(value: Any) -> list[tuple[str, str]]:
    """mixed_precision=bf16_mixed, bf16_with_fp8_current_scaling_mixed, fp16-mixed..."""
    text = str(value).lower()
    found = [("--bf16", "true")] if "bf16" in text else [("--fp16", "true")] if "fp16" in text or text == "16" else []
    found += [("--fp8-format", "hybrid")] if "fp8" in text else []
    found += [("--fp8-recipe", "mxfp8")] if "mxfp8" in text else []
    return found + ([("--fp4-format", "e2m1")] if "nvfp4" in text else [])


def _normalization(value: Any) -> list[tuple[str, str]]:
    """NeMo 1 spells the two in lower case, and its layernorm1p is a LayerNorm (from memory)."""
    known = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
    return [] if value is None else [("--normalization", known.get(str(value).strip("'\"").lower(), str(value)))]


def _optimizer(value: Any) -> list[tuple[str, str]]:
    """NeMo 1 shards the optimizer by its name: distributed_fused_adam (from memory)."""
    return [("--use-distributed-optimizer", "true")] if str(value).strip("'\"") == "distributed_fused_adam" else []


_SPECIAL: dict[str, Callable[[Any], list[tuple[str, str]]]] = {
    "activation_func": _activation,
    "activation": _activation,
    "normalization": _normalization,
    "optim.name": _optimizer,
    "mixed_precision": _precision,
    "trainer.precision": _precision,
    "gated_linear_unit": lambda value: [],
}
# Keys that say how many GPUs: NeMo's Trainer, and the wrappers around Bridge recipes.
WORLD_KEYS: dict[str, str] = {
    "trainer.num_nodes": "nodes",
    "trainer.devices": "per_node",
    "num_nodes": "nodes",
    "devices": "per_node",
    "model.trainer.num_nodes": "nodes",
}

# Option -> key of a Megatron-Bridge override, for showing changes in the words of the file.
_BRIDGE_GROUPS: dict[str, str] = {
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "--overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "--overlap-param-gather": "ddp.overlap_param_gather",
    "--tp-comm-overlap": "comm_overlap.tp_comm_overlap",
    "--overlap-moe-expert-parallel-comm": "comm_overlap.overlap_moe_expert_parallel_comm",
}


def bridge_key(option: str) -> str:
    """The override that sets what a Megatron-LM option sets."""
    renamed = {target: key for key, target in _RENAMED.items()}
    return _BRIDGE_GROUPS.get(option) or f"model.{renamed.get(option, option.removeprefix('--').replace('-', '_'))}"
