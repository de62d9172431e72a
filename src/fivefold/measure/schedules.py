"""Pipeline schedules as rows name them, in a framework's name or in notes."""

from __future__ import annotations

import re

from fivefold.layout.layout import ScheduleKind
from fivefold.measure.runs import Run
from fivefold.measure.words import denied

_SCHEDULES: tuple[tuple[str, ScheduleKind], ...] = (
    (r"\bzb-?v", "zbv"),
    (r"dual-?pipe-?v", "dualpipev"),
    (r"\bzb-?h1", "zb-h1"),
    (r"zero[- ]?bubble", "zbv"),
    (r"zero[- ]?bubble", "zb-h1"),
    (r"g-?pipe\b", "afab"),
    (r"\bafab\b|all-forward-all-backward", "afab"),
)
# Of these the two chunks of a rank are a V (Qi et al. 2024; DeepSeek's DualPipe repository).
V_SHAPED: dict[ScheduleKind, int] = {"zbv": 2, "dualpipev": 2}
# Its point is that exchanges of experts run beside the other direction's compute (DeepSeek-V3 report, 3.2.1).
DUALPIPE = re.compile(r"\bdual-?pipe", re.IGNORECASE)
# What no profile has: priced as any other pipeline of its chunks.
_OTHERS = re.compile(
    r"\bv-?(?:half|min)\b|\bzb-?(?:2p|h2)\b|\bzbb\b|hanayo|\bchimera\b|slim-?pipe|seq-?1f1b|breadth[- ]first"
    r"|pipe-?offload",
    re.IGNORECASE,
)


def schedule_of(run: Run, pp: int, vpp: int, assumed: set[str]) -> ScheduleKind | None:
    """The schedule that a row names and its chunks allow, None where it names none: the profile's own."""
    if pp == 1:
        return None
    named = schedules_of(run)
    words = f"{run.framework} {run.notes}"
    if (DUALPIPE.search(words) and "dualpipev" not in named) or _OTHERS.search(words):
        assumed.add("schedule")  # two copies of the parameters, from both ends: priced as any other pipeline
    return next((kind for kind in named if vpp == V_SHAPED.get(kind, 1)), None)


def schedules_of(run: Run) -> list[ScheduleKind]:
    """What a row's words may mean, first choices first; which it is the number of its chunks says."""
    text = f"{run.framework or ''} {run.notes or ''}".lower()
    return [kind for pattern, kind in _SCHEDULES if re.search(pattern, text) and not denied(pattern).search(text)]
