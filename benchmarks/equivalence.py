"""Prove every layout of the matrix equal to one process, spoil every sum, and write docs/equivalence.md.

    python benchmarks/equivalence.py           all of it: on two cores about half an hour
    python benchmarks/equivalence.py --core    what CI runs, printed and not written

The matrix, its controls and its faults are those of tests/train; this script runs them and sets out the figures.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "train"))

import proving  # noqa: E402 - the helpers of the tests are no package
from controls import CONTROLS, beyond, spoil  # noqa: E402
from faults import FAULTS  # noqa: E402
from matrix import CORE, EXHAUSTIVE, LOWER_PRECISION, REFUSED, Row, row  # noqa: E402
from ranks import RankFailure  # noqa: E402

from fivefold.errors import FivefoldError  # noqa: E402
from fivefold.train.verify import Relative  # noqa: E402
from fivefold.train.verify.compare import TOLERANCES  # noqa: E402

PAGE = ROOT / "docs" / "equivalence.md"
COLUMNS = ("gradients", "norm", "weights", "losses")

HEAD = """# Every layout equals one process

Written by `python benchmarks/equivalence.py`; {host}.

One process trains the whole model with PyTorch's autograd, SGD, AdamW and clipping. Each layout trains from the same
weights on the same data, on forked ranks over gloo: one step of SGD, and from the start again three steps of AdamW
(eps 1e-3) with clipping that is active. Compared, for every parameter and on every rank that holds a part of it: the
gradient, the weight after SGD and after AdamW, and besides each step's loss and gradient norm. The gate in fp64 is
`|g - g0| <= 1e-12 * max(|g0|, 1e-3 * |g_model| / sqrt(tensors))` for gradients, likewise for weights, and 1e-12
relative for losses and norms. An element that no rank holds, or that is not a number, is an infinite error. Sequences
have different numbers of valid tokens, and some have none, unless a layout's name says `masks.full`.

A name lists what is not a default: model and blocks, degrees with their kind (`cp2.a2a`, `pp2.zbv`, `dp4.replicate2`
for HSDP), the ZeRO stage, recomputation, and micro-batches per step x sequences in each. Models are tiny: hidden 32,
sequences of 24, a vocabulary of 67; `tests/train/matrix.py` has them.
"""


class Proven(NamedTuple):
    row: Row
    passed: bool
    relative: Relative
    seconds_s: float


def prove_all(rows: Sequence[Row], precision: str = "fp64", exact: str | None = None) -> list[Proven]:
    """Every row, with a line as each ends."""
    found = []
    for place, each in enumerate(rows):
        found.append(one := prove_one(each, precision, exact))
        mark = "" if one.passed else "  FAILED"
        print(f"[{place + 1}/{len(rows)}] {precision} {each.name} {max(one.relative):.1e} {one.seconds_s:.1f} s{mark}")
        sys.stdout.flush()
    return found


def prove_one(each: Row, precision: str, exact: str | None) -> Proven:
    """Infinite errors where a rank raised, whose traceback is printed."""
    try:
        verdict, _, seconds_s = proving.prove(each, precision, exact)
    except RankFailure as error:
        print(error, file=sys.stderr)
        return Proven(each, False, Relative(math.inf, math.inf, math.inf, math.inf), math.nan)
    return Proven(each, verdict.passed, verdict.relative, seconds_s)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def worst(found: Iterable[Proven]) -> Relative:
    return Relative(*(max(errors) for errors in zip(*(each.relative for each in found), strict=True)))


def errors(relative: Relative) -> list[str]:
    return [f"{error:.1e}" for error in relative]


def summary(found: Sequence[Proven]) -> str:
    titles = dict.fromkeys(each.row.table for each in found)
    groups = [(title, [each for each in found if each.row.table == title]) for title in titles]
    lines = [
        [title, str(len(some)), _ranks(some), *errors(worst(some)), f"{sum(each.seconds_s for each in some):.0f}"]
        for title, some in [*groups, ("**all**", list(found))]
    ]
    return table(("layouts of", "number", "ranks", *COLUMNS, "seconds"), lines)


def _ranks(some: Sequence[Proven]) -> str:
    return ", ".join(map(str, sorted({each.row.ranks for each in some})))


def each_layout(found: Sequence[Proven], gate: bool = True) -> str:
    lines = [
        [f"`{each.row.name}`", str(each.row.ranks), *errors(each.relative), f"{each.seconds_s:.1f}"]
        + ([] if each.passed or not gate else ["**failed**"])
        for each in found
    ]
    return table(("layout", "ranks", *COLUMNS, "seconds"), lines)


def controls() -> Iterator[tuple[bool, list[str]]]:
    """(whether both were caught, the line) for each sum."""
    for control in CONTROLS:
        found = spoil(control)
        caught = found.made and not any(verdict.passed for verdict in found.verdicts.values())
        over = [f"{beyond(verdict.relative, TOLERANCES['fp64']):.1e}" for verdict in found.verdicts.values()]
        site = control.site
        where = f"`{site.module}.{site.function}`"
        print(f"control {site}: {', '.join(over)}{'' if caught else '  NOT CAUGHT'}", flush=True)
        yield caught, [where, site.collective, site.axis, f"`{control.row.name}`", *over]


def faults() -> Iterator[tuple[bool, list[str]]]:
    for fault in FAULTS:
        caught, unseen = (row("faults", **options) for options in (fault.caught, fault.unseen))
        for each in (caught, unseen):
            proving.reference_of(each)
        with pytest.MonkeyPatch.context() as patch:
            fault.commit(patch)
            verdict, passing = (proving.prove(each).verdict for each in (caught, unseen))
        ok = not verdict.passed and passing.passed
        over = f"{beyond(verdict.relative, TOLERANCES['fp64']):.1e}"
        print(f"fault {fault.name}: {over}{'' if ok else '  NOT CAUGHT'}", flush=True)
        yield ok, [fault.name.replace("-", " "), f"`{caught.name}`", over, f"`{unseen.name}`"]


def refusals() -> Iterator[list[str]]:
    for code, options in REFUSED:
        try:
            proving.prove(row("refused", **options))
        except FivefoldError as error:
            yield [code, error.message.removeprefix("This layout would not start. ")]


def host() -> str:
    return (
        f"PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d', time.gmtime())}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", action="store_true", help="only what CI runs; the page is not written")
    core = parser.parse_args().core
    torch.set_num_threads(1)  # before the first fork
    start = time.monotonic()
    proven = prove_all(CORE)
    fp32 = prove_all(LOWER_PRECISION, "fp32", "fp64")
    bf16 = prove_all(LOWER_PRECISION, "bf16", "fp64")
    spoiled, broken = list(controls()), list(faults())
    proven += [] if core else prove_all(EXHAUSTIVE)
    good = all(each.passed for each in (*proven, *fp32)) and all(caught for caught, _ in (*spoiled, *broken))
    minutes = (time.monotonic() - start) / 60
    print(f"{len(proven)} layouts in fp64, worst {dict(worst(proven)._asdict())}; {minutes:.0f} minutes; ", end="")
    print("all as it has to be" if good else "NOT ALL AS IT HAS TO BE")
    if not core:
        PAGE.write_text(page(proven, fp32, bf16, [line for _, line in spoiled], [line for _, line in broken], minutes))
    return 0 if good else 1


def page(
    proven: Sequence[Proven],
    fp32: Sequence[Proven],
    bf16: Sequence[Proven],
    spoiled: Sequence[Sequence[str]],
    broken: Sequence[Sequence[str]],
    minutes: float,
) -> str:
    failed = [each for each in (*proven, *fp32) if not each.passed]
    said = f"{len(failed)} failed" if failed else "all passed"
    return "\n".join(
        (
            HEAD.format(host=f"{host()}; {minutes:.0f} minutes, on a machine that did other things too"),
            f"## {len(proven)} layouts in fp64: {said}\n",
            "The largest relative errors; the gate is 1e-12. Seconds are of the ranks, start included.\n",
            summary(proven),
            "\n## fp32 and bf16\n",
            "fp32 has the same gate at 5e-6, against the reference in fp64: the bound is then on the layout's own",
            "rounding, and not on the difference of two roundings, which may cancel or add.\n",
            each_layout(fp32),
            "\nbf16 (fp32 master weights and gradient accumulation) has no gate but that losses are within 0.5% and",
            "norms within 2% of fp64:\n",
            each_layout(bf16, gate=False),
            f"\n## Controls: {len(spoiled)} sums over ranks, each spoiled twice\n",
            "Sums are found by tracing every layout above; one without a control fails its proof. Dropping leaves each",
            "rank its own contribution; doubling counts all twice. The figures say how many times the gate the worst",
            "error then is.\n",
            table(("sum made by", "collective", "over", "layout", "dropped", "doubled"), spoiled),
            "\n## Faults that other trainers have had\n",
            "Each committed on purpose: the layout that catches it, by how many times the gate, and a layout that",
            "passes in spite of it.\n",
            table(("fault", "caught by", "times the gate", "not seen by"), broken),
            "\n## Refused, by the rule that says so\n",
            table(("rule", "sentence"), refusals()),
            "\n## Every layout\n",
            each_layout(proven),
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
