"""What a row leaves out and what follows from the rest of it: degrees, GPUs, batch, sequence. Nothing here looks at
what was measured; each choice is named."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import msgspec

from fivefold.measure.cells import MOST_SEQUENCES
from fivefold.measure.runs import Run
from fivefold.measure.unstated import framework_of, zero_of

# No published pipeline is so long: more is another axis, or GPUs that ran something else.
_MOST_STAGES = 128
# Micro-batches per pipeline stage where neither the batch nor the micro-batch is stated: what guides ask for at least
# (the number of micro-batches should be several times that of the stages, Narayanan et al. 2021, section 2.2).
_MICRO_BATCHES_PER_STAGE = 4
# Context of a model whose sequence is not stated: Llama 3's, Llama 2's, GPT-3's.
_USUAL_SEQ = {"wide": 8192, "gated": 4096, "gpt": 2048}
_LARGE_VOCAB = 100_000
# Micro-batches of a step: "GA=16", "grad_accum 8", "4 accumulation steps".
_ACCUMULATED = re.compile(
    r"\b(?:ga|grad(?:ient)?[_ -]acc(?:um(?:ulation)?)?(?:[_ ]steps)?|micro-?batch count|num[_ ]micro-?batches)"
    r"\W{1,3}(\d{1,5})\b|\b(\d{1,5}) (?:micro-?batches|(?:gradient[ -])?accumulation steps)\b",
    re.IGNORECASE,
)


class _Card(NamedTuple):
    """A published card of several devices, which are what ranks run on.

    name: pattern. devices: how many it may count as. of_node: cards of its usual node. nodes: so many in one node are
    cards, though ranks are counted as often.
    """

    name: re.Pattern[str]
    devices: tuple[int, ...]
    of_node: int | None = None
    nodes: tuple[int, ...] = ()


# A die each, or a core or four of them (Trainium 2 has eight, of which LNC=2 makes four). Frontier has four MI250X in a
# node and Aurora six Max 1550. All from memory.
_CARDS = (
    _Card(re.compile(r"MI250|MAX ?15[05]0|\bPVC\b|PONTE VECCHIO", re.IGNORECASE), (2,), nodes=(4, 6)),
    _Card(re.compile(r"910C", re.IGNORECASE), (2,)),
    _Card(re.compile(r"TRAINIUM ?-?[23]|TRN[23]", re.IGNORECASE), (4, 8), of_node=16),
    _Card(re.compile(r"TRAINIUM|TRN1", re.IGNORECASE), (2,), of_node=16),
)


def completed(run: Run, assumed: set[str]) -> Run:
    """The row with degrees, GPUs, sequence and batch filled in where they follow from the rest or from usage.

    If the data-parallel degree contradicts the GPUs, the GPUs are believed: some sources count expert- or
    context-parallel ranks in that degree, others only the shard groups.
    """
    changes = _degrees(run, assumed)
    run = msgspec.structs.replace(run, **changes)
    if run.seq is None:
        assumed.add("seq")
        run = msgspec.structs.replace(run, seq=_usual_seq(run))
    return _with_batch(run, assumed) if run.gpus is not None else run


def _degrees(run: Run, assumed: set[str]) -> dict[str, int | None]:
    run = _with_missing_axis(run, assumed)
    tp, gpus = run.tp, run.gpus
    rest = (run.cp or 1) * (run.pp or 1)
    if tp is None and gpus is not None:
        assumed.add("tp")
        whole = rest * (run.dp or gpus)
        tp = gpus // whole if run.dp is not None and gpus % whole == 0 else 1
    if gpus is None and tp is not None and run.dp is not None:
        assumed.add("gpus")
        gpus = tp * rest * run.dp
    dp, per_node = run.dp, run.gpus_per_node
    if gpus is not None and tp is not None and dp is not None and gpus % (tp * rest) == 0:
        parts, usual_node = _parts(run, tp * rest * dp / gpus)
        if parts > 1:
            assumed.add("gpus")
            gpus *= parts
            cards = per_node or usual_node
            per_node = None if cards is None else parts * cards
            dp = gpus // (tp * rest)
        elif tp * rest * dp != gpus:
            assumed.add("dp")
            dp = gpus // (tp * rest)
    return {"tp": tp, "cp": run.cp, "pp": run.pp, "gpus": gpus, "dp": dp, "gpus_per_node": per_node}


def _parts(run: Run, ratio: float) -> tuple[int, int | None]:
    """(devices per published card, cards of its usual node).

    A card counts as several devices if the row has that many ranks per card, or if its node has the number of cards
    that a node of two-die cards has. ratio: ranks per published GPU.
    """
    card = next((card for card in _CARDS if card.name.search(run.gpu or "")), None)
    if card is None:
        return 1, None
    if ratio == 1 and run.gpus_per_node in card.nodes:
        return 2, card.of_node
    return (int(ratio) if ratio in card.devices else 1), card.of_node


def _with_missing_axis(run: Run, assumed: set[str]) -> Run:
    """The row with the ranks that its stated degrees leave over as pipeline stages, or else as context-parallel ranks.

    Not where parameters are fully sharded without a pipeline: what is left over there are replicas of the shard
    groups, which sources call dp.
    """
    if run.gpus is None or run.tp is None or run.dp is None or _shards_without_pipeline(run):
        return run
    left, odd = divmod(run.gpus, run.tp * run.dp * (run.cp or 1) * (run.pp or 1))
    missing = next((name for name in ("pp", "cp") if getattr(run, name) is None), None)
    if odd or left < 2 or missing is None or left > _MOST_STAGES:
        return run
    assumed.add(missing)
    return msgspec.structs.replace(run, **{missing: left})


def _shards_without_pipeline(run: Run) -> bool:
    line = framework_of(run)
    return zero_of(run, line)[0] >= 2 and line.shards_without_pipeline


def _usual_seq(run: Run) -> int:
    if (run.vocab or 0) > _LARGE_VOCAB:
        return _USUAL_SEQ["wide"]
    return _USUAL_SEQ["gated" if run.gated_mlp else "gpt"]


def _with_batch(run: Run, assumed: set[str]) -> Run:
    """The row with a batch in sequences that its replicas share evenly. Any other batch is rounded up, since every
    replica waits for the fullest one."""
    seq, pp = run.seq or 1, run.pp or 1
    replicas = max((run.gpus or 1) // ((run.tp or 1) * (run.cp or 1) * pp), 1)
    gbs, accumulated = run.gbs, _accumulated(run)
    if gbs is None and accumulated and run.mbs:
        gbs = replicas * run.mbs * accumulated
    if gbs is None:
        assumed.add("gbs")
        gbs = replicas * (run.mbs or 1) * (1 if pp == 1 else _MICRO_BATCHES_PER_STAGE * pp)
    elif gbs > MOST_SEQUENCES and gbs >= seq:
        assumed.add("gbs")
        gbs = max(round(gbs / seq), 1)
    even = math.ceil(gbs / replicas) * replicas
    if even != gbs:
        assumed.add("gbs")
    mbs = run.mbs
    if mbs is None and accumulated and even % (replicas * accumulated) == 0:
        mbs = even // (replicas * accumulated)
    return msgspec.structs.replace(run, gbs=even, mbs=mbs)


def _accumulated(run: Run) -> int:
    """Micro-batches of a step on a replica where a row's notes say how many, 0 where they do not."""
    found = _ACCUMULATED.search(run.notes or "")
    return int(found[1] or found[2]) if found else 0
