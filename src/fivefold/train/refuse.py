"""What the trainer does not run, said before any process group is made. Imports no PyTorch.

First the shared rules of the plan's runtime, then the trainer's own limits: each a row with its sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from fivefold.errors import FivefoldError
from fivefold.model import Attention, Experts, LatentAttention
from fivefold.schedule.registry import SCHEDULES, illegal_reason
from fivefold.train.job import Job

OPTIMIZERS = ("adamw", "sgd")


class Limit(NamedTuple):
    """value: what is beyond the limit, None where nothing is. message: may name {model} and {value}."""

    code: str
    option: str
    value: Callable[[Job], Any]
    message: str
    legal: tuple[Any, ...] = ()


def _block(job: Job, kind: type) -> str | None:
    found = any(isinstance(part, kind) for block in job.model.kinds for part in (block.mixer, block.feed))
    return kind.__name__ if found else None


def _mixed_heads(job: Job) -> str | None:
    mixers = [block.mixer for block in job.model.kinds]
    shapes = {(mixer.head_dim, mixer.rope) for mixer in mixers if isinstance(mixer, Attention)}
    return str(sorted(shapes)) if len(shapes) > 1 else None


def _schedule(job: Job) -> str | None:
    """Why the pipeline's executor cannot run the schedule, None if it can."""
    layout = job.resolved
    if layout.schedule not in SCHEDULES:
        return f"there is no schedule {layout.schedule}"
    if layout.pp == 1:
        return None
    return illegal_reason(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)


def _empty_chunk(job: Job) -> str | None:
    """A pipeline chunk between the first and the last that holds no block."""
    layout = job.resolved
    empty = [f"rank {rank}" for rank, chunks in enumerate(layout.stages) for first, last in chunks if first == last]
    return ", ".join(empty) or None


LIMITS: tuple[Limit, ...] = (
    Limit(
        "model-not-trainable", "MODEL", lambda job: _block(job, Experts),
        "{model} has routed experts, which the trainer does not run yet. Choose a dense model, or only plan it.",
    ),
    Limit(
        "model-not-trainable", "MODEL", lambda job: _block(job, LatentAttention),
        "{model} has latent attention, which the trainer does not run yet. Choose a model with grouped-query "
        "attention, or only plan it.",
    ),
    Limit(
        "model-not-trainable", "--mtp", lambda job: job.model.mtp or None,
        "{model} has {value} multi-token-prediction modules, which the trainer does not run yet. Plan it without "
        "--mtp.",
        (0,),
    ),
    Limit(
        "model-not-trainable", "MODEL", _mixed_heads,
        "{model} has blocks of different head sizes or position embeddings, and the trainer has one rotary table for "
        "all blocks.",
    ),
    Limit(
        "layout-not-trainable", "--ep", lambda job: job.layout.ep if job.layout.ep > 1 else None,
        "The trainer has no expert parallelism yet, and the plan has --ep {value}. Plan it with --no-ep.", (1,),
    ),
    Limit(
        "layout-not-trainable", "--etp", lambda job: job.layout.etp if job.layout.etp > 1 else None,
        "The trainer has no expert tensor parallelism yet, and the plan has --etp {value}.", (1,),
    ),
    Limit(
        "layout-not-trainable", "--overlap-tp", lambda job: job.layout.overlap.tp or None,
        "The trainer does not overlap the collectives of tensor parallelism yet. Plan it with --no-overlap-tp.",
        (False,),
    ),
    Limit(
        "layout-not-trainable", "--overlap-ep", lambda job: job.layout.overlap.ep or None,
        "The trainer has no expert parallelism to overlap. Plan it with --no-overlap-ep.", (False,),
    ),
    Limit(
        "layout-not-trainable", "--schedule", _schedule,
        "The trainer cannot run the pipeline of this plan: {value}.", tuple(SCHEDULES),
    ),
    Limit(
        "layout-not-trainable", "--pp", _empty_chunk,
        "A pipeline chunk without blocks ({value}) is not something the trainer runs. Use fewer stages.",
    ),
    Limit(
        "optimizer-not-trainable", "--optimizer",
        lambda job: job.work.optimizer if job.work.optimizer not in OPTIMIZERS else None,
        "The trainer does not run the optimizer {value} yet. Plan it with --optimizer adamw or sgd.", OPTIMIZERS,
    ),
)  # fmt: skip


def refuse(job: Job) -> None:
    """Raises FivefoldError for the first rule or limit that the job breaks. The precision is refused where it is
    looked up (fivefold.train.precision), since a run may replace the plan's."""
    broken = job.broken()
    if broken:
        first, *more = broken
        rest = f" It breaks {len(more)} more: fivefold estimate lists them." if more else ""
        raise FivefoldError(
            f"This layout would not start. {first.message}{rest}",
            code=first.id,
            option=first.option,
            value=first.value,
            legal=first.legal,
        )
    for limit in LIMITS:
        value = limit.value(job)
        if value is not None:
            raise FivefoldError(
                limit.message.format(model=job.model.name, value=value),
                code=limit.code,
                option=limit.option,
                value=value,
                legal=list(limit.legal),
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
