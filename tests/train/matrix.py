"""The proof's matrix: which layouts are compared with one process, as a table.

A row is a model, a layout and a batch. A table crosses the values of some options; what it leaves out has the default
of `row`. Tables that are not core are the exhaustive ones, which run when asked for (pytest -m exhaustive).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fivefold.layout import CP_KINDS, SCHEDULES, Layout, Overlap, Recompute, ResolvedLayout, Workload, resolve
from fivefold.layout.layout import RecomputeModule
from fivefold.model import Attention, Block, BlockRun, FeedForward, ModelSpec
from fivefold.train.job import Job

RUNTIME = "fivefold"
SEQ, VOCAB, HIDDEN = 24, 67, 32  # 24 divides by twice cp and by cp times tp; 67 over no number of ranks
CHUNKS = {"interleaved": 2, "zbv": 2, "dualpipev": 2}  # per pipeline rank, of the schedules that need more than one

# ----------------------------------------------------------------- models


def _block(window: int | None = None, ffn: int = 48, **attention: Any) -> Block:
    heads: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "qk_norm": True,
        "qkv_bias": True,
        "window": window,
    }
    return Block(mixer=Attention(**{**heads, **attention}), feed=FeedForward(ffn=ffn))


_GPT2 = Block(
    mixer=Attention(heads=4, kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True, rope=False),
    feed=FeedForward(ffn=48, gated=False, bias=True, activation="gelu_tanh"),
    norm="layernorm",
    norm_bias=True,
)


class Shape(NamedTuple):
    """blocks: repeated in this order over the model's depth. more: fields of ModelSpec."""

    blocks: tuple[Block, ...]
    more: Mapping[str, Any] = MappingProxyType({})


MODELS: dict[str, Shape] = {
    "llama": Shape((_block(),)),  # grouped queries, norms and biases on them as in qwen
    "tied": Shape((_block(),), {"tied_embeddings": True}),
    "gpt2": Shape(
        (_GPT2,),
        {"tied_embeddings": True, "learned_positions": SEQ, "final_norm": "layernorm", "final_norm_bias": True},
    ),
    "mqa": Shape((_block(kv_heads=1),), {"tied_embeddings": True}),
    "six": Shape((_block(heads=6, kv_heads=3),), {"hidden": 24}),  # for degrees of 3
    "window": Shape((_block(window=5, qk_norm=False),)),
    "mixed": Shape((_block(window=5), _block(kv_heads=4, ffn=24))),  # blocks that differ
}


def spec_of(model: str, layers: int) -> ModelSpec:
    shape = MODELS[model]
    blocks = [shape.blocks[i % len(shape.blocks)] for i in range(layers)]
    sizes: dict[str, Any] = {"hidden": HIDDEN, "vocab": VOCAB, "max_position": SEQ, **shape.more}
    return ModelSpec(name=model, family=model, runs=tuple(BlockRun(1, block) for block in blocks), **sizes)


# ----------------------------------------------------------------- rows

Masks = Literal["uneven", "full"]


class Row(NamedTuple):
    """masks: whether valid tokens are unevenly many, none at all in some sequences."""

    table: str
    model: str
    layers: int
    dp: int
    micro_batches: int
    layout: Layout
    masks: Masks = "uneven"
    dropout: float = 0.0

    @property
    def ranks(self) -> int:
        return self.layout.tp * self.layout.cp * self.layout.pp * self.dp

    @property
    def global_batch(self) -> int:
        return self.layout.micro_batch * self.micro_batches * self.dp

    @property
    def spec(self) -> ModelSpec:
        return spec_of(self.model, self.layers)

    @property
    def job(self) -> Job:
        """As the rules see it, to which the proof's fp64 is no precision of a plan."""
        work = Workload(seq_len=SEQ, global_batch=self.global_batch)
        return Job(
            model=self.spec, layout=self.layout, work=work, gpus=self.ranks, gpus_per_node=8, scale_up_size=8,
            runtime=RUNTIME,
        )  # fmt: skip

    @property
    def resolved(self) -> ResolvedLayout:
        return resolve(self.layout, self.spec, self.ranks, self.job.work, RUNTIME)

    @property
    def name(self) -> str:
        """What differs from the defaults, in words of the command line."""
        return "-".join(_words(self))

    def __str__(self) -> str:
        return self.name


def row(
    table: str = "",
    model: str = "llama",
    layers: int | None = None,
    dp: int = 1,
    micro_batches: int | None = None,
    masks: Masks = "uneven",
    dropout: float = 0.0,
    **layout: Any,
) -> Row:
    """The row of these options. By default one block per pipeline chunk (two without pipeline), twice as many
    micro-batches as pipeline ranks (two without), of one sequence or as many as make a global batch of four."""
    pp: int = layout.get("pp", 1)
    vpp: int = layout.setdefault("vpp", CHUNKS.get(layout.get("schedule", ""), 1))
    count = micro_batches or 2 * pp
    layout.setdefault("micro_batch", max(1, 4 // (dp * count)))
    return Row(table, model, layers or max(2, pp * vpp), dp, count, Layout(**layout), masks, dropout)


def _words(row: Row) -> Iterator[str]:
    layout = row.layout
    yield f"{row.model}.{row.layers}"
    if layout.tp > 1:
        yield f"tp{layout.tp}" + (".nosp" if layout.sequence_parallel is False else "")
    if layout.cp > 1:
        yield f"cp{layout.cp}.{layout.cp_kind}"
    if layout.pp > 1:
        yield f"pp{layout.pp}.{layout.schedule or '1f1b'}" + (f".v{layout.vpp}" if layout.vpp > 2 else "")
    if row.dp > 1 or layout.dp_replicate > 1:
        yield f"dp{row.dp}" + (f".replicate{layout.dp_replicate}" if layout.dp_replicate > 1 else "")
    yield f"zero{layout.zero}"
    for name, value in (("first", layout.first_stage_layers), ("last", layout.last_stage_layers)):
        if value is not None:
            yield f"{name}{value}"
    for name, on in (("embedding", layout.account_for_embedding), ("loss", layout.account_for_loss)):
        if on:
            yield f"account.{name}"
    if layout.recompute.kind != "none":
        parts = (layout.recompute.kind, layout.recompute.layers, *layout.recompute.modules)
        yield ".".join(str(part) for part in parts if part is not None)
    if not layout.overlap.grad:
        yield "nooverlap"
    elif layout.overlap.param is False:
        yield "nooverlap.param"
    if layout.overlap.tp:
        yield "overlap.tp"
    yield f"m{row.micro_batches}x{layout.micro_batch}"
    if row.masks != "uneven":
        yield "masks." + row.masks
    if row.dropout:
        yield f"dropout{row.dropout}"


# ----------------------------------------------------------------- tables


class Table(NamedTuple):
    title: str
    options: list[dict[str, Any]]
    core: bool = True


def cross(*factors: Sequence[dict[str, Any]], **options: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of one setting of each factor and one value of each option."""
    settings = [*factors, *([{name: value} for value in values] for name, values in options.items())]
    return [{name: value for part in parts for name, value in part.items()} for parts in product(*settings)]


ZERO = (0, 1, 2, 3)
FULL = Recompute(kind="full")
_EACH: tuple[tuple[RecomputeModule, ...], ...] = (("core_attn",), ("mlp",), ("layernorm",))
SELECTIVE = tuple(Recompute(kind="selective", modules=m) for m in (*_EACH, sum(_EACH, ())))
RECOMPUTE = (FULL, Recompute(kind="full", layers=1), *SELECTIVE)
NO_OVERLAP = (Overlap(grad=False, param=False), Overlap(param=False))
TP_OVERLAP = (Overlap(tp=True),)
TP, CP, ULYSSES, PP, DP = {"tp": 2}, {"cp": 2}, {"cp": 2, "cp_kind": "a2a"}, {"pp": 2}, {"dp": 2}
CPS = (CP, ULYSSES)
SP = (True, False)
PPS = tuple({"pp": 2, "schedule": kind} for kind in SCHEDULES)
F1B, ZB_H1, ZBV, DUAL = ({"pp": 2, "schedule": kind} for kind in ("1f1b", "zb-h1", "zbv", "dualpipev"))
TIED = ("tied", "gpt2")
UNEVEN = ({"layers": 5, "first_stage_layers": 3, "last_stage_layers": 2}, {"layers": 3, "account_for_embedding": True})

TABLES: tuple[Table, ...] = (
    Table("TP alone", cross(model=("llama", "gpt2"), tp=(2, 4), sequence_parallel=SP)),
    Table("TP alone", cross(model=("six",), tp=(3,), sequence_parallel=SP)),
    Table("CP alone", cross(model=("llama", "gpt2"), cp=(2, 4), cp_kind=CP_KINDS)),
    Table("CP alone", cross(model=("six",), cp=(3,), cp_kind=CP_KINDS)),
    Table("PP alone", cross(pp=(2, 3, 4), schedule=SCHEDULES)),
    Table("DP alone", cross(dp=(2, 3, 4), zero=ZERO)),
    Table("TP x CP", cross([TP], CPS, sequence_parallel=SP)),
    Table("TP x PP", cross([TP], PPS)),
    Table("TP x DP", cross([TP], [DP], zero=ZERO)),
    Table("CP x PP", cross(CPS, PPS)),
    Table("CP x DP", cross(CPS, [DP], zero=ZERO)),
    Table("PP x ZeRO", cross(PPS, [DP], zero=ZERO)),
    Table("TP x PP x ZeRO", cross([TP], [F1B], [DP], zero=ZERO)),
    Table("TP x PP x ZeRO", cross([TP], [ZB_H1, ZBV, DUAL], [DP], zero=(2, 3))),
    Table("TP x PP x ZeRO", cross([TP], PPS, [DP], zero=ZERO, model=("llama", "gpt2")), core=False),
    Table("TP x CP x PP", cross([TP], CPS, [F1B, ZBV])),
    Table("TP x CP x PP", cross([TP], CPS, PPS, zero=(1, 3), model=("llama", "gpt2")), core=False),
    Table("TP x CP x DP", cross([TP], CPS, [DP], zero=(1, 3))),
    Table("TP x CP x DP", cross([TP], CPS, [DP], zero=ZERO, model=("gpt2",)), core=False),
    Table("CP x PP x ZeRO", cross(CPS, [F1B], [DP], zero=(1, 2, 3))),
    Table("CP x PP x ZeRO", cross(CPS, PPS, [DP], zero=ZERO, model=("tied",)), core=False),
    Table("TP x CP x PP x DP", cross([TP], CPS, [F1B, ZBV], [DP], zero=(1, 3)), core=False),
    Table("windows", cross(model=("window", "mixed"), cp=(2,), cp_kind=("a2a",), zero=(1, 3))),
    Table("windows", cross([TP, F1B, ZBV], model=("mixed",))),
    Table("full masks", cross([*CPS, TP, DP, F1B], masks=("full",))),
    Table("recomputation", cross([TP, *CPS, F1B, ZB_H1, {**DP, "zero": 3}], recompute=RECOMPUTE)),
    Table("recomputation", cross([ZBV, DUAL], recompute=(FULL, *SELECTIVE))),
    Table("recomputation", cross([ZBV, DUAL], recompute=(Recompute(kind="full", layers=2),), layers=(8,))),
    Table(
        "recomputation",
        cross([TP, {}], PPS, [DP], recompute=(FULL, SELECTIVE[-1]), zero=(2, 3), model=("tied",)),
        core=False,
    ),
    Table("one rank", cross(zero=ZERO)),
    Table("accumulation", cross([DP], micro_batches=(1, 4), zero=ZERO)),
    Table("accumulation", cross(dp=(4,), micro_batches=(4,), zero=(2, 3))),
    Table("accumulation", cross(PPS, micro_batches=(4, 6), micro_batch=(2,)), core=False),
    Table("accumulation", cross(PPS[:-1], micro_batches=(2,), micro_batch=(2,)), core=False),
    Table("tied embeddings", cross([TP, {**DP, "zero": 0}, {**DP, "zero": 2}, {**DP, "zero": 3}], model=TIED)),
    Table("tied embeddings", cross(PPS, model=TIED)),
    Table("tied embeddings", cross(PPS, [DP], zero=ZERO, model=TIED), core=False),
    Table("tied embeddings", cross([F1B, ZBV], [TP], sequence_parallel=SP, model=TIED)),
    Table("tied embeddings", cross([{"pp": 4, "model": "tied"}], schedule=("1f1b", "zbv"))),
    Table("tied embeddings", cross([{"pp": 4, "model": "tied"}], schedule=SCHEDULES), core=False),
    Table("uneven stages", cross([{"pp": 2}], UNEVEN, schedule=("afab", "1f1b", "zb-h1"))),
    Table("uneven stages", cross(PPS, layers=(5, 7), zero=(3,), dp=(2,)), core=False),
    Table("TP > KV heads", cross(tp=(2, 4), sequence_parallel=SP, model=("mqa",))),
    Table("TP > KV heads", cross([TP], [*CPS, F1B, ZBV, {**DP, "zero": 2}, {**DP, "zero": 3}], model=("mqa",))),
    Table("TP > KV heads", cross([{"tp": 4}], [CP, *PPS, DP], zero=(1, 3), model=("llama", "mqa")), core=False),
    Table("HSDP", cross(dp=(4,), dp_replicate=(2,), zero=(1, 2, 3))),
    Table("HSDP", cross([{**DP, "dp_replicate": 2}], zero=(1, 2, 3))),
    Table("HSDP", cross(CPS, [DP], dp_replicate=(2,), zero=(1, 2, 3))),
    Table("HSDP", cross([{**CP, "dp_replicate": 2}, {**CP, **DP, "dp_replicate": 4}], zero=(2, 3))),
    Table("HSDP", cross([TP, F1B, ZBV], dp=(4,), dp_replicate=(2,), zero=(1, 3), model=("tied",)), core=False),
    Table("TP overlap", cross(tp=(2, 4), overlap=TP_OVERLAP, model=("llama", "gpt2", "mqa"))),
    Table("TP overlap", cross([TP], [CP, F1B, ZBV, {**DP, "zero": 3}], overlap=TP_OVERLAP)),
    Table("no overlap", cross([DP], zero=ZERO, overlap=NO_OVERLAP)),
    Table("no overlap", cross([DP], [F1B, ZBV], zero=(1, 2, 3), overlap=NO_OVERLAP), core=False),
    Table("dropout", cross([TP, CP, ULYSSES, F1B, ZBV, {**DP, "zero": 3}], dropout=(0.3,), model=("gpt2",))),
    Table("dropout", cross([TP, {}], PPS, [DP], zero=(0, 3), dropout=(0.3,), recompute=(FULL,)), core=False),
    Table("several sequences", cross([TP, *CPS, *PPS, {**DP, "zero": 3}], micro_batch=(2,), model=("gpt2",))),
)

# What a user could ask for and no rule lets pass, with the rule that says so.
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cp-window", {"model": "window", **CP}),
    ("cp-a2a-heads", {"model": "six", "cp": 4, "cp_kind": "a2a"}),
    ("cp-a2a-heads", {"tp": 4, **ULYSSES}),
    ("heads-tp", {"tp": 3}),
    ("schedule-vpp", {"pp": 2, "schedule": "1f1b", "vpp": 2}),
    ("schedule-vpp", {**ZBV, "vpp": 3, "layers": 6}),
    ("dualpipev-micro-batches", {**DUAL, "micro_batches": 3}),
    ("interleaved-micro-batches", {"pp": 2, "schedule": "interleaved", "micro_batches": 3}),
    ("v-shape-uneven", {**ZBV, "layers": 6, "first_stage_layers": 2}),
    ("vpp-needs-pp", {"schedule": "interleaved"}),
    ("dp-replicate-divides", {"dp": 3, "dp_replicate": 2}),
    ("overlap-param-needs-zero", {"dp": 2, "zero": 0, "overlap": Overlap(param=True)}),
)


def rows(core: bool) -> list[Row]:
    """The rows of the core or of the exhaustive tables, each layout once."""
    found: dict[str, Row] = {}
    for table in sorted(TABLES, key=lambda table: not table.core):
        for options in table.options:
            each = row(table.title, **options)
            found.setdefault(each.name, each)
    named = {name for table in TABLES if table.core for name in (row(**o).name for o in table.options)}
    return [each for name, each in found.items() if (name in named) == core]


CORE, EXHAUSTIVE = rows(True), rows(False)

# Layouts that are run in fp32 and bf16 too.
_LOWER: tuple[dict[str, Any], ...] = (
    {},
    {**TP, "model": "gpt2"},
    {"tp": 4, "model": "mqa", "micro_batches": 1},
    {**CP},
    {**ULYSSES, "model": "mixed"},
    {**F1B, "model": "gpt2"},
    *({**pipeline, "model": "tied"} for pipeline in (ZB_H1, ZBV, DUAL)),
    *({**DP, "zero": zero} for zero in ZERO),
    {"dp": 4, "dp_replicate": 2, "zero": 3},
    {**TP, **CP, "zero": 2},
    {**TP, **F1B, "recompute": FULL},
    {**ZBV, **DP, "zero": 3},
)
LOWER_PRECISION = tuple(row("precision", **options) for options in _LOWER)
