"""The proof: a layout's gradients, norms, losses and weights compared, per parameter, with one process.

reference.py trains the whole model in one process with PyTorch's own optimizers; observe.py records what a rank of a
layout has after the same steps; compare.py sets them side by side and says which parameters are out of bounds.
"""

from __future__ import annotations

from fivefold.train.verify.compare import ParameterError, Relative, Verdict, compare
from fivefold.train.verify.observe import Part, RankReport, observe
from fivefold.train.verify.reference import ADAMW_STEPS, Proof, Reference, run_reference

__all__ = [
    "ADAMW_STEPS",
    "ParameterError",
    "Part",
    "Proof",
    "RankReport",
    "Reference",
    "Relative",
    "Verdict",
    "compare",
    "observe",
    "run_reference",
]
