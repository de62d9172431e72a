"""`fivefold explain dp-limit`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from fivefold.cli.flags import CLUSTER, ClusterFlags, OutputFlags, whole_number
from fivefold.cli.output import console, write_json

_CLUSTER, _OUTPUT = ClusterFlags(), OutputFlags()
# Of the peak: what well-tuned large dense runs reach (published MFU of 38 to 52% on A100 and H100), rounded down.
_USUAL_MFU = 0.4


def dp_limit(
    *,
    cluster: ClusterFlags = _CLUSTER,
    mfu: Annotated[float, Parameter(group=CLUSTER)] = _USUAL_MFU,
    dp: Annotated[int | None, Parameter(group=CLUSTER, converter=whole_number)] = None,
    output: OutputFlags = _OUTPUT,
) -> int:
    """From how many tokens per GPU and step pure data parallelism pays on a cluster.

    Parameters
    ----------
    mfu
        Share of the dense bf16 peak that a GPU achieves.
    dp
        Data-parallel ranks. Default: all GPUs.
    """
    from fivefold.cli.calibration import refuse_calibration
    from fivefold.cli.problem import cluster_of
    from fivefold.cli.values import fraction
    from fivefold.cluster import dp_limit as limit_of
    from fivefold.estimate.result import envelope

    refuse_calibration(cluster, "The limit of data parallelism is first order, from the links' own numbers.")
    defaults: dict[str, str] = {}
    place = cluster_of(cluster, None, defaults)
    peaks = place.gpu.peak_flops_per_s
    peak = peaks.get("bf16") or peaks.get("fp16") or max(peaks.values())
    limit = limit_of(place, fraction("--mfu", mfu) * peak, dp)
    if output.json:
        inputs = {"cluster": place.to_dict(), "mfu": mfu, "dp": limit.dp, "defaults": defaults}
        write_json({**envelope("explain", inputs), "topic": "dp-limit", **limit.to_dict()})
    else:
        from fivefold.cli.render.explain import dp_limit_view

        console(output).print(dp_limit_view(place, limit))
    return 0
