"""`fivefold check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from fivefold.cli.flags import SEARCH, ClusterFlags, OutputFlags, RuntimeFlags, whole_number
from fivefold.cli.output import console, write_json
from fivefold.errors import FivefoldError

if TYPE_CHECKING:
    from fivefold.cluster import Cluster
    from fivefold.interop.megatron.read import Reading

_FILE = Group("The file", sort_key=0)
_CLUSTER, _RUNTIME, _OUTPUT = ClusterFlags(), RuntimeFlags(), OutputFlags()


def check(
    file: str,
    /,
    *,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    with_: Annotated[str | None, Parameter(name="--with", group=_FILE, allow_leading_hyphen=True)] = None,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", group=_FILE, negative="")] = (),
    args: Annotated[str | None, Parameter(group=_FILE, allow_leading_hyphen=True)] = None,
    launch: Annotated[int | None, Parameter(group=_FILE, converter=whole_number)] = None,
    model: Annotated[str | None, Parameter(group=_FILE)] = None,
    top: Annotated[int, Parameter(group=SEARCH, converter=whole_number)] = 5,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Read a Megatron launch script, and say whether it starts and fits, how fast it is, and what would make it better.

    Reads the Megatron-LM command in a shell script, Megatron-LM's YAML, and overrides of Megatron-Bridge and NeMo. The
    file is read as text and never run. Exits with 1 when the launch would not start or not fit. Where no line of the
    file names a GPU, --gpu or --cluster has to: there is no default here.

    For example:
      fivefold check pretrain_llama.sh --gpu h100-sxm
      fivefold check pretrain.sh --gpu a100-80gb --set NNODES=4 --with '--vocab-size 32000'

    Parameters
    ----------
    file
        The launch script, or a .yaml file.
    with_
        Options or overrides to add at the end of the command, in quotes.
    set_
        NAME=VALUE, a variable of the script's environment; repeat it for more.
    args
        The script's own arguments, in quotes.
    launch
        Line of the launch to check, where a script holds several.
    model
        The model, where the file does not hold it: a catalogue name or a config.json.
    top
        How many changes to show, 1 to 100.
    """
    from fivefold.advise.check import check as checked
    from fivefold.cli.problem import is_plan_file, runtime_of
    from fivefold.interop.foreign import refuse_foreign_text
    from fivefold.interop.megatron.commands import ScriptInputs, words_of
    from fivefold.interop.megatron.read import Asked, read_file
    from fivefold.interop.source import read_text
    from fivefold.search.search import check_top

    check_top(top)
    if is_plan_file(file):
        if Path(file).is_file():
            refuse_foreign_text(read_text(Path(file)), Path(file).name)
        raise FivefoldError(
            f"{file[:100]!r} is a plan file, and check reads a launch. Price it with fivefold estimate, or write its "
            "launch with fivefold export.",
            code="plan-file",
            option="FILE",
            value=file[:100],
        )
    name = runtime_of(runtime, None, {})
    inputs = ScriptInputs(
        sets=dict(map(_assignment, set_)),
        arguments=None if args is None else tuple(field.text for field in words_of(args, "--args")),
        launch=launch,
    )
    asked = Asked(
        script=inputs,
        extra=with_ or "",
        model=model,
        gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node,
        gpu=_gpu_name(cluster),
    )
    reading = read_file(file, asked)
    where = _cluster(reading, cluster)
    _refuse_foreign(name, where)
    found = checked(reading, where, name, top)
    if output.json:
        write_json(found.to_dict())
    else:
        from fivefold.cli.render.check import check_view

        console(output).print(check_view(found, reading))
    return 0 if found.good else 1


def _assignment(text: str) -> tuple[str, str]:
    from fivefold.errors import FivefoldError

    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise FivefoldError(
            f"--set {text[:60]} is not NAME=VALUE, as in --set NNODES=4.",
            code="bad-value",
            option="--set",
            value=text[:60],
            legal="NAME=VALUE",
        )
    return name, value


def _refuse_foreign(asked: str, cluster: Cluster) -> None:
    """A launch on accelerators that its framework certainly does not run on has no step time to improve."""
    from fivefold.errors import FivefoldError
    from fivefold.runtime import load_runtime
    from fivefold.runtime.accelerators import why_not

    name = load_runtime(asked).name
    reason = why_not(name, cluster.gpu.vendor)
    if reason is not None:
        raise FivefoldError(
            f"{name} would not start on {cluster.gpu.name}: {reason}. Name another accelerator, with --gpu.",
            code="runtime-hardware",
            option="--gpu",
            value=cluster.gpu.name,
        )


def _gpu_name(flags: ClusterFlags) -> str | None:
    """The GPU that --gpu or --cluster names; some rules depend on its generation."""
    from fivefold.cli.problem import named_cluster

    named = flags.cluster or flags.gpu
    return named_cluster(flags, named).gpu.name if named is not None else None


def _cluster(reading: Reading, flags: ClusterFlags) -> Cluster:
    """The cluster of the flags or of the file's directives, with the launch's number of GPUs."""
    from fivefold.cli.calibration import calibrated
    from fivefold.cli.problem import named_cluster
    from fivefold.errors import FivefoldError

    if flags.gpu is not None and flags.cluster is not None:
        raise FivefoldError(
            "--gpu and --cluster both say what the job runs on; give one.", code="contradiction", option="--gpu"
        )
    named = flags.cluster or flags.gpu or reading.gpu
    if named is None:
        raise FivefoldError(
            f"{reading.source} does not say which GPU it runs on. Add --gpu, for example --gpu h100-sxm (fivefold gpus "
            "lists them), or --cluster with your own numbers.",
            code="missing-option",
            option="--gpu",
        )
    return calibrated(named_cluster(flags, named, reading.gpus, reading.gpus_per_node), flags)
