"""The axes of parallelism, one file each, applied to a model from outside: tensor.py (with vocabulary.py), context.py,
data.py, pipeline.py, and recompute.py, which is no axis but is applied the same way. Each imports on its own."""

from __future__ import annotations
