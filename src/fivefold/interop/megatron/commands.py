"""The launch in a script: which of its commands starts training, with which words and environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fivefold.interop.launchers import World, directives, entry, slurm_variables, world_of
from fivefold.interop.megatron.keys import GROUPS, OVERRIDE
from fivefold.interop.megatron.options import DEFINING
from fivefold.interop.shell.calls import Command
from fivefold.interop.shell.expand import Expander
from fivefold.interop.shell.files import Files
from fivefold.interop.shell.parser import parse
from fivefold.interop.shell.run import Runner
from fivefold.interop.shell.state import State, Variable, without_unknowns
from fivefold.interop.shell.syntax import Simple, Word
from fivefold.interop.source import UNKNOWN, Field, Place, plain, unreadable

# Programs of Megatron-LM's repository that take some of the same options and train nothing.
_TOOLS = (
    "preprocess_data.py",
    "convert.py",
    "merge_datasets.py",
    "run_text_generation_server.py",
    "util.py",
)


@dataclass(slots=True)
class Launch:
    """One launch. arguments: the words after the program. overrides: it is one of Megatron-Bridge or NeMo."""

    program: str
    arguments: list[Field]
    place: Place
    world: World
    state: State
    overrides: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: Files | None = None


@dataclass(frozen=True, slots=True)
class ScriptInputs:
    """What the user adds to a script. sets: variables. arguments: its own, None for not given. launch: the line of the
    launch to take, where there are several."""

    sets: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    launch: int | None = None


def find_launch(text: str, name: str, root: Path | None, inputs: ScriptInputs) -> Launch:
    """The launch of a shell script. Raises FivefoldError where there is none, or several that differ."""
    state = State(name)
    batch = directives(text, name)
    state.variables |= slurm_variables(batch)
    outside = Place("--set", 0)
    state.variables |= {key: Variable([Field(value, outside)]) for key, value in inputs.sets.items()}
    if inputs.arguments is not None:
        state.arguments = [Field(word, Place("--args", 0)) for word in inputs.arguments]
        state.arguments_given = True
    files = Files(root)
    runner = Runner(state, files, is_launch)
    runner.whole(parse(text, name))
    command = _one(runner.commands, state, files, name, inputs.launch)
    launch = _launch(command, state, batch)
    launch.files = files
    return launch


def is_launch(fields: list[Field]) -> bool:
    """Whether a command starts training with Megatron-LM, Megatron-Bridge or NeMo."""
    words = [str(plain(each.text)) for each in fields]
    at = entry(fields)
    if at is not None and words[at].rpartition("/")[2] in _TOOLS:
        return False
    return any(word.partition("=")[0] in DEFINING for word in words) or _overrides(words)


def _overrides(words: list[str]) -> bool:
    found = [match for word in words if (match := OVERRIDE.fullmatch(word)) and "." in match[1]]
    return any(match[1].partition(".")[0] in GROUPS for match in found)


def _one(commands: list[Command], state: State, files: Files, name: str, line: int | None) -> Command:
    if line is not None:
        commands = [command for command in commands if command.place.line == line]
    if not commands:
        raise _nothing(state, files, name, line)
    distinct = {tuple(plain(each.text) for each in command.fields): command for command in commands}
    if len({command.place for command in distinct.values()}) > 1:
        lines = ", ".join(str(place) for place in dict.fromkeys(command.place for command in commands))
        raise unreadable(
            name,
            f"it holds {len(distinct)} launches that differ ({lines}), or a condition decides between them",
            "say which by --launch LINE, or decide the condition with --set NAME=VALUE or --args",
            "several-launches",
        )
    return commands[0]


def _nothing(state: State, files: Files, name: str, line: int | None) -> Exception:
    if line is not None:
        return unreadable(name, f"no launch starts on line {line}", "leave out --launch to see the lines", "no-launch")
    hints = [f"{shown} at {place} was not read: {why}" for place, shown, why in files.not_read[:3]]
    hints += [f"{place}: {sentence}" for place, sentence in state.assumed[:3] if "end the script" in sentence]
    said = f" ({'; '.join(hints)})" if hints else ""
    return unreadable(
        name,
        f"no command in it starts training: none has options such as --num-layers or model.num_layers={said}",
        "give the script that calls torchrun, srun or python with Megatron's options. A launch of another framework is "
        "not read; fivefold estimate prices its layout, with --runtime fsdp, torchtitan, deepspeed or nanotron",
        "no-launch",
    )


def _launch(command: Command, state: State, batch: World) -> Launch:
    fields = list(command.fields)
    at = entry(fields)
    if at is None:
        at = next((i for i, each in enumerate(fields) if plain(each.text).partition("=")[0] in DEFINING), 0) - 1
    words = [str(plain(each.text)) for each in fields]
    launch = Launch(
        program=without_unknowns(words[at]) if at >= 0 else "",
        arguments=fields[at + 1 :],
        place=command.place,
        world=world_of(command, state, batch),
        state=state,
        overrides=_overrides(words),
        environment=_environment(command),
    )
    if command.undecided:
        launch.notes.append(f"The launch at {command.place} is only reached on a condition that the text leaves open.")
    return launch


def _environment(command: Command) -> dict[str, str]:
    """The variables that rules ask for, as far as known; also as `env NAME=VALUE` in front of the program."""
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_ALGO")
    found = {}
    for name in names:
        held = command.variables.get(name)
        text = str(plain(held.values[0].text)) if held and held.values else UNKNOWN
        for each in command.fields:
            word = str(plain(each.text))
            text = word.partition("=")[2] if word.startswith(f"{name}=") else text
        if UNKNOWN not in text:
            found[name] = text
    return found


def words_of(text: str, name: str) -> list[Field]:
    """The words of a text of options, as --with gives them."""
    nodes = parse(f": {text}", name)
    state = State(name)
    words = [word for node in nodes if isinstance(node, Simple) for word in node.words if isinstance(word, Word)]
    return Expander(state).all_fields(words)[1:]
