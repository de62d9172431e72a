"""What rows say in words rather than in columns of a closed vocabulary: precision, recomputation, how shards lie."""

from __future__ import annotations

import re

from fivefold.layout.workload import Offload
from fivefold.measure.frameworks.profiles import EXCHANGES_HEADS
from fivefold.measure.runs import Run
from fivefold.runtime import load_runtime

# Patterns in lower-case text, the first that is found counts.
_PRECISIONS: tuple[tuple[str, str], ...] = (
    (r"mx-?fp8|fp-?8[-_ ]?mx|\bmx\b", "mxfp8"),
    (r"\bnf-?4|\bbnb|q-?lora", "bf16"),  # 4-bit weights, of which a product is made in 16
    (r"nv-?fp4|\bfp4|4-bit", "nvfp4"),
    (r"fp-?8|float8|e4m3|e5m2", "fp8"),
    (r"bf-?16|bfloat", "bf16"),
    (r"fp-?16|float16|\bhalf\b|16-mixed|\bamp o[12]\b|\bapex\b", "fp16"),
    (r"fp-?32|float32|\btf-?32|\bsingle\b", "fp32"),
)
_AGAIN = r"(?:(?:gradient|activation)[ _-])?(?:checkpoint|re-?comput)"
# "None set in recipe override" says nothing.
_RECOMPUTATION: tuple[tuple[str, str], ...] = (
    (
        r"^(none|no|off|false|0|disabled|without)( ac)?( ?\([^()]*\))?$|\bac off$"
        r"|^(remat|recompute)\w*\W{1,3}(none|false|off)",
        "none",
    ),
    (
        r"selective|core[_ -]?attn|core attention|\bsac\b|--recompute-activations|\b(per-)?op(-level| ac)?\b",
        "selective",
    ),
    # Policies of JAX that keep products; "full" keeps nothing.
    (r"\bminimal|\bsave_\w+|dots?_\w*saveable", "selective"),
    (r"^(full|on|yes|true|1|uniform|block|enabled)\b|(gradient|activation)[ _-](re-?comput|checkpoint)", "full"),
    (r"checkpoint-activations|(recompute|checkpoint)\w*[-_ ]granularity\W{1,3}full|nothing_saveable", "full"),
    (r"^(ac|gc|remat|act ckpt|checkpoint(ing)?)$|^(remat|recompute)\w*\W{1,3}(full|true|on|yes)\b", "full"),
    (r"\b(layernorm|norm|mla_up_proj|moe_act|swiglu|mlp|moe|shared_experts)\b", "selective"),
)
_DENIED = (
    r"\b(?:no|not|non|without|w/o)[ -](?:\w+[ -])?(?:{0})\w*"
    r"|(?:{0})\w{{0,40}}(?: is| are)?[ =:]{{1,3}}(?:(?:off|disabled|false|none)\b|no$)"
)


def denied(what: str) -> re.Pattern[str]:
    """Matches lower-case text that says that the pattern `what` is not so: "without X", "no such X", "X=False"."""
    return re.compile(_DENIED.format(what))


def precision_in_words(text: str) -> str | None:
    """The precision that `text` names, None where it names none."""
    lower = text.strip().lower()
    found = ((kind, pattern) for pattern, kind in _PRECISIONS if re.search(pattern, lower))
    return next((kind for kind, pattern in found if not denied(pattern).search(lower)), None)


def recompute_kind(run: Run) -> str:
    """The kind of recomputation: of its column, else of its text; "unknown" where neither says."""
    if run.recompute_kind not in (None, "unknown"):
        return run.recompute_kind
    text = (run.recompute or "").strip().lower()
    no = denied(_AGAIN).search(text)
    if no is None:
        return _kind_in_words(text)
    before = text[: no.start()].rstrip()  # "selective, no full recomputation"
    kind = _kind_in_words(before[:-1]) if before.endswith((",", ";")) else "unknown"
    return kind if kind != "unknown" else "none"


def _kind_in_words(text: str) -> str:
    return next((kind for pattern, kind in _RECOMPUTATION if re.search(pattern, text)), "unknown")


def trains_adapters(run: Run) -> bool:
    """Whether a row trains adapters beside a frozen model."""
    return bool(re.search(r"\bq?-?lora\b", f"{run.model} {run.notes}", re.IGNORECASE))


def holds_4_bits(run: Run) -> bool:
    """Whether the frozen model under a row's adapters is held in 4 bits (Dettmers et al. 2023)."""
    return bool(re.search(r"\bq-?lora\b|\bnf4\b|\b4-?bit\b", f"{run.model} {run.notes} {run.precision}", re.IGNORECASE))


def is_finetuned(run: Run) -> bool:
    """Whether a row goes on training a model, on documents that are shorter than its sequences."""
    return trains_adapters(run) or bool(re.search(r"\b(sft|fine-?tun)", f"{run.model} {run.notes}", re.IGNORECASE))


# What the host's memory holds by a framework's name and notes. Disks, which ZeRO-Infinity may use too, are not
# modelled; activations that are offloaded are left where they are: they move beside compute.
_OFFLOADED: dict[str, re.Pattern[str]] = {
    "optimizer": re.compile(
        r"zero-?(offload|infinity)|optimi[sz]er[^;.]{0,30}offload(?!\w*=false)|offload_optimizer"
        r"|(?<!act )(?<!activation )cpu offload(?!=)"
    ),
    "parameters": re.compile(r"zero-?infinity|offload_param|parameters?[^;.]{0,20}offload"),
}


def offloaded(run: Run) -> Offload:
    """What a row keeps in host memory."""
    words = f"{run.framework}; {run.notes}".lower()
    words = denied(r"[\w ]{0,20}offload").sub(" ", words)
    return Offload(**{part: float(bool(pattern.search(words))) for part, pattern in _OFFLOADED.items()})


def is_ulysses(run: Run, runtime: str) -> bool:
    """Whether context parallelism exchanges heads."""
    words = f"{run.framework} {run.notes} {run.overlap} {run.attention}".lower()
    # Experts exchange tokens by an "a2a" too.
    return bool(re.search(r"\bcp\w*\W{1,3}a2a\b|ulysses", words)) or runtime in EXCHANGES_HEADS


# Experts and heads lie in groups too.
_GROUPS = re.compile(
    r"\b(\d{1,6}) (?:replica|replicate|hsdp|dp) groups\b"
    r"|\b(\d{1,6}) groups of \d{1,6}\b(?! (?:\w{1,20} )?(?:experts?|heads?|layers?|blocks?|tokens?)\b)",
    re.IGNORECASE,
)
_SHARDS = re.compile(
    r"\b(?:dp_shard|(?:shard|sharding)[_ ](?:degree|size|group(?:[_ ]size)?))\D{0,3}(\d{1,6})\b", re.IGNORECASE
)


def shard_groups(run: Run, zero: int, runtime: str, nodes: tuple[int, ...] = (1,)) -> tuple[int, ...]:
    """Of hybrid sharding, how many groups hold all parameters: as stated ("dp_replicate=4", "(FSDP=128"), else for each
    number of `nodes` that one may span; 1 where the runtime or the row has none, or where they do not divide the ranks.
    """
    words = f"{run.framework} {run.notes} {run.overlap}"
    if zero < 2 or load_runtime(runtime).sharding != "fully_sharded":
        return (1,)
    ranks = (run.gpus or 1) // ((run.tp or 1) * (run.pp or 1))
    stated = re.search(r"dp_replicate\D{0,3}(\d{1,6})\b", words)
    if stated:
        groups = int(stated[1])
        return (groups if groups and ranks % groups == 0 else 1,)
    counted = _GROUPS.search(words)
    groups = int(counted[1] or counted[2]) if counted else 0
    if groups and ranks % groups == 0:
        return (groups,)
    shards = re.search(r"\(FSDP=(\d{1,6})\b", run.notes or "") or _SHARDS.search(words)
    if shards is None and not re.search(r"\bhsdp\b|hybrid[_ -]shard|\bfsdp ?\+ ?dp\b", words, re.IGNORECASE):
        return (1,)
    one_node = max((run.gpus_per_node or 8) // (run.tp or 1), 1)
    widths = [int(shards[1])] if shards else [one_node * number for number in nodes]
    return tuple(dict.fromkeys(ranks // inside if inside and ranks % inside == 0 else 1 for inside in widths))
