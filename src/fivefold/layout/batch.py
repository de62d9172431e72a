"""Batch arithmetic: global batch = micro-batch · accumulation · dp, batches in tokens, and their ramp-up."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec

from fivefold.errors import FivefoldError
from fivefold.layout.layout import ResolvedLayout
from fivefold.layout.workload import Workload
from fivefold.model.spec import ModelSpec

# Where published large runs lie (Llama 1: 4M tokens per batch; DeepSeek-V3: 60M; pre-training sequences of 2K to 8K).
USUAL_TOKENS_PER_BATCH = (4_000_000, 60_000_000)
USUAL_SEQ_LEN = (2048, 8192)
MAX_RAMP_LEVELS = 32  # enough for a smooth ramp, few enough to read

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_COUNT = re.compile(r"(?P<number>\d[\d_,]{0,20}(?:\.\d{1,12})?)(?:[eE](?P<exponent>\d{1,2}))?\s*(?P<suffix>[KMBGT]?)")


def parse_count(text: str | int | float, option: str = "--tokens") -> int:
    """'469B', '4M', '1.5e9', '3_072' or a number, as an integer above zero. K, M, B (or G), T are powers of ten.

    Raises FivefoldError for anything else.
    """
    match = _COUNT.fullmatch(str(text).strip().upper() if not isinstance(text, float) else f"{text:.0f}")
    value = 0
    if match:
        number = float(match["number"].replace("_", "").replace(",", ""))
        value = round(number * 10 ** int(match["exponent"] or 0) * _SUFFIXES[match["suffix"]])
        if "." not in match["number"]:  # stay exact beyond 2**53
            value = int(match["number"].replace("_", "").replace(",", ""))
            value *= 10 ** int(match["exponent"] or 0) * _SUFFIXES[match["suffix"]]
    if not 0 < value < 10**18:
        raise FivefoldError(
            f"{option} {text} is not a count. Write a number above zero, with K, M, B or T if you "
            f"like: 4M, 469B, 1.5e9.",
            code="bad-count",
            option=option,
            value=text,
            legal="a number above zero, as in 4M or 469B",
        )
    return value


def global_batch_from_tokens(tokens: int | str, seq_len: int, multiple: int = 1) -> int:
    """Sequences per step for `--tokens-per-batch`: the multiple of `multiple` nearest to tokens / seq_len.

    multiple: micro-batch · dp (· pp when interleaved), if known, so that the batch is legal. The batch in tokens is
    then the result · seq_len, near to but not always equal to what was asked.
    """
    wanted = parse_count(tokens, "--tokens-per-batch")
    unit = seq_len * multiple
    return max(1, (wanted + unit // 2) // unit) * multiple


def dp_headroom(global_batch: int, micro_batch: int, dp: int) -> float:
    """How many times dp could still grow before a replica has less than one micro-batch: gbs / (mbs · dp)."""
    return global_batch / (micro_batch * dp)


def unusual(work: Workload, model: ModelSpec | None = None) -> list[str]:
    """What lies outside the usual ranges of pre-training, one sentence each; never an error."""
    notes = []
    low, high = USUAL_TOKENS_PER_BATCH
    tokens = work.tokens_per_batch
    if not low <= tokens <= high:
        side, remark = ("under", "small") if tokens < low else ("over", "large")
        size = f"{tokens / 1e6:.2f}M" if tokens >= 10**5 else f"{tokens:,}"
        notes.append(
            f"{size} tokens per batch is {side} the usual {low // 10**6}M to {high // 10**6}M of large "
            f"pre-training runs: a {remark} batch, so check that it is meant."
        )
    low, high = USUAL_SEQ_LEN
    if not low <= work.seq_len <= high:
        notes.append(f"{work.seq_len} tokens per sequence is outside the usual {low} to {high} of pre-training.")
    if model is not None and work.seq_len > model.max_position:
        notes.append(
            f"{work.seq_len} tokens per sequence is more than the {model.max_position} positions that {model.name} was "
            "published with."
        )
    return notes


class RampUp(msgspec.Struct, frozen=True, kw_only=True):
    """A ramp as asked: sequences per step from `start` to `end` over the first `tokens` tokens."""

    start: int
    end: int
    tokens: int


class RampStep(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the ramp.

    asked_tokens: this level's equal share of the ramp. tokens: what its whole iterations consume; an iteration that
    crosses the end of a share shortens the next level, so the sums never part by more than one batch.
    """

    global_batch: int
    num_micro_batches: int
    iterations: int
    asked_tokens: int
    tokens: int


class RampPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The levels below the full batch, in order; the full batch `end` follows them.

    megatron_rampup: Megatron's --rampup-batch-size (start, increment, samples), which makes the same levels; it needs
    a run counted in --train-samples.
    """

    steps: list[RampStep]
    end: int
    increment: int
    tokens: int
    iterations: int
    megatron_rampup: tuple[int, int, int]
    notes: list[str]


def parse_ramp_up(text: str, option: str = "--ramp-up") -> RampUp:
    """'3072:15360:469B' is 3,072 to 15,360 sequences over the first 469 billion tokens. Raises FivefoldError."""
    parts = text.split(":")
    if len(parts) != 3:
        raise FivefoldError(
            f"{option} {text} is not START:END:TOKENS, as in 3072:15360:469B.",
            code="bad-ramp-up",
            option=option,
            value=text,
            legal="START:END:TOKENS",
        )
    start, end, tokens = (parse_count(part, option) for part in parts)
    if start >= end:
        raise FivefoldError(
            f"{option} {text}: the batch has to grow, and {start} is not under {end}.",
            code="bad-ramp-up",
            option=option,
            value=text,
            legal=f"a start under {end}",
        )
    return RampUp(start=start, end=end, tokens=tokens)


def check_ramp_up(ramp: RampUp, work: Workload, option: str = "--ramp-up") -> None:
    """What a ramp owes its workload, whatever the layout: it ends at the batch, and takes a sequence or more.

    option: the flag that messages name. Raises FivefoldError.
    """
    if ramp.end != work.global_batch:
        raise FivefoldError(
            f"{option} ends at {ramp.end} sequences and --global-batch is {work.global_batch}; they have to agree.",
            code="bad-ramp-up",
            option=option,
            value=ramp.end,
            legal=[work.global_batch],
        )
    if ramp.tokens < work.seq_len:
        raise FivefoldError(
            f"{option} takes {ramp.tokens} tokens, which is less than one sequence of {work.seq_len}. Give its length "
            "in tokens, as in 3072:15360:469B.",
            code="bad-ramp-up",
            option=option,
            value=ramp.tokens,
            legal=f"{work.seq_len} tokens or more",
        )


def plan_ramp_up(
    ramp: RampUp | str,
    work: Workload,
    layout: ResolvedLayout,
    increment: int | None = None,
    option: str = "--ramp-up",
) -> RampPlan:
    """A ramp whose every batch is legal for `layout`: a multiple of micro-batch · dp, and of pp more when interleaved.

    increment: sequences added per level; by default the smallest legal one that makes at most MAX_RAMP_LEVELS equal
    levels. Every level gets the same share of the tokens, as in Megatron (rampup samples over number of increments).
    option: the flag that messages name. Raises FivefoldError with the nearest legal values when start, end or
    increment do not divide.
    """
    ramp = parse_ramp_up(ramp, option) if isinstance(ramp, str) else ramp
    check_ramp_up(ramp, work, option)
    unit = batch_unit(layout)
    for name, value in (("start", ramp.start), ("end", ramp.end)):
        _require_multiple(name, value, unit, layout, option)
    increment = _increment(ramp, unit, increment, option)
    batches = range(ramp.start, ramp.end, increment)
    bounds = [ramp.tokens * level // len(batches) for level in range(len(batches) + 1)]
    steps: list[RampStep] = []
    consumed = 0
    for batch, (low, high) in zip(batches, pairwise(bounds), strict=True):
        batch_tokens = batch * work.seq_len
        iterations = max(0, -(-(high - consumed) // batch_tokens))
        steps.append(
            RampStep(
                global_batch=batch,
                num_micro_batches=batch // (layout.micro_batch * layout.dp),
                iterations=iterations,
                asked_tokens=high - low,
                tokens=iterations * batch_tokens,
            )
        )
        consumed += iterations * batch_tokens
    return RampPlan(
        steps=steps,
        end=ramp.end,
        increment=increment,
        tokens=consumed,
        iterations=sum(step.iterations for step in steps),
        megatron_rampup=(ramp.start, increment, round(ramp.tokens / work.seq_len)),
        notes=_ramp_notes(ramp, steps, work),
    )


def batch_unit(layout: ResolvedLayout) -> int:
    """Sequences by which the global batch can change: micro-batch · dp, times pp when interleaved (m % pp == 0)."""
    unit = layout.micro_batch * max(layout.dp, 1)
    return unit * layout.pp if layout.schedule == "interleaved" else unit


def _require_multiple(name: str, value: int, unit: int, layout: ResolvedLayout, option: str) -> None:
    if value % unit == 0:
        return
    legal = [size for size in (value // unit * unit, value // unit * unit + unit) if size > 0]
    by = f"micro-batch {layout.micro_batch} · dp {layout.dp}"
    if layout.schedule == "interleaved":
        by += f" · pp {layout.pp} (interleaved)"
    raise FivefoldError(
        f"{option}: the {name} of {value} sequences is not a multiple of {by} = {unit}. "
        f"Nearest: {' or '.join(map(str, legal))}.",
        code="bad-ramp-up",
        option=option,
        value=value,
        legal=legal,
    )


def _increment(ramp: RampUp, unit: int, asked: int | None, option: str) -> int:
    growth = (ramp.end - ramp.start) // unit
    legal = [unit * n for n in range(1, growth + 1) if growth % n == 0]
    if asked is None:
        return next(size for size in legal if growth * unit // size <= MAX_RAMP_LEVELS)
    if asked not in legal:
        raise FivefoldError(
            f"{option}: an increment of {asked} sequences does not make equal, legal steps from "
            f"{ramp.start} to {ramp.end}.",
            code="bad-ramp-up",
            option=option,
            value=asked,
            legal=legal,
        )
    return asked


def _ramp_notes(ramp: RampUp, steps: list[RampStep], work: Workload) -> list[str]:
    notes = []
    if any(step.iterations == 0 for step in steps):
        notes.append("Some levels are shorter than one batch and are skipped; use a larger increment.")
    if ramp.tokens % work.seq_len:
        notes.append("The ramp is not a whole number of sequences; Megatron's sample count is rounded.")
    if work.tokens is not None and ramp.tokens >= work.tokens:
        notes.append("The ramp takes the whole token budget, so the full batch is never reached.")
    return notes
