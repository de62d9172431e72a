"""What times of operations follow from: the constants of one GPU (``data/compute.toml``), or a user's own."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, get_args

import msgspec

from fivefold.cluster.mistakes import legal_keys
from fivefold.errors import FivefoldError

Kind = Literal["fwd", "dgrad", "wgrad"]
Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "tf32", "fp32"]
Operation = Literal["gemm", "grouped", "attention", "streaming"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Ranges that any real GPU is far inside of; they keep hostile or mistyped files out.
Fraction = Annotated[float, msgspec.Meta(gt=0, le=2)]  # of a datasheet peak, which clocks can pass
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Size = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1)]
Table = Annotated[tuple[Fraction, ...], msgspec.Meta(min_length=1, max_length=64)]


class AttentionRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One flash-attention kernel on one GPU.

    head_dims: query/key head sizes at which the efficiencies are given; linear between, constant outside.
    forward, backward: fraction of the dense peak reached by a long sequence that fills the GPU, at each head size, with
        FLOPs counted over the unmasked pairs only (causal: half) and five products in backward (2.5 x forward).
    seq_half_forward, seq_half_backward: sequence length at which the rate has fallen to half of that.
    tail_forward, tail_backward: idle time at the end of the kernel, in units of one multiprocessor's time for one block
        of 128 query rows (of a causal sequence, on average): what few heads or a short batch cost.
    """

    head_dims: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=64)]
    forward: Table
    backward: Table
    seq_half_forward: Size
    seq_half_backward: Size
    tail_forward: Size
    tail_backward: Size
    source: str

    def __post_init__(self) -> None:
        if not len(self.head_dims) == len(self.forward) == len(self.backward):
            raise ValueError("head_dims, forward and backward need the same number of entries")
        if list(self.head_dims) != sorted(set(self.head_dims)):
            raise ValueError("head_dims must increase")


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constants of one GPU.

    efficiency: fraction of the dense peak inside a full wave, per kind of product: fwd (TN), dgrad (NN), wgrad (NT).
    precision: factor on that fraction per operand precision; a precision that is absent is refused.
    tile: output tile of one multiprocessor, either way round.
    depth_ramp: a tile's prologue and epilogue, in elements of k.
    wave_share: how much of a last, partly filled wave is waited for (1: all of it, as one kernel alone; 0: none).
    split_depth: k beyond which one tile's work is split over several multiprocessors when tiles are few.
    memory_efficiency: fraction of memory bandwidth that matrix products reach. memory_exposed: part of the shorter of
        arithmetic and memory traffic that the longer does not hide.
    launch_s: start and drain of a kernel, seconds. group_launch_s: each further group of a grouped product, seconds.
    streaming_efficiency: fraction of memory bandwidth for elementwise operations, norms and optimizer updates.
    attention: kernels by name; attention_kernel: the one that current training stacks pick on this GPU.
    in_step: seconds of the ledger's operations inside a training step over the same kernels timed alone: sustained
        clocks, cold caches and the small kernels that a ledger leaves out. 1 where no training run was fitted.
    spread: relative standard deviation of measured around predicted seconds, per operation (gemm, grouped, attention,
        streaming): 80% of the fitted points lie within 1.28 spread. source: where the numbers come from.
    in_runs: whether published training runs on this very GPU bear its level out: 20 or more, whose mean error is within
        the runtimes' spread (docs/accuracy.md, by GPU). A GPU does not inherit it from its base.
    """

    efficiency: dict[Kind, Fraction]
    precision: dict[Precision, Fraction]
    tile: tuple[Annotated[int, msgspec.Meta(ge=1, le=4096)], Annotated[int, msgspec.Meta(ge=1, le=4096)]]
    depth_ramp: Size
    wave_share: Share
    split_depth: Annotated[float, msgspec.Meta(ge=1, le=1e9)]
    memory_efficiency: Fraction
    memory_exposed: Share
    launch_s: Seconds
    group_launch_s: Seconds
    streaming_efficiency: Fraction
    attention: dict[str, AttentionRates]
    attention_kernel: str
    spread: dict[Operation, Share]
    source: str
    in_step: Annotated[float, msgspec.Meta(ge=0.5, le=3)] = 1.0
    in_runs: bool = False

    def __post_init__(self) -> None:
        for table, keys in (
            (self.efficiency, KINDS),
            (self.spread, get_args(Operation)),
        ):
            missing = [key for key in keys if key not in table]
            if missing:
                raise ValueError(f"efficiency or spread lacks {', '.join(missing)}")
        if self.attention_kernel not in self.attention:
            raise ValueError(f"attention_kernel '{self.attention_kernel}' is not in attention")


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """compute.toml with ``base`` references resolved; ``lacks``: attention kernels of the base that a GPU has not."""
    text = resources.files("fivefold.cluster").joinpath("data/compute.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = {}
    for name, table in tomllib.loads(text).items():
        base, lacks, own_runs = table.pop("base", None), table.pop("lacks", ()), table.pop("in_runs", False)
        table = merged(tables[base], table) if base else table
        kernels = {kernel: rates for kernel, rates in table["attention"].items() if kernel not in lacks}
        tables[name] = {**table, "attention": kernels, "in_runs": own_runs}
    return tables


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `change` replaced, table by table."""
    both = dict(base)
    for key, value in change.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def curves() -> tuple[str, ...]:
    """Names of the GPUs that have a curve."""
    return tuple(_tables())


@cache
def load_curve(gpu_name: str) -> Curve:
    """The constants of a GPU by its catalogue name. Raises FivefoldError for a GPU without a curve."""
    return override_curve(gpu_name, {})


def override_curve(gpu_name: str, changes: dict[str, Any], option: str = "[compute]") -> Curve:
    """The constants of a GPU with some of them replaced, as a cluster file's compute table does.

    changes: keys of Curve; nested tables are merged key by key, so ``{"efficiency": {"fwd": 0.8}}`` keeps the others.
    Raises FivefoldError, naming the key, for an unknown GPU, an unknown key or an impossible value.
    """
    tables = _tables()
    if gpu_name not in tables:
        raise FivefoldError(
            f"No compute curve for the GPU '{gpu_name}'. Name the GPU after the measured one that is nearest to it and "
            "replace the constants that differ.",
            code="unknown-gpu",
            option="gpu",
            value=gpu_name,
            legal=curves(),
        )
    try:
        _refuse_nan(changes)
        return msgspec.convert(merged(tables[gpu_name], changes), Curve)
    except (msgspec.ValidationError, ValueError) as error:
        raise FivefoldError(
            f"{option} for {gpu_name}: {error}.{legal_keys(str(error), Curve)} fivefold gpus --json shows each GPU's.",
            code="bad-compute-constant",
            option=option,
            value=changes,
            legal=Curve.__struct_fields__,
        ) from None


def _refuse_nan(value: Any) -> None:
    """NaN passes every range check."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("nan is not a number")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _refuse_nan(item)
