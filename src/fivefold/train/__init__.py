"""The trainer: runs a planned layout on PyTorch, and proves it equal to one process.

The model (model.py) has no parallel code; the axes of parallel/ are applied to it from outside, over the process
groups of mesh.py. verify/ compares a layout with one process, parameter by parameter. Importing this room imports
PyTorch, which the planner never does.
"""

from __future__ import annotations
