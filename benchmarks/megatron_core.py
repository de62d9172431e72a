"""Megatron-Core's verdict beside fivefold's, over random plans: none that fivefold exports and Megatron-Core refuses.

    PYTHONPATH=src python benchmarks/megatron_core.py [PLANS [SEED [ILLEGAL]]]

ILLEGAL: plans of each problem that break a rule, beside six that break none. Needs megatron-core and PyTorch (pip
install --no-deps megatron-core). Plans and judge are those of tests/interop.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "interop"))

import core
import megatron.core
from plans import Plan, context, plans

from fivefold.errors import FivefoldError
from fivefold.interop.export import Export, export, job_of
from fivefold.layout import resolve, violations


def main(wanted: int = 1000, start: int = 0, illegal: int = 2) -> int:
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    rules: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def judge(plan: Plan) -> None:
        what = Export(model=plan.model, cluster=plan.cluster, work=plan.work, layout=plan.layout)
        words = [str(word) for word in job_of(what).words()]
        broken = violations(plan.layout, context(plan.model, plan.cluster, plan.work))
        legal = not broken
        try:
            export(what, ("torchrun",))
            ours = None
        except FivefoldError as error:
            ours = error.code
        theirs = core.refusal(words)
        seen[f"{'we allow' if ours is None else 'we refuse'}, it {'allows' if theirs is None else 'refuses'}"] += 1
        if len(broken) == 1:
            rules[broken[0].id][theirs is not None] += 1
        if legal and ours is not None:
            seen[f"legal as a layout, not exported: {ours}"] += 1
        if ours is None and theirs is not None:
            wrong.append(f"{theirs}\n  {plan.layout}\n  {plan.model}\n  {plan.work}")
        if ours is None and theirs is None:
            seen["layers per stage compared"] += 1
            stages = resolve(plan.layout, plan.model, plan.cluster.gpus, plan.work).stages
            counts = [[last - first for first, last in rank] for rank in stages]
            if core.layers_per_stage(core.config_of(words)) != counts:
                wrong.append(f"stages {counts}\n  {plan.layout}\n  {plan.model}")

    @seed(start)
    @settings(max_examples=10**6, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(plans(most=6, illegal=illegal))
    def run(drawn: list[Plan]) -> None:
        for plan in drawn:
            if sum(count for name, count in seen.items() if name.startswith("we ")) >= wanted:
                raise StopIteration
            judge(plan)

    with suppress(StopIteration):
        run()
    report(seen, rules, wrong)
    return 1 if wrong else 0


def report(seen: Counter[str], rules: dict[str, list[int]], wrong: list[str]) -> None:
    print(f"Megatron-Core {megatron.core.__version__}, numpy {np.__version__}")
    for name, count in sorted(seen.items()):
        print(f"{count:6} {name}")
    for rule, (taken, refused) in sorted(rules.items()):
        print(f"{refused:6} of {taken + refused:5} plans that break {rule} alone are refused by it too")
    print(f"{len(wrong):6} that we allow and it refuses, or splits otherwise")
    for reason, count in Counter(each.partition("\n")[0] for each in wrong).most_common(10):
        print(f"{count:6}   {reason}")
    print(*wrong[:1], sep="\n")


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:4])))
