"""The planner's ledger of fivefold's trainer against the trainer: emulated, and on forked ranks for its traffic.

Emulated ranks are compared in FLOPs and collectives exactly, in what a block saves and in peaks within 1%
(benchmarks/agreement.py, which also has the cases). What an emulated rank sends is what real ones send by
test_emulate.py; here real ranks are compared with the ledger once more, without the emulation between them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from ranks import run_ranks

from fivefold.cluster import load_cluster
from fivefold.estimate.kernel import Problem
from fivefold.estimate.trainer_facts import rank_facts
from fivefold.layout import resolve
from fivefold.runtime import load_runtime
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.mesh import Mesh
from fivefold.train.traffic import Traffic
from fivefold.train.trainer import Trainer

_FILE = Path(__file__).parents[2] / "benchmarks" / "agreement.py"


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("agreement", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["agreement"] = module
    spec.loader.exec_module(module)
    return module


agreement = _benchmark()
named = {case.name: case for case in agreement.CASES}


@pytest.mark.parametrize("name", [case.name for case in agreement.CORE_CASES])
def test_the_ledger_is_the_emulated_rank(name: str) -> None:
    for row in agreement.compare(named[name]):
        assert row.agrees, agreement.differences(row)


def _unless_known(case: Any) -> Any:
    return pytest.param(case.name, marks=pytest.mark.xfail(strict=True, reason=case.why)) if case.why else case.name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [_unless_known(case) for case in agreement.MORE_CASES])
def test_the_ledger_is_the_emulated_rank_in_every_case(name: str) -> None:
    for row in agreement.compare(named[name]):
        assert row.agrees, agreement.differences(row)


def test_a_mix_of_chunks_with_the_head_counts_beside_one_of_more_blocks() -> None:
    """First and last chunk a block short: the last rank holds most blocks when it holds no logits."""
    model = agreement.llama(6, hidden=64, heads=4, kv=2, ffn=128, vocab=8192)
    degrees = {"pp": 2, "vpp": 2, "account_for_embedding": True, "account_for_loss": True}
    for row in agreement.compare(agreement.case("uneven", model, 2, seq=128, batch=4, **degrees)):
        assert row.agrees, agreement.differences(row)


def test_a_wider_model_may_need_less_where_its_buckets_are_cut_smaller() -> None:
    """ZeRO-2 behind a pipeline, everything recomputed: whole gradients of two buckets weigh more than activations. At
    hidden 1,024 the tensor that fills one makes 8.4M elements of it, at 1,088 6.7M of the 6.6M that fill it."""
    peaks = []
    for hidden in (1024, 1088):
        model = replace(agreement.gpt2(16), hidden=hidden, vocab=4096)
        degrees = {"tp": 2, "pp": 4, "zero": 2, "recompute": agreement.FULL}
        (row,) = agreement.compare(agreement.case("cut", model, 32, seq=256, batch=16, ranks=(0,), **degrees))
        assert row.agrees, agreement.differences(row)
        peaks.append((row.trainer.peak_bytes, row.ledger.peak_bytes))
    assert peaks[1][0] < 0.99 * peaks[0][0]
    assert peaks[1][1] < 0.99 * peaks[0][1]


def test_names_are_unique() -> None:
    assert len(named) == len(agreement.CASES) >= 40


# Small enough to run for real. The last one has every axis that fits in four ranks, with interleaved chunks.
REAL = {
    "tp2 zero 1": (4, {"tp": 2}),
    "tp2 without sp": (2, {"tp": 2, "sequence_parallel": False}),
    "ring, zero 2": (2, {"cp": 2, "zero": 2}),
    "ulysses, zero 0": (2, {"cp": 2, "cp_kind": "a2a", "zero": 0}),
    "zero 3 in replicas": (4, {"zero": 3, "dp_replicate": 2}),
    "zb-h1, zero 3": (4, {"pp": 2, "zero": 3, "schedule": "zb-h1"}),
    "zbv": (2, {"pp": 2, "vpp": 2, "schedule": "zbv"}),
    "tp2 pp2 interleaved, full recompute": (4, {"tp": 2, "pp": 2, "vpp": 2, "recompute": agreement.FULL}),
}


def _real_traffic(case: Any, rank: int) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, collective) to (how many, payload bytes of all) of one step of a rank of a real job."""
    layout = resolve(case.layout, case.model, case.gpus, case.work, agreement.RUNTIME)
    mesh = Mesh(layout, rank)
    trainer = Trainer(case.model, layout, mesh, Setup(precision="bf16"))
    batches = Synthetic(case.model.vocab, case.work.seq_len).micro_batches(0, layout, mesh.index("dp"))
    with Traffic(mesh) as traffic:
        trainer.step(0, batches)
    return {tuple(key): (each.calls, each.payload_bytes) for key, each in traffic.volumes.items()}


@pytest.mark.parametrize("name", REAL)
def test_the_ledger_is_what_real_ranks_send(name: str) -> None:
    gpus, degrees = REAL[name]
    model = agreement.llama(4, hidden=64, heads=4, kv=2, ffn=128, vocab=96)
    case = agreement.case(name, model, gpus, seq=32, batch=8, **degrees)
    problem = Problem(model, load_cluster("h100-sxm", gpus=gpus), case.work, load_runtime(agreement.RUNTIME))
    found = run_ranks(gpus, lambda rank: _real_traffic(case, rank))
    for rank, facts in enumerate(rank_facts(problem, case.layout, range(gpus))):
        calls: Counter[Any] = Counter()
        payload: Counter[Any] = Counter()
        for (axis, collective, _, size), count in facts.sent.items():
            calls[axis, collective] += count
            payload[axis, collective] += count * size
        assert {key: (calls[key], payload[key]) for key in calls} == found[rank], f"rank {rank}"


def test_a_wrong_ledger_is_seen() -> None:
    """One recomputed block more than the trainer has: FLOPs, collectives and what is saved differ."""
    case = named["full recompute, tp2"]
    (row, *_) = agreement.compare(case, [0])
    none = replace(case.layout, recompute=agreement.Recompute())
    problem = Problem(case.model, load_cluster("h100-sxm", gpus=2), case.work, load_runtime(agreement.RUNTIME))
    (facts,) = rank_facts(problem, none, [0])
    wrong = agreement.Row(case, 0, facts, row.trainer)
    assert row.agrees
    assert not (wrong.same_flops or wrong.same_collectives or wrong.agrees)
    assert wrong.saved_error > 1
    assert len(agreement.differences(wrong)) >= 3
