"""The catalogue's files: data/gpus.toml, data/systems.toml and data/aliases.toml, read entry by entry.

All tables of one name stand together in its file, so that one entry can be cut out and parsed alone: a command needs
one GPU and one or two systems, and parsing the whole catalogue would take longer than the command.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import Any

import msgspec

Table = dict[str, Any]


@lru_cache(maxsize=2)
def _entries(kind: str) -> dict[str, str]:
    """TOML text of each entry of data/{kind}s.toml, whose tables are [kind.name] and [[kind.name.links]]."""
    text = _text(f"{kind}s.toml")
    entries: dict[str, str] = {}
    heads = list(re.finditer(rf"^\[\[?{kind}\.([a-z0-9-]+)", text, re.MULTILINE))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    for head, end in zip(heads, ends, strict=True):
        entries[head[1]] = entries.get(head[1], "") + text[head.start() : end]
    return entries


def _text(name: str) -> str:
    return resources.files("fivefold.cluster").joinpath(f"data/{name}").read_text(encoding="utf-8")


def gpu_names() -> list[str]:
    return list(_entries("gpu"))


def system_names() -> list[str]:
    return list(_entries("system"))


@lru_cache(maxsize=1)
def alias_names() -> dict[str, str]:
    """Other names of systems, in lower case."""
    return msgspec.toml.decode(_text("aliases.toml"))["alias"]


@lru_cache(maxsize=256)
def gpu_table(name: str) -> Table:
    """One GPU's table; KeyError for a name that is not there. Callers must not change it."""
    return {"name": name, **msgspec.toml.decode(_entries("gpu")[name])["gpu"][name]}


@lru_cache(maxsize=256)
def system_table(name: str) -> Table:
    """One system's table with `like`, `network` and `bridge` resolved; KeyError as for gpu_table. Not to be changed.

    like: the system whose keys hold where this one has none of its own. network: the outermost link in place of that
    system's. bridge: a further innermost link.
    """
    own = msgspec.toml.decode(_entries("system")[name])["system"][name]
    base = system_table(own["like"]) if "like" in own else {}
    table = {**base, **own}
    if "network" in own:
        table["links"] = [*table["links"][:-1], {"span": 0, **own["network"]}]
    if "bridge" in own:
        table["links"] = [own["bridge"], *table["links"]]
    return {key: value for key, value in table.items() if key not in ("like", "network", "bridge")}
