"""The view of `fivefold verify`: the verdict, what was run, the worst parameters, losses and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.cli.render.layouts import degrees_words, options_words
from fivefold.cli.render.text import heading, plain_table, seconds

if TYPE_CHECKING:
    from fivefold.train.job import Job
    from fivefold.train.verify.compare import ParameterError, Verdict
    from fivefold.train.verify.prove import Proven

_SHOWN = 10
_STEPS = ("SGD", "AdamW 1", "AdamW 2", "AdamW 3")


def verify_view(job: Job, proven: Proven) -> Group:
    """Everything that `fivefold verify` prints."""
    verdict, small = proven.verdict, proven.shrunk.job
    passed = verdict.passed
    out_of = sum(not each.passed for each in verdict.parameters)
    answer = "equal to one process" if passed else f"{out_of} of {len(verdict.parameters)} parameters out of bounds"
    worst = f"worst error {verdict.worst:.2g} of its bound"
    parts: list[RenderableType] = [
        Text(f"{'PASSED' if passed else 'FAILED'}  {answer}; {worst}", style="bold green" if passed else "bold red"),
        Text(f"{job.model.name}: {degrees_words(small.resolved)} on {small.gpus} ranks, {seconds(proven.seconds_s)}"),
        Text(options_words(small.resolved)),
        *(Text(note) for note in proven.shrunk.notes),
        Text(
            f"Compared in fp64 (the plan's {job.work.precision} is not): {len(verdict.parameters)} parameters, none "
            "missing, data with uneven numbers of valid tokens; gradients, weights after an SGD step and after three "
            "AdamW steps with clipping.",
            style="dim",
        ),
        heading("Parameters", f"worst {min(_SHOWN, len(verdict.parameters))}; error over bound, 1 is the limit"),
        _parameters(verdict),
        heading("Steps"),
        _numbers(verdict),
    ]
    return Group(*parts)


def _parameters(verdict: Verdict) -> Table:
    table = plain_table(
        ("parameter", "<"), ("|g - g0|", ">"), ("bound", ">"), ("gradient", ">"), ("after SGD", ">"),
        ("after AdamW", ">"), ("", "<"),
    )  # fmt: skip
    for each in sorted(verdict.parameters, key=lambda p: max(_ratios(p)), reverse=True)[:_SHOWN]:
        shares = [f"{ratio:.2g}" for ratio in _ratios(each)]
        style = None if each.passed else "red"
        table.add_row(each.name, f"{each.error:.2g}", f"{each.bound:.2g}", *shares, _word(each.passed), style=style)
    return table


def _ratios(each: ParameterError) -> tuple[float, float, float]:
    return each.error / each.bound, each.sgd_error / each.sgd_bound, each.adamw_error / each.adamw_bound


def _numbers(verdict: Verdict) -> Table:
    table = plain_table(("step", "<"), ("loss", ">"), ("off by", ">"), ("gradient norm", ">"), ("off by", ">"))
    for step, (loss, other), (norm, other_norm) in zip(_STEPS, verdict.losses, verdict.grad_norms, strict=True):
        table.add_row(step, f"{loss:.6f}", _off(loss, other), f"{norm:.6f}", _off(norm, other_norm))
    return table


def _off(a: float, b: float) -> str:
    return f"{abs(a - b) / abs(a):.1e}"


def _word(passed: bool) -> str:
    return "" if passed else "out of bounds"
