"""fivefold: plan, prove, run and retune the parallel training of large Transformers.

    import fivefold as ff
    est = ff.estimate(ff.load_model("llama-3-70b"), ff.load_cluster("h100-sxm", gpus=64),
                      ff.Workload(seq_len=8192, global_batch=512), ff.Layout(tp=4, pp=4, cp=2))

Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "load_model": "fivefold.model",
    "models": "fivefold.model",
    "ModelSpec": "fivefold.model.spec",
    "load_cluster": "fivefold.cluster",
    "gpus": "fivefold.cluster",
    "Cluster": "fivefold.cluster",
    "Workload": "fivefold.layout",
    "Layout": "fivefold.layout",
    "Recompute": "fivefold.layout",
    "Offload": "fivefold.layout",
    "Lora": "fivefold.layout",
    "Overlap": "fivefold.layout",
    "estimate": "fivefold.estimate.estimate",
    "Estimate": "fivefold.estimate.result",
    "plan": "fivefold.search.search",
    "Plan": "fivefold.search.result",
    "load_plan": "fivefold.estimate.planfile",
    "calibrate": "fivefold.measure.calibrate",
    "load_calibration": "fivefold.cluster.calibration",
    "Calibration": "fivefold.cluster.calibration",
    "FivefoldError": "fivefold.errors",
}

if TYPE_CHECKING:
    from fivefold.cluster import Cluster as Cluster
    from fivefold.cluster import gpus as gpus
    from fivefold.cluster import load_cluster as load_cluster
    from fivefold.cluster.calibration import Calibration as Calibration
    from fivefold.cluster.calibration import load_calibration as load_calibration
    from fivefold.errors import FivefoldError as FivefoldError
    from fivefold.estimate.estimate import estimate as estimate
    from fivefold.estimate.planfile import load_plan as load_plan
    from fivefold.estimate.result import Estimate as Estimate
    from fivefold.layout import Layout as Layout
    from fivefold.layout import Lora as Lora
    from fivefold.layout import Offload as Offload
    from fivefold.layout import Overlap as Overlap
    from fivefold.layout import Recompute as Recompute
    from fivefold.layout import Workload as Workload
    from fivefold.measure.calibrate import calibrate as calibrate
    from fivefold.model import load_model as load_model
    from fivefold.model import models as models
    from fivefold.model.spec import ModelSpec as ModelSpec
    from fivefold.search.result import Plan as Plan
    from fivefold.search.search import plan as plan

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fivefold' has no attribute '{name}'")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
