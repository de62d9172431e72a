"""Which program a command starts, on how many GPUs: torchrun, srun, mpirun and the like, and Slurm's directives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fivefold.interop.shell.calls import Command
from fivefold.interop.shell.state import State, Variable
from fivefold.interop.source import UNKNOWN, Field, Place, plain

What = Literal["per_node", "nodes", "tasks", "tasks_per_node", "gpus"]

# What launchers' options count. Names: torchrun, srun, mpirun, deepspeed and accelerate's own help texts, from memory.
_COUNTS: dict[str, dict[str, What]] = {
    "torch": {"--nproc-per-node": "per_node", "--nnodes": "nodes"},
    "srun": {
        "-N": "nodes",
        "--nodes": "nodes",
        "-n": "tasks",
        "--ntasks": "tasks",
        "--ntasks-per-node": "tasks_per_node",
        "--tasks-per-node": "tasks_per_node",
        "--gpus-per-node": "per_node",
        "--gres": "per_node",
        "-G": "gpus",
        "--gpus": "gpus",
    },
    "mpirun": {
        "-np": "tasks",
        "--np": "tasks",
        "-n": "tasks",
        "-npernode": "tasks_per_node",
        "--npernode": "tasks_per_node",
        "--ntasks-per-node": "tasks_per_node",
    },
    "deepspeed": {"--num-gpus": "per_node", "--num-nodes": "nodes"},
    "accelerate": {"--num-processes": "tasks", "--num-machines": "nodes"},
}
_LAUNCHERS: dict[str, str] = {
    "torchrun": "torch",
    "torch.distributed.run": "torch",
    "torch.distributed.launch": "torch",
    "srun": "srun",
    "sbatch": "srun",
    "salloc": "srun",
    "mpirun": "mpirun",
    "mpiexec": "mpirun",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
}
_DIRECTIVE = re.compile(r"^[ \t]*#SBATCH[ \t]+(.*)$", re.MULTILINE)
_MOST_GPUS = 1 << 20
_GRES = re.compile(r"gpu(?::([A-Za-z][\w.-]*))?:(\d{1,6})|(?:([A-Za-z][\w.-]*):)?(\d{1,6})")


@dataclass(slots=True)
class World:
    """Counts by what they count, each with its place. gpu: a GPU model that a directive names. asked: what is not
    known."""

    counts: dict[str, tuple[int, Place]] = field(default_factory=dict)
    gpu: tuple[str, Place] | None = None
    asked: list[str] = field(default_factory=list)

    def get(self, name: str) -> int | None:
        found = self.counts.get(name)
        return found[0] if found else None


def directives(text: str, file: str) -> World:
    """The #SBATCH lines of a script."""
    world = World()
    for found in _DIRECTIVE.finditer(text):
        place = Place(file, text.count("\n", 0, found.start()) + 1)
        for option, value in _directive_options(found[1]):
            what = _COUNTS["srun"].get(option)
            if what is not None:
                _count(world, what, option, value, place)
    return world


def _directive_options(line: str) -> Iterator[tuple[str, str]]:
    """(option, value) of one line, which may hold several: --nodes=4, --nodes 4, -N 4 or -N4 (sbatch, 24.05)."""
    words = line.partition(" #")[0].split()
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            continue
        if not equals:
            glued = not name.startswith("--") and len(name) > 2
            name, value = (name[:2], name[2:]) if glued else (name, "".join(words[at + 1 : at + 2]))
        yield name, value


def slurm_variables(world: World) -> dict[str, Variable]:
    """The variables that Slurm itself sets in a job, as far as the directives fix them."""
    nodes, tasks = world.get("nodes"), world.get("tasks")
    per_node, gpus = world.get("tasks_per_node"), world.get("per_node")
    if tasks is None and nodes is not None and per_node is not None:
        tasks = nodes * per_node
    known = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_GPUS_ON_NODE": gpus,
    }
    places = [place for _, place in world.counts.values()]
    return {
        name: Variable([Field(str(value), places[0])]) for name, value in known.items() if value is not None and places
    }


def entry(fields: list[Field]) -> int | None:
    """Position of the program in a command: a Python file, or what follows -m; None where there is none."""
    words = [str(plain(each.text)) for each in fields]
    for at, word in enumerate(words):
        if word == "-m" and at + 1 < len(words) and words[at + 1] not in _LAUNCHERS:
            return at + 1
        if word.endswith(".py") and not word.startswith("-"):
            return at
    return None


def world_of(command: Command, state: State, batch: World) -> World:
    """How many processes the command's launchers start; Slurm's directives where they say nothing."""
    end = entry(list(command.fields))
    front = list(command.fields if end is None else command.fields[:end])
    world = World(gpu=batch.gpu)
    kind = None
    at = 0
    found: dict[str, World] = {}
    while at < len(front):
        word = str(plain(front[at].text))
        at += 1
        if word.rpartition("/")[2] in _LAUNCHERS:
            kind = _LAUNCHERS[word.rpartition("/")[2]]
            found.setdefault(kind, World())
        name, equals, value = word.partition("=")
        key = name.replace("_", "-") if name.startswith("--") else name
        what = _COUNTS.get(kind or "", {}).get(key)
        if what is None:
            continue
        field_ = Field(value, front[at - 1].place) if equals else front[at] if at < len(front) else front[at - 1]
        _value(found.setdefault(kind or "", World()), what, name, field_, state)
    inner = found.get("torch") or found.get("deepspeed") or found.get("accelerate")
    outer = found.get("srun") or found.get("mpirun")
    world.gpu = (outer.gpu if outer else None) or batch.gpu
    _combine(world, inner, outer, batch)
    if inner is None and outer is None:
        _from_variables(world, command)
    return world


def _combine(world: World, inner: World | None, outer: World | None, batch: World) -> None:
    """Total and per-node GPUs from the innermost launcher that says something."""
    if inner is not None:
        per_node, nodes, tasks = inner.get("per_node"), inner.get("nodes"), inner.get("tasks")
        world.asked += inner.asked
        if tasks is not None:
            _total(world, tasks, tasks // nodes if nodes and tasks % nodes == 0 else None, inner)
        elif not inner.asked:
            # torchrun's defaults: one node, one process (from memory: torch.distributed.run --nnodes 1:1).
            _total(world, (per_node or 1) * (nodes or 1), per_node or 1, inner)
        return
    source = outer if outer is not None and outer.counts else batch
    world.asked += outer.asked if outer else []
    nodes = source.get("nodes") or batch.get("nodes")
    per_node = source.get("tasks_per_node") or batch.get("tasks_per_node")
    tasks = source.get("tasks") or (nodes * per_node if nodes and per_node else None) or batch.get("tasks")
    if outer is not None and tasks is not None:
        _total(world, tasks, per_node or (tasks // nodes if nodes and tasks % nodes == 0 else None), source)


def _total(world: World, gpus: int, per_node: int | None, source: World) -> None:
    places = [place for _, place in source.counts.values()]
    place = places[0] if places else Place("default", 0)
    if gpus > _MOST_GPUS:
        world.asked.append(f"{gpus:,} processes at {place} are more than {_MOST_GPUS:,}")
        return
    world.counts |= {name: source.counts[name] for name in ("nodes", "tasks") if name in source.counts}
    world.counts["gpus"] = (gpus, place)
    if per_node:
        world.counts["per_node"] = (per_node, source.counts.get("per_node", (0, place))[1])


def _from_variables(world: World, command: Command) -> None:
    """WORLD_SIZE as the script sets it, for launchers that are not known."""
    held = command.variables.get("WORLD_SIZE")
    if held and held.values and re.fullmatch(r"\d{1,7}", str(plain(held.values[0].text))):
        world.counts["gpus"] = (int(str(plain(held.values[0].text))), held.values[0].place)


def _value(world: World, what: What, option: str, field_: Field, state: State) -> None:
    text = str(plain(field_.text))
    if UNKNOWN in text:
        unknown = state.unknown_in(text)
        world.asked.append(f"{option} at {field_.place}: {unknown.sentence() if unknown else 'not known'}")
        return
    _count(world, what, option, text, field_.place)


def _count(world: World, what: What, option: str, text: str, place: Place) -> None:
    if option == "--gres" or (what in ("per_node", "gpus") and ":" in text and option != "--nnodes"):
        found = _GRES.fullmatch(text.split(",")[0])
        if found is not None:
            world.counts[what] = (int(found[2] or found[4]), place)
            if found[1] or found[3]:
                world.gpu = (found[1] or found[3], place)
        return
    low, _, high = text.partition(":")  # torchrun's elastic range; the largest is what the batch is planned for
    number = high or low
    if re.fullmatch(r"\d{1,7}", number) and int(number) > 0:
        world.counts[what] = (int(number), place)
    else:
        world.asked.append(f"{option} {text[:40]} at {place} is no number known here")
