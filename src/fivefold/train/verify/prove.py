"""The proof of a user's own layout, shrunken, on forked ranks of this machine."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from msgspec.structs import replace

from fivefold.train.data import Synthetic
from fivefold.train.job import Job
from fivefold.train.mesh import Mesh
from fivefold.train.verify.compare import TOLERANCES, Verdict, compare
from fivefold.train.verify.forked import run_forked
from fivefold.train.verify.observe import RankReport, observe
from fivefold.train.verify.reference import Proof, run_reference
from fivefold.train.verify.shrink import Shrunk, proof_replicas, shrink

PRECISION = "fp64"


class Proven(NamedTuple):
    """shrunk: what was run. seconds_s: of the reference and all ranks together."""

    shrunk: Shrunk
    verdict: Verdict
    seconds_s: float


def shrunk_for_proof(job: Job, max_ranks: int) -> Shrunk:
    """The job as it is proven on this machine; FivefoldError where max_ranks do not hold one replica.

    What is computed in fp64 need not obey the rules of fp8's matrix sizes.
    """
    job = replace(job, work=replace(job.work, precision="bf16"))
    return shrink(job, proof_replicas(job, max_ranks))


def prove(shrunk: Shrunk, timeout_s: float, seed: int = 0) -> Proven:
    """Train in one process and on forked ranks, in fp64, and compare every parameter.

    Data have different numbers of valid tokens in every sequence. Sets this process's torch to one thread. Raises
    RankFailedError when a rank fails or time runs out.
    """
    torch.set_num_threads(1)  # before the first computation, see run_forked
    start = time.monotonic()
    job = shrunk.job
    layout = job.resolved
    data = Synthetic(job.model.vocab, job.work.seq_len, seed=seed, uneven=True)
    proof = Proof(spec=job.model, data=data, global_batch=job.work.global_batch, precision=PRECISION, seed=seed)
    reference = run_reference(proof)

    def one_rank(rank: int) -> RankReport:
        return observe(proof, layout, Mesh(layout))

    reports = run_forked(job.gpus, one_rank, timeout_s)
    verdict = compare(job.model, layout, reference, reports, TOLERANCES[PRECISION])
    return Proven(shrunk, verdict, time.monotonic() - start)
