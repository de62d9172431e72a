"""Megatron-Core's own configuration as a judge of options: what it refuses, and how many layers a stage gets.

Follows core_transformer_config_from_args of Megatron-LM megatron/training/arguments.py (read at 000c4ac24f), which is
not part of the megatron-core package. Its TransformerConfig and ModelParallelConfig run on a CPU; they refuse less than
the command line does. Checks that only ask for an installed Transformer Engine are told that it is there.
"""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import suppress
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from megatron.core.transformer import transformer_config as core  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from torch.nn import functional  # noqa: E402

# Destination of an option where it is not its own name.
_NAMES = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp8_format": "fp8",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
}
_OFF = {"disable_bias_linear": "add_bias_linear"}


def settings_of(words: list[str]) -> dict[str, Any]:
    """--name, --name value or --name value value, as a dictionary of argparse's destinations."""
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = True
        else:
            held = found[name]
            found[name] = word if held is True else [*(held if isinstance(held, list) else [held]), word]
    return found


def config_of(words: list[str]) -> core.TransformerConfig:
    """The configuration that Megatron-LM would build. Raises what it raises."""
    given = settings_of(words)
    latent = given.get("multi_latent_attention", False)
    kind = core.MLATransformerConfig if latent else core.TransformerConfig
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in _OFF:
            values[_OFF[name]] = False
        elif _NAMES.get(name, name) in fields:
            values[_NAMES.get(name, name)] = _typed(value)
    if "group_query_attention" not in given:
        values.pop("num_query_groups", None)
    if given.get("swiglu"):
        values |= {"activation_func": functional.silu, "gated_linear_unit": True}
    # arguments.py turns this fusion off where there are no biases.
    values["bias_activation_fusion"] = given.get("swiglu", False) or values.get("add_bias_linear", True)
    values["params_dtype"] = torch.float16 if given.get("fp16") else torch.bfloat16
    values["pipeline_dtype"] = values["params_dtype"]
    # Rotary fusion asks for Transformer Engine itself, and changes nothing else here.
    values["apply_rope_fusion"] = False
    values["recompute_modules"] = _listed(given.get("recompute_modules"))
    values["virtual_pipeline_model_parallel_size"] = _chunks(given)
    values["tensor_model_parallel_size"] = int(given["tensor_model_parallel_size"])
    if values["tensor_model_parallel_size"] == 1:
        values["sequence_parallel"] = False
    if isinstance(values.get("moe_layer_freq"), str):
        values["moe_layer_freq"] = _pattern(values["moe_layer_freq"])
    if isinstance(values.get("window_attn_skip_freq"), str):
        values["window_attn_skip_freq"] = _pattern(values["window_attn_skip_freq"])
    if "window_size" in given:
        values["window_size"] = tuple(int(number) for number in given["window_size"].split(","))
    if "attention_backend" in given:
        values["attention_backend"] = core.AttnBackend[given["attention_backend"]]
    core.is_te_min_version = lambda *_, **__: True
    return kind(**values)


def refusal(words: list[str]) -> str | None:
    """What Megatron-Core says against the options; None where it takes them."""
    try:
        config_of(words)
    except (ValueError, AssertionError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def layers_per_stage(config: core.TransformerConfig) -> list[list[int]]:
    """Layers of [pipeline rank][chunk], by Megatron-Core's own count."""
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    chunks = [None] if vpp is None else list(range(vpp))
    return [[get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank) for chunk in chunks] for rank in range(pp)]


def _chunks(given: dict[str, Any]) -> int | None:
    """validate_args: chunks from either option; one chunk is none."""
    chunks = given.get("num_virtual_stages_per_pipeline_rank")
    per_chunk = given.get("num_layers_per_virtual_pipeline_stage")
    if per_chunk is not None:
        counted = int(given["num_layers"])
        counted += "account_for_embedding_in_pipeline_split" in given
        counted += "account_for_loss_in_pipeline_split" in given
        per_rank, rest = divmod(counted, int(given["pipeline_model_parallel_size"]))
        if rest or per_rank % int(per_chunk):
            raise ValueError("layers do not divide into chunks")
        chunks = per_rank // int(per_chunk)
    return None if chunks is None or int(chunks) == 1 else int(chunks)


def _pattern(text: str) -> Any:
    """([0]*3+[1]*58), read without eval."""
    if text.isdigit():
        return int(text)
    parts = [part.strip("()").split("*") for part in text.split("+")]
    return [int(value.strip("[]")) for value, times in parts for _ in range(int(times))]


def _listed(value: Any) -> list[str] | None:
    return None if value is None else value if isinstance(value, list) else [value]


def _typed(value: Any) -> Any:
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
    return value
