"""What rows say in words rather than in columns of a closed vocabulary: precision, recomputation, how shards lie."""

from __future__ import annotations

import re

from fivefold.layout.workload import Offload, Optimizer
from fivefold.measure.frameworks.profiles import EXCHANGES_HEADS
from fivefold.measure.runs import Run
from fivefold.runtime import load_runtime

# Patterns in lower-case text, the first that is found counts.
_PRECISIONS: tuple[tuple[str, str], ...] = (
    (r"mx-?fp8|fp-?8[-_ ]?mx|\bmx\b", "mxfp8"),
    (r"\bnf-?4|\bbnb|q-?lora", "bf16"),  # 4-bit weights, of which a product is made in 16
    (r"(?:nv|mx)-?fp4|\bfp4|4-bit", "nvfp4"),
    (r"fp-?8|float8|e4m3|e5m2", "fp8"),
    (r"bf-?16|bfloat", "bf16"),
    (r"fp-?16|float16|\bhalf\b|16-mixed|\bamp o[12]\b|\bapex\b", "fp16"),
    (r"\btf-?32", "tf32"),
    (r"fp-?32|float32|\bsingle\b|\b32-true", "fp32"),
)
# What is sent or kept in 8 bits beside products in 16.
_SENT = re.compile(
    r"\b(?:fp-?8|float8|8-?bit)[- _]"
    r"(?:dispatch|combine|a2a|all-?to-?all|all-?gather|communication|comm|adamw?|optim\w*)\b"
)
_DENIED = (
    r"\b(?:no|not|non|without|w/o)[ -](?:\w+[ -])?(?:{0})\w*"
    r"|(?:{0})\w{{0,40}}(?: is| are)?[ =:]{{1,3}}(?:(?:off|disabled|false|none)\b|no$)"
)


def denied(what: str) -> re.Pattern[str]:
    """Matches lower-case text that says that the pattern `what` is not so: "without X", "no such X", "X=False"."""
    return re.compile(_DENIED.format(what))


def said(what: str, text: str) -> bool:
    """Whether `text` says the pattern `what`, and not that it is not so."""
    lower = text.lower()
    return bool(re.search(what, lower)) and not denied(what).search(lower)


def precision_in_words(text: str) -> str | None:
    """The precision that `text` names, None where it names none."""
    lower = text.strip().lower()
    lower = _SENT.sub(" ", lower) if re.search(r"bf-?16|fp-?16", lower) else lower
    found = ((kind, pattern) for pattern, kind in _PRECISIONS if re.search(pattern, lower))
    return next((kind for kind, pattern in found if not denied(pattern).search(lower)), None)


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
# modelled; activations that are offloaded are left where they are: they move beside compute. A table's columns are
# written as "'Opt Offl': 'Y'".
_STAGE = r"(?<![a-z])z(?:ero)?[-_ ]?(?:stage[-_ ]?)?"
_OFFLOADED: dict[str, re.Pattern[str]] = {
    "optimizer": re.compile(
        r"zero-?(offload|infinity)|optimi[sz]er[^;.]{0,30}offload(?!\w*=false)|offload_optimizer"
        rf"|{_STAGE}[23][-_ +]{{1,3}}offload(?!\w*[=:])|nvme offload|'opt offl': 'y'"
        r"|(?<!act )(?<!activation )cpu offload(?!=)"
    ),
    "parameters": re.compile(
        r"zero-?infinity|offload_param|parameters?[^;.]{0,20}offload|offload[^;.]{0,24}\bparam"
        rf"|{_STAGE}3[-_ +]{{1,3}}offload(?! ?\(opt\w*\))(?!\w*[=:])|'par offl': 'y'"
        r"|^[^;]*(?:fsdp|torchtune)[^;]*;.*(?<!act )(?<!activation )cpu offload(?!=)"  # CPUOffload moves parameters
    ),
}


def offloaded(run: Run) -> Offload:
    """What a row keeps in host memory."""
    words = f"{run.framework}; {run.notes}".lower()
    words = denied(r"[\w ]{0,20}offload").sub(" ", words)
    return Offload(**{part: float(bool(pattern.search(words))) for part, pattern in _OFFLOADED.items()})


def is_ulysses(run: Run, runtime: str) -> bool:
    """Whether context parallelism exchanges heads."""
    words = f"{run.framework} {run.notes} {run.overlap} {run.attention}".lower()
    # Experts exchange tokens by an "a2a" too. VeOmni and verl have no other (from memory).
    if re.search(r"\bcp\w*\W{1,3}a2a\b|ulysses|veomni|\bverl\b", words):
        return True
    return runtime in EXCHANGES_HEADS and not re.search(r"\bring[-_ ](?:flash|att)", words)


_OPTIMIZERS: tuple[tuple[str, Optimizer], ...] = (
    (r"\bmuon", "muon"),
    (r"\badafactor\b", "adafactor"),
    (r"\b8-?bit adam|\badamw?[-_ ]?(?:bnb[-_ ])?8-?bit|\bpaged_?adamw?_?8", "adamw8bit"),
    (r"\bsgd\b", "sgd"),
)


def optimizer_of(run: Run, runtime: str, assumed: set[str]) -> Optimizer:
    """The optimizer that a row names, AdamW where it names none or one that its profile lacks."""
    words = f"{run.framework or ''}; {run.notes or ''}; {run.precision or ''}"
    named: list[Optimizer] = [name for pattern, name in _OPTIMIZERS if said(pattern, words)]
    if named and named[0] in load_runtime(runtime).optimizers:
        return named[0]
    if named:
        assumed.add("optimizer")
    return "adamw"


# Experts and heads lie in groups too.
_GROUPS = re.compile(
    r"\b(\d{1,6}) (?:replica|replicate|hsdp|dp) groups\b"
    r"|\b(\d{1,6}) groups of \d{1,6}\b(?! (?:\w{1,20} )?(?:experts?|heads?|layers?|blocks?|tokens?)\b)",
    re.IGNORECASE,
)
_SHARDS = re.compile(
    r"\b(?:dp_shard|(?:shard|sharding)[_ ](?:degree|size|group(?:[_ ]size)?))\D{0,3}(\d{1,6})\b"
    r"|\b(?:data_parallel_shard_degree|ici_fsdp(?:_parallelism)?)\W{1,3}(\d{1,6})\b"
    r"|\bhsdp\b.{0,12}\bshard(?:ed)?(?: over| across)? (\d{1,6})\b(?! nodes)",
    re.IGNORECASE,
)
_REPLICAS = re.compile(
    r"\b(?:dp_replicate|data_parallel_replicate_degree)\D{0,3}(\d{1,6})\b"
    r"|\bdcn_(?:data_parallelism|data|dp)\W{1,3}(\d{1,6})\b|\bdata ?= ?(\d{1,6})\W{1,3}fsdp\b"
    r"|\bhsdp\b.{0,40}\b(\d{1,6}) replicas\b|\bhsdp\b.{0,40}\breplicate[d=: ]{1,3}(\d{1,6})\b",
    re.IGNORECASE,
)
_NODES_AT_MOST = tuple(2**power for power in range(8))
_NODES_EACH = re.compile(r"\b(\d{1,5}) nodes? (?:per|a|each) shard", re.IGNORECASE)


def shard_groups(run: Run, zero: int, runtime: str, nodes: tuple[int, ...] = (1,)) -> tuple[int, ...]:
    """Of hybrid sharding, how many groups hold all parameters: as stated ("dp_replicate=4", "(FSDP=128"), else for each
    number of `nodes` that one may span; 1 where the runtime or the row has none, or where they do not divide the ranks.
    """
    words = f"{run.framework} {run.notes} {run.overlap}"
    ranks = (run.gpus or 1) // ((run.tp or 1) * (run.pp or 1))
    whole = load_runtime(runtime).sharding == "fully_sharded"
    if whole and zero == 0:  # replicas: every rank is a group of its own
        return (max(ranks // (run.cp or 1), 1),)
    if zero < 2 or not whole:
        return (1,)
    stated = _REPLICAS.search(words)
    if stated:
        groups = _number_of(stated)
        return (groups if groups and ranks % groups == 0 else 1,)
    counted = _GROUPS.search(words)
    groups = int(counted[1] or counted[2]) if counted else 0
    if groups and ranks % groups == 0:
        return (groups,)
    shards = re.search(r"\(FSDP=(\d{1,6})\b", run.notes or "") or _SHARDS.search(words)
    if shards is None and not re.search(r"\bhsdp\b|hybrid[_ -]shard|\bfsdp ?\+ ?dp\b", words, re.IGNORECASE):
        return (1,)
    one_node = max((run.gpus_per_node or 8) // (run.tp or 1), 1)
    spanned = _NODES_EACH.search(words)
    if spanned:
        nodes = (int(spanned[1]),)
    elif nodes == (1,):  # a node is the default, which who does not fit into it changes
        nodes = _NODES_AT_MOST
    widths = [_number_of(shards)] if shards else [one_node * number for number in nodes]
    return tuple(dict.fromkeys(ranks // inside if inside and ranks % inside == 0 else 1 for inside in widths))


def _number_of(found: re.Match[str]) -> int:
    """The number in whichever group of a pattern was found."""
    return next(int(number) for number in found.groups() if number)
