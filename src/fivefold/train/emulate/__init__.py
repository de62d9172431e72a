"""Emulation: one rank of a job of any size, run by the trainer's own code in one process without its memory.

world.py makes tensors without values and collectives without peers; recorder.py watches the step; emulate.py is the
entry, and record_step does the same on a real rank, which is the proof (tests/train/test_emulate.py).
"""

from __future__ import annotations

from fivefold.train.emulate.emulate import emulate, emulate_layout
from fivefold.train.emulate.result import Emulation

__all__ = ["Emulation", "emulate", "emulate_layout"]
