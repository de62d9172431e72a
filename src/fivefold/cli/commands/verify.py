"""`fivefold verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from fivefold.cli.flags import (
    ClusterFlags,
    LayoutFlags,
    ModelFlags,
    OutputFlags,
    RuntimeFlags,
    WorkFlags,
    whole_number,
)
from fivefold.cli.output import console, write_json
from fivefold.cli.progress import progress

if TYPE_CHECKING:
    from fivefold.cli.problem import Question
    from fivefold.train.job import Job

_PROOF = Group("Proof", sort_key=5)
_MODEL, _CLUSTER, _WORK, _RUNTIME = ModelFlags(), ClusterFlags(), WorkFlags(), RuntimeFlags()
_LAYOUT, _OUTPUT = LayoutFlags(), OutputFlags()


def verify(
    model: str,
    /,
    *,
    model_flags: ModelFlags = _MODEL,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _WORK,
    layout: LayoutFlags = _LAYOUT,
    max_ranks: Annotated[int, Parameter(group=_PROOF, converter=whole_number)] = 8,
    timeout: Annotated[float, Parameter(group=_PROOF)] = 300.0,
    seed: Annotated[int, Parameter(group=_PROOF, converter=whole_number)] = 0,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Prove that a layout trains like one process: gradients, losses and weights of every parameter, in fp64.

    The model is shrunk, the layout is not, but for replicas beyond two; its ranks are processes of this machine. Needs
    PyTorch, no GPU. Exits with 1 when a number is out of bounds, a rank fails or the layout would not start.

    For example:
      fivefold verify plan.toml
      fivefold verify llama-3-8b --gpus 8 --tp 2 --pp 2 --zero 1 --gbs 64

    Parameters
    ----------
    model
        A name of the catalogue (fivefold models), a config.json, a folder with one, or a plan file (.toml).
    max_ranks
        Most processes to start here.
    timeout
        Seconds after which the ranks are stopped and the proof has failed.
    seed
        Of the weights and the data.
    """
    from fivefold.cli.job import job_question
    from fivefold.cli.values import positive, whole

    whole("--max-ranks", str(max_ranks))
    positive("--timeout", timeout)
    question, job = job_question(
        model, model_flags, cluster, work, runtime, layout,
        no_calibration="verify compares numbers, not times.",
        no_ramp="verify compares a few steps of one batch",
    )  # fmt: skip
    from fivefold.errors import WouldNotStartError
    from fivefold.train.refuse import refuse
    from fivefold.train.verify.forked import RankFailedError
    from fivefold.train.verify.prove import prove, shrunk_for_proof

    try:
        refuse(job)
    except WouldNotStartError as error:
        return _failed(question, (), job, "NOT RUN", error.message, output)
    shrunk = shrunk_for_proof(job, max_ranks)
    try:
        with progress(f"Proving {job.model.name} on {shrunk.job.gpus} ranks"):
            proven = prove(shrunk, timeout, seed)
    except RankFailedError as error:
        return _failed(question, shrunk.notes, shrunk.job, "FAILED  the ranks did not finish", str(error), output)
    if output.json:
        body = {**proven.verdict.to_dict(), "seconds_s": proven.seconds_s, "failure": None}
        write_json(_document(question, shrunk.job, shrunk.notes, body))
    else:
        from fivefold.cli.render.verify import verify_view

        console(output).print(verify_view(job, proven))
    return 0 if proven.verdict.passed else 1


def _document(question: Question, small: Job, notes: tuple[str, ...], body: dict[str, Any]) -> dict[str, Any]:
    import msgspec

    from fivefold.cli.job import resolved
    from fivefold.estimate.result import envelope

    proven = {"precision": "fp64", "ranks": small.gpus, "model": msgspec.to_builtins(small.model), "notes": notes}
    return {**envelope("verify", resolved(question)), **proven, **body}


def _failed(
    question: Question, notes: tuple[str, ...], small: Job, headline: str, why: str, output: OutputFlags
) -> int:
    """No numbers to compare: the layout would not start, a rank failed, or time ran out."""
    if output.json:
        body: dict[str, Any] = {
            "layout": small.resolved.to_dict(), "passed": False, "tolerance": None, "parameters": [], "losses": [],
            "grad_norm": {"reference": None, "layout": None}, "seconds_s": None, "failure": why,
        }  # fmt: skip
        write_json(_document(question, small, notes, body))
    else:
        out = console(output)
        out.print(headline, style="bold red")
        out.print(why, soft_wrap=True, markup=False)
    return 1
