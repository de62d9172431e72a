"""The planner's ledger beside fivefold's trainer, emulated rank by rank: writes docs/agreement.md.

python benchmarks/agreement.py              every case; minutes
python benchmarks/agreement.py --only TEXT  the cases whose name has TEXT, printed and not written
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold import __version__
from fivefold.cluster import load_cluster
from fivefold.estimate.kernel import Problem
from fivefold.estimate.trainer_facts import Facts, rank_facts
from fivefold.layout import Layout, Overlap, Recompute, Workload, resolve
from fivefold.layout.grids import world_size
from fivefold.model.spec import Attention, Block, BlockRun, FeedForward, ModelSpec
from fivefold.runtime import FIVEFOLD, load_runtime

PAGE = Path(__file__).resolve().parents[1] / "docs" / "agreement.md"
RUNTIME = "fivefold@cpu"
TOLERANCE = 0.01  # of saved bytes and peaks
_GPU = "h100-sxm"  # sizes of memory and traffic do not depend on it


# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True, slots=True)
class Case:
    """`gpus` ranks of a layout. ranks: the ones to compare; none: the representative ones. why: of a known
    difference."""

    name: str
    model: ModelSpec
    layout: Layout
    work: Workload
    gpus: int
    ranks: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank compared. peak_error, saved_error: ledger over emulation, minus 1; of kinds of blocks the worst."""

    case: Case
    rank: int
    ledger: Facts
    trainer: Facts

    @property
    def same_flops(self) -> bool:
        return self.ledger.flops == self.trainer.flops

    @property
    def same_collectives(self) -> bool:
        return self.ledger.sent == self.trainer.sent

    @property
    def peak_error(self) -> float:
        return self.ledger.peak_bytes / self.trainer.peak_bytes - 1

    @property
    def saved_error(self) -> float:
        kinds = [(self.ledger.saved_bytes[kind], kept) for kind, kept in self.trainer.saved_bytes.items() if kept]
        return max((ours / theirs - 1 for ours, theirs in kinds), key=abs, default=0.0)

    @property
    def agrees(self) -> bool:
        near = abs(self.peak_error) <= TOLERANCE and abs(self.saved_error) <= TOLERANCE
        return self.same_flops and self.same_collectives and near


def representative_ranks(case: Case) -> list[int]:
    """The case's own, or one rank of every pipeline stage and the last of all; ranks of a stage differ at most in what
    they own."""
    if case.ranks:
        return list(case.ranks)
    layout = resolve(case.layout, case.model, case.gpus, case.work, RUNTIME)
    step = layout.tp * layout.cp * layout.dp
    return sorted({*range(0, world_size(layout), step), world_size(layout) - 1})


def compare(case: Case, ranks: Iterable[int] | None = None) -> Iterator[Row]:
    """The rows of a case, by default for its representative ranks."""
    ranks = representative_ranks(case) if ranks is None else list(ranks)
    problem = Problem(case.model, load_cluster(_GPU, gpus=case.gpus), case.work, load_runtime(RUNTIME))
    for rank, facts in zip(ranks, rank_facts(problem, case.layout, ranks), strict=True):
        yield Row(case, rank, facts, emulated(case, rank))


def emulated(case: Case, rank: int) -> Facts:
    """What the trainer does on a rank of a case, by emulation."""
    from fivefold.train.emulate import emulate
    from fivefold.train.job import Job

    job = Job(
        model=case.model, layout=case.layout, work=case.work, gpus=case.gpus, gpus_per_node=8, scale_up_size=8,
        runtime=RUNTIME,
    )  # fmt: skip
    seen = emulate(job, rank)
    sent: Counter[Any] = Counter()
    for each in seen.collectives:
        sent[each.axis, each.collective, each.ranks, each.payload_bytes] += each.count
    saved: dict[int, float] = {}
    for unit in seen.saved:
        if unit.kind is not None:
            saved.setdefault(unit.kind, float(unit.bytes))
    return Facts(
        flops=(seen.flops.forward, seen.flops.backward, seen.flops.recompute),
        sent=dict(sent),
        saved_bytes=saved,
        peak_bytes=float(seen.memory.peak_bytes),
        parts={name: float(part) for name, part in seen.memory.breakdown.items() if part},
    )


def differences(row: Row) -> list[str]:
    """What differs, a line each, and why where it is known."""
    lines = [row.case.why] if row.case.why and not row.agrees else []
    if not row.same_flops:
        lines.append(f"FLOPs forward, backward, recomputed: ledger {row.ledger.flops}, trainer {row.trainer.flops}")
    for key in sorted({*row.ledger.sent, *row.trainer.sent}, key=str):
        ours, theirs = row.ledger.sent.get(key, 0), row.trainer.sent.get(key, 0)
        if ours != theirs:
            axis, collective, ranks, payload = key
            lines.append(
                f"{collective} of {payload:,} bytes over {ranks} ranks of {axis}: ledger {ours}, trainer {theirs}"
            )
    if abs(row.saved_error) > TOLERANCE:
        lines.append(f"saved by a block: ledger {row.ledger.saved_bytes}, trainer {row.trainer.saved_bytes}")
    if abs(row.peak_error) > TOLERANCE:
        lines.append(f"peak {row.peak_error:+.2%}: ledger {_gb(row.ledger.parts)}; trainer {_gb(row.trainer.parts)}")
    return lines


def _gb(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {size / 1e9:.3f}" for name, size in parts.items() if size >= 1e6) + " GB"


# ---------------------------------------------------------------- cases


def llama(layers: int = 4, *, hidden: int = 2048, heads: int = 16, kv: int = 4, ffn: int = 5632, vocab: int = 32000,
          tied: bool = False, **attention: Any) -> ModelSpec:  # fmt: skip
    """Rotary, grouped, gated, RMSNorm: Llama's and, with qkv_bias or qk_norm, Qwen2's and Qwen3's blocks."""
    mixer = Attention(heads=heads, kv_heads=kv, head_dim=hidden // heads, **attention)
    block = Block(mixer=mixer, feed=FeedForward(ffn=ffn))
    return ModelSpec(
        name="llama-like", family="llama", hidden=hidden, vocab=vocab, max_position=131072, tied_embeddings=tied,
        runs=(BlockRun(layers, block),),
    )  # fmt: skip


def gpt2(layers: int = 4) -> ModelSpec:
    """Learned positions, layer norm, biases, plain feed-forward, tied."""
    block = Block(
        mixer=Attention(heads=16, kv_heads=16, head_dim=64, qkv_bias=True, out_bias=True, rope=False),
        feed=FeedForward(ffn=4096, gated=False, bias=True, activation="gelu"), norm="layernorm", norm_bias=True,
    )  # fmt: skip
    return ModelSpec(
        name="gpt2-like", family="gpt2", hidden=1024, vocab=50257, max_position=4096, learned_positions=4096,
        tied_embeddings=True, final_norm="layernorm", final_norm_bias=True, runs=(BlockRun(layers, block),),
    )  # fmt: skip


QWEN2: dict[str, Any] = {"qkv_bias": True}
QWEN3: dict[str, Any] = {"qk_norm": True}
FULL, CORE = Recompute(kind="full"), Recompute(kind="selective")
LLAMA_8B: dict[str, Any] = {"hidden": 4096, "heads": 32, "kv": 8, "ffn": 14336, "vocab": 128256}
LLAMA_70B: dict[str, Any] = {"hidden": 8192, "heads": 64, "kv": 8, "ffn": 28672, "vocab": 128256}


SHORT = llama(8, vocab=1024)


def parts(*modules: Any) -> Recompute:
    """Selective recomputation of these."""
    return Recompute(kind="selective", modules=modules)


def case(name: str, model: ModelSpec, gpus: int = 1, *, seq: int = 2048, batch: int | None = None,
         ranks: tuple[int, ...] = (), **given: Any) -> Case:  # fmt: skip
    """batch: sequences of a step, by default two micro-batches, and two per pipeline rank."""
    precision = given.pop("precision", "bf16")
    optimizer = given.pop("optimizer", "adamw")
    layout = Layout(**given)
    replicas = gpus // (layout.tp * layout.cp * layout.pp)
    batch = layout.micro_batch * replicas * 2 * layout.pp if batch is None else batch
    work = Workload(seq_len=seq, global_batch=batch, precision=precision, optimizer=optimizer)
    return Case(name, model, layout, work, gpus, ranks, KNOWN.get(name, ""))


# Differences whose reason is known, by the name of the case; none today.
KNOWN: dict[str, str] = {}

# The ones that every test run compares; each axis, sharding and kind of recomputation at least once.
CORE_CASES: tuple[Case, ...] = (
    case("one rank", llama()),
    case("one rank, fp32", llama(), precision="fp32"),
    case("gpt2", gpt2(), micro_batch=4),
    case("tp2 with sp, micro-batch 2", llama(), 2, tp=2, micro_batch=2),
    case("tp2 without sp, tied", llama(tied=True), 2, tp=2, sequence_parallel=False),
    case("zero 0", llama(), 2, zero=0),
    case("zero 1", llama(), 8),
    case("zero 2", llama(), 4, zero=2),
    case("zero 3", llama(), 8, zero=3),
    case("ring of 2", llama(), 2, cp=2),
    case("ulysses of 2", llama(), 2, cp=2, cp_kind="a2a"),
    case("full recompute, tp2", llama(), 2, tp=2, recompute=FULL),
    case("pp2 1f1b, tied", gpt2(), 2, pp=2),
    case("pp2 zb-h1", llama(), 2, pp=2, schedule="zb-h1"),
)
MORE_CASES: tuple[Case, ...] = (
    case("qwen2 tp2", llama(**QWEN2), 2, tp=2),
    case("qwen3 tp4", llama(**QWEN3), 4, tp=4),
    case("qwen3 tp2 without sp", llama(**QWEN3), 2, tp=2, sequence_parallel=False),
    case("gpt2 tp2 with sp", gpt2(), 2, tp=2, micro_batch=2),
    case("gpt2 tp4 without sp", gpt2(), 4, tp=4, sequence_parallel=False),
    case("tp8, kv heads replicated", llama(), 8, tp=8),
    case("tp8 dp2, kv heads replicated, zero 1", llama(), 16, tp=8),
    case("tp2 overlapped", llama(), 2, tp=2, overlap=Overlap(tp=True)),
    case("tp2 fp32", llama(), 2, tp=2, precision="fp32"),
    case("vocabulary with padding, tp2 fp32", llama(vocab=32001), 2, tp=2, precision="fp32", ranks=(1,)),
    case("ring of 4 in fp32", llama(), 4, cp=4, precision="fp32"),
    case("ring of 8, long", llama(), 8, cp=8, seq=16384),
    case("ulysses of 8, kv heads repeated", llama(), 8, cp=8, cp_kind="a2a", seq=8192),
    case("tp2 ring of 2 dp2", llama(), 8, tp=2, cp=2),
    case("tp2 ulysses of 2 zero 3", llama(), 8, tp=2, cp=2, cp_kind="a2a", zero=3),
    case("zero 1 in replicas", llama(), 8, dp_replicate=2),
    case("zero 2 in replicas", llama(), 8, zero=2, dp_replicate=4),
    case("zero 3 in replicas", llama(), 8, zero=3, dp_replicate=2),
    case("zero 3 tied", llama(tied=True), 4, zero=3),
    case("zero 3 fp32", llama(), 4, zero=3, precision="fp32"),
    case("zero 2 tied, tp2", llama(tied=True), 8, zero=2, tp=2),
    case("sgd", llama(), 2, optimizer="sgd"),
    case("core recompute", llama(), 2, recompute=CORE),
    case("core recompute, ring", llama(), 2, cp=2, recompute=CORE),
    case("core recompute, ulysses", llama(), 2, cp=2, cp_kind="a2a", recompute=CORE),
    case("feed-forward recompute, tp2", llama(), 2, tp=2, recompute=parts("mlp")),
    case("norms recompute", llama(), 2, recompute=parts("layernorm")),
    case("norms and feed-forward recompute, tp2", llama(), 2, tp=2, recompute=parts("layernorm", "mlp")),
    case("full recompute of 1 block, pp2", llama(8), 2, pp=2, recompute=Recompute(kind="full", layers=1)),
    case("full recompute, zero 3", llama(8), 8, zero=3, recompute=FULL),
    case("pp4 afab", llama(8), 4, pp=4, schedule="afab"),
    case("pp4 1f1b", llama(8), 4, pp=4),
    case("pp2 uneven", llama(8), 2, pp=2, first_stage_layers=5, last_stage_layers=3),
    case("pp4, head counted", llama(7), 4, pp=4, account_for_loss=True),
    case("pp2 interleaved", llama(8), 2, pp=2, vpp=2),
    case("pp4 interleaved of 2, tied", gpt2(8), 4, pp=4, vpp=2),
    case("pp4 zb-h1", llama(8), 4, pp=4, schedule="zb-h1"),
    case("pp2 zb-h1 tp2", llama(8), 4, pp=2, tp=2, schedule="zb-h1"),
    case("pp2 zbv", llama(8), 2, pp=2, vpp=2, schedule="zbv"),
    case("pp2 zbv, tied", gpt2(8), 2, pp=2, vpp=2, schedule="zbv"),
    case("pp2 dualpipev", llama(8), 2, pp=2, vpp=2, schedule="dualpipev"),
    case("pp2 zbv with full recompute", llama(8), 2, pp=2, vpp=2, schedule="zbv", recompute=FULL),
    case("pp2 zero 2", llama(8), 4, pp=2, zero=2),
    case("pp2 zero 3", llama(8), 4, pp=2, zero=3),
    case("pp2 zb-h1 zero 3", llama(8), 4, pp=2, zero=3, schedule="zb-h1"),
    case("tp2 pp2 dp2 zero 1", llama(8), 8, tp=2, pp=2),
    case("tp2 cp2 pp2", llama(8), 8, tp=2, cp=2, pp=2),
    # With a small vocabulary and long sequences, where blocks and not the loss make the peak.
    case("blocks at the peak", SHORT, 1, seq=8192),
    case("blocks at the peak, fp32", SHORT, 1, seq=8192, precision="fp32"),
    case("blocks at the peak, tp4", SHORT, 4, seq=8192, tp=4),
    case("blocks at the peak, tp4, micro-batch 2", SHORT, 4, seq=8192, tp=4, micro_batch=2),
    case("blocks at the peak, tp4 without sp", SHORT, 4, seq=8192, tp=4, sequence_parallel=False),
    case("blocks at the peak, zero 2", SHORT, 8, seq=8192, zero=2),
    case("blocks at the peak, zero 3", SHORT, 8, seq=8192, zero=3),
    case("blocks at the peak, ring of 4", SHORT, 4, seq=16384, cp=4),
    case("blocks at the peak, ulysses of 4", SHORT, 4, seq=16384, cp=4, cp_kind="a2a"),
    case("blocks at the peak, full recompute", SHORT, 8, seq=8192, recompute=FULL),
    case("blocks at the peak, feed-forward recompute", SHORT, 2, seq=8192, recompute=parts("mlp")),
    case("blocks at the peak, norms recompute", SHORT, 2, seq=8192, recompute=parts("layernorm")),
    case("blocks at the peak, pp4", SHORT, 4, seq=8192, pp=4),
    case("blocks at the peak, pp4 zb-h1", SHORT, 4, seq=8192, pp=4, schedule="zb-h1"),
    # Of published sizes, which no test machine could hold: emulated only.
    case("llama-3-8b zero 3, 64 ranks", llama(32, **LLAMA_8B), 64, seq=8192, batch=64, zero=3, ranks=(0, 63)),
    case("llama-3-8b tp4 dp4", llama(32, **LLAMA_8B), 16, seq=8192, batch=8, tp=4, ranks=(0,)),
    case("llama-3-70b tp8 pp8 dp2", llama(80, **LLAMA_70B), 128, seq=8192, batch=16, tp=8, pp=8, ranks=(0, 64, 112)),
    case(
        "llama-3-70b tp8 zero 3",
        llama(80, **LLAMA_70B),
        64,
        seq=8192,
        batch=8,
        tp=8,
        zero=3,
        recompute=FULL,
        ranks=(0,),
    ),
)
CASES = (*CORE_CASES, *MORE_CASES)


# ---------------------------------------------------------------- the page


def layout_text(each: Case) -> str:
    layout = each.layout
    words = [f"{name}{getattr(layout, name)}" for name in ("tp", "cp", "pp", "vpp") if getattr(layout, name) > 1]
    words.append(f"zero{layout.zero}")
    return " ".join(words)


def table(rows: list[Row]) -> str:
    head = ("case", "model", "ranks", "layout", "rank", "FLOPs", "collectives", "saved by a block", "peak", "its error")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        each = row.case
        sent = f"{len(row.trainer.sent)} equal" if row.same_collectives else "**differ**"
        lines.append(
            f"| {each.name} | {each.model.name} | {each.gpus} | {layout_text(each)} | {row.rank} | "
            f"{'equal' if row.same_flops else '**differ**'} | {sent} | {_error(row.saved_error)} | "
            f"{row.trainer.peak_bytes / 1e9:.3f} GB | {_error(row.peak_error)} |"
        )
    return "\n".join(lines)


def _error(value: float) -> str:
    text = f"{value:+.2%}" if abs(value) >= 5e-5 else "equal"
    return f"**{text}**" if abs(value) > TOLERANCE else text


def page(rows: list[Row]) -> str:
    bad = [row for row in rows if not row.agrees]
    cases = {row.case.name for row in rows}
    within = sum(row.agrees for row in rows)
    worst = max((abs(row.peak_error) for row in rows if row.agrees), default=0.0)
    reasons = "\n".join(
        f"- {row.case.name}, rank {row.rank}:\n" + "\n".join(f"  - {line}" for line in differences(row)) for row in bad
    )
    devices = "\n".join(
        f"| {each.name} | {each.cpu} | {each.here} | {each.source} |" for each in FIVEFOLD.device_tensors
    )
    return f"""# The ledger and the trainer

Written by `python benchmarks/agreement.py` with fivefold {__version__}. Every row is one rank of a layout: what the
planner says about it as the runtime `{RUNTIME}`, beside what the trainer does when that rank is emulated (the trainer's
own code on tensors without memory; tests/train/test_emulate.py holds emulated ranks equal to real ones). Compared are
FLOPs (forward, backward, recomputed) and collectives (axis, collective, ranks, bytes, how many in a step), which have
to be equal, what one block keeps for backward, and the rank's peak, which have to be within {TOLERANCE:.0%}.

The ledger describes the fullest rank of a stage: where a padded vocabulary makes one rank of tp hold more than the
others (fp32 alone), that one is compared.

{len(rows)} ranks of {len(cases)} layouts: **{within} agree, {len(bad)} do not**. The largest error of a peak that
agrees is {worst:.2%}.

{table(rows)}

## What does not agree

{reasons or "Nothing."}

## On a GPU

`fivefold@cuda` keeps the same but for these saved tensors; nothing of it is measured yet.

| tensor | on a CPU | on a GPU | source |
|---|---|---|---|
{devices}
"""


def main() -> None:
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this text; printed, not written")
    only = parser.parse_args().only
    rows: list[Row] = []
    for each in (each for each in CASES if only in each.name):
        for row in compare(each):
            rows.append(row)
            verdict = "agrees" if row.agrees else "DIFFERS"
            print(f"{verdict:8}{each.name}, rank {row.rank}: peak {row.peak_error:+.3%}", file=sys.stderr, flush=True)
            for line in differences(row):
                print(f"          {line}", file=sys.stderr, flush=True)
    if only:
        print(table(rows))
    else:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
