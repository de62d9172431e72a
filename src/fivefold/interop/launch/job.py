"""What a launcher starts: a program, its options, its environment, and what a plan leaves open.

A word is either text, which no shell ever reads as anything but itself, or a Variable, which the person who starts the
job sets. Launchers turn both into their own form; nothing else of a script comes from outside.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.cluster import Cluster
from fivefold.errors import FivefoldError

# Control characters and Unicode's line separators: what could end a comment or hide in a terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NAME, _WORDS = re.compile(r"[A-Z_][A-Z0-9_]*"), re.compile(r"[\w ,.:/()-]*", re.ASCII)
_NAME_LENGTH = 40  # Kubernetes appends up to some 20 characters to make the 63 of a host name


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable's value, with constant text after it."""

    name: str
    suffix: str = ""


Word = str | Variable
Value = bool | Word | tuple[Word, ...]
Options = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Need:
    """A variable that a plan does not know. why: what it is, in words that bash reads as words even inside ${...:?}.
    default: its value where a usual one exists; None: the launcher stops without it."""

    name: str
    why: str
    default: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or not all(map(_WORDS.fullmatch, (self.why, self.default or ""))):
            raise ValueError(f"{self.name}: {self.why!r} or its default holds what bash would not read as words")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program on every GPU of some whole nodes.

    name: as slug() makes it. about: sentences for the head of the file. program: what follows the Python interpreter.
    groups: options by heading; True is a switch. environment: exported to every rank. resumes: whether the program
    saves and ends when it gets SIGTERM, and goes on from there when it is started again.
    """

    name: str
    about: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    program: tuple[Word, ...]
    groups: tuple[tuple[str, Options], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    resumes: bool = False

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def words(self) -> tuple[Word, ...]:
        """All options as separate words."""
        return tuple(
            word for _, options in self.groups for name, value in options.items() for word in flat(name, value)
        )


def flat(name: str, value: Value) -> tuple[Word, ...]:
    """An option and its values as words; nothing for False."""
    if isinstance(value, bool):
        return (name,) if value else ()
    return (name, *(value if isinstance(value, tuple) else (value,)))


def nodes_of(cluster: Cluster) -> tuple[int, int]:
    """(nodes, GPUs on each). Raises FivefoldError where the last node would be part-filled."""
    per_node = min(cluster.gpus, cluster.gpus_per_node)
    nodes, rest = divmod(cluster.gpus, per_node)
    if rest:
        legal = [nodes * per_node, (nodes + 1) * per_node]
        full = f"{nodes} node{'s' * (nodes > 1)} of {per_node}"
        raise FivefoldError(
            f"--gpus {cluster.gpus} fill {full} and {rest} GPU{'s' * (rest > 1)} of another, and launchers start "
            f"the same number of processes on every node. Plan for {legal[0]} or {legal[1]} GPUs.",
            code="part-filled-node",
            option="--gpus",
            value=cluster.gpus,
            legal=legal,
        )
    return nodes, per_node


def slug(text: str) -> str:
    """A name that is legal as a job's, a host's and a file's: lower-case letters, digits and dashes, a letter first."""
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    kept = kept if kept[:1].isalpha() else f"job-{kept}".strip("-")
    return kept[:_NAME_LENGTH].strip("-")


def checked(option: str, text: str) -> str:
    """Text of a user's that goes into a file: without control characters. Raises FivefoldError."""
    found = _CONTROL.search(text)
    if found:
        raise FivefoldError(
            f"{option} holds the control character {found[0]!r}, which launch files cannot.",
            code="control-character",
            option=option,
            value=text[:80],
            legal="text without control characters",
        )
    return text


def comment(text: str) -> str:
    """Text as one line of a comment."""
    return _CONTROL.sub(" ", text)


def in_shell(word: Word) -> str:
    """A word as bash reads it back unchanged."""
    if isinstance(word, Variable):
        return f'"${{{word.name}}}{word.suffix}"' if word.suffix else f'"${word.name}"'
    text = checked("an option's value", word)
    # A comma in an array is one of bash's words, and looks like a mistake to a reader (and to shellcheck).
    return f"'{text}'" if "," in text and text == shlex.quote(text) else shlex.quote(text)
