"""What is counted as running again is what is priced as running again."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.estimate.price import OWNERS
from fivefold.estimate.recomputed import runs_again
from fivefold.layout import Layout
from fivefold.layout.layout import RECOMPUTE_MODULES

_COMMUNICATION = [OWNERS.index(name) for name in ("tp", "ep")]


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan", "fsdp", "deepspeed"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek"])
def test_collectives_that_are_counted_twice_are_those_priced_twice(kernel_of, runtime, family):
    """The seconds of the collectives that a module repeats, beside those that its recomputation is charged with."""
    kernel = kernel_of(family, [Layout(tp=4, ep=1 if family == "llama" else 2)], gpus=8, runtime=runtime)
    by_operations = kernel.problem.runtime.selective_by_operation
    repeated = 0.0
    for ledger, cost in zip(kernel.ledgers, kernel.costs, strict=True):
        for index, module in enumerate(RECOMPUTE_MODULES):
            if by_operations and module != "core_attn":
                continue
            charged = float(cost.recompute[index, _COMMUNICATION].sum())
            again = sum(
                float(np.ravel(seconds)[0])
                for row, seconds in cost.exchanges
                if runs_again(row, ledger, kernel.problem.runtime, "selective", (module,))
            )
            assert again == pytest.approx(charged, rel=1e-12)
            repeated += again
        full = float(cost.full[_COMMUNICATION].sum())
        again = [s for row, s in cost.exchanges if runs_again(row, ledger, kernel.problem.runtime, "full", ())]
        assert float(np.sum(again)) == pytest.approx(full, rel=1e-12)
    assert repeated > 0
