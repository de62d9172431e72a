"""One line per training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from fivefold.cli.render.text import giga, percent, seconds

if TYPE_CHECKING:
    from fivefold.train.loop import Metrics


def step_line(metrics: Metrics) -> Text:
    """step 12  loss 3.21  grad norm 1.4 ..., what is not known left out."""
    line = Text(f"step {metrics.step:>5}  ")
    line.append(f"loss {metrics.loss:.4f}", style="bold")
    line.append(
        f"  grad norm {metrics.grad_norm:.3g}  rate {metrics.learning_rate:.2e}  {seconds(metrics.step_s)}"
        f"  {metrics.tokens_per_s:,.0f} tok/s"
    )
    if metrics.mfu is not None:
        line.append(f"  MFU {percent(metrics.mfu)}")
    line.append(f"  peak {giga(metrics.peak_memory_bytes)} GB")
    if metrics.skipped:
        line.append(f"  skipped: fp16 overflow at scale {metrics.loss_scale:g}", style="yellow")
    return line
