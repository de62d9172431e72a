"""A plan made small enough for one machine: the same structure and the same layout, on a few numbers per tensor.

Every size becomes the smallest with which the layout still obeys all rules and still is what it was: grouped queries
stay grouped, uneven stages uneven, partial recomputation partial, TP above the KV heads above them. The search for
each size goes up to the plan's own, which obeys the rules, so it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from fivefold.errors import FivefoldError
from fivefold.layout import Layout
from fivefold.layout.divisors import divisors
from fivefold.layout.mixers import softmax_attention
from fivefold.model import Attention, Block, BlockRun, FeedForward, ModelSpec
from fivefold.schedule.registry import illegal_reason
from fivefold.train.job import Job


class Sizes(NamedTuple):
    """Of a shrunken model. vocab: a number that hardly any degree divides, so that padding is tested too."""

    head_dim: int
    seq_len: int
    vocab: int


TINY = Sizes(head_dim=8, seq_len=16, vocab=67)


class Shrunk(NamedTuple):
    """notes: a sentence for each thing that is not as in the plan."""

    job: Job
    notes: tuple[str, ...]


def shrink(job: Job, dp: int, sizes: Sizes = TINY) -> Shrunk:
    """`job`, which obeys all rules, on a small model and dp replicas."""
    layout = job.resolved
    small = _replicas(job, dp)
    small = _first(
        (small.with_batch(size, layout.num_micro_batches, dp) for size in range(min(layout.micro_batch, 2), 3)), small
    )
    small = _shapes(small, sizes)
    small = _depth(small)
    small = _micro_batches(small, dp)
    if not _legal(small):
        raise FivefoldError(
            f"{job.model.name} cannot be shrunk to {small.gpus} ranks with this layout"
            + "".join(f": {rule.message}" for rule in small.broken()[:1]),
            code="cannot-shrink",
            option="MODEL",
            value=job.model.name,
        )
    return Shrunk(small, tuple(_notes(job, small)))


def proof_replicas(job: Job, most: int) -> int:
    """How many replicas a proof on at most `most` ranks takes: two show every sum over data, and four are needed for
    shards inside of replicas. Raises FivefoldError when one replica alone is more."""
    if job.model_ranks > most:
        layout = job.layout
        raise FivefoldError(
            f"One replica of this layout is {job.model_ranks} ranks (tp {layout.tp}, cp {layout.cp}, pp {layout.pp}), "
            f"and the proof runs at most {most} here. Allow more with --max-ranks {job.model_ranks}, or prove smaller "
            "degrees of the same kind, for example with --tp 2.",
            code="too-many-ranks",
            option="--max-ranks",
            value=most,
            legal=f"{job.model_ranks} or more",
        )
    hybrid = job.layout.dp_replicate > 1 and job.layout.zero > 0
    wanted = min(job.resolved.dp, 4 if hybrid and job.layout.cp == 1 else 2)
    return max(dp for dp in (1, 2, 4) if dp <= max(wanted, 1) and (dp == 1 or dp * job.model_ranks <= most))


def _legal(job: Job) -> bool:
    if job.broken():
        return False
    layout = job.resolved
    if layout.pp > 1 and illegal_reason(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp):
        return False
    return all(first < last for chunks in layout.stages for first, last in chunks)


def _first(candidates: Iterable[Job], otherwise: Job) -> Job:
    return next((candidate for candidate in candidates if _legal(candidate)), otherwise)


def _replicas(job: Job, dp: int) -> Job:
    """On dp replicas, with two sharding groups where there were several."""
    ranks = dp * job.layout.cp
    copies = job.layout.dp_replicate
    if job.layout.zero == 0:
        copies = ranks if copies > 1 else 1
    elif copies > 1 and dp != job.resolved.dp:
        copies = 2 if ranks % 2 == 0 else 1
    small = job.with_batch(job.layout.micro_batch, job.resolved.num_micro_batches, dp)
    return replace(small, layout=replace(small.layout, dp_replicate=copies))


# ---------------------------------------------------------------- sizes of tensors


def _shapes(job: Job, sizes: Sizes) -> Job:
    """Fewer and narrower heads, a narrow feed-forward, a short sequence, a small vocabulary."""
    small = job
    for kind in job.model.kinds:
        small = _fewer_heads(small, kind)
    small = _first(
        (
            replace(
                small,
                work=replace(small.work, seq_len=seq),
                model=_narrow(small.model, job.model, small.layout.tp, seq, sizes),
            )
            for seq in range(sizes.seq_len, job.work.seq_len, 8)
        ),
        replace(small, model=_narrow(small.model, job.model, small.layout.tp, small.work.seq_len, sizes)),
    )
    return small


def _fewer_heads(job: Job, kind: Block) -> Job:
    """The fewest KV heads and queries of each that the layout divides."""
    mixer = kind.mixer
    if not isinstance(mixer, Attention):
        return job
    tp, group = job.layout.tp, mixer.heads // mixer.kv_heads
    pairs = (
        (kv, queries)
        for kv in _above_one(mixer.kv_heads)
        for queries in _above_one(group)
        if (kv < tp) == (mixer.kv_heads < tp)
    )

    def with_heads(kv: int, queries: int) -> Job:
        block = replace(kind, mixer=replace(mixer, heads=kv * queries, kv_heads=kv))
        return replace(job, model=_map_blocks(job.model, lambda b: block if b == kind else b))

    return _first((with_heads(*pair) for pair in pairs), job)


def _above_one(number: int) -> list[int]:
    """Divisors in ascending order, without 1 unless it is the only one."""
    return divisors(number)[1:] or [1]


def _narrow(model: ModelSpec, original: ModelSpec, tp: int, seq: int, sizes: Sizes) -> ModelSpec:
    """Widths in about the proportions that they had: hidden to heads, feed-forward to hidden."""
    new, old = model.kinds[0].mixer, original.kinds[0].mixer
    if not isinstance(new, Attention) or not isinstance(old, Attention):
        return model
    head_dim = min(new.head_dim, sizes.head_dim)
    width = new.heads * head_dim
    ratio = original.hidden / (old.heads * old.head_dim)
    hidden = width if ratio == 1 else _round_up(width * ratio, 8 * tp)

    def block(each: Block) -> Block:
        mixer, feed = each.mixer, each.feed
        if isinstance(mixer, Attention):
            window = min(mixer.window, seq // 2) if mixer.window else None
            mixer = replace(mixer, head_dim=head_dim, window=window)
        if isinstance(feed, FeedForward):
            feed = replace(feed, ffn=min(_round_up(feed.ffn / original.hidden * hidden, 4 * tp), feed.ffn))
        return replace(each, mixer=mixer, feed=feed)

    return replace(
        _map_blocks(model, block),
        hidden=hidden,
        vocab=min(model.vocab, sizes.vocab),
        max_position=seq,
        learned_positions=seq if model.learned_positions else 0,
    )


def _round_up(value: float, unit: int) -> int:
    return max(-int(-value // unit), 1) * unit


def _map_blocks(model: ModelSpec, change: Callable[[Block], Block]) -> ModelSpec:
    return replace(model, runs=tuple(BlockRun(run.count, change(run.block)) for run in model.runs))


# ---------------------------------------------------------------- depth and batch


def _depth(job: Job) -> Job:
    """The fewest blocks: one per chunk, two where only some are recomputed, uneven where the stages were."""
    layout = job.layout
    per_chunk = 1 if layout.recompute.layers is None else 2
    if layout.first_stage_layers or layout.last_stage_layers:
        return _first([_uneven_ends(job, per_chunk)], job)
    chunks = layout.pp * layout.vpp
    least = max(chunks * per_chunk, 2)
    uneven = _is_uneven(job)
    candidates = (_with_depth(job, layout, layers) for layers in range(least, job.model.layers + 1))
    return _first((each for each in candidates if _is_uneven(each) == uneven), job)


def _is_uneven(job: Job) -> bool:
    return len({last - first for chunks in job.resolved.stages for first, last in chunks}) > 1


def _uneven_ends(job: Job, per_chunk: int) -> Job:
    """First, middle and last stage in the order of size that they had."""
    layout = job.layout
    ends = [count for count in (layout.first_stage_layers, layout.last_stage_layers) if count]
    middle_ranks = layout.pp - len(ends)
    middle = (job.model.layers - sum(ends)) // middle_ranks if middle_ranks else 0
    order = sorted({*ends, *([middle] if middle_ranks else [])})
    small = {count: (per_chunk + place) * layout.vpp for place, count in enumerate(order)}
    shaped = replace(
        layout,
        first_stage_layers=small.get(layout.first_stage_layers or 0),
        last_stage_layers=small.get(layout.last_stage_layers or 0),
    )
    layers = sum(small[count] for count in ends) + middle_ranks * small.get(middle, 0)
    return _with_depth(job, shaped, layers)


def _with_depth(job: Job, layout: Layout, layers: int) -> Job:
    recompute = layout.recompute
    if recompute.layers is not None:
        whole = max(sum(last - first for first, last in chunks) for chunks in job.resolved.stages)
        every = recompute.layers >= whole
        fullest = layout.vpp * -(-layers // (layout.pp * layout.vpp))
        recompute = replace(recompute, layers=fullest if every else layout.vpp)
    return replace(job, layout=replace(layout, recompute=recompute), model=_with_layers(job.model, layers))


def _with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """The first blocks; a kind that would be lost takes the place of the last ones."""
    blocks = [run.block for run in model.runs for _ in range(run.count)][:layers]
    lost = [kind for kind in model.kinds if kind not in blocks][:layers]
    blocks[len(blocks) - len(lost) :] = lost
    return replace(model, runs=tuple(BlockRun(1, block) for block in blocks))


def _micro_batches(job: Job, dp: int) -> Job:
    """Enough micro-batches to fill the pipeline and go on, two of accumulation; one where there was one."""
    layout = job.resolved
    start = min(layout.num_micro_batches, 2 * layout.pp if layout.pp > 1 else 2)
    counts = range(start, layout.num_micro_batches + 1)
    return _first((job.with_batch(layout.micro_batch, count, dp) for count in counts), job)


def _notes(job: Job, small: Job) -> Iterable[str]:
    before, after = job.resolved, small.resolved
    model, tiny = job.model, small.model
    yield (
        f"Model shrunk: {tiny.layers} of {model.layers} blocks, hidden {tiny.hidden} of {model.hidden:,}, heads "
        f"{_heads(tiny)} of {_heads(model)}, vocabulary {tiny.vocab} of {model.vocab:,}; sequences of "
        f"{small.work.seq_len} of {job.work.seq_len:,} tokens."
    )
    if before.dp != after.dp:
        yield f"Data parallelism reduced from {before.dp:,} replicas to {after.dp}."
    if job.layout.dp_replicate != small.layout.dp_replicate:
        yield f"HSDP replicas reduced from {before.dp_replicate} to {after.dp_replicate}."
    batch = (before.micro_batch, before.num_micro_batches)
    if batch != (after.micro_batch, after.num_micro_batches):
        yield (
            f"Batch reduced to {after.num_micro_batches} micro-batches of {after.micro_batch}, from {batch[1]:,} of "
            f"{batch[0]}."
        )


def _heads(model: ModelSpec) -> str:
    mixer = softmax_attention(model.kinds[0].mixer)
    if mixer is None:
        return "none"
    return f"{mixer.heads}/{mixer.kv_heads}" if isinstance(mixer, Attention) else str(mixer.heads)
