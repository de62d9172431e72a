"""Counted traffic against closed forms: 2 psi for DP and ZeRO-1, what ZeRO-2 adds, and pipeline boundaries."""

from __future__ import annotations

from typing import Any

import pytest
from proofs import BATCH, SEQ, VOCAB, layout_of, llama
from ranks import run_ranks

from fivefold.model import count_params
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.mesh import Mesh
from fivefold.train.traffic import Key, Traffic, Volume
from fivefold.train.trainer import Trainer

SPEC = llama(2)
PARAMETERS = count_params(SPEC).total
WIDTH = 8  # bytes of fp64


def step_traffic(ranks: int, **degrees: Any) -> list[dict[Key, Volume]]:
    layout = layout_of(SPEC, ranks, **degrees)

    def run(rank: int) -> dict[Key, Volume]:
        mesh = Mesh(layout)
        trainer = Trainer(SPEC, layout, mesh, Setup(precision="fp64"))
        with Traffic(mesh) as traffic:
            trainer.step(0, Synthetic(VOCAB, SEQ).micro_batches(0, layout, mesh.index("dp")))
        return traffic.volumes

    return run_ranks(ranks, run)


@pytest.mark.parametrize(("zero", "psis"), [(0, 2), (1, 2), (2, 1 + BATCH // 2 // 2)])
def test_data_parallel_volume(zero: int, psis: int) -> None:
    """ZeRO-0 and 1 move 2 psi (n - 1) / n; ZeRO-2 one psi for each of its micro-batches and one for the gather."""
    for volumes in step_traffic(2, zero=zero, micro_batch=2):
        counts = 2 * 8 + 2 * 8  # all-reduces of the number of valid tokens, of loss and norm
        sent = sum(volume.sent_bytes for key, volume in volumes.items() if key.axis == "dp")
        expected = psis * PARAMETERS * WIDTH / 2
        assert abs(sent - expected) <= counts + 4 * WIDTH  # and the padding of the buckets
        reduced = volumes[Key("dp", "all_reduce" if zero == 0 else "reduce_scatter")]
        assert reduced.calls >= 1


def test_pipeline_boundaries() -> None:
    first, second = step_traffic(2, pp=2, micro_batch=2)
    boundary = 2 * SEQ * SPEC.hidden * WIDTH
    for volumes in (first, second):
        sent = volumes[Key("pp", "send")]
        assert (sent.calls, sent.payload_bytes) == (4, 4 * boundary)  # four micro-batches, one way each


def test_ulysses_and_tensor_parallel_are_told_apart() -> None:
    volumes = step_traffic(4, tp=2, cp=2, cp_kind="a2a", micro_batch=4)[0]
    head_bytes = 4 * SEQ // 2 * SPEC.hidden // 2 * WIDTH
    # Queries, keys, values and the output of the core, there and back, for two blocks and two micro-batches.
    exchanged = volumes[Key("cp", "all_to_all")]
    assert exchanged.payload_bytes >= 2 * 2 * 2 * head_bytes * 2
    assert volumes[Key("tp", "all_gather")].calls == volumes[Key("tp", "all_gather")].payload_bytes // (
        4 * SEQ // 2 * SPEC.hidden * WIDTH
    )
