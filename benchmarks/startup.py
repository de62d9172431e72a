"""How long the command line takes from a cold start, as medians over fresh processes.

Run: python benchmarks/startup.py [REPEATS]. The goals are 0.3 s for --help and 1.5 s for a first plan; they are looked
at by people and are no test, because a busy machine would fail them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from time import perf_counter

# (what, arguments, goal in seconds)
CASES = (
    ("--version", ["--version"], 0.3),
    ("--help", ["--help"], 0.3),
    ("plan --help", ["plan", "--help"], 0.3),
    ("gpus", ["gpus"], 0.5),
    ("estimate, one layout", ["estimate", "llama-3-8b", "--gpus", "8", "--tp", "2", "--json"], 1.0),
    ("plan llama-3-8b --gpus 8", ["plan", "llama-3-8b", "--gpus", "8"], 1.5),
    ("plan llama-3-70b --gpus 64", ["plan", "llama-3-70b", "--gpus", "64"], 3.0),
)


def seconds(arguments: list[str]) -> float:
    """Wall seconds of one fresh process, output thrown away."""
    start = perf_counter()
    subprocess.run([sys.executable, "-m", "fivefold", *arguments], stdout=subprocess.DEVNULL, check=True)
    return perf_counter() - start


def main(repeats: int) -> None:
    """Print one line per case: median, range, goal."""
    for name, arguments, goal in CASES:
        times = sorted(seconds(arguments) for _ in range(repeats))
        median = statistics.median(times)
        met = "met" if median <= goal else "MISSED"
        print(f"{name:28} {median:6.2f} s ({times[0]:.2f} to {times[-1]:.2f}), goal {goal} s {met}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
