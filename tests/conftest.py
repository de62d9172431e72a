"""Hypothesis draws anew on a developer's machine and the same examples on every CI run, so that main fails for its own
changes only; nowhere does an example fail for the time it took, which on a busy machine says nothing."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("here", deadline=None)
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")
