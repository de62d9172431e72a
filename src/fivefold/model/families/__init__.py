"""The model families that are read exactly, one table keyed by model_type.

A family is a declaration of its config.json's keys and a function that makes a ModelSpec from them; a new one is
added by writing those two and listing it here.
"""

from __future__ import annotations

from fivefold.model.families import deepseek, dense, gpt2, moe
from fivefold.model.families.reader import Family, Reader

FAMILIES: dict[str, Family] = {
    family.model_type: family for module in (dense, gpt2, moe, deepseek) for family in module.FAMILIES
}

__all__ = ["FAMILIES", "Family", "Reader"]
