"""Layouts and work in words: a layout's short form in tables, its long form beside an estimate."""

from __future__ import annotations

from rich.text import Text

from fivefold.cli.render.text import count
from fivefold.layout import Workload
from fivefold.layout.layout import Recompute, ResolvedLayout

# What tables call the parts that selective recomputation names.
_SHORT_PARTS = {
    "layernorm": "norm",
    "core_attn": "attn",
    "mla_up_proj": "mla",
    "moe_act": "act",
    "shared_experts": "shared",
}


def recompute_words(recompute: Recompute, *, short: bool = False) -> str:
    """none, full, full 4/stage, or the parts that are dropped."""
    if recompute.kind == "none":
        return "-" if short else "none"
    if recompute.kind == "full":
        return "full" if recompute.layers is None else f"full {recompute.layers}/stage"
    parts = recompute.modules or ("core_attn",)
    return "+".join(_SHORT_PARTS.get(part, part) if short else part for part in parts)


def zero_words(layout: ResolvedLayout) -> str:
    """1, or with hybrid sharding 1 x4 for four replicas."""
    return f"{layout.zero}" + (f" x{layout.dp_replicate}" if layout.dp_replicate > 1 and layout.zero else "")


def schedule_words(layout: ResolvedLayout) -> str:
    if layout.pp == 1:
        return "-"
    return layout.schedule + (f" v{layout.vpp}" if layout.vpp > 1 else "")


def degrees_words(layout: ResolvedLayout) -> str:
    """TP4 CP2 PP4 DP2, with EP and ETP where experts are split."""
    words = [f"TP{layout.tp}", f"CP{layout.cp}", f"PP{layout.pp}", f"DP{layout.dp}"]
    if layout.ep > 1 or layout.etp > 1:
        words += [f"EP{layout.ep}", f"ETP{layout.etp}", f"EDP{layout.edp}"]
    return " ".join(words)


def options_words(layout: ResolvedLayout) -> str:
    """Everything of a layout that is not a degree, in one line."""
    words = [
        f"ZeRO-{layout.zero}"
        + (f" in {layout.dp_shard}, replicated {layout.dp_replicate}x" * (layout.dp_replicate > 1 and layout.zero > 0)),
        f"SP {'on' if layout.sequence_parallel else 'off'}",
        f"micro-batch {layout.micro_batch} x {layout.num_micro_batches}",
    ]
    if layout.pp > 1:
        words.append(schedule_words(layout) + f" ({blocks_words(layout)} blocks per stage)")
    if layout.cp > 1:
        words.append(f"CP {layout.cp_kind}")
    words.append(f"recompute {recompute_words(layout.recompute)}")
    overlap = layout.overlap
    on = [name for name in ("grad", "param", "tp", "ep") if getattr(overlap, name)]
    words.append(f"overlap {', '.join(on) or 'none'}")
    return " | ".join(words)


def blocks_words(layout: ResolvedLayout) -> str:
    """20 when all stages are equal, else 19-20-20-21 with repeats written as 20x14."""
    counts = [sum(last - first for first, last in rank) for rank in layout.stages]
    runs: list[list[int]] = []
    for each in counts:
        if runs and runs[-1][0] == each:
            runs[-1][1] += 1
        else:
            runs.append([each, 1])
    if len(runs) == 1:
        return str(counts[0])
    return "-".join(f"{each}x{times}" if times > 1 else str(each) for each, times in runs)


def work_words(work: Workload, trained: int | None) -> Text:
    """The work of a step in a line. trained: parameters that are, where not all are."""
    line = Text(
        f"{work.global_batch:,} sequences x {work.seq_len:,} = {count(work.tokens_per_batch)} tokens a step, "
        f"{work.precision}, {work.grad_dtype} gradients, {work.optimizer}"
    )
    if work.moe_imbalance != 1.0:
        line.append(f", imbalance {work.moe_imbalance:g}")
    if work.moe_dispatcher != "alltoall":
        line.append(f", {work.moe_dispatcher}")
    if work.cuda_graphs:
        line.append(", CUDA graphs")
    if work.dropout:
        line.append(", dropout")
    if work.document_length is not None:
        line.append(f", documents of {work.document_length:,.0f} tokens ({work.document_lengths} lengths)")
    if work.lora is not None:
        base = ", base in 4 bits" if work.base_precision == "nf4" else ""
        line.append(f", LoRA {work.lora.rank} on {','.join(work.lora.targets)}: {count(trained or 0)} trained{base}")
    if work.offload.anything:
        line.append(f", offloading {work.offload.words}")
    return line
