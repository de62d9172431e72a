"""What is counted as running again is what is priced as running again."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.estimate.detail import Detail
from fivefold.estimate.kernel import Problem
from fivefold.estimate.price import OWNERS
from fivefold.estimate.recomputed import runs_again
from fivefold.layout import Layout, Recompute, Workload
from fivefold.layout.columns import Columns
from fivefold.layout.layout import RECOMPUTE_MODULES
from fivefold.layout.stages import resolve_row
from fivefold.runtime import load_runtime

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


def test_what_a_policy_keeps_is_among_the_largest_tensors(small):
    model, cluster, work = small["llama"], load_cluster("h100-sxm", gpus=8), Workload(seq_len=2048, global_batch=64)
    columns = Columns.from_layouts([Layout(recompute=Recompute(kind="full"))], 8, work)

    def memory(*keeps):
        profile = replace(load_runtime("megatron"), checkpoint_keeps=keeps)
        return Detail(Problem(model, cluster, work, profile), columns, resolve_row(columns, model, "megatron")).memory

    plain, kept = memory(), memory("qkv_proj", "core_attention")
    found = {each.name: each.bytes for each in kept.largest}
    # At the peak one of 16 blocks runs again, and has all of its tensors with and without a policy.
    assert found["kept by a policy"] * 15 == (kept.peak_bytes - plain.peak_bytes) * 16 > 0
    assert "kept by a policy" not in {each.name for each in plain.largest}
