"""What the trainer does not run, said before any process group is made. Imports no PyTorch.

First the shared rules of the plan's runtime, then the trainer's own, which are rules like any runtime's
(fivefold.layout.rules.fivefold), and last what no rule about columns can say.
"""

from __future__ import annotations

from importlib.util import find_spec

from msgspec.structs import replace

from fivefold.errors import FivefoldError, WouldNotStartError
from fivefold.layout import Violation
from fivefold.runtime import FIVEFOLD, load_runtime
from fivefold.schedule.registry import illegal_reason
from fivefold.train.job import Job

# Said where the precision is looked up (fivefold.train.precision), since a run may replace the plan's.
_OF_THE_PRECISION = ("precision-runtime", "fivefold-grad-dtype", "fp8-dimensions")


def refuse(job: Job) -> None:
    """Raises WouldNotStartError for the first rule that the job breaks: of its plan's runtime, or of the trainer."""
    broken = job.broken()
    if broken:
        raise _error("This layout would not start.", broken)
    if load_runtime(job.runtime).name != FIVEFOLD.name:
        ours = replace(job, runtime=FIVEFOLD.name).broken()
        broken = [rule for rule in ours if rule.id not in _OF_THE_PRECISION]
        if broken:
            raise _error("The trainer does not run this plan.", broken)
    layout = job.resolved
    reason = illegal_reason(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp) if layout.pp > 1 else None
    if reason is not None:
        raise WouldNotStartError(
            f"The trainer cannot run the pipeline of this plan: {reason}.",
            code="schedule",
            option="--schedule",
            value=layout.schedule,
        )


def _error(why: str, broken: list[Violation]) -> WouldNotStartError:
    first, *more = broken
    rest = f" It breaks {len(more)} more: fivefold estimate lists them." if more else ""
    return WouldNotStartError(
        f"{why} {first.message}{rest}",
        code=first.id,
        option=first.option,
        value=first.value,
        legal=first.legal,
    )


def require_torch() -> None:
    """Raises FivefoldError where PyTorch, which the planner does without, is not installed."""
    if find_spec("torch") is None:
        raise FivefoldError(
            "This command needs PyTorch, which is not installed. Install it with: pip install 'torch>=2.9'",
            code="needs-torch",
            option="torch",
            legal=["2.9 or newer"],
        )
