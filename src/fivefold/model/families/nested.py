"""Models that read images too: their config.json holds the language model's configuration in a table of its own.

Only the language model is read; the tower for images, a few hundred million parameters, and the projection between
the two are not counted, and the model says so among its peculiarities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fivefold.errors import FivefoldError
from fivefold.model.families.reader import COMMON_IRRELEVANT, keys

TEXT = "text_config"
IMAGES = "images, whose tower is not counted"
# The tower's own configuration, and the numbers of the tokens that stand for images and video.
_BESIDE = keys(
    """
    vision_config audio_config image_token_id image_token_index video_token_id vision_start_token_id
    vision_end_token_id boi_token_id boi_token_index eoi_token_id eoi_token_index mm_tokens_per_image
    """
)


class Nested(msgspec.Struct, frozen=True, kw_only=True):
    """A model_type whose language model is another, text, under text_config; architecture: of the two together."""

    model_type: str
    architecture: str
    text: str


NESTED = {
    each.model_type: each
    for each in (
        Nested(model_type="gemma3", architecture="Gemma3ForConditionalGeneration", text="gemma3_text"),
        Nested(model_type="llama4", architecture="Llama4ForConditionalGeneration", text="llama4_text"),
        Nested(model_type="qwen3_5", architecture="Qwen3_5ForConditionalGeneration", text="qwen3_5_text"),
        Nested(model_type="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration", text="qwen3_5_moe_text"),
    )
}


def text_config(raw: Mapping[str, Any], nested: Nested, where: str) -> dict[str, Any]:
    """The language model's configuration, with the keys that transformers lets the outer one decide.

    Raises FivefoldError for another architecture, an unknown outer key or a text_config of another kind.
    """
    inner = raw.get(TEXT)
    if not isinstance(inner, dict) or inner.get("model_type", nested.text) != nested.text:
        raise _error(where, TEXT, inner, f"must be a table with model_type {nested.text}", [nested.text])
    if not all(isinstance(key, str) for key in inner):
        raise _error(where, TEXT, inner, "every key must be a string")
    given = raw.get("architectures")
    if given is not None and given != [nested.architecture]:
        raise _error(where, "architectures", given, f"must be [{nested.architecture}]", [nested.architecture])
    known = _BESIDE | COMMON_IRRELEVANT | {TEXT, "tie_word_embeddings"}
    for key in raw:
        if key not in known:
            raise _error(
                where, key, raw[key], f"is unknown for {nested.model_type}", sorted(known), "unknown-config-key"
            )
    tied = raw.get("tie_word_embeddings")
    if tied is not None and inner.get("tie_word_embeddings", tied) != tied:
        raise _error(where, "tie_word_embeddings", tied, f"contradicts that of {TEXT}")
    outer = {} if tied is None else {"tie_word_embeddings": tied}
    return outer | inner | {"model_type": nested.text, "architectures": None}


def _error(
    where: str, key: str, value: Any, problem: str, legal: Any = None, code: str = "bad-config-value"
) -> FivefoldError:
    return FivefoldError(
        f"{where}: {key[:80]} = {str(value)[:60]}: {problem}",
        code=code,
        option=f"{where}: {key[:80]}",
        value=value,
        legal=legal,
    )
