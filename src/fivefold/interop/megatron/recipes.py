"""What a recipe of Megatron-Bridge or NeMo 2 stands for, as far as its name tells: llama3_8b_pretrain_config."""

from __future__ import annotations

import re

from fivefold.interop.megatron.given import Given, Setting
from fivefold.interop.megatron.keys import bridge_key
from fivefold.interop.source import Field, Place
from fivefold.model.catalogue import resolve

_AROUND = re.compile(r"^(?:pretrain|finetune|train|sft)_|(?:_(?:pretrain|finetune|sft|peft|config|recipe))+.*$|\.py$")
# On in every pre-training recipe: Megatron-Bridge recipes/common.py, _pretrain_common, at 0eca073e6f; NeMo 2 from
# memory.
_ON = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_ON_SOURCE = "on in Megatron-Bridge's pre-training recipes (recipes/common.py)"
# Each recipe's own, and off where the file does not say.
_OWN = (
    "--sequence-parallel",
    "--num-virtual-stages-per-pipeline-rank",
    "--recompute-granularity",
    "--tp-comm-overlap",
)
_TUNING = re.compile(r"finetune|sft|peft|lora|dpo")
_NUMBER = re.compile(r"^([a-z]+)(\d)(\d)_(\d.*)$")


def recipe_model(words: list[str]) -> str | None:
    """The catalogue's name of the first word that names a model, None where none does."""
    for word in words[:64]:
        name = _AROUND.sub("", word[:100].rpartition("/")[2].rpartition(".py")[0] or word[:100].rpartition("/")[2])
        name = _AROUND.sub("", name)
        dotted = _NUMBER.sub(r"\1-\2.\3-\4", name)
        found = (resolve(name) or resolve(dotted)) if len(name) > 3 else None
        if found is not None:
            return found
    return None


def assume_recipe(given: Given, words: list[str]) -> list[tuple[str, object, str]]:
    """Set what pre-training recipes set and the file does not override. Returns (key, value, source) of each, and of
    what is each recipe's own. words: the program and what is left of its arguments.

    NeMo 1 (megatron_gpt_pretraining.py) has no recipes, and fine-tuning leaves reduction and gathering unhidden.
    """
    if not words or words[0].rpartition("/")[2].startswith("megatron_"):
        return []
    assumed: list[tuple[str, object, str]] = []
    tuning = any(_TUNING.search(word[:100]) for word in words[:64])
    for option in _ON[:1] if tuning else _ON:
        needs = option != "--overlap-param-gather" or given.flag("--use-distributed-optimizer")
        if option not in given and needs:
            place = Place("recipe", 0)
            given.add(Setting(option, (Field("true", place),), place))
            assumed.append((bridge_key(option), "true", _ON_SOURCE))
    own = [bridge_key(option) for option in _OWN if option not in given]
    if own:
        assumed.append((", ".join(own), "off", "the recipe's own values are code, which is not read"))
    return assumed
