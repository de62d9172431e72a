"""DP and ZeRO-1/2: what each shards; overlap; precisions. That they equal one process: test_matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proofs import BATCH, SEQ, VOCAB, layout_of, llama
from ranks import run_ranks
from torch import nn

from fivefold.errors import FivefoldError
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Recipe
from fivefold.train.parallel.data import DataParallel
from fivefold.train.precision import precision
from fivefold.train.trainer import Trainer

SPEC = llama(2)


def sizes(rank: int, layout: Any) -> tuple[int, int, int, int]:
    """Elements of parameters, of gradients kept after a step, of master weights, of moments."""
    trainer = Trainer(SPEC, layout, Mesh(layout), Setup(precision="bf16", recipe=Recipe()))
    trainer.step(0, Synthetic(VOCAB, SEQ).micro_batches(0, layout, trainer.mesh.index("dp")))
    trainer.wait()
    buckets = trainer.stages[0].data.buckets
    kept = sum(b.gradient.untyped_storage().nbytes() // b.gradient.itemsize for b in buckets)
    state = trainer.optimizer.state_dict()["state"].values()
    moments = sum(entry["exp_avg"].numel() + entry["exp_avg_sq"].numel() for entry in state)
    return sum(b.flat.numel() for b in buckets), kept, sum(b.master.numel() for b in buckets), moments


@pytest.mark.parametrize(("zero", "gradient_parts", "state_parts"), [(0, 1, 1), (1, 1, 4), (2, 4, 4)])
def test_what_is_sharded(zero: int, gradient_parts: int, state_parts: int) -> None:
    """Rajbhandari et al. 2020, table 1: what a rank of four holds of gradients and optimizer states."""
    found = run_ranks(4, sizes, layout_of(SPEC, 4, zero=zero))
    total = found[0][0]
    assert all(parameters == total for parameters, *_ in found)
    assert all(gradients == total // gradient_parts for _, gradients, *_ in found)
    assert all(master == total // state_parts for *_, master, _ in found)
    padding = 4
    assert abs(sum(moments for *_, moments in found) - 2 * total * 4 // state_parts) <= 8 * padding


def losses(rank: int, layout: Any, name: str, steps: int = 4) -> list[float]:
    mesh = Mesh(layout)
    trainer = Trainer(SPEC, layout, mesh, Setup(precision=name, recipe=Recipe(rate=3e-3)))
    source = Synthetic(VOCAB, SEQ)
    return [trainer.step(k, source.micro_batches(k, layout, mesh.index("dp"))).loss for k in range(steps)]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_follows_fp32(name: str) -> None:
    exact = losses(0, layout_of(SPEC, 1), "fp32")
    for zero in (0, 2):
        half = run_ranks(2, losses, layout_of(SPEC, 2, zero=zero), name)[0]
        assert half == pytest.approx(exact, rel=1e-2)


def test_small_gradients_are_accumulated_in_fp32() -> None:
    """1 + 64 * 2^-9 is 1 in bf16, where every addition rounds away."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    data = DataParallel(layer, Mesh(layout_of(SPEC, 1)), precision("bf16"), zero=1, rounds=65)
    for value in [1.0] + [2.0**-9] * 64:
        (layer.weight * value).sum().backward()
    data.finish()
    assert data.pieces[0].gradient.item() == 1 + 64 * 2.0**-9
    assert data.pieces[0].gradient.dtype == torch.float32


def test_master_weights_take_steps_that_bf16_cannot_hold() -> None:
    layout = layout_of(SPEC, 1)
    trainer = Trainer(SPEC, layout, Mesh(layout), Setup(precision="bf16", recipe=Recipe(rate=1e-7, decay=0.0)))
    matrices = [piece for piece in trainer.pieces if piece.parameter.dim() == 2]
    masters = [piece.master.clone() for piece in matrices]
    weights = [piece.parameter.clone() for piece in matrices]
    trainer.step(0, Synthetic(VOCAB, SEQ).micro_batches(0, layout, 0))
    moved = torch.cat([old != piece.master for old, piece in zip(masters, matrices, strict=True)])
    assert moved.float().mean() > 0.9
    rounded = torch.cat([(old != p.parameter).flatten() for old, p in zip(weights, matrices, strict=True)])
    assert rounded.float().mean() < 0.1


def test_a_missing_micro_batch_is_refused() -> None:
    layout = layout_of(SPEC, 1)
    trainer = Trainer(SPEC, layout, Mesh(layout), Setup(precision="fp64"))
    batches = Synthetic(VOCAB, SEQ).micro_batches(0, layout, 0)
    assert len(batches) == BATCH
    with pytest.raises(FivefoldError, match="7 of 8 micro-batches"):
        trainer.step(0, batches[:-1])


def test_zero_3_is_not_these_buckets() -> None:
    with pytest.raises(FivefoldError, match="ZeRO-3"):
        DataParallel(nn.Linear(1, 1), Mesh(layout_of(SPEC, 1)), precision("fp32"), zero=3, rounds=1)


def test_reductions_start_before_backward_ends() -> None:
    """Overlap: when the embedding's gradient arrives, last of all, the buckets of the blocks are on their way."""

    def order(rank: int) -> tuple[int, int]:
        layout = layout_of(SPEC, 2, zero=1, micro_batch=4)
        trainer = Trainer(SPEC, layout, Mesh(layout), Setup(precision="fp64", bucket_bytes=2**12))
        stage = trainer.stages[0]
        started: list[int] = []
        assert stage.module.embed_tokens is not None
        stage.module.embed_tokens.weight.register_post_accumulate_grad_hook(
            lambda _: started.append(sum(bucket.reducing for bucket in stage.data.buckets))
        )
        trainer.step(0, Synthetic(VOCAB, SEQ).micro_batches(0, layout, rank))
        return started[0], len(stage.data.buckets)

    started, buckets = run_ranks(2, order)[0]
    assert buckets > 4
    assert started >= buckets - 1


def test_a_module_waits_for_its_own_parameters_only() -> None:
    """The gather's overlap: when a module's forward begins, its buckets are there and others may be on their way."""

    def pending(rank: int) -> list[tuple[bool, int]]:
        layout = layout_of(SPEC, 2, zero=1, micro_batch=4)
        trainer = Trainer(SPEC, layout, Mesh(layout), Setup(precision="fp64", bucket_bytes=2**12))
        data = trainer.stages[0].data
        found: list[tuple[bool, int]] = []

        def look(module: nn.Module, _inputs: object) -> None:
            mine = {id(parameter) for parameter in module.parameters()}
            own = [b for b in data.buckets if any(id(parameter) in mine for _, parameter in b.parameters)]
            found.append((any(b.gathering for b in own), sum(b.gathering for b in data.buckets)))

        for block in trainer.stages[0].module.layers.values():
            block.register_forward_pre_hook(look)
        source = Synthetic(VOCAB, SEQ)
        trainer.step(0, source.micro_batches(0, layout, rank))
        found.clear()
        trainer.step(1, source.micro_batches(1, layout, rank))
        return found

    found = run_ranks(2, pending)[0]
    assert not any(own for own, _ in found)
    assert found[0][1] > 0
    assert found[-1][1] < found[0][1]
