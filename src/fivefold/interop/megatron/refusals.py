"""What the options of a launch break, as violations: rules, options without effect, and what the parser refuses."""

from __future__ import annotations

from typing import Any

from fivefold.interop.megatron.given import Given
from fivefold.interop.megatron.options import ARGUMENTS
from fivefold.interop.megatron.rules import RULES, Facts
from fivefold.layout.mixers import softmax_attention
from fivefold.layout.rules import Violation

_RUNTIMES = ["megatron"]


def broken_options(facts: Facts, *, command_line: bool = True) -> list[Violation]:
    """Every rule that the options break, and every option that the parser itself would refuse.

    command_line: the launch goes through arguments.py; else only the rules of Megatron-Core itself hold.
    """
    given, layout = facts.given, facts.layout
    attention = softmax_attention(facts.model.kinds[0].mixer)
    numbers = {
        "seq": facts.work.seq_len,
        "heads": attention.heads if attention is not None else 0,
        "connections": facts.connections,
        "pp": layout.pp,
        "cp": layout.cp,
        "dp": facts.dp,
        "m": facts.work.global_batch // max(layout.micro_batch * facts.dp, 1),
    }
    broken = [
        _violation(
            rule.id, rule.option, _value(given, rule.option), rule.legal, rule.message.format(**numbers), rule.source
        )
        for rule in RULES
        if (command_line or rule.source != ARGUMENTS) and not rule.holds(facts)
    ]
    silent = [
        _violation("silent", option, _value(given, option), (), message, ARGUMENTS, silent=True)
        for option, message in facts.parts.silent
    ]
    return broken + silent + mistakes(given)


def mistakes(given: Given) -> list[Violation]:
    """Options that Megatron-LM's own parser would refuse: wrong types, words and missing values."""
    return [
        _violation(each.id, each.option, each.value, tuple(each.legal), f"{each.message} ({each.place})", ARGUMENTS)
        for each in given.mistakes
    ]


def _value(given: Given, option: str) -> Any:
    found = given.settings.get(option)
    return None if found is None else found.text or True


def _violation(
    id: str, option: str, value: Any, legal: tuple[Any, ...], message: str, source: str, *, silent: bool = False
) -> Violation:
    return Violation(
        id=f"megatron-{id}",
        option=option,
        value=value,
        legal=list(legal),
        message=message,
        source=source,
        runtimes=_RUNTIMES,
        silent=silent,
    )
