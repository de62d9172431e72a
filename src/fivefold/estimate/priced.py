"""Keys priced: the ledgers of a problem's pieces for a set of keys and what they cost.

One key alone is remembered, because estimates of neighbouring layouts (another dp, ZeRO stage, pipeline or
recomputation) ask for the same few again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from fivefold.estimate.adapters import add_adapters
from fivefold.estimate.items import ItemWriter
from fivefold.estimate.ledger import Ledger
from fivefold.estimate.price import Cost, Pricer
from fivefold.estimate.problem import Problem
from fivefold.estimate.shard import Shard
from fivefold.estimate.trainer_blocks import TrainerWriter


@dataclass(slots=True, frozen=True)
class PricedKeys:
    """Ledgers and costs of the pieces: block kinds, embedding, head, MTP. head_weight: [K] elements of the projection.

    The head's cost includes the output projection unless it is tied to the embedding. Shared: not to be written to.
    """

    ledgers: tuple[Ledger, ...]
    costs: tuple[Cost, ...]
    pricer: Pricer
    head_weight: np.ndarray


@dataclass(slots=True, frozen=True)
class _ByContent:
    """Something compared by its encoded content."""

    content: bytes
    value: Any = field(compare=False)


def priced_keys(problem: Problem, shard: Shard) -> PricedKeys:
    """The ledgers and costs of `problem` for the keys of `shard`."""
    if len(shard) > 1:
        return _priced(problem, shard)
    question = msgspec.msgpack.encode((problem.model, problem.cluster, problem.work, problem.runtime))
    key = np.array([shard.tp, shard.sp, shard.cp, shard.ulysses, shard.ep, shard.etp, shard.micro_batch]).tobytes()
    overlap = np.array([shard.overlap_tp, shard.overlap_ep]).tobytes()
    return _remembered(_ByContent(question, problem), _ByContent(key + overlap, shard))


@lru_cache(maxsize=1024)
def _remembered(problem: _ByContent, shard: _ByContent) -> PricedKeys:
    return _priced(problem.value, shard.value)


def _priced(problem: Problem, shard: Shard) -> PricedKeys:
    model = problem.model
    write = TrainerWriter if problem.runtime.sharding == "buckets" else ItemWriter
    writer = write(model, problem.work, problem.runtime, shard)
    mtp = writer.mtp() if model.mtp else writer.nothing("mtp")
    ledgers = (*(writer.block(kind) for kind in model.kinds), writer.embedding(), writer.head(), mtp)
    if problem.work.trained == "adapters":
        for ledger, kind in zip(ledgers, model.kinds, strict=False):
            add_adapters(ledger, kind, shard, problem.work, problem.runtime)
    pricer = Pricer(problem.cluster, problem.runtime, problem.work, shard)
    costs = tuple(pricer.price(ledger) for ledger in ledgers)
    head_weight = writer.head_weight()
    if not model.tied_embeddings:
        head = costs[len(model.kinds) + 1]
        head.dense[:] += head_weight
        head.factored[:] += head_weight / model.hidden + model.hidden
    return PricedKeys(ledgers, costs, pricer, head_weight)
