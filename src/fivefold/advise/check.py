"""`check`: a launch priced as it stands, and the single changes that would help it most."""

from __future__ import annotations

import msgspec

from fivefold.advise.changes import best_of_each, single_changes
from fivefold.advise.result import Change, Check
from fivefold.advise.waste import doubts, mfu_sentence, wasted
from fivefold.cluster import Cluster
from fivefold.errors import FivefoldError
from fivefold.estimate import Estimate, Problem, estimate
from fivefold.estimate.estimate import as_violation
from fivefold.estimate.result import Assumption, Parts, RuleViolation
from fivefold.interop.megatron.given import unknown_sentence
from fivefold.interop.megatron.layout_options import changed_options, layout_options
from fivefold.interop.megatron.option_names import LESS_MEMORY
from fivefold.interop.megatron.options import OPTIONS
from fivefold.interop.megatron.read import Reading
from fivefold.interop.megatron.words import in_their_words, option_of, spelled
from fivefold.layout import Layout, unusual
from fivefold.runtime import load_runtime
from fivefold.search.found import search
from fivefold.search.pins import checked_pins
from fivefold.search.words import layout_words

replace = msgspec.structs.replace

_LEAST_GAIN = 0.002  # of the step: less is noise even between two layouts of one problem


def check(reading: Reading, cluster: Cluster, runtime: str = "megatron", top: int = 5) -> Check:
    """Validity, memory, time and the best `top` changes of a launch that was read.

    cluster: with as many GPUs as the launch. runtime: of a release of megatron the profile that the launch's options
    ask for is taken. Raises FivefoldError for an unknown runtime.
    """
    runtime = _profile(reading, runtime)
    problem = Problem(reading.model, cluster, reading.work, load_runtime(runtime))
    now = _estimated(reading, problem, runtime)
    return Check(
        source=reading.source,
        runtime=runtime,
        understood=_understood(reading, now),
        unknown_options=tuple(setting.option for setting in reading.unknown),
        unknown=tuple(_unknown(reading)),
        estimate=now,
        starts=now.valid,
        fits=bool(now.fits),
        summary=mfu_sentence(reading.source, now) + doubts(now, _roomy(reading), len(reading.unknown), reading.style),
        waste=wasted(now),
        changes=_changes(reading, problem, runtime, now, top),
        notes=(*reading.notes, *unusual(reading.work, reading.model)),
    )


def _profile(reading: Reading, asked: str) -> str:
    """`megatron@0.14` is megatron-fsdp@0.14 for a launch with --use-megatron-fsdp."""
    _, at, version = asked.partition("@")
    return f"{reading.runtime}{at}{version}" if load_runtime(asked).name == "megatron" else asked


# ---------------------------------------------------------------- the launch as it stands


def _estimated(reading: Reading, problem: Problem, runtime: str) -> Estimate:
    """The estimate of the launch, its broken rules in the user's words, with the rules on options among them."""
    found = estimate(reading.model, problem.cluster, reading.work, reading.layout, runtime)
    broken = [_in_their_words(each, reading) for each in found.violations]
    broken += [_in_their_words(as_violation(each), reading) for each in reading.violations]
    stated = tuple(Assumption(field=each.field, value=each.value, source=each.source) for each in reading.assumed)
    fits = found.fits if not broken else None
    return replace(
        found, valid=not broken, fits=fits, violations=tuple(broken), assumptions=(*stated, *found.assumptions)
    )


def _in_their_words(broken: RuleViolation, reading: Reading) -> RuleViolation:
    option = option_of(broken.option)
    place = reading.given.place(option)
    message = in_their_words(broken.message, reading.style)
    where = f" ({place})" if place and str(place) not in message else ""
    return replace(broken, option=spelled(option, reading.style), message=f"{message}{where}")


def _roomy(reading: Reading) -> list[str]:
    """Options of the launch that make it need less memory than is priced."""
    given = reading.given
    return [
        option
        for option, setting in given.settings.items()
        if option in LESS_MEMORY
        and (OPTIONS[option].kind != "flag" or given.flag(option))
        and setting.text not in ("0", "0.0")
    ]


# ---------------------------------------------------------------- changes


def _changes(reading: Reading, problem: Problem, runtime: str, now: Estimate, top: int) -> tuple[Change, ...]:
    if top < 1:
        return ()
    candidates = single_changes(problem, reading.layout)
    step = now.step.seconds.value if now.step else None
    # A launch that only breaks a rule on options has a price, which changes have to beat.
    memory = now.memory
    good = memory is not None and memory.reserved_bytes <= memory.capacity_bytes
    kept: list[Change] = []
    for candidate, outcome in best_of_each(problem, runtime, candidates):
        gain = None if step is None else step - outcome.seconds
        if good and (gain is None or step is None or gain < _LEAST_GAIN * step):
            continue
        kept.append(_change(reading, problem, runtime, now, candidate.layout, candidate.kind))
        if len(kept) == top:
            break
    if not kept and not good:
        return _several(reading, problem, runtime, now)
    return tuple(kept)


def _several(reading: Reading, problem: Problem, runtime: str, now: Estimate) -> tuple[Change, ...]:
    """Where no single change helps: the fastest layout of all, which changes several things at once."""
    try:
        found = search(problem, runtime, checked_pins(None))
    except FivefoldError:
        return ()
    if not len(found.rows):
        return ()
    best = found.columns.row(int(found.rows[0]))
    return (_change(reading, problem, runtime, now, best, "several at once"),)


def _change(reading: Reading, problem: Problem, runtime: str, now: Estimate, layout: Layout, kind: str) -> Change:
    then = estimate(reading.model, problem.cluster, reading.work, layout, runtime)
    layers, moe = reading.model.layers, reading.model.is_moe
    like = reading.given if reading.style == "megatron-lm" else None
    before, after = (layout_options(each, layers, moe, like) for each in (reading.layout, layout))
    old, new = changed_options(before, after, reading.given)
    options = Parts(
        old={spelled(name, reading.style): value for name, value in old.items()},
        new={spelled(name, reading.style): value for name, value in new.items()},
    )
    gain_s, delta_bytes = _moved(now, then)
    return Change(
        kind=kind,
        description=f"{kind}: {layout_words(layout)}",
        options=options,
        gain_s=gain_s,
        delta_bytes=delta_bytes,
        estimate=then,
    )


def _moved(now: Estimate, then: Estimate) -> tuple[float | None, int | None]:
    """(seconds per step that are saved, device bytes that are added); None where one of the two breaks a rule."""
    if now.step is None or now.memory is None or then.step is None or then.memory is None:
        return None, None
    return now.step.seconds.value - then.step.seconds.value, then.memory.reserved_bytes - now.memory.reserved_bytes


# ---------------------------------------------------------------- what was understood


def _understood(reading: Reading, now: Estimate) -> Parts:
    given, launch = reading.given, reading.launch
    world = {name: {"value": value, "place": str(place)} for name, (value, place) in launch.world.counts.items()}
    return Parts(
        style=reading.style,
        launch={"program": launch.program, "place": str(launch.place), "environment": launch.environment},
        gpus=reading.gpus,
        gpus_per_node=reading.gpus_per_node,
        world=world,
        model={
            "name": reading.model.name,
            "layers": reading.model.layers,
            "hidden": reading.model.hidden,
            "vocab": reading.model.vocab,
            "padded_vocab": reading.padded_vocab,
            "parameters": now.params.total,
            "active_parameters": now.params.active,
        },
        workload=msgspec.to_builtins(reading.work),
        layout=msgspec.to_builtins(reading.layout),
        options=[
            {
                "option": option,
                "value": setting.text if setting.values else True,
                "place": str(setting.at),
                "field": OPTIONS[option].field,
                "effect": OPTIONS[option].effect,
            }
            for option, setting in given.settings.items()
        ],
        assumed=[msgspec.to_builtins(each) for each in reading.assumed],
        files_read=launch.files.read if launch.files else [],
        files_not_read=[
            {"file": shown, "place": str(place), "why": why}
            for place, shown, why in (launch.files.not_read if launch.files else [])
        ],
    )


def _unknown(reading: Reading) -> list[Parts]:
    return [
        Parts(option=each.option, value=each.text or None, place=str(each.place), message=unknown_sentence(each))
        for each in reading.unknown
    ]
