"""What every constant is worth: each set to a value that means nothing, and the errors by source then.

    python benchmarks/ablation.py [RUNS.csv]    print the table (default: the shipped runs)

A constant is ablated everywhere at once, over all GPUs and runtimes: as one idea of the model. vTrain's 1,440 runs are
thinned to every fifth. Change: median error with the neutral value minus with the shipped one, in points; positive: the
constant helps. Interval constants move no prediction: their change is that of the coverage. What constants of kernels
and links are worth on the timings that they were fitted to is benchmarks/ablation_timings.py's.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

import ablation_timings
from ablation_constants import Constant, constants, word
from accuracy import percent, table
from accuracy_wide import REPORTED, thinned
from fivefold.estimate import doubt, interval
from fivefold.measure import Run, shipped_runs
from fivefold.measure.convert import Case, Unconvertible, convert
from fivefold.measure.predict import Predicted, choose, predict_all
from fivefold.measure.validate import comparable_bytes
from fivefold.runtime import PROFILES, load_runtime

UNTOLD = "x_extra"  # most of its rows do not state their GPU
THINNED = {"vtrain-single": 5}
MOVED = 0.002  # a run is moved when its seconds change by more than this share
NOTHING = 0.0005  # a change of a median that is smaller is none


class Effect(NamedTuple):
    """What the neutral value does. moved: runs whose seconds change; better: how many of them the constant serves;
    bytes_moved and bytes_better likewise for the peak. medians, memory: change of the median errors by source."""

    constant: Constant
    moved: int
    better: int
    bytes_moved: int
    bytes_better: int
    medians: dict[str, float]
    memory: dict[str, float]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.medians.values())))

    @property
    def matters(self) -> bool:
        return any(abs(value) > NOTHING for value in (*self.medians.values(), *self.memory.values()))


# ---------------------------------------------------------------- what each is worth


class Base(NamedTuple):
    """Cases with what is predicted and measured; NaN where a row has no time or no memory."""

    cases: list[Case]
    sources: np.ndarray
    seconds: np.ndarray
    measured: np.ndarray
    memory: np.ndarray


def base_of(runs: Iterable[Run]) -> Base:
    cases: list[Case] = []
    for run in thinned(runs, THINNED):
        if run.group == UNTOLD:
            continue
        try:
            cases.append(choose(convert(run)))
        except Unconvertible:
            continue
    found = predict_all(cases)
    priced = [(case, each) for case, each in zip(cases, found, strict=True) if isinstance(each, Predicted)]
    cases = [case for case, _ in priced]
    return Base(
        cases,
        np.array([case.run.group for case in cases]),
        np.array([each.seconds.value for _, each in priced]),
        np.array([case.run.measured_s or np.nan for case in cases], dtype=float),
        np.array([_memory_error(case, each) for case, each in priced]),
    )


def _memory_error(case: Case, found: Predicted) -> float:
    known = case.run.measured_bytes
    return np.nan if not known else comparable_bytes(case.run, found) / known - 1


def effect(constant: Constant, base: Base) -> Effect:
    """The constant's neutral value on all cases that it changes."""
    changed = [constant.change(case) for case in base.cases]
    touched = [i for i, (old, new) in enumerate(zip(base.cases, changed, strict=True)) if new is not old]
    touched = [i for i in touched if not _same(constant, base.cases[i])]
    seconds, memory = base.seconds.copy(), base.memory.copy()
    with constant.within():
        again = predict_all([changed[i] for i in touched])
    for i, found in zip(touched, again, strict=True):
        if isinstance(found, Predicted):
            seconds[i], memory[i] = found.seconds.value, _memory_error(base.cases[i], found)
    was, now = (np.abs(each / base.measured - 1) for each in (base.seconds, seconds))
    moved = np.abs(seconds / base.seconds - 1) > MOVED
    judged = ~np.isin(base.sources, REPORTED) & ~np.isnan(base.measured)
    known, fits, off = ~np.isnan(base.memory), np.abs(base.memory), np.abs(memory)
    resized = known & (np.abs((1 + memory) / (1 + base.memory) - 1) > MOVED)
    return Effect(
        constant,
        int((moved & judged).sum()),
        int((moved & judged & (now > was)).sum()),
        int(resized.sum()),
        int((resized & (off > fits)).sum()),
        _by_source(base.sources, was, now, judged),
        _by_source(base.sources, fits, off, known),
    )


def _same(constant: Constant, case: Case) -> bool:
    """Whether the case has the neutral value already, so that pricing would change nothing."""
    if constant.room != "runtime":
        return False
    own = case.changes.get(constant.name, getattr(load_runtime(case.runtime), constant.name))
    return word(own) == constant.neutral


def _by_source(sources: np.ndarray, was: np.ndarray, now: np.ndarray, use: np.ndarray) -> dict[str, float]:
    return {
        str(source): float(np.median(now[mine]) - np.median(was[mine]))
        for source in sorted(set(sources[use]))
        for mine in [use & (sources == source)]
    }


# ---------------------------------------------------------------- intervals


@contextmanager
def _interval(module: ModuleType, name: str, value: object):
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


_INTERVAL = (
    (interval, "EXPERTS_SPREAD", 0.0, "added spread of mixtures of experts"),
    (doubt, "WIDTHS", dict.fromkeys(doubt.WIDTHS, 0.0), "width of owners that are less sure"),
)


def interval_rows(base: Base) -> list[tuple[str, str, str, str, str]]:
    """(name, value, neutral, coverage with, coverage without), the mean over judged sources."""
    rows = []
    with_all = _coverage(base)
    for module, name, neutral, words in _INTERVAL:
        value = _in_words(getattr(module, name))
        with _interval(module, name, neutral):
            rows.append((words, value, "0", percent(with_all), percent(_coverage(base))))
    plain = [replace(case, changes={**case.changes, "time_spread": 0.10}) for case in base.cases]
    spreads = ", ".join(f"{profile.time_spread:g} ({profile.name})" for profile in PROFILES)
    without = percent(_coverage(base._replace(cases=plain)))
    rows.append(("time_spread of each runtime", spreads, "0.1", percent(with_all), without))
    return rows


def _in_words(value: float | dict[str, float]) -> str:
    return ", ".join(f"{each:g} ({name})" for name, each in value.items()) if isinstance(value, dict) else f"{value:g}"


def _coverage(base: Base) -> float:
    inside: dict[str, list[bool]] = defaultdict(list)
    for case, found, measured in zip(base.cases, predict_all(base.cases), base.measured, strict=True):
        if isinstance(found, Predicted) and not np.isnan(measured) and case.run.group not in REPORTED:
            inside[case.run.group].append(found.seconds.low <= measured <= found.seconds.high)
    return float(np.mean([np.mean(each) for each in inside.values()]))


# ---------------------------------------------------------------- the page's part


def effects(base: Base) -> list[Effect]:
    """Of all constants but the intervals', those that matter most first."""
    found = [effect(each, base) for each in constants(base.cases) if each.name != "time_spread"]
    return sorted(found, key=lambda each: -abs(each.mean))


def report(found: list[Effect], base: Base) -> str:
    timed = ablation_timings.worths()
    return "\n\n".join(
        (
            "### Step time",
            _of_time(found, base),
            "### Peak memory",
            _of_memory(found),
            "### Timed kernels and collectives",
            ablation_timings.report(timed),
            "### Intervals",
            table(("constant", "value", "neutral", "covered with it", "without"), interval_rows(base)),
            "### Values and sources",
            table(
                ("constant", "unit", "value", "neutral", "fitted to", "source"),
                (
                    (one.name, one.unit, one.values, one.neutral, one.fitted or "–", one.source)
                    for one in (each.constant for each in found)
                ),
            ),
            _without_effect(found, {each.constant for each in timed}),
        )
    )


def _of_time(found: list[Effect], base: Base) -> str:
    judged = [source for source in sorted(set(base.sources)) if source not in REPORTED]
    return table(
        ("constant", "of", "runs moved", "better with it", *judged, "mean"),
        (
            (
                each.constant.name,
                each.constant.room,
                str(each.moved),
                percent(each.better / each.moved) if each.moved else "–",
                *(_points(each.medians.get(source)) for source in judged),
                _points(each.mean),
            )
            for each in found
            if each.matters and any(abs(value) > NOTHING for value in each.medians.values())
        ),
    )


def _of_memory(found: list[Effect]) -> str:
    sources = sorted(found[0].memory) if found else []
    return table(
        ("constant", "runs moved", "better with it", *sources),
        (
            (
                each.constant.name,
                str(each.bytes_moved),
                percent(each.bytes_better / each.bytes_moved) if each.bytes_moved else "–",
                *(_points(each.memory[name]) for name in sources),
            )
            for each in found
            if any(abs(value) > NOTHING for value in each.memory.values())
        ),
    )


def _without_effect(found: list[Effect], on_timings: set[str]) -> str:
    """Which constants move no median: those that code says, and fitted ones, which something must still bear out."""
    silent = [each for each in found if not each.matters]
    fitted = [each for each in silent if each.constant.fitted]
    idle = [each.constant.name for each in fitted if each.constant.name not in on_timings]
    read = ", ".join(
        f"{each.constant.name} ({each.moved}, {each.bytes_moved})" for each in silent if not each.constant.fitted
    )
    return (
        f"Of {sum(bool(each.constant.fitted) for each in found)} fitted constants these move no median of runs: "
        f"{', '.join(each.constant.name for each in fitted) or 'none'}; of them these move no timing either, and "
        f"have to go: {', '.join(idle) or 'none'}.\n\n"
        "What is read in code or papers, or remembered, and moves no median of runs (runs whose seconds move, and "
        f"whose bytes do): {read or 'none'}."
    )


def _points(value: float | None) -> str:
    return "–" if value is None else "0" if abs(value) <= NOTHING else f"{100 * value:+.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", help="CSV file of runs; default: the shipped ones")
    args = parser.parse_args()
    from accuracy_wide import complete

    base = base_of(shipped_runs().runs if args.runs is None else complete(args.runs))
    print(report(effects(base), base))


if __name__ == "__main__":
    main()
