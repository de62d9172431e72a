"""What is written for Megatron-LM, read back by the reader of launch scripts, is the plan that was written."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace
from plans import Plan, plans

from fivefold.interop.export import Export, canonical, job_of
from fivefold.interop.launch.torchrun import torchrun
from fivefold.interop.megatron.read import Asked, read_source

# What Megatron-LM refuses about options that no layout holds; every other plan has to be written.
REFUSED = {"fp16-experts"}


def read_back(plan: Plan):
    """The reading of the torchrun script of a plan."""
    (text,) = torchrun(job_of(Export(**vars_of(plan)))).values()
    return read_source(text, "job.sh", None, Asked(gpu=plan.cluster.gpu.name))


def vars_of(plan: Plan) -> dict:
    return {"model": plan.model, "cluster": plan.cluster, "work": plan.work, "layout": plan.layout}


@settings(max_examples=170, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(most=5))
def test_reading_gives_the_plan_that_was_written(drawn: list[Plan]) -> None:
    for plan in drawn:
        reading = read_back(plan)
        assert reading.gpus == plan.cluster.gpus
        assert reading.gpus_per_node == min(plan.cluster.gpus, plan.cluster.gpus_per_node)
        assert replace(reading.work, tokens=None) == plan.work
        ours = canonical(plan.layout, plan.model, plan.cluster.gpus, plan.work)
        assert canonical(reading.layout, reading.model, reading.gpus, reading.work) == ours
        assert [setting.option for setting in reading.unknown] == []
        same_model(plan, reading.model)


def same_model(plan: Plan, read) -> None:
    """Every size, block by block."""
    ours = plan.model
    for name in ("hidden", "vocab", "layers", "mtp", "tied_embeddings", "learned_positions", "final_norm", "rotary"):
        if name == "rotary" and ours.learned_positions:
            continue
        assert getattr(read, name) == getattr(ours, name), name
    blocks = [[run.block for run in model.runs for _ in range(run.count)] for model in (ours, read)]
    for mine, theirs in zip(*blocks, strict=True):
        assert theirs.mixer == mine.mixer
        assert (theirs.norm, theirs.norm_bias) == (mine.norm, mine.norm_bias)
        activation = mine.feed.activation.removesuffix("_tanh")
        assert theirs.feed == replace(mine.feed, activation=activation)
