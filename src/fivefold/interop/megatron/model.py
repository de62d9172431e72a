"""The model that a launch trains: a ModelSpec from the architecture's options and Megatron-LM's defaults.

Defaults and derived sizes: Megatron-LM megatron/training/arguments.py and its core_transformer_config_from_args, read
at 000c4ac24f. Vocabulary sizes of named tokenizers are those of the published models, and marked as assumed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fivefold.interop.megatron.given import Given
from fivefold.model.families.reader import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, MAX_VOCAB, runs
from fivefold.model.spec import (
    Activation,
    Attention,
    Block,
    Experts,
    Feed,
    FeedForward,
    LatentAttention,
    Mixer,
    ModelSpec,
    Rotary,
)

# Tokenizers whose vocabulary is known without opening them: --tokenizer-type, then parts of --tokenizer-model's name.
_TYPES: dict[str, int] = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_MODELS: tuple[tuple[str, int], ...] = (
    ("llama-?3", 128256),
    ("llama-?2|llama-?7b|llama-?13b|tinyllama|mixtral|mistral-7b-v0.1", 32000),
    ("mistral-7b-v0.3", 32768),
    ("qwen-?2\\.?5-(?:0\\.5|1\\.5|3)b|qwen-?3", 151936),
    ("qwen-?2\\.?5", 152064),
    ("deepseek-v3|deepseek-r1|deepseek-ai/deepseek-v3", 129280),
    ("gpt-?2", 50257),
)
_LAYER_LIST = re.compile(r"\s*(?:(\[[\d,\s]*\])|(\()|(\))|(\+)|\*\s*(\d{1,4}))")


@dataclass(slots=True)
class ModelParts:
    """What building the model also finds out. assumed: (option, value, where it comes from). notes: sentences."""

    spec: ModelSpec | None = None
    assumed: list[tuple[str, object, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    silent: list[tuple[str, str]] = field(default_factory=list)


def build_model(given: Given, name: str) -> ModelParts:
    """The model of a launch, None in `spec` where something is missing; `given.missing` then says what."""
    parts = ModelParts()
    why = "the model's size follows from it"
    layers = given.integer("--num-layers", needed=why)
    hidden = given.integer("--hidden-size", needed=why)
    heads = given.integer("--num-attention-heads", needed=why)
    vocab = _vocab(given, parts)
    if given.flag("--use-checkpoint-args"):
        _explain_checkpoint(given)
    if layers is None or hidden is None or heads is None or vocab is None:
        return parts
    for option, value, most in (
        ("--num-layers", layers, MAX_LAYERS),
        ("--hidden-size", hidden, MAX_SIZE),
        ("--num-attention-heads", heads, MAX_SIZE),
        ("--vocab-size", vocab, MAX_VOCAB),
    ):
        if value > most:
            given.missing[option] = f"{option} {value:,} is beyond the {most:,} that fivefold reads"
    mixer = _mixer(given, parts, hidden, heads)
    blocks = _blocks(given, mixer, layers, hidden)
    if given.missing or blocks is None or mixer is None:
        return parts
    parts.spec = _spec(given, name, hidden, vocab, blocks)
    return parts


def _explain_checkpoint(given: Given) -> None:
    for option in ("--num-layers", "--hidden-size", "--num-attention-heads"):
        if option in given.missing and option not in given:
            place = given.place("--use-checkpoint-args")
            given.missing[option] = (
                f"{option} is taken from a checkpoint (--use-checkpoint-args, {place}), not read here"
            )


def _spec(given: Given, name: str, hidden: int, vocab: int, blocks: list[Block]) -> ModelSpec:
    positions = given.integer("--max-position-embeddings")
    seq = given.integer("--seq-length") or 1
    kind = given.word("--position-embedding-type")
    learned = kind == "learned_absolute" and not given.flag("--use-rotary-position-embeddings")
    layernorm = blocks[-1].norm == "layernorm"
    return ModelSpec(
        name=name,
        family="megatron",
        hidden=hidden,
        vocab=vocab,
        max_position=positions or seq,
        runs=runs(blocks),
        tied_embeddings=not given.flag("--untie-embeddings-and-output-weights"),
        learned_positions=(positions or seq) if learned else 0,
        final_norm="layernorm" if layernorm else "rmsnorm",
        final_norm_bias=layernorm,
        rotary=Rotary(theta=given.number("--rotary-base") or 10_000.0, share=given.number("--rotary-percent") or 1.0),
        norm_eps=given.number("--norm-epsilon") or 1e-5,
        mtp=given.integer("--mtp-num-layers", low=0) or 0,
        source=str(given.state.file),
    )


# ---------------------------------------------------------------- attention


def _mixer(given: Given, parts: ModelParts, hidden: int, heads: int) -> Mixer | None:
    bias = not given.flag("--disable-bias-linear")
    if given.flag("--multi-latent-attention"):
        return LatentAttention(
            heads=heads,
            q_lora_rank=given.integer("--q-lora-rank"),
            kv_lora_rank=given.integer("--kv-lora-rank") or 32,
            qk_nope_head_dim=given.integer("--qk-head-dim") or 128,
            qk_rope_head_dim=given.integer("--qk-pos-emb-head-dim") or 64,
            v_head_dim=given.integer("--v-head-dim") or 128,
            bias=bias,
        )
    head_dim = given.integer("--kv-channels")
    if head_dim is None and hidden % heads:
        given.missing["--kv-channels"] = (
            f"--kv-channels is not given and {heads} heads do not divide the hidden size {hidden}, which Megatron-LM "
            "refuses"
        )
        return None
    rope = given.word("--position-embedding-type") != "learned_absolute" or given.flag(
        "--use-rotary-position-embeddings"
    )
    return Attention(
        heads=heads,
        kv_heads=_kv_heads(given, parts, heads),
        head_dim=head_dim or hidden // heads,
        qkv_bias=bias or given.flag("--add-qkv-bias"),
        out_bias=bias,
        qk_norm=given.flag("--qk-layernorm"),
        rope=rope,
    )


def _kv_heads(given: Given, parts: ModelParts, heads: int) -> int:
    groups = given.integer("--num-query-groups") or 1
    if given.flag("--group-query-attention"):
        return groups
    if "--num-query-groups" in given and groups != heads:
        parts.silent.append(
            (
                "--num-query-groups",
                f"--num-query-groups {groups} is ignored without --group-query-attention: it trains {heads} key/value "
                "heads.",
            )
        )
    return heads


# ---------------------------------------------------------------- blocks


def _blocks(given: Given, mixer: Mixer | None, layers: int, hidden: int) -> list[Block] | None:
    """One block per layer; at most MAX_LAYERS."""
    if mixer is None or layers > MAX_LAYERS:
        return None
    layernorm = given.word("--normalization") == "LayerNorm"
    ffn = given.integer("--ffn-hidden-size") or _default_ffn(given, hidden)
    dense = _dense(given, ffn)
    experts = given.integer("--num-experts", low=0) or 0
    sparse = _experts(given, experts, ffn) if experts else None
    pattern = _moe_pattern(given, layers) if experts else [0] * layers
    windows = _windows(given, layers)
    if pattern is None or windows is None:
        return None

    def block(at: int) -> Block:
        feed: Feed = sparse if sparse is not None and pattern[at] else dense
        mixed = mixer
        if windows[at] is not None and isinstance(mixer, Attention):
            mixed = Attention(**{name: getattr(mixer, name) for name in _ATTENTION}, window=windows[at])
        return Block(mixer=mixed, feed=feed, norm="layernorm" if layernorm else "rmsnorm", norm_bias=layernorm)

    return [block(at) for at in range(layers)]


_ATTENTION = ("heads", "kv_heads", "head_dim", "qkv_bias", "out_bias", "qk_norm", "rope")


def _default_ffn(given: Given, hidden: int) -> int:
    """4 x hidden; under --swiglu two thirds of it, cut to a multiple of 64."""
    return max(int(4 * hidden * 2 / 3) // 64 * 64, 64) if given.flag("--swiglu") else 4 * hidden


def _gate(given: Given) -> tuple[bool, Activation]:
    if given.flag("--swiglu"):
        return True, "silu"
    if given.flag("--quick-geglu"):
        return True, "gelu"
    return False, "relu2" if given.flag("--squared-relu") else "gelu"


def _dense(given: Given, ffn: int) -> FeedForward:
    gated, activation = _gate(given)
    bias = not given.flag("--disable-bias-linear")
    return FeedForward(ffn=ffn, gated=gated, bias=bias, activation=activation)


def _experts(given: Given, experts: int, ffn: int) -> Experts | None:
    gated, activation = _gate(given)
    if experts > MAX_EXPERTS:
        given.missing["--num-experts"] = f"--num-experts {experts:,} is beyond the {MAX_EXPERTS:,} that fivefold reads"
        return None
    return Experts(
        num_experts=experts,
        top_k=min(given.integer("--moe-router-topk") or 2, experts),
        ffn=given.integer("--moe-ffn-hidden-size") or ffn,
        shared_ffn=given.integer("--moe-shared-expert-intermediate-size", low=0) or 0,
        gated=gated,
        activation=activation,
        bias=not given.flag("--disable-bias-linear"),
    )


def _moe_pattern(given: Given, layers: int) -> list[int] | None:
    """1 for each layer with experts. A number N: layers 0, N, 2N, ... (Megatron-Core get_gpt_decoder_block_spec)."""
    text = given.text("--moe-layer-freq") or "1"
    if re.fullmatch(r"[1-9]\d{0,3}", text):
        return [int(at % int(text) == 0) for at in range(layers)]
    return _listed(given, "--moe-layer-freq", text, layers)


def _windows(given: Given, layers: int) -> Sequence[int | None] | None:
    """Tokens that each layer attends to; None for all of them."""
    text = given.text("--window-size")
    if text is None:
        return [None] * layers
    numbers = re.findall(r"-?\d{1,9}", text)
    if len(numbers) != 2 or int(numbers[0]) < 0:
        given.missing["--window-size"] = f"--window-size {text[:40]!r} is not LEFT,0 with LEFT of 0 or more"
        return None
    window = int(numbers[0]) + 1  # Transformer Engine counts the tokens to the left, without the token itself
    skip = given.text("--window-attn-skip-freq")
    if skip is None:
        return [window] * layers
    if re.fullmatch(r"[1-9]\d{0,3}", skip):
        return [None if (at + 1) % int(skip) == 0 else window for at in range(layers)]
    pattern = _listed(given, "--window-attn-skip-freq", skip, layers)
    return None if pattern is None else [window if on else None for on in pattern]


def _listed(given: Given, option: str, text: str, layers: int) -> list[int] | None:
    pattern = layer_pattern(text, layers)
    if pattern is None or len(pattern) != layers:
        given.missing[option] = (
            f"{option} {text[:60]!r} is neither a number nor a list of {layers} zeros and ones such as "
            f"'([0]*1+[1]*{max(layers - 1, 1)})'"
        )
        return None
    return pattern


def layer_pattern(text: str, most: int) -> list[int] | None:
    """A Python list expression of [..], +, * and parentheses, such as ([0]*3+[1]*58); None for anything else, or for
    more than `most` items. Read by hand: nothing is evaluated."""
    stack: list[list[int]] = [[]]
    last: list[list[int]] = [[]]
    at = 0
    text = text.strip()
    while at < len(text) and len(text) <= 4 * MAX_LAYERS:
        found = _LAYER_LIST.match(text, at)
        if found is None or len(stack) > 20:
            return None
        at = found.end()
        if found[1]:
            stack[-1] += last[-1]
            last[-1] = [int(number) for number in re.findall(r"\d{1,6}", found[1])]
        elif found[2]:
            stack[-1] += last[-1]
            last[-1] = []
            stack.append([])
            last.append([])
        elif found[3]:
            if len(stack) == 1:
                return None
            inner = stack.pop() + last.pop()
            last[-1] = inner
        elif found[5]:
            last[-1] = last[-1] * int(found[5])
        if len(last[-1]) > most or len(stack[-1]) > most:
            return None
    return stack[0] + last[0] if len(stack) == 1 and at == len(text) and text else None


# ---------------------------------------------------------------- vocabulary


def _vocab(given: Given, parts: ModelParts) -> int | None:
    """Rows of the embedding before padding."""
    padded = given.integer("--padded-vocab-size")
    if padded is not None:
        return padded
    kind = given.text("--tokenizer-type") if "--tokenizer-type" in given else None
    stated = given.integer("--vocab-size") if "--vocab-size" in given else None
    extra = given.integer("--vocab-extra-ids", low=0) or 0
    if stated is not None:
        # NullTokenizer adds an end-of-document token (Megatron-LM megatron/training/tokenizer, from memory).
        return stated + extra + (kind == "NullTokenizer")
    if kind in _TYPES:
        parts.assumed.append(("--vocab-size", _TYPES[kind], f"the vocabulary that {kind} is published with"))
        return _TYPES[kind] + extra
    model = (given.text("--tokenizer-model") or "").lower() if "--tokenizer-model" in given else ""
    given.missing.pop("--tokenizer-model", None)
    for pattern, size in _MODELS:
        if model and re.search(pattern, model):
            parts.assumed.append(("--vocab-size", size, f"the published vocabulary of {model[-60:]}"))
            return size + extra
    if kind is None and "--vocab-file" in given:
        parts.assumed.append(("--vocab-size", 50257, "a vocabulary file without a tokenizer type: GPT-2's"))
        return 50257 + extra
    given.missing["--vocab-size"] = (
        "--vocab-size is not given, and the tokenizer is only opened when it runs; give its size"
    )
    return None


def padded_vocab(vocab: int, multiple: int, tp: int) -> int:
    """Rows of the embedding in Megatron-LM: up to a multiple of make-vocab-size-divisible-by x tp."""
    unit = multiple * tp
    return -(-vocab // unit) * unit
