"""Shrinking: small, of the same structure, and still a layout that obeys every rule; and forked ranks that end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.errors import FivefoldError
from fivefold.layout import Layout, Recompute, Workload
from fivefold.model import Attention, count_params, load_model, model_tensors
from fivefold.train.job import Job
from fivefold.train.smoke import smoke
from fivefold.train.verify.forked import RankFailedError, run_forked
from fivefold.train.verify.prove import prove, shrunk_for_proof
from fivefold.train.verify.shrink import proof_replicas, shrink


def job_of(model: str, gpus: int, batch: int = 512, runtime: str = "megatron", **layout: Any) -> Job:
    spec = load_model(model)
    work = Workload(seq_len=min(spec.max_position, 8192), global_batch=batch)
    return Job(
        model=spec, layout=Layout(**layout), work=work, gpus=gpus, gpus_per_node=8, scale_up_size=8, runtime=runtime
    )


PARTIAL = Recompute(kind="full", layers=2)
JOBS = [
    job_of("llama-3-70b", 64, tp=4, pp=4, cp=2),
    job_of("llama-3-70b", 64, tp=8, pp=4, vpp=5, zero=0),
    job_of("llama-3-8b", 16, tp=2, pp=4, recompute=PARTIAL, micro_batch=4),
    job_of("llama-3-70b", 32, pp=4, first_stage_layers=18, last_stage_layers=20),
    job_of("llama-3-8b", 8, pp=2, account_for_embedding=True, account_for_loss=True, vpp=1, batch=64),
    job_of("qwen2.5-7b", 64, cp=2, dp_replicate=4),
    job_of("gpt2-xl", 8, batch=8),
    job_of("llama-3-8b", 64, tp=16),  # more ranks than KV heads
    job_of("llama-3-8b", 64, runtime="torchtitan", zero=3, tp=2, cp=2),
]


def runnable(job: Job) -> Job:
    if job.model.name.startswith("llama") and job.layout.account_for_embedding:
        return replace(job, model=load_model("llama-3-8b", layers=30))
    return job


def names(job: Job) -> set[str]:
    return {tensor.name.split(".", 2)[-1] for tensor in model_tensors(job.model)}


@pytest.mark.parametrize("job", [runnable(job) for job in JOBS], ids=lambda job: job.model.name)
@pytest.mark.parametrize("dp", [1, 2])
def test_the_structure_stays(job: Job, dp: int) -> None:
    assert not job.broken()
    small, notes = shrink(job, dp)
    assert not small.broken()
    assert notes
    before, after = job.resolved, small.resolved
    kept = ("tp", "cp", "cp_kind", "pp", "vpp", "zero", "sequence_parallel", "schedule", "overlap")
    assert [getattr(before, name) for name in kept] == [getattr(after, name) for name in kept]
    assert after.dp == dp
    assert small.gpus == small.model_ranks * dp
    assert names(job) == names(small)  # biases, norms, gates, tied heads
    assert count_params(small.model).total < count_params(job.model).total / 1000
    old, new = job.model.kinds[0].mixer, small.model.kinds[0].mixer
    assert isinstance(old, Attention)
    assert isinstance(new, Attention)
    assert (old.heads > old.kv_heads) == (new.heads > new.kv_heads)
    assert (old.kv_heads < before.tp) == (new.kv_heads < after.tp)
    assert (uneven(before) > 1) == (uneven(after) > 1)
    assert (before.num_micro_batches > 1) == (after.num_micro_batches > 1)


def uneven(layout: Any) -> int:
    return len({last - first for chunks in layout.stages for first, last in chunks})


def test_the_order_of_uneven_stages_stays() -> None:
    small = shrink(job_of("llama-3-70b", 32, pp=4, first_stage_layers=18, last_stage_layers=20), 1).job
    assert [last - first for [(first, last)] in small.resolved.stages] == [1, 3, 3, 2]  # 18, 21, 21, 20


def test_partial_recomputation_stays_partial() -> None:
    small = shrink(job_of("llama-3-8b", 16, tp=2, pp=4, recompute=PARTIAL), 1).job.resolved
    assert small.recompute.layers == 1
    assert all(last - first == 2 for [(first, last)] in small.stages)
    every = job_of("llama-3-8b", 16, tp=2, pp=4, recompute=Recompute(kind="full", layers=8))
    assert shrink(every, 1).job.resolved.recompute.layers == 2


@settings(deadline=None, max_examples=40)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["p2p", "a2a"]),
    pp=st.sampled_from([1, 2, 4]),
    vpp=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2, 4]),
    zero=st.sampled_from([0, 1]),
)
def test_any_legal_layout_shrinks(tp: int, cp: int, kind: str, pp: int, vpp: int, micro_batch: int, zero: int) -> None:
    degrees = {"tp": tp, "cp": cp, "cp_kind": kind, "pp": pp, "vpp": vpp, "micro_batch": micro_batch, "zero": zero}
    job = job_of("llama-3-8b", 256, batch=1024, **degrees)
    if job.broken():
        return
    small = shrink(job, 2).job
    assert not small.broken()
    assert small.model.layers == max(pp * vpp, 2)
    assert small.model.hidden <= 64 * max(tp, 1) * cp


def test_smoke_takes_the_replicas_that_fit() -> None:
    job = job_of("llama-3-70b", 64, tp=2, pp=2)
    assert smoke(job, 4).job.resolved.dp == 1
    assert smoke(job, 8).job.resolved.dp == 2
    for world in (1, 3, 128):
        with pytest.raises(FivefoldError, match="nproc-per-node 4"):
            smoke(job, world)


def test_replicas_of_a_proof() -> None:
    assert proof_replicas(job_of("llama-3-70b", 64, tp=2, pp=2), 8) == 2
    assert proof_replicas(job_of("llama-3-70b", 64, tp=4, pp=2), 8) == 1
    assert proof_replicas(job_of("llama-3-8b", 1), 8) == 1
    assert proof_replicas(job_of("llama-3-8b", 8, dp_replicate=2), 8) == 4
    with pytest.raises(FivefoldError, match="--max-ranks 32"):
        proof_replicas(job_of("llama-3-70b", 64, tp=8, pp=4), 8)


def test_a_proof_in_fp64_needs_no_sizes_of_fp8() -> None:
    job = job_of("llama-3-8b", 8, tp=8)
    job = replace(job, work=replace(job.work, precision="fp8"))
    assert not job.broken()
    assert shrunk_for_proof(job, 8).job.model.hidden == 128


@pytest.mark.parametrize(
    "job",
    [
        job_of("qwen2.5-7b", 8, dp_replicate=2, cp=2),
        job_of("llama-3-70b", 32, pp=4, first_stage_layers=18, last_stage_layers=20),
    ],
    ids=["hsdp", "uneven"],
)
def test_a_shrunken_layout_is_proven(job: Job) -> None:
    proven = prove(shrunk_for_proof(job, 4), 60)
    assert proven.verdict.passed, proven.verdict.failures()


def test_a_failing_rank_is_told_and_the_others_are_gone() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("the cause")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"Rank 1 failed(.|\n)*the cause"):
        run_forked(2, fail, 60)
    assert time.monotonic() - start < 10


def test_a_late_rank_is_stopped() -> None:
    with pytest.raises(RankFailedError, match=r"Ranks .*1 did not finish within 1 s"):
        run_forked(2, lambda rank: time.sleep(60 * rank) if rank else None, 1)
