"""The search under the workload's options finds what an enumeration of every layout finds."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fivefold.estimate import Problem
from fivefold.layout import Lora, Offload

OPTIONS = {
    "optimizer": {"offload": Offload(optimizer=1)},
    "activations": {"offload": Offload(activations=0.5)},
    "adapters": {"trained": "adapters", "lora": Lora(rank=16)},
    "documents": {"document_length": 700.0},
    "graphs": {"cuda_graphs": True},
    "dropout": {"dropout": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("memory_gb", [3.0, 10.0])
def test_the_optimum(help_with, name: str, memory_gb: float) -> None:
    model = help_with.cut("llama-3-8b", 2)
    small = replace(model, hidden=1024, vocab=8192)
    cluster = help_with.small_cluster(4, memory_gb)
    problem: Problem = help_with.problem_of(small, cluster, **OPTIONS[name])
    priced = [help_with.priced(problem, layout) for layout in help_with.every_layout(problem)]
    fitting = [each.step.seconds.value for each in priced if each.fits and each.step]
    found = help_with.found(problem, top=1)
    assert bool(found.plans) == bool(fitting)
    if fitting:
        fastest = found.plans[found.fastest].step.seconds.value
        assert fastest == pytest.approx(min(fitting), rel=1e-9)
