"""Published training runs: a typed row, and the reader of their CSV files.

The shipped table (data/measured_runs.csv) has SimuMax's Megatron-LM runs on B200, llm-foundry's FSDP tables on A100
and the Ultra-Scale Playbook's best nanotron runs on H100, each row with its source. A file of the user's own with the
same columns is read alike; a blank cell is None: not stated.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from fivefold.errors import FivefoldError
from fivefold.measure.cells import kinds, mistake, read_cell
from fivefold.measure.frameworks import line_of

MAX_FILE_BYTES = 64 << 20
MAX_ROWS = 100_000
MAX_CELL = 20_000  # characters
# What is matched against patterns of several words: the time that takes may grow with a power of the length.
MAX_WORDS = 1_000
# By words of a source's convention, how many times the FLOPs of a forward it counts; see Run.counted_flops.
_PASSES = ((re.compile(r"^hardware flops 96bslh\^2"), 4), (re.compile(r"megatron-lm formula non-causal"), 3))
_IN_WORDS = ("framework", "model", "arch", "gpu", "interconnect", "precision", "recompute", "attention")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One published run, as published; None: not stated.

    id: "source-number". layers, hidden, ffn, heads, kv_heads, head_dim, vocab, experts, topk, moe_ffn, shared_experts:
        the model's sizes (moe_ffn: width of one expert). params_b: parameters in units of 1e9, as the source counts.
    seq, mbs, gbs: tokens per sequence, sequences per micro-batch and per step.
    gpus, gpus_per_node, tp, sp, cp, pp, vpp, ep, etp, dp, zero, dist_opt: degrees and switches (1 on, 0 off).
    precision_kind, recompute_kind, mem_kind: closed vocabularies; precision, recompute, attention, overlap: as
        published.
    step_time_s: published seconds of one optimizer step; d_step_time_s: the same derived from published throughput.
    tflops_per_gpu, flops_convention: published TFLOP/s and how the source counts them. notes: read for what is trained
        (adapters alone) and for what the columns cannot say.
    peak_mem_gb: GiB where mem_kind is "allocated" or the cell or peak_mem_kind says GiB, and of frameworks whose logs
        count so; 1e9 bytes elsewhere.
    max_allocated_mib, max_reserved_mib: per rank, "a/b/c".
    """

    id: str
    source: str | None = None
    source_date: str | None = None
    framework: str | None = None
    model: str | None = None
    arch: str | None = None
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    experts: int | None = None
    topk: int | None = None
    moe_ffn: int | None = None
    shared_experts: int | None = None
    params_b: float | None = None
    gated_mlp: int | None = None
    tied_embeddings: int | None = None
    seq: int | None = None
    mbs: int | None = None
    gbs: int | None = None
    gpu: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    interconnect: str | None = None
    tp: int | None = None
    sp: int | None = None
    cp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    zero: int | None = None
    dist_opt: int | None = None
    recompute: str | None = None
    recompute_kind: str | None = None
    precision: str | None = None
    precision_kind: str | None = None
    attention: str | None = None
    overlap: str | None = None
    step_time_s: float | None = None
    d_step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    flops_convention: str | None = None
    notes: str | None = None
    peak_mem_gb: float | None = None
    peak_mem_kind: str | None = None
    mem_kind: str | None = None
    max_allocated_mib: str | None = None
    max_reserved_mib: str | None = None

    @property
    def group(self) -> str:
        """The source that the id names: "simumax" of "simumax-0001"."""
        return source_of(self.id)

    @property
    def measured_s(self) -> float | None:
        """Seconds of one step: as published, else derived from published throughput."""
        if self.step_time_s is not None:
            return self.step_time_s
        if self.d_step_time_s is not None:
            return self.d_step_time_s
        if not (self.gbs and self.seq and self.gpus):
            return None
        if self.tokens_per_s_per_gpu:
            return self.gbs * self.seq / (self.tokens_per_s_per_gpu * self.gpus)
        flops = self.counted_flops
        return flops / (self.tflops_per_gpu * 1e12 * self.gpus) if flops and self.tflops_per_gpu else None

    @property
    def counted_flops(self) -> float | None:
        """FLOPs of one step as the source counts them, None for conventions that are not known exactly.

        Narayanan et al. 2021, appendix: 24 B s l h^2 (1 + s/6h + V/16lh) forward, attention not halved, four times that
        with full recomputation, as hardware FLOPs, and three times as model FLOPs.
        """
        words = (self.flops_convention or "").lower()
        passes = next((passes for convention, passes in _PASSES if convention.search(words)), 0)
        if not (passes and self.layers and self.hidden and self.vocab and self.seq and self.gbs):
            return None
        layers, hidden, seq = self.layers, self.hidden, self.seq
        rest = 1 + seq / (6 * hidden) + self.vocab / (16 * layers * hidden)
        return passes * 24 * self.gbs * seq * layers * hidden**2 * rest

    @property
    def measured_bytes(self) -> int | None:
        """Published peak memory of a rank."""
        if self.peak_mem_gb is None:
            return None
        kind = self.peak_mem_kind or ""
        binary = self.mem_kind == "allocated" or "GiB" in kind or "MiB/1024" in kind or self._logs_reserved_gib
        return int(self.peak_mem_gb * (2**30 if binary else 1e9))

    @property
    def memory_kind(self) -> str | None:
        """What the published peak counts: as stated, else what the framework is known to log; None without a peak."""
        if self.peak_mem_gb is None:
            return None
        stated = self.mem_kind or "unknown"
        return "reserved" if stated == "unknown" and self._logs_reserved_gib else stated

    @property
    def _logs_reserved_gib(self) -> bool:
        return line_of((self.framework or "").lower()).logs_reserved_gib


def source_of(name: str) -> str:
    """The source that a run's id names, or the id itself where it has no number."""
    return name.rpartition("-")[0] or name


class Unread(msgspec.Struct, frozen=True):
    """A row with a cell that cannot be read: its id, or "line 7" where it has none, and the mistake."""

    id: str
    reason: str


class RunTable(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one file. unused_columns: what the file has beside the columns of Run. unread: rows with mistakes,
    where they were asked to be left out."""

    runs: tuple[Run, ...]
    where: str
    unused_columns: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()


def shipped_runs() -> RunTable:
    """The runs that come with the package."""
    file = resources.files("fivefold.measure").joinpath("data/measured_runs.csv")
    return _parse(file.read_bytes(), "measured_runs.csv (shipped)")


def read_runs(path: str | Path, *, leave_out_mistakes: bool = False) -> RunTable:
    """The runs of a CSV file with a header of Run's field names, `id` at least; other columns are counted as unused.

    leave_out_mistakes: a row that cannot be read is listed in `unread` instead of refusing the file.
    Raises FivefoldError, naming line and column, for a file that is too large or no CSV, an unreadable number, a word
    outside a closed vocabulary, or an id that occurs twice.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or "it cannot be opened"
        raise mistake(str(path), f"{reason}", "give the path of a CSV file of measured runs") from error
    if len(raw) > MAX_FILE_BYTES:
        raise mistake(str(path), f"it is larger than {MAX_FILE_BYTES >> 20} MiB", "split it")
    return _parse(raw, str(path), leave_out_mistakes)


def _parse(raw: bytes, where: str, leave_out_mistakes: bool = False) -> RunTable:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise mistake(f"{where}, line {line}", "it is not UTF-8 text", "save it as UTF-8") from error
    lines = _lines(text, where)
    header = next(lines, (1, []))[1]
    columns = _columns(header, where)
    runs: list[Run] = []
    unread: list[Unread] = []
    seen: dict[str, int] = {}
    for number, cells in lines:
        if len(runs) + len(unread) == MAX_ROWS:
            raise mistake(where, f"it has more than {MAX_ROWS:,} rows", "split it")
        try:
            run = _row(cells, columns, len(header), f"{where}, line {number}")
            _check_id(run.id, seen, f"{where}, line {number}, column id")
        except FivefoldError as error:
            if not leave_out_mistakes:
                raise
            unread.append(Unread(_id_of(cells, columns) or f"line {number}", error.message))
            continue
        seen[run.id] = number
        runs.append(run)
    known = {name for _, name in columns}
    unused = tuple(n for n in header if n not in known)
    return RunTable(runs=tuple(runs), where=where, unused_columns=unused, unread=tuple(unread))


def _check_id(name: str, seen: dict[str, int], where: str) -> None:
    if name in seen:
        problem = f"{name[:80]!r} is already the id of line {seen[name]}"
        raise mistake(where, problem, "give every run an id of its own")


def _id_of(cells: list[str], columns: list[tuple[int, str]]) -> str:
    at = next(at for at, name in columns if name == "id")
    return cells[at].strip()[:80] if at < len(cells) else ""


def _lines(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of every row that is not empty."""
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            message = f"{error}"[:200]
            raise mistake(f"{where}, line {reader.line_num}", message, "correct the quoting of the CSV") from error
        if any(cells):
            yield reader.line_num, cells


def _columns(header: list[str], where: str) -> list[tuple[int, str]]:
    """(position, name) of the columns that Run has."""
    names = Run.__struct_fields__
    twice = sorted({name for name in header if header.count(name) > 1 and name in names})
    if len(header) > 1000 or twice:
        problem = f"column {twice[0]} is there twice" if twice else "it has more than 1,000 columns"
        raise mistake(f"{where}, line 1", problem, "correct the header")
    if "id" not in header:
        near = get_close_matches("id", header[:1000], n=1)
        hint = f" (there is {near[0]!r})" if near else ""
        raise mistake(
            f"{where}, line 1", f"the header has no column id{hint}", f"name the columns {', '.join(names[:12])}, ..."
        )
    return [(at, name) for at, name in enumerate(header) if name in names]


_KINDS = kinds(Run)
_BINARY = re.compile(r"\d ?[gm]ib", re.IGNORECASE)


def _row(cells: list[str], columns: list[tuple[int, str]], width: int, where: str) -> Run:
    if len(cells) != width:
        raise mistake(where, f"it has {len(cells)} cells, the header {width}", "add or remove commas")
    fields: dict[str, Any] = {}
    binary = ""
    for at, name in columns:
        cell = cells[at].strip()
        place = f"{where}, column {name}"
        most = MAX_WORDS if name in _IN_WORDS else MAX_CELL
        if len(cell) > most:
            raise mistake(place, f"a cell of {len(cell):,} characters", f"keep it to {most:,}")
        said = read_cell(cell, name, _KINDS[name], place) if cell else None
        if said is not None:
            fields[name] = said
            if name == "peak_mem_gb" and _BINARY.search(cell):
                binary = "GiB"
    if fields.get("sp", 0) > 1:  # without tensor parallelism it is heads or sequences that so many ranks share
        if fields.get("tp", 1) == 1 and fields.get("cp", 1) == 1:
            fields["cp"] = fields["sp"]
        fields["sp"] = int(fields.get("tp", 1) > 1)
    if binary:
        fields["peak_mem_kind"] = " ".join(filter(None, (fields.get("peak_mem_kind"), binary)))
    if "id" not in fields:
        raise mistake(f"{where}, column id", "it is blank", "give every run an id")
    return Run(**fields)
