"""How much a few of one's own runs help: each source cold, and with factors fitted to three of its runs.

    python benchmarks/accuracy_calibrated.py [RUNS.csv]           print the table (default: the shipped runs)
    python benchmarks/accuracy_calibrated.py RUNS.csv --widths    the priors' widths tuned, each source left out

A stack is the runs of one source on one GPU with one framework of one date: what a user has. Three of its runs are
drawn (20 times, seeded), `calibrate` fits its factors to them, and the others are predicted cold and with the factors;
at most 20 of them each time, drawn too.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accuracy import percent, table
from accuracy_wide import REPORTED
from fivefold.cluster.calibration import CONSTANTS
from fivefold.measure import Run, shipped_runs
from fivefold.measure.calibrate import scale_of
from fivefold.measure.convert import Case, Unconvertible, convert
from fivefold.measure.factors import WIDTHS, fit, log_seconds, predicted, slopes_at
from fivefold.measure.fitting import solve
from fivefold.measure.predict import Predicted, choose, predict_all

RUNS, DRAWS, TESTED = 3, 20, 20
FEWEST = 6  # timed runs of one stack

Key = tuple[str, str, str, str]  # source, GPU, runtime, framework and date


class Group(NamedTuple):
    """The timed cases of one stack. cold: logs of predicted over measured seconds."""

    cases: list[Case]
    cold: np.ndarray


class Gain(NamedTuple):
    """Absolute errors of runs that were not fitted, cold and after, and whether the interval held them; over draws."""

    cold: np.ndarray
    after: np.ndarray
    inside: np.ndarray


def groups_of(runs: Iterable[Run]) -> dict[Key, Group]:
    """The cases of each stack that has enough timed runs."""
    cases: list[Case] = []
    for run in runs:
        if run.measured_s is None or run.group in REPORTED:
            continue
        try:
            cases.append(choose(convert(run)))
        except Unconvertible:
            continue
    members: dict[Key, list[tuple[Case, float]]] = defaultdict(list)
    for case, found in zip(cases, predict_all(cases), strict=True):
        if isinstance(found, Predicted):
            key = (case.run.group, case.cluster.gpu.name, case.runtime, _stack(case.run))
            members[key].append((case, float(np.log(found.seconds.value / measured(case)))))
    return {
        key: Group([case for case, _ in rows], np.array([error for _, error in rows]))
        for key, rows in members.items()
        if len(rows) >= FEWEST
    }


def _stack(run: Run) -> str:
    """The framework in a few words, and its date or release."""
    words = (run.framework or "").split("/")[0].split(",")[0]
    return f"{words} {(run.source_date or '').split(' ')[0].rstrip(';')}".strip()


def measured(case: Case) -> float:
    return float(case.run.measured_s or 0)


def gain(group: Group, rng: np.random.Generator, widths: Mapping = WIDTHS) -> Gain:
    """Draw, fit, predict the rest."""
    cold, after, inside = [], [], []
    for _ in range(DRAWS):
        order = rng.permutation(len(group.cases))
        drawn, rest = order[:RUNS], order[RUNS : RUNS + TESTED]
        found = fit([group.cases[i] for i in drawn], widths)
        others = [group.cases[i] for i in rest]
        seconds, wide = predicted(others, found.solution.logs)
        error = seconds - np.log([measured(case) for case in others])
        cold.append(np.abs(np.expm1(group.cold[rest])))
        after.append(np.abs(np.expm1(error)))
        inside.append(np.abs(error) <= np.log1p(scale_of(found) * np.expm1(wide)))
    return Gain(*(np.concatenate(each) for each in (cold, after, inside)))


def gains(groups: Mapping[Key, Group], seed: int = 0) -> dict[Key, Gain]:
    return {key: gain(group, np.random.default_rng(seed)) for key, group in groups.items()}


def by_source(found: Mapping[Key, Gain], groups: Mapping[Key, Group]) -> list[tuple[str, int, Gain]]:
    """(source, runs, gain) with a source's groups weighing by their runs."""
    out = []
    for source in sorted({key[0] for key in found}):
        keys = [key for key in found if key[0] == source]
        rng = np.random.default_rng(0)
        parts = []
        for key in keys:
            # As many tested errors as the group has runs, whatever the draws tested.
            take = rng.integers(0, len(found[key].cold), 50 * len(groups[key].cases))
            parts.append(Gain(*(each[take] for each in found[key])))
        pooled = Gain(*(np.concatenate(each) for each in zip(*parts, strict=True)))
        out.append((source, sum(len(groups[key].cases) for key in keys), pooled))
    return out


def report(found: Mapping[Key, Gain], groups: Mapping[Key, Group]) -> str:
    """The tables by source, each weighing the same in the summary, and by stack."""
    sources = by_source(found, groups)
    cold, after = ([float(np.median(each[at])) for _, _, each in sources] for at in (0, 1))
    summary = (
        f"Median error of runs that were not fitted, cold and after three runs: {percent(float(np.median(cold)))} and "
        f"{percent(float(np.median(after)))} at the median of {len(sources)} sources, {percent(float(np.mean(cold)))} "
        f"and {percent(float(np.mean(after)))} in their mean."
    )
    head = ("runs", "cold: median", "p90", "3 runs: median", "p90", "in 80% range")
    stacks = [(*key, str(len(groups[key].cases)), *_cells(each)) for key, each in sorted(found.items())]
    every = table(("source", "GPU", "runtime", "stack", *head), stacks)
    return f"{summary}\n\n{table(('source', *head), [(s, str(n), *_cells(e)) for s, n, e in sources])}\n\n{every}"


def _cells(each: Gain) -> tuple[str, ...]:
    return (
        percent(float(np.median(each.cold))),
        percent(float(np.quantile(each.cold, 0.9))),
        percent(float(np.median(each.after))),
        percent(float(np.quantile(each.after, 0.9))),
        percent(float(np.mean(each.inside))),
    )


# ---------------------------------------------------------------- widths of the priors


class Linear(NamedTuple):
    """A group linearised at factors of 1: slopes [N, K] and logs [N] that they have to explain."""

    slopes: np.ndarray
    logs: np.ndarray


def linear(groups: Mapping[Key, Group]) -> dict[Key, Linear]:
    zeros = np.zeros(len(CONSTANTS))
    return {
        key: Linear(slopes_at(group.cases, zeros, log_seconds(group.cases, zeros)), -group.cold)
        for key, group in groups.items()
    }


def loss(lines: Mapping[Key, Linear], widths: np.ndarray, draws: int = 5) -> float:
    """Mean of median and mean absolute log error of the runs that one, three or six others predict; every source the
    same weight, within it groups by the root of their runs."""
    by: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, line in lines.items():
        rng = np.random.default_rng(1)
        for count in (1, 3, 6):
            if len(line.logs) < count + 3:
                continue
            for _ in range(draws):
                order = rng.permutation(len(line.logs))
                drawn, rest = order[:count], order[count : count + 200]
                found = solve(line.slopes[drawn], line.logs[drawn], widths).logs
                left = np.minimum(np.abs(line.logs[rest] - line.slopes[rest] @ found), 0.3)
                by[key[0]].append((float(np.median(left) + left.mean()) / 2, len(line.logs) ** 0.5))
    pairs = [np.array(each) for each in by.values()]
    return float(np.mean([np.average(each[:, 0], weights=each[:, 1]) for each in pairs]))


def tuned(lines: Mapping[Key, Linear], passes: int = 1) -> tuple[np.ndarray, float]:
    """Widths by coordinate descent from the shipped ones."""
    widths = np.array([WIDTHS[name] for name in CONSTANTS])
    best = loss(lines, widths)
    for _ in range(passes):
        for at in range(len(widths)):
            for scale in (0.1, 0.5, 2.0):
                trial = widths.copy()
                trial[at] = np.clip(trial[at] * scale, 1e-3, 3)
                value = loss(lines, trial)
                if value < best - 1e-6:
                    best, widths = value, trial
    return widths, best


def widths_report(groups: Mapping[Key, Group]) -> str:
    lines = linear(groups)
    shipped = np.array([WIDTHS[name] for name in CONSTANTS])
    cold = np.full(len(CONSTANTS), 1e-6)
    rows = [_widths_row("none", lines, lines, shipped, cold)]
    for source in sorted({key[0] for key in groups}):
        others = {key: line for key, line in lines.items() if key[0] != source}
        own = {key: line for key, line in lines.items() if key[0] == source}
        rows.append(_widths_row(source, others, own, shipped, cold))
    return table(("left out", *CONSTANTS, "loss of it: cold", "shipped widths", "these"), rows)


def _widths_row(
    name: str, fitted: Mapping[Key, Linear], tested: Mapping[Key, Linear], shipped: np.ndarray, cold: np.ndarray
) -> Sequence[str]:
    widths, _ = tuned(fitted)
    losses = (percent(loss(tested, each)) for each in (cold, shipped, widths))
    return (name, *(f"{value:.3g}" for value in widths), *losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", help="CSV file of runs; default: the shipped ones")
    parser.add_argument("--widths", action="store_true", help="tune the priors' widths instead")
    args = parser.parse_args()
    from accuracy_wide import complete

    groups = groups_of(shipped_runs().runs if args.runs is None else complete(args.runs))
    print(widths_report(groups) if args.widths else report(gains(groups), groups))


if __name__ == "__main__":
    main()
