"""nanotron's sweep in the Ultra-Scale Playbook beside what the planner would have chosen.

    python benchmarks/playbook.py

Winners: for each of the 14 published combinations of model and GPUs, the winner's predicted step over the fastest
predicted one of its sweep (scripts/scaling_benchmarks.py of nanotron: degrees and micro-batches in powers of two, ZeRO
0 and 1, sequence parallelism with tensor parallelism, no recomputation), of those that are predicted to fit.
Largest micro-batches: of a 3.57B model on 2 to 32 GPUs of one tensor-parallel group. The published sizes are round, and
nanotron's scripts/scaling_benchmarks.py names 3, 9, 18, 40 and 90 where the plot with sequence parallelism says 4, 10,
20, 40 and 100: somebody tried some sizes. So the largest that fits is printed, and the largest of all published sizes
that does; that those are the sizes which were tried is inferred.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from fivefold.layout import Layout
from fivefold.measure import Run, shipped_runs
from fivefold.measure.convert import Case, convert
from fivefold.measure.predict import Predicted, kernel_of, predict, predict_all

TP, PP = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
TIED = 1.10
# tp: the largest micro-batch that the playbook's plots say to fit, without and with sequence parallelism.
PUBLISHED = {2: (3, 4), 4: (8, 10), 8: (12, 20), 16: (16, 40), 32: (20, 100)}
GRID = sorted({size for sizes in PUBLISHED.values() for size in sizes})
SEARCHED = 200


def winners() -> list[Run]:
    return [run for run in shipped_runs().runs if run.group == "nanotron"]


def sweep(winner: Run) -> Iterator[Run]:
    """What nanotron's benchmark script would have tried on the winner's GPUs."""
    gpus, gbs = int(winner.gpus or 1), int(winner.gbs or 1)
    for tp, pp, mbs, zero in itertools.product(TP, PP, MICRO_BATCHES, (0, 1)):
        dp = gpus // (tp * pp)
        if tp * pp * dp != gpus or gbs % (dp * mbs) or tp > int(winner.heads or 1):
            continue
        if gbs // (dp * mbs) >= max(pp - 1, 1) and pp <= int(winner.layers or 1) // 2 and (zero == 0 or dp > 1):
            yield replace(winner, tp=tp, pp=pp, mbs=mbs, zero=zero, dp=dp, sp=int(tp > 1), vpp=1)


def fits(case: Case) -> bool:
    """Whether the planner says that it fits: allocations, fragmentation, and what lies outside the allocator."""
    kernel, rows = kernel_of(case), np.arange(1)
    return bool(kernel.peak(rows).reserved[0] <= case.cluster.gpu.memory_bytes)


def ratio(winner: Run) -> tuple[float, Case]:
    """(the winner's predicted seconds over those of the fastest of its sweep, that one)."""
    cases = [case for case in map(convert, sweep(winner)) if fits(case)]
    timed = [(found.seconds.value, at) for at, found in enumerate(predict_all(cases)) if isinstance(found, Predicted)]
    fastest, at = min(timed)
    return predict(convert(winner)).seconds.value / fastest, cases[at]


def _words(layout: Layout) -> str:
    return f"tp {layout.tp} pp {layout.pp} mbs {layout.micro_batch} zero {layout.zero}"


def largest_micro_batch(tp: int, sequence_parallel: bool) -> int:
    """The largest micro-batch of the 3.57B model on `tp` GPUs that is predicted to fit."""
    model = replace(winners()[0], model="llama-3.57B", layers=28, hidden=3072, heads=32, kv_heads=32, head_dim=96)
    alone = replace(model, gpus=tp, gpus_per_node=min(tp, 8), tp=tp, pp=1, dp=1, zero=0, sp=int(sequence_parallel))
    sizes = range(1, SEARCHED)
    return max((mbs for mbs in sizes if fits(convert(replace(alone, mbs=mbs, gbs=mbs)))), default=0)


def main() -> None:
    within = 0
    for winner in winners():
        times, best = ratio(winner)
        within += times <= TIED
        ran, ours = convert(winner).layout, best.layout
        print(f"{winner.model:22} {winner.gpus:4} GPUs: {_words(ran)} takes {times:.2f} times {_words(ours)}")
    print(f"{within} of {len(winners())} winners within {TIED:.2f} times our optimum")
    for tp, sizes in PUBLISHED.items():
        for published, parallel in zip(sizes, (False, True), strict=True):
            found, name = largest_micro_batch(tp, parallel), "with" if parallel else "without"
            error, tried = found / published - 1, max((size for size in GRID if size <= found), default=0)
            print(
                f"tp {tp:2} {name:7} sequence parallelism: {found:3} fit, {tried:3} of the published sizes, "
                f"published {published:3}, {error:+.0%}"
            )


if __name__ == "__main__":
    main()
