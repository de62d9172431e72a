"""What each published framework does where a row does not say: one line of data per framework.

Nothing here reads a row's performance. Defaults are those of the framework's own documentation or example scripts;
"from memory" where the document was not opened.
"""

from __future__ import annotations

from fivefold.measure.frameworks import deepspeed, megatron, pytorch, xla
from fivefold.measure.frameworks.line import FLASH_USUAL, Framework

FRAMEWORKS: tuple[Framework, ...] = (*megatron.LINES, *deepspeed.LINES, *pytorch.LINES, *xla.LINES)
# A framework that no line names: its degrees say which kind of profile is nearest.
OTHER = Framework(
    starts=("",),
    runtime="megatron",
    before_te="deepspeed",
    stands_in=True,
    unfused_until=FLASH_USUAL,
    source="nearest kind of framework",
)


def line_of(name: str) -> Framework:
    """The line whose start of a usual name fits `name` furthest; OTHER where none does."""
    fits = [(len(start), line) for line in FRAMEWORKS for start in line.starts if name.startswith(start)]
    return max(fits, key=lambda fit: fit[0], default=(0, OTHER))[1]


__all__ = ["FRAMEWORKS", "OTHER", "Framework", "line_of"]
