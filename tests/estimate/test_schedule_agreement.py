"""The kernel's pipeline seconds and bubble against the event simulator, run on stage times assembled here."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.layout import Layout, Recompute
from fivefold.schedule import actions, simulate

ONE = np.arange(1)


def short(value: object) -> str:
    """Test names: a layout by the fields that differ from the defaults."""
    if not isinstance(value, Layout):
        return str(value)
    given = {name: getattr(value, name) for name in value.__struct_fields__}
    told = {name: got for name, got in given.items() if got != getattr(Layout(), name)}
    return "-".join(f"{name}{got.kind if isinstance(got, Recompute) else got}" for name, got in told.items())


MEGATRON = [
    Layout(pp=2),
    Layout(pp=4),
    Layout(pp=8),
    Layout(pp=4, first_stage_layers=2, last_stage_layers=6),
    Layout(pp=4, first_stage_layers=7),
    Layout(pp=2, vpp=2),
    Layout(pp=4, vpp=2),
    Layout(pp=4, vpp=4),
    Layout(pp=2, vpp=2, account_for_embedding=True, account_for_loss=True),
    Layout(pp=4, recompute=Recompute(kind="full", layers=1)),
    Layout(pp=4, vpp=2, recompute=Recompute(kind="full", layers=2)),
    Layout(pp=4, recompute=Recompute(kind="selective")),
    Layout(pp=2, tp=2, cp=2, micro_batch=2),
]
TORCHTITAN = [Layout(pp=2, zero=3), Layout(pp=4, zero=2, schedule="afab"), Layout(pp=4, vpp=2, zero=3)]
CASES = [("megatron", layout) for layout in MEGATRON] + [("torchtitan", layout) for layout in TORCHTITAN]


def stage_times(kernel, stages, model, layout) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of every virtual stage, chunk by chunk, from the blocks that each one holds."""
    v = kernel.variants
    kinds = [model.kinds.index(run.block) for run in model.runs for _ in range(run.count)]
    embedding, head = len(model.kinds), len(model.kinds) + 1
    forward, backward = [], []
    for chunk in range(layout.vpp):
        for rank in range(layout.pp):
            first, last = stages[rank][chunk]
            pieces = kinds[first:last]
            redone = blocks_redone(stages[rank], chunk, layout) if layout.recompute.kind != "none" else 0
            again = pieces[:redone]
            pieces = pieces + [embedding] * (rank == chunk == 0)
            pieces = pieces + [head] * (rank == layout.pp - 1 and chunk == layout.vpp - 1)
            forward.append(sum(float(v.forward_s[0, piece]) for piece in pieces))
            backward.append(
                sum(float(v.backward_s[0, piece]) for piece in pieces)
                + sum(float(v.again_s[0, piece]) for piece in again)
            )
    return forward, backward


def blocks_redone(chunks, chunk: int, layout: Layout) -> int:
    """Blocks of a chunk that backward recomputes: all, or an equal share of the rank's number (Megatron: per chunk)."""
    first, last = chunks[chunk]
    asked = layout.recompute.layers
    return last - first if asked is None else min(asked // layout.vpp, last - first)


@pytest.fixture(params=["llama", "deepseek", "gpt2"])
def family(request):
    return request.param


@pytest.mark.parametrize(("runtime", "layout"), CASES, ids=short)
def test_pipeline_seconds_are_the_simulators(runtime, layout, family, small, price, kernel_of, with_layers):
    model = small[family]
    if runtime == "torchtitan" and model.tied_embeddings:
        pytest.skip("torchtitan ties no embeddings over a pipeline")
    if layout.account_for_embedding:
        model = with_layers(model, 18)  # 18 blocks, embedding and head make 4 equal stages of 5
    est = price(model, layout, runtime=runtime)
    kernel = kernel_of(model, [layout], runtime=runtime)
    stages, m = est.layout.stages, est.layout.num_micro_batches
    forward, backward = stage_times(kernel, stages, model, layout)
    transfer = float(kernel.exchange_seconds(ONE)[0])
    ranks = actions(est.layout.schedule, layout.pp, m, layout.vpp)
    timeline = simulate(ranks, forward, backward, transfer)
    assert kernel.pipeline_seconds(ONE)[0] == pytest.approx(timeline.makespan_s, rel=1e-12)

    breakdown, slowest = est.step.breakdown_s, est.step.slowest_stage
    ideal = simulate(ranks, forward, backward, 0.0)
    assert breakdown["bubble"] == pytest.approx(ideal.makespan_s - ideal.busy_s[slowest], rel=1e-9)
    waiting = breakdown["bubble"] + breakdown["pp"]
    assert waiting == pytest.approx(timeline.makespan_s - timeline.busy_s[slowest], rel=1e-9)
    assert timeline.busy_s[slowest] == pytest.approx(timeline.busy_s.max(), rel=1e-12)


@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 8), (4, 64), (8, 8)])
def test_even_stages_have_the_textbook_bubble(pp, m, small, price):
    """(p - 1) / m of the ideal time where all stages are alike: an embedding and a head that cost next to nothing."""
    from msgspec.structs import replace

    model = replace(small["llama"], vocab=128)
    est = price(model, Layout(pp=pp), gpus=pp, global_batch=m, seq_len=16384)
    busy = sum(est.step.breakdown_s[owner] for owner in ("compute", "host", "recompute", "tp", "cp", "ep"))
    assert est.step.breakdown_s["bubble"] / busy == pytest.approx((pp - 1) / m, rel=0.1)


def test_interleaving_divides_the_bubble(small, price):
    from msgspec.structs import replace

    model = replace(small["llama"], vocab=128)
    plain, halved = (price(model, Layout(pp=4, vpp=v), gpus=4, global_batch=16).step.breakdown_s for v in (1, 2))
    assert halved["bubble"] / plain["bubble"] == pytest.approx(1 / 2, rel=0.1)


@pytest.mark.parametrize("layout", [layout for _, layout in CASES[:13]], ids=short)
def test_in_flight_is_the_simulators(layout, small, price, with_layers):
    model = with_layers(small["llama"], 18) if layout.account_for_embedding else small["llama"]
    est = price(model, layout)
    m = est.layout.num_micro_batches
    timeline = simulate(
        actions(est.layout.schedule, layout.pp, m, layout.vpp),
        [1.0] * (layout.pp * layout.vpp),
        [2.0] * (layout.pp * layout.vpp),
    )
    for stage in est.memory.stages:
        assert stage.in_flight * layout.vpp == timeline.in_flight[stage.stage]


def test_no_pipeline_no_bubble(price):
    est = price("llama", Layout(tp=2))
    assert est.step.breakdown_s["pp"] == 0
    assert est.step.breakdown_s["bubble"] == pytest.approx(0, abs=1e-12)
