"""From a published row's sizes to a ModelSpec; what the columns cannot say comes from the catalogue's model of the same
sizes, or from the family's usual choice, and is named as assumed."""

from __future__ import annotations

import math
import re
from functools import lru_cache

import msgspec

from fivefold.errors import FivefoldError
from fivefold.layout.mixers import softmax_attention
from fivefold.measure.runs import Run
from fivefold.measure.sizes import (
    named,
    names_a_mixture,
    sizes_of,
    with_blocks_of_name,
    with_parameters,
    with_sizes_of,
)
from fivefold.measure.unstated import framework_of
from fivefold.measure.words import denied
from fivefold.model import count_params, load_model, models
from fivefold.model.spec import (
    Attention,
    Block,
    BlockRun,
    Experts,
    Feed,
    FeedForward,
    LatentAttention,
    Mixer,
    ModelSpec,
)

# GPT-2's byte-pair vocabulary, which Megatron's and DeepSpeed's GPT examples train with, and Llama's.
_USUAL_VOCAB = {False: 50_257, True: 32_000}
_USUAL_HEAD_DIM = 128
_CLASSES = 1000  # of ImageNet
# Families with a gated feed-forward, and without, where a row does not say.
_GATED = re.compile(
    r"llama|qwen|mi[sx]tral|deepseek|gemma|\byi-|internlm|baichuan|palm|kimi|phi-?[34]|olmo|glm|vicuna|aquila|skywork"
    r"|granite|command|smollm|gpt-oss|dbrx|minimax|ernie|hunyuan|grok|seed|orion|xverse|zephyr|amber|k2-",
    re.IGNORECASE,
)
_UNGATED = re.compile(r"gpt|opt\b|opt-|bloom|pythia|neox|falcon|mpt|bert|switch|glam", re.IGNORECASE)
# Architectures that the columns cannot say: encoders with decoders, state spaces, images. An encoder alone is priced as
# the decoder of its sizes: they differ in the mask of the attention's core. So is one over patches whose sizes a row
# states, with the classes of ImageNet.
_OTHER = re.compile(
    r"(?<![a-z])m?t5(?![a-z])|\bt5x\b|\bbart|enc(oder)?[-/ +]*dec|seq2seq|mamba|rwkv|hyena|retnet|\bssm\b|hybrid"
    r"|diffusion|\bvit\b|vit-|swin|resnet|whisper|\bdit\b|clip|u-?net\b|\bsdxl|\bflux\b|\bdlrm\b|\brnn\b|lstm",
    re.IGNORECASE,
)
# DeepSeek-V2 and V3 (papers' tables of hyper-parameters): latent widths and head sizes; V2-Lite and smaller ones
# project queries directly.
_LATENT = LatentAttention(heads=1, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_QUERY_RANK, _QUERY_RANK_FROM = 1536, 5120
_DENSE_FIRST = re.compile(
    r"(?:dense_layers|first_k_dense(?:_replace)?)\W{1,3}(\d{1,3})\b"
    r"|(?<![\d.,])(\d{1,3}) dense(?: layers?| blocks?)?\b(?! ?(?:gpus|[tpe]-?flop|[tpe]f))",
    re.IGNORECASE,
)
# The most by which the published and the computed number of parameters of one model differ, as a logarithm: sources
# round, and leave embeddings out.
_COUNTED_ALIKE = 0.15


def model_of(run: Run, assumed: set[str]) -> ModelSpec:
    """The model of a row. Needs seq. Raises FivefoldError for a model that the row does not say and for one whose
    architecture its columns cannot."""
    return _with_dense_first(run, _model_of(run, assumed))


def _with_dense_first(run: Run, model: ModelSpec) -> ModelSpec:
    """A mixture with as many dense blocks before those with experts as a row says: "dense_layers=1", "1 dense + 3"."""
    found = _DENSE_FIRST.search(run.notes or "")
    last = model.runs[-1].block
    dense = int(found[1] or found[2]) if found else 0
    if not found or not isinstance(last.feed, Experts) or dense >= model.layers:
        return model
    plain = next((kind for kind in model.kinds if isinstance(kind.feed, FeedForward)), None)
    plain = plain or _alternating(run, msgspec.structs.replace(model, runs=(BlockRun(2, last),))).runs[0].block
    runs = (BlockRun(dense, plain),) if dense else ()
    return msgspec.structs.replace(model, runs=(*runs, BlockRun(model.layers - dense, last)))


def _model_of(run: Run, assumed: set[str]) -> ModelSpec:
    run = _with_vocabulary(with_blocks_of_name(run, assumed), assumed)
    like = named(run)
    if like is not None and run.hidden not in (None, like.hidden):
        like = None
    known = _catalogued(run) or (_of_name(run, like) if like is not None else None)
    if known is not None:
        assumed.add("architecture")
        return _with_modules(run, known, assumed)
    _refuse_other(run)
    if like is not None:
        run = with_sizes_of(run, like, assumed)
    if run.experts is None and (re.search("moe", run.arch or "", re.IGNORECASE) or names_a_mixture(run)):
        raise _unknown("not stated: experts", run)
    run = with_parameters(run, lambda one: _built(one, set()), _is_gated(run), assumed)
    missing = [field for field in ("layers", "hidden") if getattr(run, field) is None]
    if missing:
        raise _unknown(f"not stated: {', '.join(missing)}", run)
    whole = _built(run, assumed)
    if _alternates(run, whole):
        return _alternating(run, whole)
    return _of_other_gate(run, whole) or whole


def _of_other_gate(run: Run, whole: ModelSpec) -> ModelSpec | None:
    """The mixture with experts gated otherwise than its family's, where a row does not say and only so they have as
    many parameters as were published."""
    if run.gated_mlp is not None or run.params_b is None or not whole.is_moe:
        return None
    other = _built(msgspec.structs.replace(run, gated_mlp=int(not _is_gated(run))), set())
    mine, its = (abs(math.log(count_params(model).total / (run.params_b * 1e9))) for model in (whole, other))
    return other if its < _COUNTED_ALIKE < mine else None


def _alternates(run: Run, whole: ModelSpec) -> bool:
    """Whether a mixture has experts in every other block: where so many parameters were published as these make and
    experts in all blocks do not (GShard, GLaM, DeepSpeed-MoE and Llama 4 Maverick have them so)."""
    if run.params_b is None or not whole.is_moe or whole.layers < 2:
        return False
    every, other = (
        abs(math.log(count_params(model).total / (run.params_b * 1e9))) for model in (whole, _alternating(run, whole))
    )
    return other < _COUNTED_ALIKE < every


def _alternating(run: Run, whole: ModelSpec) -> ModelSpec:
    """The mixture with the experts of every other block replaced by a dense feed-forward."""
    block = whole.runs[0].block
    like_gpt = block.norm_bias
    dense = FeedForward(
        ffn=int(run.ffn or 4 * whole.hidden),
        gated=not like_gpt,
        bias=like_gpt,
        activation="gelu" if like_gpt else "silu",
    )
    pair = (BlockRun(1, msgspec.structs.replace(block, feed=dense)), BlockRun(1, block))
    return msgspec.structs.replace(whole, runs=pair * (whole.layers // 2) + pair[:1] * (whole.layers % 2))


def _with_modules(run: Run, known: ModelSpec, assumed: set[str]) -> ModelSpec:
    """A whole model of the catalogue with its modules of multi-token prediction, where the row says that they are
    trained, or the framework's recipes do and the row does not deny it."""
    words = (run.notes or "").lower()
    words = re.sub(r"\bmtp=(?=\s*(?:[;,]|$))", " ", words)  # a list's blank says nothing
    said = bool(re.search(r"\bmtp\b", words))
    trained = not re.search(r"\bmtp\W{1,3}0(?![.\d])", words) if said else framework_of(run).trains_mtp
    modules = _modules(known.name)
    if not trained or denied(r"\bmtp\b").search(words) or known.mtp or not modules:
        return known
    if run.layers not in (None, load_model(known.name).layers):
        return known
    if not said:
        assumed.add("mtp")
    return msgspec.structs.replace(known, mtp=modules)


def _with_vocabulary(run: Run, assumed: set[str]) -> Run:
    """The row with the vocabulary that its framework's rows share, whatever the model of their name has."""
    shared = _CLASSES if _is_of_patches(run) else framework_of(run).vocab
    if run.vocab is not None or shared is None:
        return run
    assumed.add("vocab")
    return msgspec.structs.replace(run, vocab=shared)


def _of_name(run: Run, like: ModelSpec) -> ModelSpec | None:
    """The catalogue's model of a row's name, unless the row states another size: where it states no blocks, and where
    columns cannot build its blocks (its first ones, of a cut-down). A vocabulary that is padded, or embeddings that are
    untied, leave the blocks as they are."""
    around = ("layers", "vocab", "tied_embeddings", "shared_experts")
    if _contradicts(run, sizes_of(like), around):
        return None
    if run.layers is not None and (like not in _mixed_models() or run.layers > like.layers):
        return None
    model, seq = _cut(run, like), int(run.seq or 1)
    return msgspec.structs.replace(
        model,
        vocab=run.vocab or model.vocab,
        tied_embeddings=model.tied_embeddings if run.tied_embeddings is None else bool(run.tied_embeddings),
        max_position=max(model.max_position, seq),
        learned_positions=max(model.learned_positions, seq) if model.learned_positions else 0,
    )


def _cut(run: Run, like: ModelSpec) -> ModelSpec:
    """The first blocks of a model, as many as a row has: the last ones where it spreads experts that these lack."""
    if run.layers is None:
        return like
    first = load_model(like.name, layers=run.layers)
    if first.is_moe or not like.is_moe or (run.ep or 1) == 1:
        return first
    return msgspec.structs.replace(like, runs=(BlockRun(run.layers, like.runs[-1].block),))


def _contradicts(run: Run, sizes: dict[str, int], beside: tuple[str, ...] = ()) -> bool:
    """Whether a row states a size otherwise, `beside` some."""
    stated = {name: getattr(run, name) for name in sizes if name not in beside}
    others = (run.experts or 0) > 1 and "experts" not in sizes
    return others or any(value not in (None, sizes[name]) for name, value in stated.items())


def _experts(model: ModelSpec) -> int | None:
    return sizes_of(model).get("experts")


def _refuse_other(run: Run) -> None:
    if _is_of_patches(run):
        return
    if _OTHER.search(run.arch or ""):
        raise _unknown(f"the architecture {run.arch!r} cannot be built from the table's columns", run)
    if _OTHER.search(run.model or ""):
        raise _unknown(f"{run.model!r} is no decoder, and the table's columns say no more of it", run)


def _is_of_patches(run: Run) -> bool:
    """Whether a row is of a vision Transformer and states its sizes."""
    sized = None not in (run.layers, run.hidden, run.seq)
    return sized and bool(re.search(r"(?<![a-z])vit(?![a-z])", f"{run.arch} {run.model}", re.IGNORECASE))


def _unknown(problem: str, run: Run) -> FivefoldError:
    return FivefoldError(problem, code="unknown-model", value=run.model)


def _is_gated(run: Run) -> bool | None:
    """Whether the feed-forward is gated, None where nothing tells.

    As stated; else as models of that name are; else a feed-forward whose width is not four times the hidden size is
    gated, and so are experts of no known family.
    """
    if run.gated_mlp is not None:
        return bool(run.gated_mlp)
    if _GATED.search(f"{run.model} {run.arch}"):
        return True
    if _UNGATED.search(run.model or ""):
        return False
    if run.ffn is not None and run.hidden is not None:
        return run.ffn != 4 * run.hidden
    return True if (run.experts or 0) > 1 else None


@lru_cache(maxsize=1)
def _mixed_models() -> tuple[ModelSpec, ...]:
    """Models of the catalogue whose columns do not say everything: several kinds of block, latent attention..."""
    found = [load_model(name) for name in models()]
    return tuple(m for m in found if len(m.kinds) > 1 or any(_is_peculiar(block) for block in m.kinds))


def _is_peculiar(block: Block) -> bool:
    """Whether a block has what no column says: latent attention, norms of queries and keys or after a sublayer,
    sublayers side by side."""
    mixer = block.mixer
    if block.parallel or block.norms != "pre":
        return True
    return isinstance(mixer, LatentAttention) or (isinstance(mixer, Attention) and mixer.qk_norm)


# Models whose configurations do not state the modules that their recipes train (Megatron-Bridge qwen3_next.py, read).
_UNSTATED_MODULES = {"qwen3-next-80b-a3b": 1}


@lru_cache(maxsize=64)
def _modules(name: str) -> int:
    """How many modules of multi-token prediction the catalogue's model of a name has."""
    try:
        return load_model(name, mtp=True).mtp
    except FivefoldError:  # its configuration states none
        return _UNSTATED_MODULES.get(name, 0)


def _catalogued(run: Run) -> ModelSpec | None:
    """The catalogue's model with a row's layers, hidden size, heads and experts, and no other size than the row states,
    where columns cannot build it."""
    for model in _mixed_models():
        last = model.runs[-1].block
        attention = softmax_attention(last.mixer)
        sizes = (model.layers, model.hidden, model.vocab, _experts(model), attention.heads if attention else None)
        same = sizes == (run.layers, run.hidden, run.vocab, run.experts, run.heads)
        if same and not _contradicts(run, sizes_of(model), ("shared_experts", "tied_embeddings", "gated_mlp")):
            return model
    return None


def _built(run: Run, assumed: set[str]) -> ModelSpec:
    hidden, seq = int(run.hidden or 1), int(run.seq or 1)
    like_gpt = not _is_gated(run)
    for field in ("kv_heads", "tied_embeddings", "vocab", "heads", "gated_mlp"):
        if getattr(run, field) is None:
            assumed.add(field)
    line = framework_of(run)
    tied = bool(run.tied_embeddings) if run.tied_embeddings is not None else like_gpt
    if line.lists_ties:
        tied = "untie-embeddings" not in (run.overlap or "")
    modules = re.search(r"\bmtp=(\d{1,2})\b", run.notes or "")
    block = Block(
        mixer=_mixer(run, hidden, like_gpt, assumed),
        feed=_feed(run, hidden, like_gpt),
        norm="layernorm" if like_gpt else "rmsnorm",
        norm_bias=like_gpt,
    )
    return ModelSpec(
        name=run.model or run.id,
        family="gpt2" if like_gpt else "llama",
        hidden=hidden,
        vocab=int(run.vocab or _USUAL_VOCAB[not like_gpt]),
        max_position=seq,
        runs=(BlockRun(int(run.layers or 1), block),),
        tied_embeddings=tied,
        learned_positions=seq if like_gpt else 0,
        final_norm="layernorm" if like_gpt else "rmsnorm",
        final_norm_bias=like_gpt,
        mtp=int(modules[1]) if modules else 0,
    )


def _mixer(run: Run, hidden: int, like_gpt: bool, assumed: set[str]) -> Mixer:
    heads = run.heads or max(hidden // _USUAL_HEAD_DIM, 1)
    if "mla" in (run.arch or "").lower():
        assumed.add("latent_sizes")
        rank = _QUERY_RANK if hidden >= _QUERY_RANK_FROM else None
        return msgspec.structs.replace(_LATENT, heads=heads, q_lora_rank=rank)
    head_dim = run.head_dim or max(hidden // heads, 1)
    kv_heads = run.kv_heads or heads
    return Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, qkv_bias=like_gpt, out_bias=like_gpt, rope=not like_gpt
    )


def _feed(run: Run, hidden: int, like_gpt: bool) -> Feed:
    ffn = int(run.ffn or 4 * hidden)
    if run.experts and run.experts > 1:
        width = int(run.moe_ffn or ffn)
        return Experts(
            num_experts=run.experts,
            top_k=int(run.topk or 2),
            ffn=width,
            shared_ffn=width * (run.shared_experts or 0),
            gated=not like_gpt,
        )
    return FeedForward(ffn=ffn, gated=not like_gpt, bias=like_gpt, activation="gelu" if like_gpt else "silu")
