"""How frameworks are written: other spellings of the names in frameworks/, and the ZeRO stage that a name states."""

from __future__ import annotations

import re

# Who publishes or ports a framework, before its name.
_VENDORS = re.compile(
    r"^(nvidia|amd|rocm|microsoft|intel|habana|ascend|aws|eleutherai|mosaicml|databricks|meta|ai2|allenai|vanilla|plain"
    r"|native|hpcai(tech)?|alibaba|stanford)[\s/_-]+(?=\w)",
    re.IGNORECASE,
)
# (pattern in a name, the name whose line of frameworks/ it means), in the order in which they count. What runs the
# step decides: a trainer over DeepSpeed is DeepSpeed.
_SPELLINGS: tuple[tuple[str, str], ...] = tuple(
    (rf"(?i){pattern}", name)
    for pattern, name in (
        (r"torch-?titan|simple-?fsdp", "torchtitan"),
        (r"automodel|torch-?tune|\blingua\b|fsdp-?2(?![+\d])|\bprime\b|opendiloco|veomni|vescale", "fsdp2"),
        (r"megatron.{0,8}fsdp", "fsdp of megatron"),
        (r"metaseq", "metaseq"),
        (r"neuron|nxd|trainium", "nxd"),
        (r"primus", "primus"),
        (r"megatron.*deep-?speed|deep-?speed.*megatron", "megatron-deepspeed"),
        (r"megatron.?bridge|\bnemo\b.*bridge", "megatron-bridge"),
        (r"\bnemo\b", "nemo"),
        (r"megatron-?lm ci\b", "megatron-lm ci"),
        (r"mlperf.*nvidia|nvidia.*mlperf", "nemo"),  # its submissions are NeMo's recipes (from memory)
        (r"^megatron[- ]?core|\bmcore\b", "megatron-core"),
        (r"megatron|mindspeed|modellink|megascale|flagscale", "megatron"),
        (r"gpt-?neox|\bneox\b", "gpt-neox"),
        (r"\bfsdp-?1?\b(?![+-]?\d).*\bzero", "fsdp"),  # whose stages others name by ZeRO's
        (r"deep-?speed|\bzero(-?[123]|\+\+|-infinity|-offload| stage)|ulysses|bmtrain", "deepspeed"),
        (r"max-?text", "maxtext"),
        (r"\bpax|praxis", "paxml"),
        (r"ax-?learn", "axlearn"),
        (r"levanter", "levanter"),
        (r"easy-?lm", "easylm"),
        (r"\bxla\b|jax|flax|pathways|t5x|haiku|mesh[- ]?t(ensor|f)|gspmd", "jax"),
        (r"colossal", "colossal"),
        (r"foundry|composer|mosaic", "llm-foundry"),
        (r"nanotron|picotron", "nanotron"),
        (r"olmo-?core|open-?lm", "fsdp2"),
        (r"\bolmo\b", "olmo"),
        (r"hybrid_shard|\bhsdp\b|fsdp|fair-?scale|fully.?shard", "fsdp"),
        (
            r"^hf\b|hugging ?face|transformers|\btrl\b|llama-?factory|axolotl|unsloth|accelerate|\bswift\b"
            r"|open_?instruct|optimum|\bverl\b|openrlhf|\bpeft\b|xtuner|lm-?flow|fast-?chat|bitsandbytes|h2o-?gpt"
            r"|llama-?(?:recipes|cookbook)|alpaca",
            "hf ",
        ),
        (r"lit-?(?:gpt|llama)|lightning", "litgpt"),
        (r"\bddp\b|data ?parallel|nano-?(?:gpt|chat)|llm\.c|horovod|byteps", "ddp"),
        (r"pytorch|\btorch\b|fairseq", "pytorch"),
    )
)
_STAGES: tuple[tuple[str, int], ...] = (
    (r"(?i)\bzero[-_ ]?(?:stage|dp)?[-_ ]?([0-3])\b", -1),
    (r"(?i)zero-?infinity|zero\+\+|gemini|hybrid_shard|full_shard|\bhsdp\b", 3),
    (r"(?i)zero-?offload|shard_grad_op", 2),
    (r"(?i)no_shard|\bddp\b", 0),
)


# What trainers around Hugging Face's models run a step by, where their rows' notes name it.
_BACKENDS: tuple[tuple[str, str], ...] = (
    (r"(?i)deep-?speed|\bzero[-_ ]?(stage[-_ ]?)?[123]\b", "deepspeed"),
    (r"(?i)fsdp-?2|fsdp_version\W{1,3}2|fully_shard", "fsdp2"),
    (r"(?i)fsdp", "hf "),
    (r"(?i)\bddp\b|distributed ?data ?parallel", "ddp"),
)
# The same of what no line of frameworks/ names.
_OTHERS_BACKENDS: tuple[tuple[str, str], ...] = (
    (r"(?i)deep-?speed", "deepspeed"),
    (r"(?i)megatron[- ]fsdp", "fsdp of megatron"),
    (r"(?i)megatron", "megatron"),
    (r"(?i)fsdp-?2|fully_shard", "fsdp2"),
    (r"(?i)fsdp", "fsdp"),
    (r"(?i)\bddp\b", "ddp"),
)
_COMPARED = re.compile(r"(?i)(?:compared|versus|\bvs\b|\bthan\b|unlike|\bbaseline)[^;]*")
# (pattern in notes, the stage that it states, -1: the one that it numbers), the first that is found counts.
_STAGES_IN_NOTES: tuple[tuple[str, int], ...] = (
    (r"(?i)\bzero[-_ ]?(?:stage|dp)?[-_ ]?([0-3])(?!\d)", -1),
    (r"(?i)\b(?:sharding|zero|deepspeed)[- ]stage[-_ ]?([1-3])\b", -1),
    (r"(?i)\b(?:no|without) dist(?:ributed)?[-_ ]optim\w*|dist\w*[-_ ]optim\w*\W{1,3}(?:false|off|0)\b", 0),
    (r"(?i)\bdist(?:ributed)?[-_ ]optim", 1),
    (r"(?i)(?:megatron|custom|torch)[-_ ]fsdp2?(?!\W{1,2}(?:false|0)\b)|\bfsdp ?= ?[1-9]", 3),
)


def without_comparison(notes: str) -> str:
    """`notes` without what they compare a run with."""
    return _COMPARED.sub(" ", notes)


def usual_name(framework: str, notes: str = "") -> str:
    """The name in lower case, as a line of frameworks/ starts, where `framework` is another spelling of it; of what
    `notes` name where it is a trainer that leaves the step to others."""
    name = framework.strip()
    bare = _VENDORS.sub("", name)
    usual = next((usual for pattern, usual in _SPELLINGS if re.search(pattern, bare)), bare.lower())
    if usual != "hf ":
        return usual
    said = without_comparison(notes)
    return next((backend for pattern, backend in _BACKENDS if re.search(pattern, said)), usual)


def backend_of(notes: str) -> str:
    """The name of what runs a step by a row's notes, where its framework is one that no line names; "" without."""
    said = without_comparison(notes)
    return next((backend for pattern, backend in _OTHERS_BACKENDS if re.search(pattern, said)), "")


def stage_in_notes(notes: str) -> int | None:
    """The ZeRO stage that a row's notes or options state in any framework's words."""
    said = without_comparison(notes)
    for pattern, stage in _STAGES_IN_NOTES:
        found = re.search(pattern, said)
        if found:
            return stage if stage >= 0 else int(found[1])
    return None


def zero_in_name(framework: str) -> int | None:
    """The ZeRO stage that a framework's name states ("DeepSpeed ZeRO-2"), None where it states none."""
    for pattern, stage in _STAGES:
        found = re.search(pattern, framework)
        if found:
            return stage if stage >= 0 else int(found[1])
    return None


def zero_in_notes(notes: str) -> int | None:
    """The ZeRO stage that notes state: not where they name other replicas only, which a run is compared with."""
    return zero_in_name(re.sub(r"(?i)\bddp\b|\bgemini\b", " ", notes))
