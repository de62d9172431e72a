"""The settings of a launch, wherever they are written: a command, overrides, YAML files, what the user adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.interop.foreign import refuse_foreign
from fivefold.interop.launchers import World
from fivefold.interop.megatron.commands import Launch, words_of
from fivefold.interop.megatron.given import Given, parse_arguments
from fivefold.interop.megatron.keys import OVERRIDE, WORLD_KEYS, read_key, read_mapping
from fivefold.interop.shell.files import Files
from fivefold.interop.shell.state import State
from fivefold.interop.source import Field, Place, plain, unreadable
from fivefold.interop.yaml_text import read_yaml


def script_settings(launch: Launch, root: Path | None) -> tuple[Given, str]:
    given = Given(launch.state)
    if launch.overrides:
        _read_overrides(given, launch)
        return given, "bridge"
    parse_arguments(given, launch.arguments)
    yaml = given.text("--yaml-cfg")
    if yaml is not None and root is not None:
        # With --yaml-cfg everything else on the command line is ignored (arguments.py, parse_args).
        found = Files(root).text_of(yaml)
        if found is None:
            given.missing["--yaml-cfg"] = f"--yaml-cfg {yaml[:80]} does not lie beside the script, so it is not read"
        else:
            tree, lines = read_yaml(found, Path(yaml).name)
            given = Given(launch.state)
            read_mapping(given, tree, lambda key: Place(Path(yaml).name, lines.get(key, 1)))
            return given, "yaml"
    return given, "megatron-lm"


def _read_overrides(given: Given, launch: Launch) -> None:
    """key=value words; options in between belong to the program (--recipe NAME)."""
    rest: list[Field] = []
    for each in launch.arguments:
        found = OVERRIDE.fullmatch(str(plain(each.text)))
        if found is None or each.text.startswith("-"):
            rest.append(each)
        elif found[1] in WORLD_KEYS:
            if found[2].isdigit() and len(found[2]) < 7:
                launch.world.counts[WORLD_KEYS[found[1]]] = (int(found[2]), each.place)
        else:
            read_key(given, found[1], found[2], each.place)
    launch.arguments = rest


def yaml_settings(text: str, name: str) -> tuple[Launch, Given, str]:
    tree, lines = read_yaml(text, name)
    refuse_foreign(tree, name)
    if "apiVersion" in tree and "kind" in tree:
        raise unreadable(
            name,
            f"it is a Kubernetes manifest ({str(tree['kind'])[:40]}), which is not read",
            "give the shell script that its container runs, or a script with the same options",
        )
    state = State(name)
    launch = Launch(program="", arguments=[], place=Place(name, 1), world=World(), state=state)
    given = Given(state)
    arguments = tree.get("MODEL_ARGS")
    if isinstance(arguments, dict):
        _model_arguments(given, arguments, name, lines)
        variables = tree.get("ENV_VARS")
        launch.environment = {key: str(value) for key, value in (variables or {}).items()} if variables else {}
        return launch, given, "megatron-lm"
    leaves = read_mapping(given, tree, lambda key: Place(name, lines.get(key, 1)))
    for key, what in WORLD_KEYS.items():
        value = leaves.get(key)
        if isinstance(value, int) and 0 < value < 1 << 20:
            launch.world.counts[what] = (value, Place(name, lines.get(key, 1)))
    bridge = any(key in tree for key in ("train", "ddp", "trainer", "_target_"))
    launch.overrides = bridge
    return launch, given, "bridge" if bridge else "yaml"


def _model_arguments(given: Given, tree: dict[str, Any], name: str, lines: dict[str, int]) -> None:
    """A file of options by name, as Megatron-LM's own tests have them: {"--num-layers": 12, "--swiglu": true}."""
    for option, value in tree.items():
        place = Place(name, lines.get(f"MODEL_ARGS.{option}", 1))
        if value is False:
            continue
        words = [Field(option, place)]
        if value is not True and value is not None:
            words += [Field(word, place) for word in ([str(value)] if not isinstance(value, list) else map(str, value))]
        parse_arguments(given, words)


def add_words(given: Given, text: str, style: str) -> None:
    """--with: appended as the last words of the command."""
    words = words_of(text, "--with") if text else []
    rest: list[Field] = []
    for each in words:
        found = OVERRIDE.fullmatch(str(plain(each.text)))
        if found is not None and style != "megatron-lm":
            read_key(given, found[1], found[2], each.place)
        else:
            rest.append(each)
    parse_arguments(given, rest)
