"""Collectives beside compute: their kernels hold multiprocessors and memory bandwidth, so that compute takes longer
while one runs.

Lee et al. 2025 (arXiv 2507.03114, abstract): on A100, H100, MI210 and MI250 compute is 18.9% slower on average beside
communication, and up to 40%. One of NCCL's all-gathers on an H100 holds 24 of its 132 multiprocessors (NVIDIA developer
forum, thread 337991), which alone would be 22%.
"""

from __future__ import annotations

import numpy as np

SLOWER = 0.189  # seconds of compute beside a collective over its seconds alone, less 1
SOURCE = "Lee et al. 2025, arXiv 2507.03114: compute beside communication takes 18.9% longer on average"
# Of a collective's seconds, what compute falls behind meanwhile.
WAITED = SLOWER / (1 + SLOWER)


def unhidden(collective_s: np.ndarray | float, compute_s: np.ndarray | float, waited: float = WAITED) -> np.ndarray:
    """Seconds that a collective adds to the compute beside it: what compute does not last for, and what it falls behind
    at least. Any shapes that broadcast. waited: WAITED, or 0 for collectives that hold hardly a multiprocessor."""
    return np.maximum(collective_s - compute_s, waited * collective_s)
