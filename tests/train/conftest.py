"""Makes the helpers beside these tests importable: tests have no packages, and pytest's importlib mode adds no path.

One thread in this process too: the models are tiny, and a thread pool does not survive the forks of run_ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
