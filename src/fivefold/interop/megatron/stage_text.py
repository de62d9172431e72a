"""--pipeline-model-parallel-layout: a text such as "Et|(tt|)*30mL" as counts of blocks.

Letters, bars, parentheses and multiplication as described by the option's help in Megatron-LM arguments.py, read at
000c4ac24f: E embedding, t decoder layer, m MTP module, L loss; stages are split by bars, commas only help the eye.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(r"([EtmL|])|(\()|(\))(?:\*(\d{1,4}))?|\*(\d{1,4})")
_LONGEST = 8192  # letters and bars, more than any model's


@dataclass(slots=True)
class StageCounts:
    """fields: of a Layout. problem: why they cannot be said. notes: what they simplify."""

    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    notes: list[str] = field(default_factory=list)


def spread(text: str) -> str | None:
    """The text with its repetitions written out; None where it is not of the form."""
    stack, last = [""], [""]
    at = 0
    text = text.replace(",", "").replace(" ", "")
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or len(stack) > 20:
            return None
        at = found.end()
        if found[1]:
            stack[-1] += last[-1]
            last[-1] = found[1]
        elif found[2]:
            stack[-1] += last[-1]
            last[-1] = ""
            stack.append("")
            last.append("")
        elif found[3]:
            if len(stack) == 1:
                return None
            inner = stack.pop() + last.pop()
            last[-1] = inner * int(found[4] or 1)
        else:
            last[-1] = last[-1] * int(found[5])
        if len(last[-1]) + len(stack[-1]) > _LONGEST:
            return None
    return stack[0] + last[0] if len(stack) == 1 else None


def counts_of(text: str, layers: int, pp: int) -> StageCounts:
    """The counts of a layout text for a model of `layers` blocks on `pp` ranks."""
    option = "--pipeline-model-parallel-layout"
    whole = spread(text)
    if whole is None:
        return StageCounts(problem=f"{option} {text[:60]!r} is not made of E, t, m, L, |, (...) and *N")
    stages = whole.split("|")
    if len(stages) % pp:
        return StageCounts(problem=f"{option} has {len(stages)} stages, which the {pp} pipeline ranks do not divide")
    blocks = [stage.count("t") for stage in stages]
    if sum(blocks) != layers:
        return StageCounts(problem=f"{option} holds {sum(blocks)} layers and --num-layers is {layers}")
    vpp = len(stages) // pp
    ranks = [sum(blocks[rank::pp]) for rank in range(pp)]
    chunks = [blocks[rank::pp] for rank in range(pp)]
    middle = set(ranks[1:-1])
    if len(middle) > 1 or any(count == 0 for count in ranks):
        return StageCounts(problem=f"{option} gives ranks {ranks[:16]} blocks: only equal middle ranks can be priced")
    fields: dict[str, Any] = {"vpp": vpp}
    if len(set(ranks)) > 1:
        fields |= {"first_stage_layers": ranks[0], "last_stage_layers": ranks[-1]}
    notes = []
    if any(len(set(each)) > 1 for each in chunks):
        notes.append(f"{option}: the chunks of a rank hold different numbers of blocks; they are priced as equal.")
        if any(count % vpp for count in ranks):
            fields["vpp"] = max(v for v in range(1, vpp + 1) if all(count % v == 0 for count in ranks))
            notes.append(f"{option}: priced with {fields['vpp']} chunks per rank instead of {vpp}.")
    return StageCounts(fields=fields, notes=notes)
