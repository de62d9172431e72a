"""What keeps a step from being compute alone, and a GPU from being full, in sentences with their shares."""

from __future__ import annotations

from fivefold.estimate import Estimate
from fivefold.estimate.result import Parts
from fivefold.search.words import duration, gigabytes

_LEAST = 0.01  # shares of the step below this are not worth a sentence
_SPARE = 0.15  # memory left over from which on it is said


def wasted(estimate: Estimate) -> tuple[Parts, ...]:
    """(owner, seconds, share, message) of all but compute, largest first; spare memory last."""
    step, memory, layout = estimate.step, estimate.memory, estimate.layout
    if step is None or memory is None:
        return ()
    total = step.seconds.value
    m, p = layout.num_micro_batches, layout.pp
    words = {
        "host": "the GPU waits for the host to launch its operations",
        "recompute": f"{layout.recompute.kind} recomputation runs forward operations again",
        "tp": f"collectives of the {layout.tp} tensor-parallel ranks that nothing hides",
        "cp": f"exchange of keys and values between the {layout.cp} context-parallel ranks that nothing hides",
        "ep": f"exchange of tokens between the {layout.ep} expert-parallel ranks that nothing hides",
        "pp": "transfers between pipeline stages",
        "dp": "reduction of gradients and gathering of parameters that nothing hides",
        "bubble": f"ranks wait: {p} stages, {m} micro-batches"
        + (f", {layout.vpp} chunks each" if layout.vpp > 1 else ", no interleaving"),
        "optimizer": "the optimizer's own step",
        "other": "the host's work between steps, and copies to its memory that nothing hides",
    }
    rows = [
        Parts(owner=owner, seconds=seconds, share=seconds / total, message=words.get(owner, owner))
        for owner, seconds in step.breakdown_s.items()
        if owner != "compute" and seconds / total >= _LEAST
    ]
    rows.sort(key=lambda row: -row["seconds"])
    spare = memory.capacity_bytes - memory.reserved_bytes
    if spare > _SPARE * memory.capacity_bytes:
        share = spare / memory.capacity_bytes
        rows.append(Parts(owner="memory", seconds=None, share=share, message=f"{gigabytes(spare)} stay free per GPU"))
    return tuple(rows)


def mfu_sentence(name: str, estimate: Estimate) -> str:
    """The one line that a prologue wants."""
    step, memory = estimate.step, estimate.memory
    if step is None or memory is None:
        first = estimate.violations[0].message if estimate.violations else "a rule is broken"
        return f"{name} would not start: {first}"
    low, high = (step.mfu.causal * step.seconds.value / each for each in (step.seconds.high, step.seconds.low))
    speed = (
        f"{duration(step.seconds.value)} per step, and the MFU should be about {step.mfu.causal:.0%} "
        f"({low:.0%} to {high:.0%})"
    )
    need = f"{gigabytes(memory.reserved_bytes)} of {gigabytes(memory.capacity_bytes)}"
    if estimate.violations:
        return f"{name} would not start: {estimate.violations[0].message} Otherwise: {need}, {speed}."
    if not estimate.fits:
        over = memory.reserved_bytes - memory.capacity_bytes
        return (
            f"{name} would start and run out of memory: stage {memory.peak_stage} needs {need}, {gigabytes(over)} more."
        )
    return f"{name} starts and fits, {need}; {speed}."


def doubts(estimate: Estimate, roomy: list[str], unknown: int, style: str) -> str:
    """What could turn the verdict, as a further sentence; empty where nothing does.

    roomy: options that need less memory than is priced. unknown: options that the table does not have; Megatron-LM's
    own parser refuses those that it does not have either (arguments.py, parse_args, at 000c4ac24f).
    """
    if not estimate.valid:
        return ""
    if not estimate.fits and roomy:
        return f" It needs less than that with {' and '.join(roomy)}, which the figures leave out, so it may fit."
    if unknown and style == "megatron-lm":
        which = "1 option is" if unknown == 1 else f"{unknown} options are"
        return f" But {which} unknown here (below): if this Megatron-LM does not have them either, it stops at once."
    return ""
