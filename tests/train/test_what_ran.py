"""What a layout asks for is what runs: nothing of the matrix passes because an option was quietly left out."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import proving
import pytest
from matrix import DP, DUAL, F1B, FULL, PP, TP, ZB_H1, ZBV, Row, cross, row
from ranks import run_ranks

from fivefold.layout.layout import SPLIT_BACKWARD
from fivefold.train.build import Setup
from fivefold.train.mesh import Mesh
from fivefold.train.model import Block
from fivefold.train.parallel.sharded import FullySharded
from fivefold.train.parallel.split_backward import Owed
from fivefold.train.trainer import Trainer

INTERLEAVED = {**PP, "schedule": "interleaved"}
OPTIONS = [
    *cross([ZB_H1, ZBV, DUAL], [DP], zero=(1, 2, 3)),
    *cross([ZB_H1, ZBV, DUAL], [{"recompute": FULL}]),
    *cross([F1B, INTERLEAVED], [DP], zero=(3,), recompute=(FULL,)),
    *cross([F1B], [TP], zero=(0,)),
    *cross([{"dp": 4, "dp_replicate": 2}], zero=(1, 3)),
]
ROWS = [row("what ran", **options) for options in OPTIONS]


class Ran(NamedTuple):
    """Of one rank after one step. parameters, gradients, masters: elements in memory per element of its stages.
    split: backwards whose weight gradients ran apart. forwards: of one block per micro-batch."""

    parameters: float
    gradients: float
    masters: float
    split: int
    forwards: float


def step(rank: int, asked: Row) -> Ran:
    layout = asked.resolved
    mesh = Mesh(layout)
    trainer = Trainer(asked.spec, layout, mesh, Setup(precision="fp64"))
    forwards, split = [0], [0]
    blocks = [cast(Block, block) for stage in trainer.stages for block in stage.module.layers.values()]
    for block in blocks:
        block.input_layernorm.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    pay = Owed.pay

    def counting(owed: Owed) -> None:
        split[0] += bool(owed._parts)
        pay(owed)

    Owed.pay = counting  # type: ignore[method-assign]  # in this forked process only
    trainer.step(0, proving.proof_of(asked).data.micro_batches(0, layout, mesh.index("dp")))
    buckets = [bucket for stage in trainer.stages for bucket in stage.data.buckets]
    assert all(isinstance(stage.data, FullySharded) == (layout.zero == 3) for stage in trainer.stages)
    total = sum(p.numel() for stage in trainer.stages for p in stage.module.parameters())
    return Ran(
        parameters=_in_memory(bucket.flat for bucket in buckets) / total,
        gradients=_in_memory(bucket.gradient for bucket in buckets) / total,
        masters=sum(bucket.master.numel() for bucket in buckets) / total,
        split=split[0],
        forwards=forwards[0] / len(blocks) / layout.num_micro_batches,
    )


def _in_memory(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize("asked", ROWS, ids=str)
def test_what_was_asked_is_what_ran(asked: Row) -> None:
    layout = asked.resolved
    splits = layout.schedule in SPLIT_BACKWARD and layout.recompute.kind == "none"
    for ran in run_ranks(asked.ranks, step, asked):
        assert ran.parameters == pytest.approx(0 if layout.zero == 3 else 1, abs=0.02)
        assert ran.gradients == pytest.approx(1 / layout.dp_shard if layout.zero >= 2 else 1, abs=0.02)
        assert ran.masters == pytest.approx(1 / layout.dp_shard, abs=0.02)
        assert (ran.split > 0) == splits
        assert ran.forwards == (2 if layout.recompute.kind == "full" else 1)
