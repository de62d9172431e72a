"""Runs command lines in process and keeps what they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fivefold.cli import progress
from fivefold.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """One finished command line."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output as the one JSON document that it has to be."""
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run("plan llama-3-8b --gpus 8") or run("plan", "a name with spaces")."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(progress, "PATIENCE_S", 600.0)  # a busy machine must not add lines to what is compared

    def call(*words: str) -> Outcome:
        arguments = words[0].split() if len(words) == 1 else list(words)
        code = main(arguments)
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return call
