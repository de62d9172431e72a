"""Dictionaries as YAML 1.2: block style, every text in double quotes, so that no value can be read as anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# JSON's escapes of text are YAML's too; what JSON lets pass and YAML does not print is escaped by hand.
_UNPRINTED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029, 0xFEFF)}


def yaml(document: Mapping[str, Any]) -> str:
    """One document. Keys and texts, whole numbers, truth values, mappings and lists; TypeError for anything else."""
    return "\n".join(_mapping(document, "")) + "\n"


def _mapping(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, item in value.items():
        yield from _item(f"{indent}{_key(key)}:", item, f"{indent}  ")


def _list(value: Sequence[Any], indent: str) -> Iterator[str]:
    for item in value:
        if isinstance(item, Mapping) and item:
            lines = [*_mapping(item, f"{indent}  ")]
            yield f"{indent}- {lines[0].lstrip()}"
            yield from lines[1:]
        else:
            yield from _item(f"{indent}-", item, f"{indent}  ")


def _item(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield head
        yield from _mapping(value, indent)
    elif isinstance(value, (list, tuple)) and value:
        yield head
        yield from _list(value, indent)
    else:
        yield f"{head} {_scalar(value)}"


def _key(key: str) -> str:
    """Plain where it is a word, which keeps manifests readable."""
    return (
        key
        if key.isidentifier() and key.lower() not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
        else _text(key)
    )


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).translate(_UNPRINTED)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, (list, tuple)):
        return "[]"
    raise TypeError(f"a manifest holds no {type(value).__name__}")
