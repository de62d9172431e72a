"""The workload of a question: sequences, batch, precision, and the options of a step, from flags and a plan file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from msgspec.structs import replace

from fivefold.cli.flags import WorkFlags
from fivefold.cli.values import (
    documents_of,
    names,
    offload_of,
    positive,
    whole,
    word,
)
from fivefold.cluster import Cluster
from fivefold.errors import FivefoldError, option_of
from fivefold.estimate.planfile import SavedPlan
from fivefold.layout import Layout, Lora, RampUp, Workload, parse_count
from fivefold.layout.batch import global_batch_from_tokens
from fivefold.layout.workload import LORA_TARGETS, Optimizer, Precision
from fivefold.model import ModelSpec

# The published models of the catalogue were pre-trained on sequences of 2K to 8K tokens, whatever they extend to later.
LONGEST_DEFAULT_SEQ = 8192
# The low end of what large pre-training runs use (Llama 1: about 4M tokens per batch).
DEFAULT_TOKENS_PER_BATCH = 4 * 1024 * 1024
# A batch asked for in tokens may move so far to a number of sequences that more layouts divide.
_BATCH_TOLERANCE = 0.02


# Fields of the workload that go without saying, and what makes each of its flag's value.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "moe_imbalance": positive,
    "tokens": lambda option, text: parse_count(text, option),
    "price": positive,
    "moe_dispatcher": lambda option, text: word(option, text, ("alltoall", "deepep")),
    "cuda_graphs": lambda _, on: on,
    "dropout": lambda _, on: on,
    "offload": offload_of,
}


def workload_of(
    flags: WorkFlags,
    saved: SavedPlan | None,
    model: ModelSpec,
    cluster: Cluster,
    layout: Layout | None,
    ramp: RampUp | None,
    defaults: dict[str, str],
) -> Workload:
    base = saved.workload if saved else None
    seq = _seq_len(flags, base, model, defaults)
    words = {"precision": get_args(Precision), "optimizer": get_args(Optimizer), "grad_dtype": ("fp32", "bf16")}
    chosen: dict[str, Any] = {}
    for name, legal in words.items():
        value = getattr(flags, name)
        if value is not None:
            chosen[name] = word(option_of(name), value, legal)
        elif base is None:
            defaults[option_of(name)] = legal[0]
    for name, read in _READERS.items():
        value = getattr(flags, name)
        if value is not None:
            chosen[name] = read(option_of(name), value)
    if flags.document_length is not None:
        chosen |= documents_of("--document-length", flags.document_length)
    chosen |= _reliability(flags, base)
    _reliability_defaults(flags, base, defaults)
    chosen |= _adapters(flags, base)
    batch = _global_batch(flags, base, seq, cluster.gpus, layout, ramp, defaults)
    work = replace(base or Workload(seq_len=seq, global_batch=batch), seq_len=seq, global_batch=batch, **chosen)
    if work.price is not None and work.tokens is None:
        raise FivefoldError(
            "--price needs --tokens, the token budget whose cost is asked for, for example --tokens 1.4T.",
            code="missing-option",
            option="--tokens",
        )
    return work


def _reliability(flags: WorkFlags, base: Workload | None) -> dict[str, float]:
    """How often GPUs fail and what that costs, in the workload's units; only a token budget has a use for it."""
    out: dict[str, float] = {}
    for option, value, name, unit in (
        ("--gpu-mtbf-hours", flags.gpu_mtbf_hours, "gpu_mtbf_hours", 1),
        ("--checkpoint-gb-per-s", flags.checkpoint_gb_per_s, "checkpoint_bytes_per_s", 1e9),
        ("--restart-minutes", flags.restart_minutes, "restart_s", 60),
    ):
        if value is None:
            continue
        if flags.tokens is None and (base is None or base.tokens is None):
            raise FivefoldError(
                f"{option} needs --tokens, the token budget whose wall-clock time is asked for, for example "
                "--tokens 1.4T.",
                code="missing-option",
                option="--tokens",
            )
        out[name] = (positive(option, value) or 0.0) * unit
    return out


def _reliability_defaults(flags: WorkFlags, base: Workload | None, defaults: dict[str, str]) -> None:
    """Writes down what a token budget takes for granted of failures; the budget's answer has the values in SI units."""
    if flags.tokens is None and (base is None or base.tokens is None):
        return
    for option, name, field, taken in (
        ("--gpu-mtbf-hours", "gpu_mtbf_hours", "gpu_mtbf_hours", "50000"),
        ("--checkpoint-gb-per-s", "checkpoint_gb_per_s", "checkpoint_bytes_per_s", "1 per node"),
        ("--restart-minutes", "restart_minutes", "restart_s", "10"),
    ):
        if getattr(flags, name) is None and (base is None or getattr(base, field) is None):
            defaults[option] = taken


def _adapters(flags: WorkFlags, base: Workload | None) -> dict[str, Any]:
    """LoRA's fields of the workload."""
    known = base.lora if base else None
    if flags.lora_rank is None and known is None:
        for option, value in (("--lora-targets", flags.lora_targets), ("--base-precision", flags.base_precision)):
            if value is not None and value != "compute":
                raise FivefoldError(
                    f"{option} needs --lora-rank, the rank of the adapters that are trained, for example 16.",
                    code="missing-option",
                    option="--lora-rank",
                )
        return {}
    targets = known.targets if known else LORA_TARGETS
    if flags.lora_targets is not None:
        text = ",".join(LORA_TARGETS) if flags.lora_targets == "all" else flags.lora_targets
        chosen = [word("--lora-targets", name, LORA_TARGETS) for name in names("--lora-targets", text)]
        targets = tuple(name for name in LORA_TARGETS if name in chosen)
    rank = flags.lora_rank if flags.lora_rank is not None else known.rank if known else 0
    out: dict[str, Any] = {"trained": "adapters", "lora": Lora(rank=rank, targets=targets)}
    if flags.base_precision is not None:
        out["base_precision"] = word("--base-precision", flags.base_precision, ("compute", "nf4"))
    return out


def _seq_len(flags: WorkFlags, base: Workload | None, model: ModelSpec, defaults: dict[str, str]) -> int:
    if flags.seq_len is not None:
        return whole("--seq-len", flags.seq_len)
    if base is not None:
        return base.seq_len
    seq = min(model.max_position, LONGEST_DEFAULT_SEQ)
    why = "the model's longest" if seq == model.max_position else f"as {model.name} takes up to {model.max_position:,}"
    defaults["--seq-len"] = f"{seq}, {why}"
    return seq


def _global_batch(
    flags: WorkFlags,
    base: Workload | None,
    seq: int,
    gpus: int,
    layout: Layout | None,
    ramp: RampUp | None,
    defaults: dict[str, str],
) -> int:
    """Sequences per step, from whichever flag gives them."""
    if flags.global_batch is not None and flags.tokens_per_batch is not None:
        raise FivefoldError(
            "--global-batch and --tokens-per-batch both give the batch; give one of them.",
            code="contradiction",
            option="--tokens-per-batch",
            value=flags.tokens_per_batch[:60],
        )
    if flags.global_batch is not None:
        return whole("--global-batch", flags.global_batch)
    unit = layout_unit(layout, gpus) if layout is not None else None
    if flags.tokens_per_batch is not None:
        return _batch_of_tokens(parse_count(flags.tokens_per_batch, "--tokens-per-batch"), seq, gpus, unit, defaults)
    if ramp is not None:
        defaults["--global-batch"] = f"{ramp.end}, the end of --ramp"
        return ramp.end
    if base is not None:
        return base.global_batch
    wanted = max(DEFAULT_TOKENS_PER_BATCH // seq, 1)
    unit = unit or _searched_unit(gpus, wanted)
    batch = round_up(wanted, unit)
    defaults["--global-batch"] = f"{batch} sequences, {batch * seq / 1e6:.1f}M tokens, a multiple of {unit}"
    return batch


def round_up(value: int, unit: int) -> int:
    return max(-(-value // unit), 1) * unit


def layout_unit(layout: Layout, gpus: int) -> int | None:
    """Sequences by which the batch of one layout can change; None where its degrees do not divide the GPUs, so that
    there is no number of replicas."""
    replica = max(layout.tp * layout.cp * layout.pp, 1)
    if gpus % replica:
        return None
    interleaved = layout.vpp > 1 and layout.schedule in (None, "interleaved")
    return max(layout.micro_batch * (gpus // replica) * (layout.pp if interleaved else 1), 1)


def _searched_unit(gpus: int, wanted: int) -> int:
    """The GPUs, so that any layout divides; halved while they are more than the batch that is wanted."""
    unit = gpus
    while unit > wanted and unit % 2 == 0:
        unit //= 2
    return unit


def _batch_of_tokens(tokens: int, seq: int, gpus: int, unit: int | None, defaults: dict[str, str]) -> int:
    """The nearest batch that the layout, or else the GPUs divide, and near it one that many layouts divide."""
    if unit is None:
        unit = _searched_unit(gpus, max(tokens // seq, 1))
        batch = global_batch_from_tokens(tokens, seq, unit)
        while abs(global_batch_from_tokens(tokens, seq, unit * 2) * seq / tokens - 1) <= _BATCH_TOLERANCE:
            unit *= 2
    batch = global_batch_from_tokens(tokens, seq, unit)
    defaults["--global-batch"] = (
        f"{batch} sequences, {batch * seq / tokens - 1:+.1%} of {tokens:,} tokens, a multiple of {unit}"
    )
    return batch
