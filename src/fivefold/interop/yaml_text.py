"""YAML from strangers: plain data only, bounded in size, depth and aliases."""

from __future__ import annotations

import re
from typing import Any

from fivefold.interop.source import Place, unreadable

MAX_NODES = 20_000
MAX_DEPTH = 30
MAX_ALIASES = 200


def read_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """(the mapping at the top, line of each dotted key). Raises FivefoldError naming the line.

    Only YAML's own plain types are made, so no tag can construct anything; anchors may be used MAX_ALIASES times and
    are counted with their contents, which bounds what a file can grow to.
    """
    import yaml  # only YAML files need it

    try:
        root = yaml.compose(_bounded(yaml, text, name), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = Place(name, mark.line + 1) if mark else name
        problem = str(getattr(error, "problem", None) or "it is not YAML")
        raise unreadable(where, f"it is not YAML: {problem[:120]}", "correct that line") from error
    except (RecursionError, ValueError) as error:
        raise unreadable(name, "it is nested too deeply, or is not YAML", "make it flatter") from error
    if root is None or not isinstance(root, yaml.MappingNode):
        raise unreadable(name, "it has no keys at its top", "give a file of keys and values")
    walker = _Walker(yaml, name)
    value = walker.value(root, "", 0)
    return value, walker.lines


def _bounded(yaml: Any, text: str, name: str) -> str:
    """The text, after its events were counted: composing recurses, and this does not."""
    if _brackets(text) > 2 * MAX_DEPTH:  # the scanner reads to the end of a bracket before it says anything
        raise unreadable(name, f"its brackets nest deeper than {2 * MAX_DEPTH}", "make it flatter")
    depth = aliases = 0
    for nodes, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH or nodes > MAX_NODES or aliases > MAX_ALIASES:
            line = event.start_mark.line + 1
            limit = f"{MAX_DEPTH} levels, {MAX_NODES:,} values or {MAX_ALIASES} aliases"
            raise unreadable(Place(name, line), f"it has more than {limit}", "give a plain configuration")
    return text


def _brackets(text: str) -> int:
    """How deep brackets nest at most, quotes not looked at."""
    level = deepest = 0
    for found in re.finditer(r"[\[{]|[]}]", text):
        level = level + 1 if found[0] in "[{" else max(level - 1, 0)
        deepest = max(deepest, level)
    return deepest


class _Walker:
    """Makes plain values of composed nodes, counting what aliases repeat."""

    def __init__(self, yaml: Any, name: str) -> None:
        self._yaml, self._name = yaml, name
        self._constructor = yaml.SafeLoader("")
        self._made = 0
        self.lines: dict[str, int] = {}

    def value(self, node: Any, path: str, depth: int) -> Any:
        self._made += 1
        if self._made > MAX_NODES or depth > MAX_DEPTH:
            place = Place(self._name, node.start_mark.line + 1)
            raise unreadable(place, "its aliases make it too large, or contain themselves", "write the values out")
        self.lines[path] = node.start_mark.line + 1
        if isinstance(node, self._yaml.MappingNode):
            return {
                key: self.value(item, f"{path}.{key}".lstrip("."), depth + 1)
                for name, item in node.value
                if (key := str(getattr(name, "value", ""))[:200]) is not None
            }
        if isinstance(node, self._yaml.SequenceNode):
            return [self.value(item, path, depth + 1) for item in node.value]
        return self._scalar(node)

    def _scalar(self, node: Any) -> Any:
        """null, booleans, numbers and text; any other tag stays text."""
        readers = {
            "tag:yaml.org,2002:null": lambda _: None,
            "tag:yaml.org,2002:bool": self._constructor.construct_yaml_bool,
            "tag:yaml.org,2002:int": _whole,
            "tag:yaml.org,2002:float": lambda each: each.value[:60],
        }
        read = readers.get(node.tag)
        if read is None:
            return node.value[:100_000]
        try:
            return read(node)
        except (ValueError, KeyError, IndexError):
            return node.value[:200]


def _whole(node: Any) -> Any:
    text = node.value.replace("_", "")
    return (
        int(text)
        if (text.lstrip("+-").isdigit() and len(text) < 19 and not text.startswith("0")) or text == "0"
        else text
    )
