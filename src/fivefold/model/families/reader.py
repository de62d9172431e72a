"""Reading one family's keys out of a configuration: which keys may appear, and bounded values of them.

A Family declares every key it knows. A key outside that list stops the reading: it may change the model,
and a model that is read wrongly gives numbers that look right (a renamed key made a 671B mixture of
experts look like a 37B dense model in other tools).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import msgspec

from fivefold.errors import FivefoldError
from fivefold.model.families.rotary import read_rotary
from fivefold.model.spec import Activation, Block, BlockRun, ModelSpec

# Far above any model in existence, low enough that no product of three overflows 64 bits by accident
# and no configuration makes us build a huge list of blocks.
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_SIZE = 1 << 20
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 31
MAX_NUMBER = 1 << 40

# hidden_act / activation_function spellings of transformers' ACT2FN (transformers 5.24).
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def keys(names: str) -> frozenset[str]:
    """The keys in a text that separates them by spaces."""
    return frozenset(names.split())


# Keys of every configuration that change neither parameters nor FLOPs: bookkeeping, token ids, initialisation,
# dropout rates, generation defaults (transformers' PreTrainedConfig and GenerationConfig). quantization_config says
# how a checkpoint is stored; the precision of training is the workload's to say.
COMMON_IRRELEVANT = keys(
    """
    _name_or_path _commit_hash name_or_path model_type architectures auto_map transformers_version
    torch_dtype dtype use_cache use_return_dict return_dict output_hidden_states output_attentions
    torchscript use_bfloat16 initializer_range attention_dropout hidden_dropout
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    tokenizer_class id2label label2id num_labels problem_type finetuning_task prefix
    task_specific_params license quantization_config chunk_size_feed_forward is_decoder
    attn_implementation _attn_implementation do_sample temperature top_p top_k typical_p max_length
    min_length max_new_tokens num_beams num_beam_groups diversity_penalty length_penalty
    repetition_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size early_stopping
    num_return_sequences bad_words_ids begin_suppress_tokens suppress_tokens output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty tf_legacy_loss
    """
)

# Rotary embedding changes angles, never sizes; its elementwise work is not a matrix product. read_rotary reads these.
ROPE_KEYS = keys(
    """
    rope_theta rope_scaling rope_parameters rope_interleave partial_rotary_factor
    """
)

# Spellings of the norm's epsilon.
NORM_EPS = keys("rms_norm_eps layer_norm_epsilon")

# Keys that may be present only with a value that means "nothing of this kind".
COMMON_FIXED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
}

_REQUIRED: Any = object()


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One model_type and the keys of its config.json.

    required:   keys without which nothing is read.
    optional:   keys that are used when present; the reader holds transformers' default for each.
    fixed:      keys that may only have the listed values, because others are not modelled or ignored by transformers.
    irrelevant: known keys that change neither parameters nor FLOPs (routing rules, loss weights ...).
    rope_theta, norm_eps: the class's own defaults of the two.
    norm_eps_keys: spellings of the norms' epsilon.
    aliases:    other spellings of a key that transformers' class or older files use.
    tables:     keys that hold a table of further keys, which are then known as "table.key".
    other_architectures: names of the same model in files older than transformers' class.
    rope_share: the class's own default of the share of a head that turns.
    defaults:   the class's own values of sizes that published files of the family leave out.
    read:       makes the ModelSpec; it may touch required and optional keys, the rotary ones and the norm's epsilon.
    """

    model_type: str
    architecture: str
    other_architectures: tuple[str, ...] = ()
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    fixed: dict[str, tuple[Any, ...]] = {}
    irrelevant: frozenset[str] = frozenset()
    aliases: dict[str, str] = {}
    tables: tuple[str, ...] = ()
    rope_theta: float = 10_000.0
    rope_share: float = 1.0
    defaults: dict[str, Any] = {}
    norm_eps: float = 1e-6
    norm_eps_keys: frozenset[str] = NORM_EPS
    read: Callable[[Reader], ModelSpec]

    @property
    def known(self) -> frozenset[str]:
        return (
            self.required
            | self.optional
            | self.irrelevant
            | self.norm_eps_keys
            | frozenset(self.tables)
            | COMMON_IRRELEVANT
            | frozenset(self.all_fixed)
        )

    @property
    def all_fixed(self) -> dict[str, tuple[Any, ...]]:
        return {**COMMON_FIXED, **self.fixed}


class Reader:
    """Typed, bounded access to the keys of one configuration; every error names the file and the key."""

    def __init__(
        self,
        config: Mapping[str, Any],
        family: Family,
        name: str,
        where: str,
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        """spelled: how the file spells the keys that it gives under another name."""
        self.config = config
        self.family = family
        self.name = name
        self.where = where
        self.spelled = spelled or {}

    def error(self, key: str, problem: str, legal: Any = None) -> FivefoldError:
        value = self.config.get(key)
        key = self.spelled.get(key, key)
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return FivefoldError(
            f"{self.where}: {key} = {shown}: {problem}",
            code="bad-config-value",
            option=f"{self.where}: {key}",
            value=value,
            legal=legal,
        )

    def size(self, key: str, default: Any = _REQUIRED, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """A whole number in [low, high]. Absent or null gives the default, if there is one."""
        value = self.config.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(key, f"a whole number from {low} to {high} is required", f"{low}..{high}")
            return default
        # bool is an int in Python, and JSON's true is no size.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"must be a whole number from {low} to {high}", f"{low}..{high}")
        return value

    def optional_size(self, key: str, *, high: int = MAX_SIZE) -> int | None:
        """A whole number, or None where the key is absent or null."""
        return None if self.config.get(key) is None else self.size(key, high=high)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", [True, False])
        return value

    def activation(self, key: str, default: str) -> Activation:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(
                key, f"is not an activation that is modelled ({', '.join(ACTIVATIONS)})", list(ACTIVATIONS)
            )
        return ACTIVATIONS[value]

    def layer_numbers(self, key: str, layers: int) -> frozenset[int]:
        """A list of block numbers, empty where the key is absent or null."""
        value = self.config.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or len(value) > layers:
            raise self.error(key, "must be a list of block numbers")
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < layers for n in value):
            raise self.error(key, f"every block number must be from 0 to {layers - 1}", f"0..{layers - 1}")
        return frozenset(value)

    def norm_eps(self) -> float:
        """What the norms add to the variance; the class's default where the file does not say."""
        for key in sorted(self.family.norm_eps_keys & self.config.keys()):
            value = self.config[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
                raise self.error(key, "must be a number between 0 and 1", "0..1")
            return float(value)
        return self.family.norm_eps

    def layers(self, key: str = "num_hidden_layers") -> int:
        return self.size(key, high=MAX_LAYERS)

    def sliding_window(self, default: int | None) -> int | None:
        """Window in tokens; null says full attention, an absent key takes the class's default."""
        if "sliding_window" not in self.config:
            return default
        return self.optional_size("sliding_window", high=MAX_POSITIONS)

    def layer_types(self, key: str, layers: int, legal: tuple[str, ...], default: Callable[[int], str]) -> list[str]:
        """The kind of each block: one of `legal` for each, or default(block number) where the key is absent or null."""
        given = self.config.get(key)
        if given is None:
            return [default(i) for i in range(layers)]
        if not isinstance(given, list) or len(given) != layers or not all(kind in legal for kind in given):
            raise self.error(key, f"must name one of {', '.join(legal)} for each of {layers} blocks", list(legal))
        return given

    def number(self, key: str) -> float | None:
        """A number of any sign up to MAX_NUMBER, None where the key is absent or null."""
        value = self.config.get(key)
        if value is not None and not is_number(value):
            raise self.error(key, "must be a number or null")
        return value

    def model(
        self,
        blocks: Iterable[Block],
        *,
        hidden: str = "hidden_size",
        positions: str = "max_position_embeddings",
        default_positions: Any = _REQUIRED,
        tied: bool = False,
        **fields: Any,
    ) -> ModelSpec:
        """The ModelSpec from the keys that families spell alike.

        hidden, positions: the family's keys of the two. default_positions: the class's own, where it has one.
        tied: whether embeddings are tied where the file does not say. fields: of ModelSpec, which win.
        """
        max_position = self.size(positions, default_positions, high=MAX_POSITIONS)
        common = {
            "name": self.name,
            "family": self.family.model_type,
            "hidden": self.size(hidden),
            "vocab": self.size("vocab_size", high=MAX_VOCAB),
            "max_position": max_position,
            "norm_eps": self.norm_eps(),
            "runs": runs(blocks),
            "source": self.where,
        }
        if "tied_embeddings" not in fields:
            common["tied_embeddings"] = self.flag("tie_word_embeddings", tied)
        if "rotary" not in fields:
            common["rotary"] = read_rotary(self, self.family.rope_theta, max_position, self.family.rope_share)
        return ModelSpec(**common | fields)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def runs(blocks: Iterable[Block]) -> tuple[BlockRun, ...]:
    """Run-length coding of consecutive equal blocks."""
    return tuple(BlockRun(sum(1 for _ in same), block) for block, same in groupby(blocks))
