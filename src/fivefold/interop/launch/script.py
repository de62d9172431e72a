"""The pieces that bash scripts of all launchers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fivefold.interop.launch.job import Job, Need, comment, flat, in_shell

_WIDTH = 112


def head(job: Job) -> list[str]:
    return ["#!/usr/bin/env bash", *(f"# {comment(line)}" for line in job.about)]


def prologue(job: Job, more: Iterable[Need] = ()) -> list[str]:
    """Strict mode, what has to be there, what may be changed, and the environment. more: needs of the launcher."""
    needs = (*job.needs, *more)
    required = [need for need in needs if need.default is None]
    usual = [need for need in needs if need.default is not None]
    lines = ["set -euo pipefail"]
    if required:
        lines += ["", "# A plan does not know these. Without them nothing is started."]
        lines += [f': "${{{need.name}:?{need.why}}}"' for need in required]
    if usual:
        lines += ["", "# A plan does not fix these either; change them here or in the environment."]
        for need in usual:
            lines += [f"# {need.why}", f'{need.name}="${{{need.name}:-{need.default}}}"']
    if job.environment:
        lines += ["", *(f"export {name}={in_shell(value)}" for name, value in job.environment.items())]
    return lines


def arrays(job: Job) -> list[str]:
    """The options as one bash array per group, one option a line."""
    lines: list[str] = []
    for title, options in job.groups:
        rows = [words for name, value in options.items() if (words := flat(name, value))]
        if rows:
            lines += ["", f"{_array(title)}=(", *(f"    {' '.join(map(in_shell, row))}" for row in rows), ")"]
    return lines


def expanded(job: Job) -> list[str]:
    """What stands for the arrays in a command."""
    held = (title for title, options in job.groups if any(flat(*item) for item in options.items()))
    return [f'"${{{_array(title)}[@]}}"' for title in held]


def command(words: Sequence[str]) -> str:
    """Words that are already quoted, as one command over several lines."""
    lines, line = [], ""
    for word in words:
        if line and len(line) + len(word) > _WIDTH:
            lines.append(f"{line} \\")
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def _array(title: str) -> str:
    return f"{title.upper().replace(' ', '_')}_ARGS"
