"""Hypothesis draws anew on a developer's machine and the same examples on every CI run, so that main fails for its own
changes only."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
