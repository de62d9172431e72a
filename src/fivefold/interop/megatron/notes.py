"""What a reading took for granted, and what its figures leave out, in sentences with places."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from fivefold.interop.megatron.commands import Launch
from fivefold.interop.megatron.given import Given, unknown_sentence
from fivefold.interop.megatron.model import padded_vocab
from fivefold.interop.megatron.options import OPTIONS
from fivefold.interop.megatron.rules import Facts
from fivefold.model.spec import ModelSpec

# Variables that no figure rests on, whatever the file: addresses, ranks, paths, names.
_NEVER = re.compile(
    r"\$\w*(?:RANK|ADDR|PORT|HOST|MASTER|PATH|DIR|FILE|NAME|LOG|SAVE|LOAD|CKPT|CHECKPOINT|WANDB|SEED)\w* "
)


class Assumed(msgspec.Struct, frozen=True, kw_only=True):
    """A value that the file does not state."""

    field: str
    value: Any
    source: str


def assumed_values(
    launch: Launch,
    given: Given,
    model: list[tuple[str, object, str]],
    work: list[tuple[str, object, str]],
    facts: Facts,
) -> Iterable[Assumed]:
    for option, value, source in (*model, *work):
        yield Assumed(field=option, value=value, source=source)
    if facts.model.is_moe and "--expert-tensor-parallel-size" not in given:
        yield Assumed(field="--expert-tensor-parallel-size", value=facts.layout.etp, source="Megatron-LM's default: TP")
    if facts.connections is None and (facts.layout.tp > 1 or facts.layout.cp > 1) and not facts.blackwell:
        yield Assumed(
            field="CUDA_DEVICE_MAX_CONNECTIONS",
            value="1",
            source="not set in the file; Megatron-LM needs 1 with TP or CP above 1 before Blackwell",
        )
    used = {setting.at for option, setting in given.settings.items() if OPTIONS[option].effect == "priced"}
    used |= {place for _, place in launch.world.counts.values()}
    for place, sentence in launch.state.assumed:
        relevant = place in used and _NEVER.search(sentence) is None
        if relevant or "default" not in sentence:
            yield Assumed(field=str(place), value=None, source=sentence)


def odd_vocabulary(model: ModelSpec, multiple: int, tp: int) -> Iterable[str]:
    if multiple % 2 and model.vocab % tp:
        padded = padded_vocab(model.vocab, multiple, tp)
        yield (
            f"The vocabulary of {model.vocab:,} is padded to {padded:,} for TP {tp}; rows that pad it were seen to "
            "take part in the loss (Megatron-LM issue 1754), so that it differs from TP 1."
        )


def left_out(given: Given, launch: Launch) -> Iterable[str]:
    for option, setting in given.settings.items():
        found = OPTIONS[option]
        if found.effect == "unmodelled" and not (found.kind == "flag" and not given.flag(option)):
            yield f"{option} {setting.text}".rstrip() + f" ({setting.at}): {found.why}."
    for place, unknown in given.dropped:
        if unknown.why in ("unset", "argument"):
            yield f"{place}: ${unknown.name} is set nowhere in what was read and taken as empty."
        else:
            yield f"{place}: {unknown.sentence()}; it is read without."
    for setting in given.repeated:
        yield f"{setting.option} is given again after {setting.place}; the last one counts."
    for setting in given.unknown:
        yield unknown_sentence(setting)
    if launch.files is not None:
        for place, shown, why in launch.files.not_read:
            if not re.search(r"conda|bashrc|profile|activate|modules|lmod", shown):
                yield f"{place}: {shown} is not read: {why}."
