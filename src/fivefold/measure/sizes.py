"""A model's sizes where a row leaves some out: from the catalogue's model of that name, from the number of parameters,
or from the table of sizes that models of a kind are built in."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator

import msgspec

from fivefold.errors import FivefoldError
from fivefold.layout.mixers import softmax_attention
from fivefold.measure.runs import Run
from fivefold.model import count_params, load_model
from fivefold.model.catalogue import resolve
from fivefold.model.spec import Attention, Experts, FeedForward, ModelSpec

# Words of a name that say nothing about sizes.
_ADDED = re.compile(
    r"[-_ ]*(instruct|base|chat|hf|it|pretrain(ing|ed)?|sft|meta|lora|proxy|style|like|thinking|vl|omni|text"
    r"|\d{1,3}b-\d{1,4}e)\b",
    re.IGNORECASE,
)
# NeMo's recipes leave the dot of a version out: "llama31_8b", "qwen25_7b", "qwen2p5-7b".
_VERSION = re.compile(r"(?<=[a-z])-?(\d)p?(\d)(?=-\d)", re.IGNORECASE)
# Names that count what a token passes, or the experts: mixtures.
_MIXTURE = re.compile(
    r"(?<![a-z])a\d{1,3}(\.\d{1,3})?b(?![a-z])|\d{1,3}x\d{1,4}(\.\d{1,3})?b(?![a-z])|moe", re.IGNORECASE
)
_CUT = re.compile(r"reduced|truncated|\bcut\b|fewer layers", re.IGNORECASE)
_BLOCKS = re.compile(r"(?<![\d.])(\d{1,3}) ?-?L(?:ayers?)?\b", re.IGNORECASE)
_SIZE = re.compile(r"(?<![\d.])(\d{1,5}(?:\.\d{1,5})?) ?([MBT])\b", re.IGNORECASE)
_UNITS = {"m": 1e-3, "b": 1.0, "t": 1e3}
# (parameters in 1e9, layers, hidden). GPT-3's table 2.1 (Brown et al. 2020) and table 1 of Narayanan et al. 2021;
# Llama 1 and 3 (Touvron et al. 2023, Grattafiori et al. 2024), Llama-3.2's below them.
_GPT = (
    (0.125, 12, 768), (0.35, 24, 1024), (0.76, 24, 1536), (1.3, 24, 2048), (2.7, 32, 2560), (6.7, 32, 4096),
    (13.0, 40, 5120), (18.4, 40, 6144), (39.1, 48, 8192), (76.1, 60, 10240), (145.6, 80, 12288), (175.0, 96, 12288),
    (310.1, 96, 16384), (529.6, 105, 20480), (1008.0, 128, 25600),
)  # fmt: skip
_LLAMA = (
    (1.24, 16, 2048), (3.2, 28, 3072), (6.7, 32, 4096), (13.0, 40, 5120), (32.5, 60, 6656), (65.2, 80, 8192),
    (405.9, 126, 16384),
)  # fmt: skip
# Numbers of KV heads that models have, tried where a row states none: the one that best meets the published number of
# parameters is taken.
_KV_HEADS = (8, 4, 2, 1)
# "7B" names models of 6.5 to 7.5 billion, so the first choice within this distance is taken; "6.74B" is exact enough
# to take the nearest.
_ROUNDED = 0.08
_MOST_BLOCKS = 1000  # beyond any model: a width or a number of parameters is mistyped

Build = Callable[[Run], ModelSpec]


def named(run: Run) -> ModelSpec | None:
    """The catalogue's model of a row's name: of one that also reads images, its language model."""
    name = _BLOCKS.sub("", re.sub(r"\(.*\)", "", (run.model or "").rpartition("/")[2])).strip().replace("_", "-")
    bare = _ADDED.sub("", name)
    for spelled in (name, bare, _VERSION.sub(r"\1.\2", name), _VERSION.sub(r"\1.\2", bare)):
        found = resolve(spelled.strip(" -_").replace(" ", "-")) if spelled else None
        if found is not None:
            return load_model(found)
    return None


def names_a_mixture(run: Run) -> bool:
    """Whether a row's name says that it is a mixture of experts."""
    return bool(_MIXTURE.search(run.model or ""))


def with_blocks_of_name(run: Run, assumed: set[str]) -> Run:
    """The row with the blocks that its name states: "llama3-70b-12L". Raises FivefoldError for a cut-down that does not
    say how many are left."""
    if run.layers is not None:
        return run
    found = _BLOCKS.search(run.model or "")
    if found is not None:
        assumed.add("layers")
        return msgspec.structs.replace(run, layers=int(found[1]))
    if _CUT.search(run.model or ""):
        raise FivefoldError("not stated: layers", code="unknown-model", value=run.model)
    return run


def sizes_of(model: ModelSpec) -> dict[str, int]:
    """The columns of a row that state a model's sizes, for the last of its blocks."""
    block = model.runs[-1].block
    attention, feed = softmax_attention(block.mixer), block.feed
    sizes = {"layers": model.layers, "hidden": model.hidden, "vocab": model.vocab}
    sizes["tied_embeddings"] = int(model.tied_embeddings)
    if isinstance(attention, Attention):
        sizes |= {"heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
    if isinstance(feed, FeedForward):
        sizes |= {"ffn": feed.ffn, "gated_mlp": int(feed.gated)}
    elif isinstance(feed, Experts):
        sizes |= {"experts": feed.num_experts, "topk": feed.top_k, "moe_ffn": feed.ffn, "gated_mlp": int(feed.gated)}
        sizes["shared_experts"] = feed.shared_ffn // feed.ffn
    return sizes


def with_sizes_of(run: Run, model: ModelSpec, assumed: set[str]) -> Run:
    """The row with the sizes it leaves out taken from `model`, whose name it has."""
    missing = {name: value for name, value in sizes_of(model).items() if getattr(run, name) is None}
    assumed.update(missing)
    return msgspec.structs.replace(run, **missing)


def with_parameters(run: Run, build: Build, gated: bool | None, assumed: set[str]) -> Run:
    """The row with the sizes it leaves out chosen so that the model has the published number of parameters.

    build: makes the model of a row. gated: whether the feed-forward is, None: unknown.
    """
    billions = run.params_b or _size_in_name(run)
    if billions is None:
        return run
    if (run.experts or 0) > 1:
        return _with_blocks(run, build, billions, assumed) if run.layers is None and run.hidden is not None else run
    if run.hidden is None:
        run = _on_ladder(run, billions, bool(gated), assumed)
    choices = [msgspec.structs.replace(run, **changes) for changes in _choices(run, gated)]
    if run.layers is None:
        choices = [_with_blocks(one, build, billions, assumed) for one in choices]
    elif len(choices) == 1:
        return run
    off = [abs(math.log(count_params(build(one)).total / (billions * 1e9))) for one in choices]
    best = min(range(len(off)), key=off.__getitem__)
    if billions == round(billions):
        best = next((at for at, error in enumerate(off) if error < _ROUNDED), best)
    chosen = choices[best]
    assumed.update(name for name in ("ffn", "kv_heads", "gated_mlp") if getattr(run, name) is None)
    return chosen


def _size_in_name(run: Run) -> float | None:
    found = _SIZE.search(run.model or "")
    return (float(found[1]) * _UNITS[found[2].lower()] or None) if found else None


def _on_ladder(run: Run, billions: float, gated: bool, assumed: set[str]) -> Run:
    """Hidden size and blocks of the nearest usual model; of these more or fewer, in whole pipeline stages, where it has
    more or fewer parameters. Raises FivefoldError where those are more than any model has."""
    assumed.update(name for name in ("layers", "hidden") if getattr(run, name) is None)
    near, layers, hidden = min(_LLAMA if gated else _GPT, key=lambda size: abs(math.log(size[0] / billions)))
    scale = 1 if abs(billions / near - 1) < _ROUNDED else billions / near
    blocks = run.layers or _in_stages(layers * scale, run)
    _check_blocks(run, billions, blocks, hidden)
    return msgspec.structs.replace(run, layers=blocks, hidden=hidden)


def _with_blocks(run: Run, build: Build, billions: float, assumed: set[str]) -> Run:
    """A row that states its width with as many blocks, in whole pipeline stages, as its parameters need beside its
    embeddings. Raises FivefoldError where those are more than any model has."""
    assumed.add("layers")
    one, two = (count_params(build(msgspec.structs.replace(run, layers=blocks))).total for blocks in (1, 2))
    blocks = _in_stages((billions * 1e9 - one) / (two - one) + 1, run)
    _check_blocks(run, billions, blocks, run.hidden or 0)
    return msgspec.structs.replace(run, layers=blocks)


def _in_stages(blocks: float, run: Run) -> int:
    """Blocks rounded to the pipeline's stages, at least one each."""
    stages = run.pp or 1
    return max(round(blocks / stages), 1) * stages


def _check_blocks(run: Run, billions: float, blocks: int, hidden: int) -> None:
    if blocks > _MOST_BLOCKS:
        problem = f"not stated: layers, and {billions:g}e9 parameters would take {blocks:,.0f} of width {hidden:,}"
        raise FivefoldError(problem, code="unknown-model", value=run.model)


def _choices(run: Run, gated: bool | None) -> Iterator[dict[str, int]]:
    """Of the sizes that are not stated, what they may be; the usual ones first."""
    hidden = run.hidden or 1
    gates = (False, True) if gated is None else (gated,)
    heads = run.heads or max(hidden // 128, 1)
    keys = (
        [run.kv_heads] if run.kv_heads is not None else [heads, *(n for n in _KV_HEADS if heads % n == 0 and n < heads)]
    )
    for gate, kv_heads in itertools.product(gates, keys):
        wide = -(-8 * hidden // 3 // 256) * 256
        usual = (wide, 7 * hidden // 2, 4 * hidden) if gate else (4 * hidden,)
        for ffn in (run.ffn,) if run.ffn is not None else usual:
            yield {"gated_mlp": int(gate), "kv_heads": kv_heads, "ffn": ffn}
