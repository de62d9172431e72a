"""What a sweep measured: its candidates' own logs, beside what was predicted for them, in a new order.

Lines of logs: Megatron-LM megatron/training/training.py ("elapsed time per iteration (ms): ...", "max reserved: ..." in
MiB), as in public logs from 2023 to 2026; the JSON lines of `fivefold train`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np

from fivefold.errors import FivefoldError, reason_of
from fivefold.estimate.planfile import load_plan
from fivefold.estimate.result import Estimate, envelope
from fivefold.measure.validate import spearman

Outcome = Literal["measured", "out of memory", "failed", "not run"]

_LOG, _STEPS = "log.txt", "steps.jsonl"
MAX_LOG_BYTES = 64 << 20
# The first steps allocate, compile and fill caches; their time is not the run's.
_WARM_UP = 3
_FEWEST = 2
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\):\s*(\d{1,9}(?:\.\d{1,6})?)")
_RESERVED = re.compile(r"max reserved:\s*(\d{1,9}(?:\.\d{1,12})?)")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate. step_s: median of the steps after the first three, None where it was not measured.

    peak_bytes: the largest that a rank reserved, None where the log does not say. ratio: measured over predicted.
    """

    number: int
    outcome: Outcome
    steps: int
    step_s: float | None
    peak_bytes: int | None
    predicted_s: float | None
    predicted_bytes: int | None
    ratio: float | None
    plan: str
    estimate: Estimate

    def to_dict(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self), "estimate": self.estimate.body()}


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, the best first: measured ones by their time, then the others as predicted.

    spearman: rank correlation of predicted and measured times, None below three measured ones. bias: median of
    measured over predicted, minus 1.
    """

    folder: str
    candidates: tuple[Candidate, ...]
    measured: int
    spearman: float | None
    bias: float | None

    def to_dict(self) -> dict[str, Any]:
        found = msgspec.to_builtins(self) | {"candidates": [each.to_dict() for each in self.candidates]}
        return {**envelope("sweep", {"folder": self.folder}), **found}


def collect(folder: str | Path) -> Sweep:
    """Reads what lies in a sweep's folder. Raises FivefoldError where it holds no candidates."""
    root = Path(folder)
    try:
        numbers = sorted(int(path.name) for path in root.glob("candidates/*") if path.name.isdecimal())
    except (OSError, ValueError) as error:  # a folder that may not be entered, a name too long
        raise FivefoldError(
            f"{str(folder)[:200]!r} cannot be read: {reason_of(error)}.",
            code="no-sweep",
            option="MODEL",
            value=str(folder)[:200],
        ) from error
    if not numbers:
        raise FivefoldError(
            f"{str(folder)[:200]!r} holds no candidates of a sweep. Write them first: fivefold sweep MODEL -o FOLDER.",
            code="no-sweep",
            option="MODEL",
            value=str(folder)[:200],
        )
    found = [_candidate(root / "candidates" / str(number), number) for number in numbers]
    timed = [each for each in found if each.step_s is not None and each.predicted_s is not None]
    ratios = [each.ratio for each in timed if each.ratio is not None]
    pairs = np.array([[each.predicted_s, each.step_s] for each in timed], dtype=float)
    return Sweep(
        folder=str(folder),
        candidates=tuple(sorted(found, key=_order)),
        measured=len(timed),
        spearman=spearman(pairs[:, 0], pairs[:, 1]) if len(timed) > 2 else None,
        bias=median(ratios) - 1 if ratios else None,
    )


def _order(each: Candidate) -> tuple[int, float]:
    rank = {"measured": 0, "not run": 1, "failed": 2, "out of memory": 3}[each.outcome]
    return rank, each.step_s or each.predicted_s or float("inf")


def _candidate(folder: Path, number: int) -> Candidate:
    plan = folder / "plan.toml"
    estimate = load_plan(plan).estimate()
    seconds, peak, text = _read(folder)
    warm = seconds[_WARM_UP:]
    step_s = median(warm) if len(warm) >= _FEWEST else None
    predicted = estimate.step.seconds.value if estimate.step else None
    return Candidate(
        number=number,
        outcome=_outcome(folder, step_s, text),
        steps=len(seconds),
        step_s=step_s,
        peak_bytes=peak,
        predicted_s=predicted,
        predicted_bytes=estimate.memory.reserved_bytes if estimate.memory else None,
        ratio=None if step_s is None or predicted is None else step_s / predicted,
        plan=str(plan),
        estimate=estimate,
    )


def _outcome(folder: Path, step_s: float | None, text: str) -> Outcome:
    if _OUT_OF_MEMORY.search(text):
        return "out of memory"
    if step_s is not None:
        return "measured"
    return "failed" if (folder / _LOG).exists() else "not run"


def _read(folder: Path) -> tuple[list[float], int | None, str]:
    """(seconds of each step, largest peak, the log)."""
    text = _text(folder / _LOG)
    seconds = [float(value) / 1e3 for value in _ELAPSED.findall(text)]
    peaks = [int(float(value) * (1 << 20)) for value in _RESERVED.findall(text)]
    for line in _text(folder / _STEPS).splitlines():
        try:
            step = json.loads(line)
            seconds.append(float(step["step_s"]))
            peaks.append(int(step["peak_memory_bytes"]))
        except (ValueError, KeyError, TypeError):
            continue  # a line that the end of the run cut short
    return seconds, max(peaks, default=None), text


def _text(path: Path) -> str:
    """The file's last MAX_LOG_BYTES, empty where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(path.stat().st_size - MAX_LOG_BYTES, 0))
            return stream.read(MAX_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
