"""Columns: many layouts at once, as one struct of equal-length numpy arrays.

A search holds a million layouts here and one estimate holds a single row; both run the same code. Words are
stored as codes (their index in CP_KINDS, SCHEDULES, RECOMPUTE_KINDS, RECOMPUTE_MODULES of layout.py).
Nothing is checked here: degrees that do not divide give floored quotients, which the rules then refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import FivefoldError, option_of
from fivefold.layout.layout import CP_KINDS, RECOMPUTE_KINDS, RECOMPUTE_MODULES, SCHEDULES, Layout, Overlap, Recompute
from fivefold.layout.workload import Workload

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

EVEN = 0  # first_stage_layers, last_stage_layers: no count asked for
ALL_LAYERS = -1  # recompute_layers: every block of the rank
CORE_ATTENTION_MASK = 1 << RECOMPUTE_MODULES.index("core_attn")
_LARGEST = 2**31  # far beyond any degree; keeps a mistyped number out of int64 overflow
_SELECTIVE = RECOMPUTE_KINDS.index("selective")


@dataclass(slots=True, frozen=True)
class Columns:
    """One entry per layout, all arrays of shape [n]; int64, or bool for sp, overlap_* and account_*.

    dp = world // (tp·cp·pp), edp = world // (etp·ep·pp), dp_shard·dp_replicate = dp·cp (zero 0: dp_shard 1).
    num_micro_batches = global_batch // (micro_batch·dp).
    cp_kind, schedule, recompute_kind: index into CP_KINDS, SCHEDULES, RECOMPUTE_KINDS.
    recompute_layers: blocks per pipeline rank, -1 for all. recompute_modules: bit i is RECOMPUTE_MODULES[i].
    first_stage_layers, last_stage_layers: blocks, 0 for an even split.
    Arrays may be read-only views of a scalar; replace one rather than writing into it.
    """

    tp: Ints
    cp: Ints
    cp_kind: Ints
    pp: Ints
    vpp: Ints
    ep: Ints
    etp: Ints
    dp: Ints
    edp: Ints
    dp_shard: Ints
    dp_replicate: Ints
    zero: Ints
    sp: Bools
    micro_batch: Ints
    num_micro_batches: Ints
    schedule: Ints
    recompute_kind: Ints
    recompute_layers: Ints
    recompute_modules: Ints
    first_stage_layers: Ints
    last_stage_layers: Ints
    account_for_embedding: Bools
    account_for_loss: Bools
    overlap_grad: Bools
    overlap_param: Bools
    overlap_tp: Bools
    overlap_ep: Bools

    def __len__(self) -> int:
        return len(self.tp)

    @classmethod
    def build(
        cls,
        world: int,
        work: Workload,
        *,
        tp: ArrayLike = 1,
        cp: ArrayLike = 1,
        cp_kind: ArrayLike = 0,
        pp: ArrayLike = 1,
        vpp: ArrayLike = 1,
        ep: ArrayLike = 1,
        etp: ArrayLike = 1,
        dp_replicate: ArrayLike = 1,
        zero: ArrayLike = 1,
        sp: ArrayLike | None = None,
        micro_batch: ArrayLike = 1,
        schedule: ArrayLike | None = None,
        recompute_kind: ArrayLike = 0,
        recompute_layers: ArrayLike = ALL_LAYERS,
        recompute_modules: ArrayLike = 0,
        first_stage_layers: ArrayLike = EVEN,
        last_stage_layers: ArrayLike = EVEN,
        account_for_embedding: ArrayLike = False,
        account_for_loss: ArrayLike = False,
        overlap_grad: ArrayLike = True,
        overlap_param: ArrayLike | None = None,
        overlap_tp: ArrayLike = False,
        overlap_ep: ArrayLike = False,
    ) -> Columns:
        """Columns from arrays and scalars that broadcast to one shape [n]; None takes Layout's default.

        world: number of GPUs. A selective recompute that names no module recomputes the attention core.
        """
        tp, cp, pp, vpp = _int(tp), _int(cp), _int(pp), _int(vpp)
        ep, etp, zero, mbs = _int(ep), _int(etp), _int(zero), _int(micro_batch)
        kind, modules = _int(recompute_kind), _int(recompute_modules)
        grad = _bool(overlap_grad)
        asked_replicas = _int(dp_replicate)

        dp = world // np.maximum(tp * cp * pp, 1)
        edp = world // np.maximum(etp * ep * pp, 1)
        sharding_ranks = dp * cp
        unsharded = zero == 0
        replicas = np.where(unsharded & (asked_replicas == 1), np.maximum(sharding_ranks, 1), asked_replicas)
        shard = np.where(unsharded, 1, sharding_ranks // np.maximum(asked_replicas, 1))
        columns = {
            "tp": tp,
            "cp": cp,
            "cp_kind": _int(cp_kind),
            "pp": pp,
            "vpp": vpp,
            "ep": ep,
            "etp": etp,
            "dp": dp,
            "edp": edp,
            "dp_shard": shard,
            "dp_replicate": replicas,
            "zero": zero,
            "sp": tp > 1 if sp is None else _bool(sp),
            "micro_batch": mbs,
            "num_micro_batches": work.global_batch // np.maximum(mbs * dp, 1),
            "schedule": default_schedule(vpp) if schedule is None else _int(schedule),
            "recompute_kind": kind,
            "recompute_layers": _int(recompute_layers),
            "recompute_modules": np.where((kind == _SELECTIVE) & (modules == 0), CORE_ATTENTION_MASK, modules),
            "first_stage_layers": _int(first_stage_layers),
            "last_stage_layers": _int(last_stage_layers),
            "account_for_embedding": _bool(account_for_embedding),
            "account_for_loss": _bool(account_for_loss),
            "overlap_grad": grad,
            "overlap_param": (zero >= 1) & grad if overlap_param is None else _bool(overlap_param),
            "overlap_tp": _bool(overlap_tp),
            "overlap_ep": _bool(overlap_ep),
        }
        shape = np.broadcast_shapes((1,), *(array.shape for array in columns.values()))
        if len(shape) != 1:
            raise FivefoldError(f"Columns are one-dimensional, not of shape {shape}. Flatten the arrays first.")
        return cls(**{name: np.broadcast_to(array, shape) for name, array in columns.items()})

    @classmethod
    def from_layouts(cls, layouts: Sequence[Layout], world: int, work: Workload) -> Columns:
        """One row per layout. Raises FivefoldError for a word that is not in the closed set of its field."""
        if not layouts:
            return cls.build(world, work).take(np.arange(0))
        raw = [_row_values(layout) for layout in layouts]
        return cls.build(world, work, **{name: _gathered(name, [values[name] for values in raw]) for name in raw[0]})

    def row(self, i: int) -> Layout:
        """Row i as a Layout with its defaults written out; from_layouts of it gives the same row again."""
        value = {name: getattr(self, name)[i].item() for name in COLUMN_NAMES}
        ddp = value["zero"] == 0 and value["dp_replicate"] == max(value["dp"] * value["cp"], 1)
        mask = value["recompute_modules"]
        layers = value["recompute_layers"]
        return Layout(
            tp=value["tp"],
            cp=value["cp"],
            cp_kind=CP_KINDS[value["cp_kind"]],
            pp=value["pp"],
            vpp=value["vpp"],
            ep=value["ep"],
            etp=value["etp"],
            dp_replicate=1 if ddp else value["dp_replicate"],
            zero=value["zero"],
            sequence_parallel=value["sp"],
            micro_batch=value["micro_batch"],
            schedule=SCHEDULES[value["schedule"]],
            recompute=Recompute(
                kind=RECOMPUTE_KINDS[value["recompute_kind"]],
                layers=None if layers == ALL_LAYERS else layers,
                modules=modules_of(mask),
            ),
            overlap=Overlap(
                grad=value["overlap_grad"],
                param=value["overlap_param"],
                tp=value["overlap_tp"],
                ep=value["overlap_ep"],
            ),
            first_stage_layers=_decoded_count(value["first_stage_layers"]),
            last_stage_layers=_decoded_count(value["last_stage_layers"]),
            account_for_embedding=value["account_for_embedding"],
            account_for_loss=value["account_for_loss"],
        )

    def take(self, index: ArrayLike) -> Columns:
        """The rows that an integer or boolean index selects, in its order."""
        index = np.asarray(index)
        return Columns(**{name: getattr(self, name)[index] for name in COLUMN_NAMES})


_1F1B, _INTERLEAVED = SCHEDULES.index("1f1b"), SCHEDULES.index("interleaved")


def default_schedule(vpp: Ints) -> Ints:
    """Codes of the schedules that go without saying: interleaved where there are several chunks, else 1F1B."""
    return np.where(vpp > 1, _INTERLEAVED, _1F1B)


COLUMN_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Columns))
DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp_replicate", "micro_batch")  # 1 where not used
SWITCHES: tuple[str, ...] = tuple(field.name for field in fields(Columns) if field.type == "Bools")  # on or off


def modules_of(mask: int) -> tuple[Any, ...]:
    """Names of the recomputed modules in a recompute_modules mask."""
    return tuple(name for bit, name in enumerate(RECOMPUTE_MODULES) if mask >> bit & 1)


def mask_of(modules: Iterable[str]) -> int:
    """The recompute_modules mask of some module names; FivefoldError for an unknown one."""
    return sum(1 << _code(RECOMPUTE_MODULES, name, "--recompute-modules") for name in set(modules))


def _int(value: ArrayLike) -> Ints:
    return np.asarray(value, dtype=np.int64)


def _bool(value: ArrayLike) -> Bools:
    return np.asarray(value, dtype=np.bool_)


def _code(words: Sequence[str], word: str, option: str) -> int:
    try:
        return words.index(word)
    except ValueError:
        raise FivefoldError(
            f"{option} {word} is not known. Legal: {', '.join(words)}.",
            code="unknown-value",
            option=option,
            value=word,
            legal=list(words),
        ) from None


def _gathered(name: str, values: list[int | bool]) -> NDArray[Any]:
    large = max(abs(value) for value in values)
    if large > _LARGEST:
        option = option_of(name)
        raise FivefoldError(
            f"{option} {large} is too large to be meant.", code="bad-degree", option=option, value=large
        )
    return np.array(values)


def _encoded_count(count: int | None) -> int:
    """None to 0 (even); a count below one to -1, so that an asked-for zero is refused and not read as "even"."""
    if count is None:
        return EVEN
    return count if count > 0 else -1


def _decoded_count(code: int) -> int | None:
    if code == EVEN:
        return None
    return code if code > 0 else 0


def _row_values(layout: Layout) -> dict[str, int | bool]:
    """Arguments of Columns.build for one layout, its defaults filled in."""
    recompute, overlap = layout.recompute, layout.overlap
    schedule = layout.schedule or ("interleaved" if layout.vpp > 1 else "1f1b")
    param = overlap.grad and layout.zero >= 1 if overlap.param is None else overlap.param
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "cp_kind": _code(CP_KINDS, layout.cp_kind, "--cp-kind"),
        "pp": layout.pp,
        "vpp": layout.vpp,
        "ep": layout.ep,
        "etp": layout.etp,
        "dp_replicate": layout.dp_replicate,
        "zero": layout.zero,
        "sp": layout.tp > 1 if layout.sequence_parallel is None else layout.sequence_parallel,
        "micro_batch": layout.micro_batch,
        "schedule": _code(SCHEDULES, schedule, "--schedule"),
        "recompute_kind": _code(RECOMPUTE_KINDS, recompute.kind, "--recompute"),
        # A count below one becomes 0, which a rule refuses: -1 would read as "all".
        "recompute_layers": ALL_LAYERS if recompute.layers is None else max(recompute.layers, 0),
        "recompute_modules": mask_of(recompute.modules),
        "first_stage_layers": _encoded_count(layout.first_stage_layers),
        "last_stage_layers": _encoded_count(layout.last_stage_layers),
        "account_for_embedding": layout.account_for_embedding,
        "account_for_loss": layout.account_for_loss,
        "overlap_grad": overlap.grad,
        "overlap_param": param,
        "overlap_tp": overlap.tp,
        "overlap_ep": overlap.ep,
    }
