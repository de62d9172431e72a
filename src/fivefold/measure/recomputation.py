"""What a row says of recomputation: its kind, and how many blocks."""

from __future__ import annotations

import re

from fivefold.measure.runs import Run
from fivefold.measure.words import denied

# Patterns in lower-case text, the first that is found counts.
_SHORT = re.compile(r"\b(?:act|activation|grad|gradient)s?[._ -]{0,2}(?:ck?pt|chkpt)(?:ing)?\b")
_AGAIN = r"(?:(?:gradient|activation)[ _-])?(?:checkpoint|re-?comput)"
# "None set in recipe override" says nothing.
_RECOMPUTATION: tuple[tuple[str, str], ...] = (
    (
        r"^(none|no|off|false|0|disabled|without|n|unused|not (used|needed))( ac)?( ?\([^()]*\))?$|\bac off$"
        r"|^(remat|recompute)\w*\W{1,3}(none|false|off)",
        "none",
    ),
    (
        r"selective|core[_ -]?attn|core attention|\bsac\b|--recompute-activations|\b(per-)?op(-level| ac)?\b",
        "selective",
    ),
    # Policies of JAX that keep products; "full" keeps nothing.
    (r"\bminimal|\bsave_\w+|dots?_\w*saveable|memory[_ ]budget", "selective"),
    (
        r"^(full|on|yes|y|true|1|uniform|block|enabled|unsloth)\b|(gradient|activation)[ _-](re-?comput|checkpoint)",
        "full",
    ),
    (r"checkpoint-activations|(recompute|checkpoint)\w*[-_ ]granularity\W{1,3}full|nothing_saveable", "full"),
    (
        r"^(ac|gc|remat|ckpt|checkpoint(ing)?)(\W{1,3}(on|full|all|true|1))?$|recompute[_-]num[_-]layers\W{1,3}[1-9]",
        "full",
    ),
    (r"^(remat|recompute)\w*\W{1,3}(full|true|on|yes)\b|^(per|full)[ -]layer\b|^layer[ -]?wise", "full"),
    (r"\b(layernorm|norm|mla_up_proj|moe_act|swiglu|mlp|moe|shared_experts|attn|attention)\b", "selective"),
)
# Whole blocks, some of them.
_ORDINALS = {"other": 2, "second": 2, "third": 3, "fourth": 4}
_EVERY = re.compile(
    rf"\bevery (?:({'|'.join(_ORDINALS)})|(\d{{1,2}})(?:st|nd|rd|th)?) (?:transformer )?(?:layer|block)s?\b"
)
_SHARE = re.compile(r"\b(\d{1,3}) ?(?:of|/) ?(?:the )?(\d{1,3}) (?:layers|blocks)\b|\b(\d)/(\d)(?: of|$)")
_PERCENT = re.compile(r"\b(\d{1,2}) ?% of (?:all |the )?(?:layers|blocks)\b")
_COUNT = re.compile(
    r"block num_layers=(\d{1,5})\b|\bblock\b[^;]{0,30}?\b(\d{1,5}) (?:transformer )?layers\b"
    r"|recompute[_-]num[_-]layers\W{1,3}(\d{1,5})\b"
    r"|^(?:full|first|partial(?:ly)?|recomput\w*|checkpoint\w*)?\W{0,3}(\d{1,3}) (?:layers|blocks)\b"
)
# How notes say it, each a phrase of its own.
_WHAT = r"(?:checkpoint|re-?comput)\w*"
_IN_NOTES = re.compile(
    rf"(?:(?:no|without|w/o|full|selective|per-?op|op-level) (?:ac|sac|(?:(?:gradient|activation) )?{_WHAT})"
    rf"|remat(?:_policy)?[ =:]{{1,3}}(?:full|none|off|nothing_saveable)"
    rf"|(?:gradient|activation)[ _]{_WHAT}|sac|--recompute-activations)(?:[ =:]{{1,2}}(?:on|true|enabled|used|full))?"
)


def recompute_kind(run: Run) -> str:
    """The kind of recomputation: of its column, else of its text; "unknown" where neither says."""
    if run.recompute_kind not in (None, "unknown"):
        return run.recompute_kind
    text = _recomputation(run)
    if _blocks_in_words(text, 1) is not None:
        return "full"
    no = denied(_AGAIN).search(text)
    if no is None:
        return _kind_in_words(text)
    before = text[: no.start()].rstrip()  # "selective, no full recomputation"
    kind = _kind_in_words(before[:-1]) if before.endswith((",", ";")) else "unknown"
    return kind if kind != "unknown" else "none"


def _recomputation(run: Run) -> str:
    """A row's words on recomputation: of its column, else a phrase of its notes that says nothing else."""
    text = (run.recompute or "").strip().lower()
    if text:
        return _SHORT.sub("activation checkpoint", text)
    phrases = (_SHORT.sub("activation checkpoint", one).strip() for one in re.split("[;,+]", (run.notes or "").lower()))
    return next((one for one in phrases if _IN_NOTES.fullmatch(one)), "")


def blocks_recomputed(run: Run, blocks: int) -> int | None:
    """How many of a pipeline rank's `blocks` a row recomputes whole, None where it does not say that some are."""
    return _blocks_in_words(_recomputation(run), blocks)


def _blocks_in_words(text: str, blocks: int) -> int | None:
    every, share, percent, count = (pattern.search(text) for pattern in (_EVERY, _SHARE, _PERCENT, _COUNT))
    if every:
        return max(blocks // (_ORDINALS.get(every[1] or "") or max(int(every[2]), 1)), 1)
    if share:
        some, all_of_them = (int(number) for number in share.groups() if number)
        return max(round(blocks * some / all_of_them), 1) if 0 < some < all_of_them else None
    if percent:
        return max(round(blocks * int(percent[1]) / 100), 1)
    if count and "uniform" not in text:
        return next(int(number) for number in count.groups() if number) or None
    return None


def _kind_in_words(text: str) -> str:
    return next((kind for pattern, kind in _RECOMPUTATION if re.search(pattern, text)), "unknown")
