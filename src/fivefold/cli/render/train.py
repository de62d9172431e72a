"""The steps of a run, a line each or one moving line on a terminal, and what every rank did, where it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from fivefold.cli.render.text import giga, heading, mega, percent, plain_table, seconds

if TYPE_CHECKING:
    from fivefold.train.loop import Metrics
    from fivefold.train.measured import RankTimes

_RANKS_SHOWN = 16


class Screen:
    """steps: how many there will be. moving: whether each line takes the place of the one before."""

    def __init__(self, out: Console, steps: int, moving: bool) -> None:
        self._out, self._steps, self._moving = out, steps, moving

    def step(self, metrics: Metrics) -> None:
        if not self._moving:
            self._out.print(step_line(metrics), soft_wrap=True)
            return
        left = seconds(metrics.step_s * (self._steps - 1 - metrics.step))
        line = step_line(metrics, self._steps).append(f"  {left} left", style="dim")
        self._out.control(Control((ControlType.ERASE_IN_LINE, 2)))
        self._out.print(line, end="", no_wrap=True, overflow="ellipsis")
        # The cursor waits at the line's begin, so that whatever ends the run writes over it.
        self._out.control(Control(ControlType.CARRIAGE_RETURN))

    def end(self, told: Sequence[Metrics]) -> None:
        """After the last step: what the ranks did, where it was measured."""
        if self._moving:
            self._out.print()
        # The first step also sets up what later ones find: it is left out where there are others.
        ranks = [metrics for metrics in told[1:] or told if metrics.ranks is not None]
        if ranks:
            self._out.print(ranks_view(ranks))


def step_line(metrics: Metrics, steps: int | None = None) -> Text:
    """step 12  loss 3.21  grad norm 1.4 ..., what is not known left out. steps: of how many, where it is said."""
    number = f"{metrics.step:>5}" if steps is None else f"{metrics.step + 1}/{steps}"
    line = Text(f"step {number}  ")
    line.append(f"loss {metrics.loss:.4f}", style="bold")
    line.append(
        f"  grad norm {metrics.grad_norm:.3g}  rate {metrics.learning_rate:.2e}  {seconds(metrics.step_s)}"
        f"  {metrics.tokens_per_s:,.0f} tok/s"
    )
    if metrics.mfu is not None:
        line.append(f"  MFU {percent(metrics.mfu)}")
    line.append(f"  peak {giga(metrics.peak_memory_bytes)} GB")
    bubbles = [rank.bubble for rank in metrics.ranks or () if rank.bubble is not None]
    if bubbles:
        line.append(f"  bubble {percent(mean(bubbles))}")
    if metrics.skipped:
        line.append(f"  skipped: fp16 overflow at scale {metrics.loss_scale:g}", style="yellow")
    return line


def ranks_view(told: Sequence[Metrics]) -> Group:
    """Seconds in communication and bytes sent per step, by axis, memory and bubble of every rank: means of the steps.
    Of many ranks the ones that wait longest."""
    by_rank = list(zip(*(metrics.ranks or () for metrics in told), strict=True))
    axes = list(dict.fromkeys(axis for steps in by_rank for rank in steps for axis in rank.wait_s))
    piped = any(rank.bubble is not None for rank in by_rank[0])
    table = plain_table(
        ("rank", ">"), *((f"{axis} wait", ">") for axis in axes), *((f"{axis} MB", ">") for axis in axes),
        ("peak GB", ">"), *([("bubble", ">")] if piped else []),
    )  # fmt: skip
    shown = sorted(by_rank, key=_waited_s, reverse=True)[:_RANKS_SHOWN]
    for steps in sorted(shown, key=lambda steps: steps[0].rank):
        table.add_row(
            str(steps[0].rank),
            *(seconds(_mean(rank.wait_s.get(axis) for rank in steps)) for axis in axes),
            *(mega(_mean(rank.sent_bytes.get(axis) for rank in steps)) for axis in axes),
            giga(max(rank.peak_memory_bytes for rank in steps)),
            *([percent(_mean(rank.bubble for rank in steps))] if piped else []),
        )
    few = "" if len(by_rank) <= _RANKS_SHOWN else f" of {len(by_rank):,} ranks, the {_RANKS_SHOWN} that wait longest"
    late = ", so pp holds the bubble" if piped else ""
    note = f"per step, mean of {len(told)}{few}; waiting for late ranks counts{late}"
    return Group(heading("Communication", note), table)


def _waited_s(steps: Iterable[RankTimes]) -> float:
    return sum(sum(rank.wait_s.values()) for rank in steps)


def _mean(values: Iterable[float | None]) -> float:
    return mean(value or 0.0 for value in values)
