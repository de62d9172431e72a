"""ZeRO-3 and HSDP: what is whole when; controls; precisions. That it equals one process: test_matrix."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from proofs import BATCH, SEQ, VOCAB, layout_of, llama, reference_of, verdict_of
from ranks import run_ranks

from fivefold.errors import FivefoldError
from fivefold.layout import Overlap, Recompute, ResolvedLayout
from fivefold.model import ModelSpec
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Recipe
from fivefold.train.parallel.sharded import FullySharded, Unit
from fivefold.train.trainer import Trainer

FULL = Recompute(kind="full")
NO_OVERLAP = Overlap(grad=False, param=False)
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
    layout = layout_of(spec, 4, zero=3, micro_batch=2, **degrees)
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
