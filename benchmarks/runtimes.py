"""One layout in seven frameworks: the memory of each, entry by entry, and what explains the differences.

    python benchmarks/runtimes.py            print the tables of docs/runtimes.md
    python benchmarks/runtimes.py --write    put them there

Memory is the peak that the caching allocator hands out on the fullest rank. An entry is a category of the estimate or,
for activations, one tensor kept for backward; what the peak adds beside those is an entry of its own, so that the
entries of a column sum to its peak and those of two columns to their difference, to the byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from fivefold.cluster import load_cluster
from fivefold.estimate.estimate import Estimate, estimate
from fivefold.estimate.kernel import Kernel, Problem
from fivefold.layout import Layout, Recompute, Workload
from fivefold.layout.columns import Columns
from fivefold.layout.features import PHRASES
from fivefold.layout.rules import RULES
from fivefold.layout.rules.models import LACKS
from fivefold.model import load_model
from fivefold.runtime import OTHER_VERSIONS, PROFILES, Profile, load_runtime

DOCUMENT = Path(__file__).parent.parent / "docs" / "runtimes.md"
RUNTIMES = ("megatron", "nanotron", "torchtitan", "deepspeed", "fsdp", "accelerate", "fivefold")
WORKING = "activations: the block in backward, or what was freed by then"
CHECKPOINTS = "activations: inputs of checkpointed blocks"
# Kept for backward by fivefold's loss, and counted with the logits.
_IN_LOGITS = ("log-probabilities",)
GB = 1e9
_SHOWN = 5e6  # bytes from which on an entry of a difference is named


@dataclass(frozen=True, slots=True)
class Question:
    """One model and layout. The ZeRO stage is each framework's own: the distributed optimizer where it has stage 1,
    else `sharded`."""

    model: str
    gpus: int
    work: Workload
    layout: Layout
    sharded: int = 3


QUESTIONS = (
    Question("gpt2-xl", 8, Workload(seq_len=1024, global_batch=64), Layout(micro_batch=4)),
    Question("llama-3-8b", 8, Workload(seq_len=4096, global_batch=32), Layout(tp=2)),
    Question("llama-3-70b", 64, Workload(seq_len=4096, global_batch=64), Layout(tp=8, pp=2), sharded=2),
    Question("mixtral-8x7b", 32, Workload(seq_len=4096, global_batch=64), Layout(ep=8)),
    Question(
        "deepseek-v3", 1024, Workload(seq_len=4096, global_batch=1024), Layout(ep=64, recompute=Recompute(kind="full"))
    ),
)

# Of each entry, by the start of its name: the fields of the profile that it follows, and how.
WHY: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("weights", ("weight_bytes", "sharded_weight_bytes"), "16-bit weights are whole beside ZeRO-1, absent where only "
     "fp32 shards rest; the vocabulary is padded or not (vocab_multiple)"),
    ("gradients", ("sharding",), "whole with ZeRO-1, shards with FSDP, whole again where a pipeline keeps them until "
     "its last backward (pipeline_keeps_whole_gradients)"),
    ("master", ("vocab_multiple",), "fp32 shards"),
    ("optimizer", ("vocab_multiple",), "two fp32 moments, as the master weights"),
    ("gathered", ("sharding", "prefetch_blocks"), "16-bit copies of the blocks in use, of all with ZeRO-2"),
    ("buffers", ("cached_wgrad_buffers", "gather_buffers", "sharding"), "placeholders of weight gradients (Transformer "
     "Engine), what gathers fill (nanotron), one block's gradient while it is scattered (FSDP), tensors of the "
     "pipeline, token ids (fivefold)"),
    ("reserve", ("workspace_bytes",), "workspaces of libraries"),
    ("logits", ("loss_bytes_per_logit", "sharded_loss_bytes_per_logit"), "what the loss keeps at its worst moment; "
     "none where a block's backward is the peak"),
    (WORKING, ("head_wgrad_placeholder", "micro_batch_grad_bytes"), "gradients alive at the moment that peaks, less "
     "what was freed by then"),
    (CHECKPOINTS, (), "the same in all"),
    ("activations: mlp.activated gate", ("fused_glu",), "silu and product are two kernels, or one"),
    ("activations: experts.activated gate", ("fused_glu",), "likewise"),
    ("activations: shared_experts.activated gate", ("fused_glu",), "likewise"),
    ("activations: random state", ("attention_state_bytes",), "a kernel's seed and offset"),
    ("activations: input_norm.f", ("norms_kept_fp32",), "an RMSNorm of single operations keeps more"),
    ("activations: input_norm.i", ("norms_kept_fp32",), "likewise"),
    ("activations: input_norm.n", ("norms_kept_fp32",), "likewise"),
    ("activations: feed_norm.f", ("norms_kept_fp32",), "likewise"),
    ("activations: feed_norm.i", ("norms_kept_fp32",), "likewise"),
    ("activations: feed_norm.n", ("norms_kept_fp32",), "likewise"),
    ("activations: input_norm.s", ("layernorm_statistic_bytes",), "mean and deviation of a norm"),
    ("activations: feed_norm.s", ("layernorm_statistic_bytes",), "likewise"),
    ("activations: final_norm.s", ("layernorm_statistic_bytes",), "likewise"),
    ("activations: repeated keys and values", ("repeats_keys_and_values",), "copied for every query head, or not"),
    ("activations:", ("gathered_inputs_kept",), "what sequence parallelism gathered is kept, or gathered again; "
     "fivefold keeps tokens and targets too"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One framework's answer: entries in bytes, or the sentence of each rule that refuses."""

    layout: Layout
    estimate: Estimate
    entries: dict[str, int]
    refused: tuple[str, ...]


def cell(question: Question, runtime: str) -> Cell:
    """Price one layout in one framework."""
    profile = load_runtime(runtime)
    zero = 1 if 1 in profile.zero_stages else question.sharded
    layout = msgspec.structs.replace(question.layout, zero=zero)
    model, cluster = load_model(question.model), load_cluster("h100-sxm", question.gpus, 8)
    found = estimate(model, cluster, question.work, layout, runtime)
    if found.memory is None:
        return Cell(layout, found, {}, tuple(violation.message for violation in found.violations))
    kernel = Kernel(
        Problem(model, cluster, question.work, profile),
        Columns.from_layouts([layout], question.gpus, question.work),
        every_rank=True,
    )
    return Cell(layout, found, _entries(kernel, found), ())


def _entries(kernel: Kernel, found: Estimate) -> dict[str, int]:
    """Bytes at the peak by entry; they sum to the peak."""
    memory = found.memory
    assert memory is not None
    breakdown = dict(memory.stages[memory.peak_stage].breakdown)
    whole = breakdown.pop("activations")
    saved = _saved(kernel, memory.peak_stage, found.layout.recompute.kind == "full")
    entries = {name: size for name, size in breakdown.items() if size} | saved
    rest = whole - sum(saved.values())
    return entries | ({WORKING: rest} if rest else {})


def _saved(kernel: Kernel, rank: int, checkpointed: bool) -> dict[str, int]:
    """Bytes of each tensor that is kept for backward on a rank, all micro-batches in flight together."""
    table = kernel.table
    mine = np.flatnonzero((table.rank[0] == rank) & table.exists[0])
    total = sum(np.floor(part[0]) for part in kernel.rank_memory(np.arange(1)).values())
    entry = int(mine[np.asarray(total)[mine].argmax()])
    sums: dict[str, float] = {}
    for index, ledger in enumerate(kernel.ledgers):
        plain, again = float(table.held_plain[0, entry, index]), float(table.held_again[0, entry, index])
        for row in ledger.saved:
            if row.name in _IN_LOGITS:
                continue
            name = f"activations: {row.name}"
            sums[name] = sums.get(name, 0.0) + _number(row.bytes) * (plain + (0 if checkpointed else again))
        if checkpointed and again:
            sums[CHECKPOINTS] = sums.get(CHECKPOINTS, 0.0) + _number(ledger.input_bytes) * again
    return {name: int(size) for name, size in sums.items() if size >= 1}


def _number(column: object) -> float:
    return float(np.asarray(column).reshape(-1)[0])


# ---------------------------------------------------------------- the page


def tables() -> Iterator[str]:
    """The page's computed part."""
    for question in QUESTIONS:
        cells = {runtime: cell(question, runtime) for runtime in RUNTIMES}
        yield from _table(question, cells)
    yield from _profiles()
    yield from _models()
    yield from _versions()


def _table(question: Question, cells: dict[str, Cell]) -> Iterator[str]:
    priced = {name: each for name, each in cells.items() if each.entries}
    yield f"## {question.model}, {question.gpus} H100, {_words(question)}"
    yield ""
    yield f"| GB on the fullest rank | {' | '.join(priced)} | follows |"
    yield f"| --- |{' ---: |' * len(priced)} --- |"
    yield f"| ZeRO stage | {' | '.join(str(each.layout.zero) for each in priced.values())} | |"
    for name in _names(priced):
        sizes = [each.entries.get(name, 0) for each in priced.values()]
        follows = _why(name)[0] if len(set(sizes)) > 1 else ()
        yield f"| {name} | {' | '.join(_gb(size) for size in sizes)} | {', '.join(follows)} |"
    peaks = [sum(each.entries.values()) for each in priced.values()]
    yield f"| **peak** | {' | '.join(f'**{_gb(peak)}**' for peak in peaks)} | |"
    seconds = [each.estimate.step.seconds.value if each.estimate.step else 0.0 for each in priced.values()]
    yield f"| step, s | {' | '.join(f'{each:.2f}' for each in seconds)} | |"
    yield ""
    yield from _differences(priced)
    for name, each in cells.items():
        if each.refused:
            yield f"{name} refuses: {' '.join(each.refused)}"
            yield ""


def _differences(priced: dict[str, Cell]) -> Iterator[str]:
    """Each framework's difference to the first one, by the entries that make it, largest first."""
    first, *others = priced
    for name in others:
        deltas = difference(priced[first], priced[name])
        large = sorted((key for key in deltas if abs(deltas[key]) >= _SHOWN), key=lambda key: -abs(deltas[key]))
        parts = [f"{key} {deltas[key] / GB:+.2f}" for key in large]
        small = {key: size for key, size in deltas.items() if abs(size) < _SHOWN}
        if small:
            parts.append(f"{len(small)} entries below 5 MB, together {sum(small.values()) / GB:+.4f}")
        whole = sum(deltas.values())
        yield f"- {name} less {first}: {whole / GB:+.2f} GB ({whole:+,} bytes) = {', '.join(parts) or 'nothing'}."
    yield ""


def difference(base: Cell, other: Cell) -> dict[str, int]:
    """Bytes that `other` has beyond `base`, by entry; they sum to the difference of the peaks."""
    names = _names({"base": base, "other": other})
    deltas = {name: other.entries.get(name, 0) - base.entries.get(name, 0) for name in names}
    return {name: delta for name, delta in deltas.items() if delta}


def _names(priced: dict[str, Cell]) -> list[str]:
    """Every entry of some columns, in the order in which they first appear."""
    return list(dict.fromkeys(name for each in priced.values() for name in each.entries))


def _why(entry: str) -> tuple[tuple[str, ...], str]:
    return next((fields, words) for start, fields, words in WHY if entry.startswith(start))


def _gb(size: float) -> str:
    return f"{size / GB:.2f}" if size else "–"


def _words(question: Question) -> str:
    layout, work = question.layout, question.work
    axes = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "ep") if getattr(layout, name) > 1]
    axes += [f"micro-batch {layout.micro_batch}", f"sequences of {work.seq_len:,}", f"batch {work.global_batch}"]
    axes += ["full recomputation"] if layout.recompute.kind == "full" else []
    return ", ".join(axes)


# What the profiles say, one row a field.
SHOWN = (
    "sharding", "weight_bytes", "sharded_weight_bytes", "micro_batch_grad_bytes", "zero_stages", "schedules",
    "vocab_multiple", "norms_fused_into_linears", "norms_kept_fp32", "unfused_norms", "fused_glu",
    "cached_wgrad_buffers", "loss_bytes_per_logit", "gathered_inputs_kept", "gather_buffers",
    "pipeline_keeps_whole_gradients", "wgrad_bytes", "grad_buckets", "prefetch_blocks", "checkpoint_stops_early",
    "selective_by_operation", "tp_beside_dgrad_hidden", "tp_overlap_hidden", "ep_overlap_hidden", "fragmentation",
    "launch_host_s",
)  # fmt: skip


def _profiles() -> Iterator[str]:
    yield "## What the profiles say"
    yield ""
    profiles = sorted((*PROFILES, *OTHER_VERSIONS), key=lambda profile: (profile.name, profile.oldest))
    yield f"| | {' | '.join(_title(profile) for profile in profiles)} |"
    yield f"| --- |{' --- |' * len(profiles)}"
    yield f"| bytes per parameter, alone | {' | '.join(_states(profile) for profile in profiles)} |"
    for field in SHOWN:
        yield f"| {field} | {' | '.join(_plain(getattr(profile, field)) for profile in profiles)} |"
    yield ""
    yield "What an entry follows:"
    yield ""
    for start, fields, words in WHY:
        if words != "likewise":
            name = "other activations" if start == "activations:" else start
            yield f"- {name}: {words} ({', '.join(fields) or 'no field'})."
    yield ""


def _models() -> Iterator[str]:
    yield "## Models that a framework's own code lacks"
    yield ""
    yield "Only what is certain; the others train models of the user's or of transformers, or compose layers freely."
    yield ""
    for name, lacking in LACKS.items():
        yield f"- {name}: {', '.join(PHRASES[feature] for feature in sorted(lacking))}."
    yield "- nanotron: routed experts. fivefold: what `fivefold.layout.rules.fivefold` says."
    yield ""


def _versions() -> Iterator[str]:
    yield "## Rules that some versions have"
    yield ""
    yield "| rule | runtime | since | before | source |"
    yield "| --- | --- | --- | --- | --- |"
    for rule in RULES:
        if rule.since or rule.before:
            since, before = (".".join(map(str, bound)) if bound else "" for bound in (rule.since, rule.before))
            yield f"| {rule.id} | {', '.join(rule.runtimes)} | {since} | {before} | {rule.source} |"
    yield ""


def _title(profile: Profile) -> str:
    return f"{profile.name} ({profile.versions})"


def _states(profile: Profile) -> str:
    """Weights, fp32 gradients, master and moments of one parameter on one rank that shards with nobody."""
    beside = profile.micro_batch_grad_bytes + profile.sharded_weight_bytes
    return str(profile.weight_bytes + beside + 4 + 4 + 8)


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(each) for each in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value}"


def main() -> None:
    """Print the tables, or put them into the page."""
    from pages import print_or_put  # beside this script, which a test loads from elsewhere

    print_or_put(DOCUMENT, "\n".join(tables()), sys.argv[1:])


if __name__ == "__main__":
    main()
