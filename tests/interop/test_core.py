"""Megatron-Core's own configuration takes every plan that is exported, and splits its layers the same way.

Skipped where megatron-core is not installed; benchmarks/megatron_core.py is the same on 1,000 plans.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import Plan, plans

from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.interop.export import Export, export, job_of
from fivefold.layout import Layout, Workload, plan_ramp_up, resolve
from fivefold.model import load_model
from fivefold.search.splits import layout_text

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
core = pytest.importorskip("core")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(most=4))
def test_core_takes_what_is_exported(drawn: list[Plan]) -> None:
    for plan in drawn:
        what = Export(model=plan.model, cluster=plan.cluster, work=plan.work, layout=plan.layout)
        try:
            export(what, ("torchrun",))
        except FivefoldError:
            continue
        words = [str(word) for word in job_of(what).words()]
        assert core.refusal(words) is None
        stages = resolve(plan.layout, plan.model, plan.cluster.gpus, plan.work).stages
        counts = [[last - first for first, last in rank] for rank in stages]
        assert core.layers_per_stage(core.config_of(words)) == counts


def test_core_grows_the_batch_as_the_ramp_says() -> None:
    """Its own calculator of micro-batches, asked after every step of the ramp."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    model, cluster = load_model("llama-3-8b"), load_cluster("h100-sxm", gpus=8)
    work = Workload(seq_len=4096, global_batch=1024)
    layout = Layout(tp=2)
    ramp = plan_ramp_up("256:1024:1G", work, resolve(layout, model, 8, work))
    options = job_of(Export(model=model, cluster=cluster, work=work, layout=layout, ramp=ramp)).groups[2][1]
    start, increment, samples = (int(word) for word in options["--rampup-batch-size"])  # type: ignore[union-attr]
    theirs = RampupBatchsizeNumMicroBatchesCalculator(1024, 1, 4, False, 0, start, increment, samples)
    consumed, counted = 0, {}
    while consumed <= samples:
        theirs.update(consumed, False, False)
        batch = theirs.get_current_global_batch_size()
        counted[batch] = counted.get(batch, 0) + 1
        consumed += batch
    assert [batch for batch in counted if batch < 1024] == [step.global_batch for step in ramp.steps]
    for step in ramp.steps:
        assert abs(counted[step.global_batch] - step.iterations) <= 1


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 5), min_size=2, max_size=12), st.integers(0, 1))
def test_core_reads_the_text_of_a_split_as_its_counts(vpp: int, counts: list[int], mtp: int) -> None:
    """Its parser of --pipeline-model-parallel-layout, and its own checks of what the parser read."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    counts = [max(count, 1) if 0 < at < len(counts) - 1 else count for at, count in enumerate(counts)]
    pp = len(counts) // vpp
    counts = counts[: pp * vpp]
    if pp < 2 or not sum(counts):
        return
    read = PipelineParallelLayerLayout(layout_text(tuple(counts), mtp), pp)
    read.validate_layer_layout(num_layers=sum(counts), mtp_num_layers=mtp)
    held = [read.layout[rank][chunk].count(LayerType.decoder) for chunk in range(vpp) for rank in range(pp)]
    assert held == counts
