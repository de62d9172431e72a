"""ZeRO-3 and HSDP against one process: alone and with every other axis; what is whole when; controls; precisions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from proofs import BATCH, SEQ, VOCAB, gpt2, layout_of, llama, proof_of, reference_of, reports_of, verdict_of
from ranks import run_ranks

from fivefold.errors import FivefoldError
from fivefold.layout import Layout, Overlap, Recompute, ResolvedLayout, Workload, resolve
from fivefold.model import ModelSpec
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Recipe
from fivefold.train.parallel.sharded import FullySharded, Unit
from fivefold.train.trainer import Trainer
from fivefold.train.verify import Verdict, compare, observe, run_reference
from fivefold.train.verify.controls import Site, Spoil, Spoiled, Sums

FULL = Recompute(kind="full")
NORMS = Recompute(kind="selective", modules=("layernorm", "core_attn"))
NO_OVERLAP = Overlap(grad=False, param=False)
CASES: list[tuple[ModelSpec, int, dict[str, Any]]] = [
    (llama(2), 1, {"micro_batch": 4}),
    (llama(2), 2, {"micro_batch": 4}),
    (llama(2), 2, {"overlap": NO_OVERLAP}),
    (llama(2), 4, {"micro_batch": 2}),
    (llama(2, tied=True), 4, {"micro_batch": 2}),
    (gpt2(2), 2, {"micro_batch": 1}),
    (llama(2), 4, {"dp_replicate": 2}),
    (llama(2), 2, {"dp_replicate": 2}),
    (llama(2), 2, {"recompute": FULL}),
    (gpt2(2), 2, {"recompute": NORMS}),
    (gpt2(2), 4, {"tp": 2, "micro_batch": 2}),
    (llama(2, tied=True), 4, {"tp": 2, "micro_batch": 4}),
    (llama(2), 4, {"cp": 2, "micro_batch": 2}),
    (gpt2(2), 4, {"pp": 2}),
    (llama(2), 4, {"pp": 2, "recompute": FULL, "micro_batch": 2}),
    (llama(4), 4, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
    (llama(2, tied=True), 8, {"pp": 2, "tp": 2, "micro_batch": 2}),
]


@pytest.mark.parametrize(("spec", "ranks", "degrees"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_equal_to_one_process(spec: ModelSpec, ranks: int, degrees: dict[str, Any]) -> None:
    """Uneven masks and active clipping are part of every proof."""
    verdict = verdict_of(spec, ranks, zero=3, **degrees)
    assert verdict.passed, verdict.failures()
    assert len(verdict.parameters) == len(reference_of(spec).gradients)


def test_four_micro_batches_on_four_ranks() -> None:
    """Of a larger global batch than the other proofs'."""
    spec = llama(1)
    layout = resolve(Layout(zero=3), spec, 4, Workload(seq_len=SEQ, global_batch=16))
    assert layout.num_micro_batches == 4
    proof = msgspec.structs.replace(proof_of(spec), global_batch=16)
    verdict = compare(
        spec, layout, run_reference(proof), run_ranks(4, lambda rank: observe(proof, layout, Mesh(layout)))
    )
    assert verdict.passed, verdict.failures()


V_SHAPED = (((0, 1), (3, 4)), ((1, 2), (2, 3)))  # four blocks on two ranks with two chunks each


def sharded_layout(spec: ModelSpec, ranks: int, schedule: str = "1f1b", **degrees: Any) -> ResolvedLayout:
    """With schedules that the layout's rules do not let a plan have, too."""
    layout = layout_of(spec, ranks, zero=3, **degrees)
    stages = V_SHAPED if schedule == "zbv" else layout.stages
    return msgspec.structs.replace(layout, schedule=schedule, stages=stages)


@pytest.mark.parametrize(
    ("spec", "degrees"),
    [(gpt2(4), {"schedule": "zb-h1", "micro_batch": 2}), (llama(4, tied=True), {"schedule": "zbv", "vpp": 2})],
    ids=["zb-h1", "zbv"],
)
def test_schedules_that_split_the_backward(spec: ModelSpec, degrees: dict[str, Any]) -> None:
    """Weight gradients are computed from released parameters: reading one would bring a NaN."""
    layout = sharded_layout(spec, 4, pp=2, **degrees)
    verdict = compare(spec, layout, reference_of(spec), reports_of(spec, layout, 4))
    assert verdict.passed, verdict.failures()


# ----------------------------------------------------------------- what is sharded


def trainer_of(spec: ModelSpec, layout: ResolvedLayout, name: str = "fp64", recipe: Recipe | None = None) -> Trainer:
    return Trainer(spec, layout, Mesh(layout), Setup(precision=name, recipe=recipe or Recipe()))


def sharded(trainer: Trainer) -> list[Unit]:
    stages = [stage.data for stage in trainer.stages]
    return [unit for data in stages if isinstance(data, FullySharded) for unit in data.buckets]


def step(trainer: Trainer, index: int = 0, leave_out: int = 0) -> Any:
    batches = Synthetic(VOCAB, SEQ).micro_batches(index, trainer.layout, trainer.mesh.index("dp"))
    return trainer.step(index, batches[: len(batches) - leave_out])


def in_memory(trainer: Trainer) -> int:
    """Elements of the storages behind the flat buffers of all units."""
    return sum(unit.flat.untyped_storage().nbytes() // unit.flat.itemsize for unit in sharded(trainer))


def live(rank: int, spec: ModelSpec, layout: ResolvedLayout) -> dict[str, Any]:
    """The most parameter elements and whole gradients that live at once in a step, sampled after each gather and each
    gradient's arrival, which is when there are more; what is left after it; and the sizes of the units."""
    trainer = trainer_of(spec, layout)
    found: dict[str, Any] = {"parameters": 0, "gradients": 0, "sizes": [unit.flat.numel() for unit in sharded(trainer)]}
    gather, accumulate = Unit.gather, Unit.accumulate

    def sample() -> None:
        found["parameters"] = max(found["parameters"], in_memory(trainer))
        found["gradients"] = max(found["gradients"], sum(unit._whole is not None for unit in sharded(trainer)))

    def gather_and_look(unit: Unit) -> None:
        gather(unit)
        sample()

    def accumulate_and_look(unit: Unit, parameter: torch.nn.Parameter) -> None:
        accumulate(unit, parameter)
        sample()

    Unit.gather, Unit.accumulate = gather_and_look, accumulate_and_look  # in this forked process only
    try:
        trainer.gradients(Synthetic(VOCAB, SEQ).micro_batches(0, layout, trainer.mesh.index("dp")))
    finally:
        Unit.gather, Unit.accumulate = gather, accumulate
    found["after"] = in_memory(trainer)
    found["master"] = [unit.master.numel() for unit in sharded(trainer)]
    found["kept gradients"] = [unit.gradient.untyped_storage().nbytes() // 8 for unit in sharded(trainer)]
    trainer.wait()
    found["waited"] = in_memory(trainer)
    found["count"] = sum(p.numel() for stage in trainer.stages for p in stage.module.parameters())
    return found


MEMORY: list[tuple[ModelSpec, dict[str, Any]]] = [
    (llama(3), {}),
    (llama(3), {"overlap": NO_OVERLAP}),
    (llama(2), {"recompute": FULL}),
    (llama(2, tied=True), {}),
    (llama(2, tied=True), {"overlap": NO_OVERLAP}),
    (llama(4), {"pp": 2}),
    (llama(4), {"pp": 2, "schedule": "zb-h1"}),
]


@pytest.mark.parametrize(("spec", "degrees"), MEMORY, ids=lambda x: getattr(x, "name", str(x)))
def test_parameters_are_whole_only_in_use(spec: ModelSpec, degrees: dict[str, Any]) -> None:
    """One unit at a time, or with overlap two neighbours, and never another one."""
    layout = sharded_layout(spec, 4, micro_batch=2, **degrees)
    for found in run_ranks(4, live, spec, layout):
        sizes = found["sizes"]
        chain = [*sizes, sizes[0]] if spec.tied_embeddings else sizes  # the head needs the embedding's unit again
        most = max(a + b for a, b in pairwise(chain)) if layout.overlap.param else max(sizes)
        assert found["parameters"] == most < sum(sizes)
        assert found["gradients"] == (2 if layout.overlap.grad else 1)
        assert found["after"] == 0
        assert found["master"] == found["kept gradients"] == [size // layout.dp_shard for size in sizes]
        assert found["waited"] == sum(sizes) >= found["count"]


def test_a_released_parameter_is_nan_until_it_is_waited_for() -> None:
    trainer = trainer_of(llama(1), layout_of(llama(1), 1, zero=3))
    parameters = list(trainer.stages[0].module.parameters())
    for _ in range(2):
        assert all(p.isnan().all() for p in parameters)
        trainer.wait()
        assert not any(p.isnan().any() for p in parameters)
        step(trainer)
    _, norm, _ = trainer.gradients(Synthetic(VOCAB, SEQ).micro_batches(2, trainer.layout, 0))
    trainer.wait()
    trainer.update(2, norm)  # what was whole has old values now
    assert all(p.isnan().all() for p in parameters)
    assert {p.shape for p in parameters} == {p.shape for p in reference_of(llama(1)).gradients.values()}


# ----------------------------------------------------------------- controls


def test_every_sum_has_a_control() -> None:
    """Dropping or doubling the reduce-scatter, or the sum over HSDP's replicas, fails the proof."""
    spec = llama(1)
    layout, proof = layout_of(spec, 4, zero=3, dp_replicate=2, micro_batch=2), proof_of(spec)

    def traced(rank: int) -> list[Site]:
        with Sums() as sums:
            observe(proof, layout, Mesh(layout))
        return list(sums.sites)

    def spoiled(site: Site, how: Spoil) -> Verdict:
        def run(rank: int) -> Any:
            with Spoiled(site, how):
                return observe(proof, layout, Mesh(layout))

        return compare(spec, layout, reference_of(spec), run_ranks(4, run))

    mine = {site for rank in run_ranks(4, traced) for site in rank if site.module == "parallel.data"}
    assert {(site.function, site.collective) for site in mine} == {
        ("Bucket.reduce", "reduce_scatter"),
        ("Bucket.finish", "all_reduce"),
    }
    for site in mine:
        for how in ("drop", "double"):
            assert not spoiled(site, how).passed, f"{how} {site} went unnoticed"


def test_forgetting_to_gather_before_backward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullySharded, "_before_backward", lambda self, place: None)
    # Saved parameters are NaN then; views of them have no memory, and reading those ends the process.
    with pytest.raises(AssertionError):
        verdict = verdict_of(llama(1), 2, zero=3, micro_batch=4)
        assert verdict.passed


def test_a_missing_micro_batch_is_refused() -> None:
    layout = layout_of(llama(1), 1, zero=3)
    with pytest.raises(FivefoldError, match=f"{BATCH - 1} of {BATCH} micro-batches"):
        step(trainer_of(llama(1), layout), leave_out=1)


# ----------------------------------------------------------------- precisions


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_is_zero_2s(name: str) -> None:
    """ZeRO-2 and 3 do the same sums: losses of several steps agree to rounding in the order of sums."""

    def losses(rank: int, zero: int) -> list[float]:
        trainer = trainer_of(llama(2), layout_of(llama(2), 2, zero=zero), name, Recipe(rate=3e-3))
        return [step(trainer, k).loss for k in range(4)]

    assert run_ranks(2, losses, 3)[0] == pytest.approx(run_ranks(2, losses, 2)[0], rel=1e-3)


def test_an_overflow_leaves_the_weights() -> None:
    trainer = trainer_of(llama(1), layout_of(llama(1), 1, zero=3), "fp16")
    before = [unit.master.clone() for unit in sharded(trainer)]
    trainer.scale.value = 2.0**40
    assert step(trainer).skipped
    assert all(torch.equal(a, unit.master) for a, unit in zip(before, sharded(trainer), strict=True))
    assert not any(unit.gradient.any() for unit in sharded(trainer))
    trainer.scale.value = 1.0
    assert not step(trainer).skipped
