"""`fivefold explain axes`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from fivefold.cli.flags import WORKLOAD, OutputFlags, whole_number
from fivefold.cli.output import console, write_json

_OUTPUT = OutputFlags()


def axes(
    *,
    global_batch: Annotated[
        int | None, Parameter(name=("--global-batch", "--gbs"), group=WORKLOAD, converter=whole_number)
    ] = None,
    micro_batch: Annotated[int, Parameter(name=("--micro-batch", "--mbs"), group=WORKLOAD, converter=whole_number)] = 1,
    dp: Annotated[int, Parameter(group=WORKLOAD, converter=whole_number)] = 1,
    output: OutputFlags = _OUTPUT,
) -> int:
    """What each axis of parallelism cuts, moves and is bounded by, and which go together.

    Parameters
    ----------
    global_batch
        Sequences per step: also says how far data parallelism can still grow.
    micro_batch
        Sequences per micro-batch, for --global-batch.
    dp
        Data-parallel replicas, for --global-batch.
    """
    from fivefold.cluster import explain_axes
    from fivefold.errors import FivefoldError
    from fivefold.estimate.result import envelope

    if global_batch is None and (micro_batch, dp) != (1, 1):
        raise FivefoldError(
            "--micro-batch and --dp say how far data parallelism can grow, which takes --global-batch too.",
            code="missing-option",
            option="--global-batch",
        )
    table = explain_axes(global_batch=global_batch, micro_batch=micro_batch, dp=dp)
    if output.json:
        inputs = {"global_batch": global_batch, "micro_batch": micro_batch, "dp": dp}
        write_json({**envelope("explain", inputs), "topic": "axes", **table.to_dict()})
    else:
        from fivefold.cli.render.explain import axes_view

        console(output).print(axes_view(table))
    return 0
