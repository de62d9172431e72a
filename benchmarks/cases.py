"""Public cases of launches that failed, fitted or surprised, and what `check` and `estimate` say of them.

    python benchmarks/cases.py            print the tables of docs/cases.md
    python benchmarks/cases.py --write    put them there

Each case is retold as one launch, or several that it decides between, from the facts that its source states; what it
does not state takes the framework's defaults or what `assumed` says. Megatron's launches are command lines, in
data/cases_megatron.toml; those of other frameworks are layouts, in data/cases.toml. Expected is what the source
reports: "fits", "oom" (starts and runs out of memory), "starts", "refused" (would not start, or trains something else
than was asked for).
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from fivefold.advise.check import check
from fivefold.advise.result import Check
from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.estimate.estimate import Estimate, estimate
from fivefold.interop.megatron.read import Asked, Reading, read_source
from fivefold.layout import Layout, Workload
from fivefold.model import load_model
from fivefold.model.spec import Attention, Block, BlockRun, Experts, FeedForward, ModelSpec

DATA = Path(__file__).parent / "data"
DOCUMENT = Path(__file__).parent.parent / "docs" / "cases.md"


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One launch of Megatron as a command line; fields as data/cases_megatron.toml describes them."""

    base: str
    expected: str
    options: str = ""
    gpus: int = 8
    gpu: str = "h100-sxm"
    runtime: str = "megatron"
    environment: str = "export CUDA_DEVICE_MAX_CONNECTIONS=1"

    @property
    def words(self) -> str:
        """Every option, those that win last."""
        bases = _data("cases_megatron.toml")["bases"]
        return " ".join([*(line for name in self.base.split() for line in bases[name]), self.options])


class Planned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One launch of a case as a layout; fields as data/cases.toml describes them."""

    model: str
    gpus: int
    runtime: str
    seq: int
    batch: int
    expected: str
    gpu: str = "h100-sxm"
    gpus_per_node: int | None = None
    layout: Layout = Layout()
    against: Layout | None = None
    work: dict[str, Any] = {}
    host_gb: float | None = None
    because: str = ""


class Sizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of equal blocks that the catalogue lacks."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int = 32000
    gated: bool = True
    tied: bool = False
    experts: int = 0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """id: as in the collection that it comes from. facts: what the source reports, in own words. explained: why the
    answer may differ from it."""

    id: str
    source: str
    facts: str
    launches: tuple[Command | Planned, ...]
    assumed: str = ""
    explained: str = ""


@cache
def _data(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


def _cases() -> Iterator[Case]:
    """Every case that is scored."""
    for name, key, kind in (("cases_megatron.toml", "command", Command), ("cases.toml", "launch", Planned)):
        for row in _data(name)["case"]:
            given = {field: row.get(field, "") for field in ("id", "source", "facts", "assumed", "explained")}
            yield Case(launches=msgspec.convert(tuple(row[key]), tuple[kind, ...]), **given)


CASES: tuple[Case, ...] = tuple(sorted(_cases(), key=lambda case: case.id))
LEFT_OUT: tuple[tuple[str, str], ...] = tuple(sorted(_data("cases.toml")["left_out"].items()))


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one case."""

    case: Case
    said: tuple[str, ...]
    agrees: bool


def scores() -> list[Score]:
    """Every case, checked."""
    return [_score(case) for case in CASES]


def _score(case: Case) -> Score:
    said = tuple(verdict(launch) for launch in case.launches)
    agrees = all(_same(launch.expected, each) for launch, each in zip(case.launches, said, strict=True))
    return Score(case, said, agrees)


def _same(expected: str, said: str) -> bool:
    return said.startswith(expected) or (expected == "starts" and said.startswith(("fits", "oom")))


def verdict(launch: Command | Planned) -> str:
    """ "fits 68.2 GB", "oom 121 GB", "refused (rule, ...)", or what a launch with another question asks for."""
    return _planned_verdict(launch) if isinstance(launch, Planned) else _launched_verdict(launch)


def _planned_verdict(launch: Planned) -> str:
    try:
        found = _estimate(launch, launch.layout)
    except FivefoldError as error:
        return f"refused ({error.code})"
    if not found.valid or found.memory is None:
        broken = [violation.id for violation in found.violations]
        known = not launch.because or launch.because in broken
        return f"refused ({', '.join(broken)})" if known else f"other reason than {launch.because}: {broken}"
    peak = found.memory.peak_bytes
    if launch.against is not None:
        other = _estimate(launch, launch.against).memory
        assert other is not None
        share = 1 - peak / other.peak_bytes
        return f"saves {'under 5%' if share < 0.05 else f'{share:.0%}'} ({share:.1%})"
    host = f" and {found.memory.host_bytes / 1e9:.0f} GB of host memory" if found.memory.host_bytes else ""
    return f"{'fits' if found.fits else 'oom'} {found.memory.reserved_bytes / 1e9:.1f} GB{host}"


def _estimate(launch: Planned, layout: Layout) -> Estimate:
    cluster = load_cluster(launch.gpu, launch.gpus, launch.gpus_per_node or min(launch.gpus, 8))
    if launch.host_gb is not None:
        cluster = msgspec.structs.replace(cluster, host_memory_bytes=int(launch.host_gb * 1e9))
    work = msgspec.convert({"seq_len": launch.seq, "global_batch": launch.batch, **launch.work}, Workload)
    return estimate(_model(launch.model), cluster, work, layout, launch.runtime)


def _model(name: str) -> ModelSpec:
    """A model of data/cases.toml, or else of the catalogue."""
    given = _data("cases.toml")["models"].get(name)
    if given is None:
        return load_model(name)
    size = msgspec.convert(given, Sizes)
    head_dim = size.head_dim or size.hidden // size.heads
    mixer = Attention(heads=size.heads, kv_heads=size.kv_heads or size.heads, head_dim=head_dim)
    if size.experts:
        feed = Experts(num_experts=size.experts, top_k=size.top_k, ffn=size.ffn, gated=size.gated)
    else:
        feed = FeedForward(ffn=size.ffn, gated=size.gated)
    return ModelSpec(
        name=name, family="case", hidden=size.hidden, vocab=size.vocab, max_position=2**20,
        runs=(BlockRun(size.layers, Block(mixer=mixer, feed=feed)),), tied_embeddings=size.tied,
    )  # fmt: skip


def _launched_verdict(launch: Command) -> str:
    text = f"{launch.environment}\ntorchrun --nproc_per_node {min(launch.gpus, 8)} --nnodes {-(-launch.gpus // 8)} "
    try:
        reading = read_source(f"{text} pretrain_gpt.py {launch.words}\n", "case.sh", None, Asked(gpu=launch.gpu))
    except FivefoldError as error:
        return f"refused ({error.code})"
    found = check(reading, load_cluster(launch.gpu, reading.gpus, reading.gpus_per_node), launch.runtime, top=0)
    return _words(launch, found, reading)


def _words(launch: Command, found: Check, reading: Reading) -> str:
    if launch.expected.startswith("padded"):
        return f"padded {reading.padded_vocab}"
    if launch.expected == "noted":
        return "noted" if any("padded" in note for note in found.notes) else "not noted"
    if not found.starts:
        return f"refused ({', '.join(dict.fromkeys(each.id for each in found.estimate.violations))})"
    memory = found.estimate.memory
    peak = f" {memory.peak_bytes / 1e9:.1f} GB" if memory is not None else ""
    return ("fits" if found.fits else "oom") + peak


def tables() -> Iterator[str]:
    """The page's computed part."""
    rows = scores()
    agreed = sum(row.agrees for row in rows)
    yield f"{agreed} of {len(rows)} cases agree ({agreed / len(rows):.0%})."
    yield ""
    yield "| case | reported | expected | said | |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        expected = "; ".join(launch.expected for launch in row.case.launches)
        mark = "agrees" if row.agrees else "**differs**"
        facts = f"{row.case.facts} ({row.case.source})" + (f". Assumed: {row.case.assumed}" if row.case.assumed else "")
        yield f"| {row.case.id} | {facts} | {expected} | {'; '.join(row.said)} | {mark} |"
    yield ""
    yield "Where the answer differs:"
    yield ""
    yield from (f"- {row.case.id}: {row.case.explained}." for row in rows if not row.agrees)
    yield ""
    yield "Left out, and what is missing:"
    yield ""
    yield from (f"- {name}: {why}." for name, why in LEFT_OUT)


def main() -> None:
    """Print the tables, or put them into the page."""
    from pages import print_or_put  # beside this script, which a test loads from elsewhere

    print_or_put(DOCUMENT, "\n".join(tables()), sys.argv[1:])


if __name__ == "__main__":
    main()
