"""--calibration: the fitted factors on the cluster that a command prices, or a refusal where nothing is priced."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.cli.flags import ClusterFlags
from fivefold.cluster import Cluster
from fivefold.cluster.calibration import load_calibration
from fivefold.errors import FivefoldError

_NONE = "none"


def calibrated(cluster: Cluster, flags: ClusterFlags) -> Cluster:
    """The cluster with the file's calibration; "none" drops the one that a plan file holds."""
    if flags.calibration is None:
        return cluster
    found = None if flags.calibration.lower() == _NONE else load_calibration(flags.calibration)
    return replace(cluster, calibration=found)


def refuse_calibration(flags: ClusterFlags, why: str) -> None:
    """FivefoldError where a command would take a calibration and do nothing with it."""
    if flags.calibration is not None:
        raise FivefoldError(
            f"{why} Leave out --calibration.",
            code="not-here",
            option="--calibration",
            value=flags.calibration[:100],
        )
