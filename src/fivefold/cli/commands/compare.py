"""`fivefold compare`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from fivefold.cli.flags import (
    DEGREES,
    ClusterFlags,
    LayoutFlags,
    ModelFlags,
    OutputFlags,
    RuntimeFlags,
    WorkFlags,
)
from fivefold.cli.output import console, write_json

_MODEL, _CLUSTER, _WORK, _RUNTIME = ModelFlags(), ClusterFlags(), WorkFlags(), RuntimeFlags()
_LAYOUT, _OUTPUT = LayoutFlags(), OutputFlags()


def compare(
    first: str,
    second: str | None = None,
    /,
    *,
    a: Annotated[str | None, Parameter(group=DEGREES)] = None,
    b: Annotated[str | None, Parameter(group=DEGREES)] = None,
    model_flags: ModelFlags = _MODEL,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _WORK,
    layout: LayoutFlags = _LAYOUT,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Where two layouts differ, by owner of seconds and of bytes.

    Two plan files (or models), or one model with two layouts. Flags hold for both sides, --a and --b on top of them for
    one. Exits with 1 when a side breaks a rule of its runtime.

    For example:
      fivefold compare llama-3-70b --gpus 64 --gbs 512 --a tp=4,pp=4,cp=2 --b tp=8,pp=4
      fivefold compare monday.toml tuesday.toml

    Parameters
    ----------
    first
        A plan file, a name of the catalogue, a config.json or a folder with one.
    second
        The same for the other side. Default: the first, with another layout.
    a
        Layout of the first, such as tp=4,pp=4,recompute=full; modules are joined by +.
    b
        Layout of the second.
    """
    from fivefold.cli.answer import compared
    from fivefold.cli.problem import comparison_questions

    questions = comparison_questions((first, second), (a, b), model_flags, cluster, work, runtime, layout)
    found = compared(questions)
    if output.json:
        document = found.to_dict()
        for side, question in zip("ab", questions, strict=True):
            document["inputs"][side] = {**document["inputs"][side], "defaults": question.defaults}
        write_json(document)
    else:
        from fivefold.cli.render.compare import compare_view

        console(output).print(compare_view(questions, found))
    return 0 if found.faster is not None else 1
