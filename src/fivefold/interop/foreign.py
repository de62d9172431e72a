"""Configurations of frameworks whose launches are not read, known by keys that no file of Megatron's has."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, NamedTuple

from fivefold.interop.source import unreadable


class Foreign(NamedTuple):
    """A framework's configuration: its name, the profile that prices its layouts, how the file's name ends, and keys
    at its top, each of which tells it."""

    name: str
    runtime: str
    suffixes: tuple[str, ...]
    keys: frozenset[str]


_YAML = (".yaml", ".yml")
FOREIGN = (
    Foreign("accelerate", "accelerate", _YAML, frozenset({"distributed_type", "compute_environment", "fsdp_config"})),
    Foreign("nanotron", "nanotron", _YAML, frozenset({"parallelism", "data_stages"})),
    Foreign(
        "DeepSpeed", "deepspeed-zero", (".json",), frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"})
    ),
    Foreign("torchtitan", "torchtitan", (".toml",), frozenset({"job", "training", "parallelism"})),
)


def refuse_foreign(keys: Iterable[str], name: str) -> None:
    """Raises FivefoldError for the keys at the top of a file that is another framework's. name: of the file."""
    found, suffix = set(keys), PurePath(name).suffix.lower()
    for each in FOREIGN:
        if suffix in each.suffixes and found & each.keys:
            raise unreadable(
                name,
                f"it is a configuration of {each.name}, and launches of Megatron-LM, Megatron-Bridge and NeMo are read",
                f"price its layout: fivefold estimate MODEL --gpus N --runtime {each.runtime}, with its degrees",
                "foreign-framework",
            )


def refuse_foreign_text(text: str, name: str) -> None:
    """The same for the text of a JSON or TOML file; anything else, and what is neither, passes."""
    read = {".json": json.loads, ".toml": tomllib.loads}.get(PurePath(name).suffix.lower())
    try:
        tree: Any = read(text) if read else None
    except (ValueError, RecursionError):
        return
    if isinstance(tree, dict):
        refuse_foreign(tree, name)
