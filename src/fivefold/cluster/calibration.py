"""Calibration: factors on a GPU's and a runtime's constants, fitted to a user's own runs.

A cluster carries one; what is priced on the cluster is then priced with the factors (fivefold.estimate.calibrated), and
is refused where no fit is for the GPU and the runtime. Neither is fitted here (fivefold.measure.calibrate).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from fivefold.errors import FivefoldError
from fivefold.files import Unreadable, read_table, save_text

SCHEMA = "fivefold-calibration/1"
MAX_FILE_BYTES = 1 << 18
# products: matrix products; attention: flash kernels; memory: operations bound by the GPU's memory; scale_up: links
# inside the innermost domains; network: the outermost link; step: host work of a step; launch: host work an operation.
Constant = Literal["products", "attention", "memory", "scale_up", "network", "step", "launch"]
CONSTANTS: tuple[Constant, ...] = get_args(Constant)

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Text = Annotated[str, msgspec.Meta(max_length=2000)]
_Factor = Annotated[float, msgspec.Meta(ge=1e-4, le=1e4)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=10)]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of one GPU under one runtime say.

    runs: how many were fitted. factors: seconds of each constant's work over the seconds of the plain prediction; one
    that is absent is 1. uncertainty: relative standard deviation of each factor; near its prior's width where the runs
    do not tell. spread: half-width of the 80% interval of a step like the runs, relative, from their leave-one-out
    errors. scale: what they leave of the interval that a step has without them; 0: not given, every step has `spread`.
    experts: whether some of the runs were of mixtures of experts; if not, the spread does not hold for one.
    source: the file of runs, and the version that fitted them.
    """

    gpu: _Name
    runtime: _Name
    runs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    factors: dict[Constant, _Factor]
    uncertainty: dict[Constant, _Share] = {}
    spread: Annotated[float, msgspec.Meta(gt=0, le=10)]
    scale: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    experts: bool = False
    source: _Text = ""

    @property
    def provenance(self) -> str:
        return f"calibrated on {self.runs} {'run' if self.runs == 1 else 'runs'}"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Fits, one per GPU and runtime."""

    fits: Annotated[tuple[Fit, ...], msgspec.Meta(min_length=1, max_length=100)]

    def fit_of(self, gpu: str, runtime: str) -> Fit:
        """The fit of a GPU and a runtime's profile. Raises FivefoldError where there is none."""
        found = next((fit for fit in self.fits if (fit.gpu, fit.runtime) == (gpu, runtime)), None)
        if found is None:
            known = [f"{fit.runtime} on {fit.gpu}" for fit in self.fits]
            raise FivefoldError(
                f"The calibration holds {', '.join(known)}, and this is {runtime} on {gpu}. Constants of one GPU and "
                "runtime say little about another's: leave the calibration out, or add runs of this pair to it with "
                "fivefold calibrate.",
                code="calibration-of-another",
                option="--calibration",
                value=f"{runtime} on {gpu}",
                legal=known,
            )
        return found

    def save(self, path: str | Path) -> None:
        """Write the TOML file that load_calibration reads. Raises FivefoldError where it cannot be written."""
        import tomli_w  # only when something is saved

        head = "# Factors on predicted seconds. Use it: fivefold estimate MODEL ... --calibration FILE\n\n"
        text = head + tomli_w.dumps({"schema": SCHEMA, **msgspec.to_builtins(self)})
        save_text(path, text, "The calibration")


def load_calibration(path: str | Path) -> Calibration:
    """Read a calibration file. Raises FivefoldError for what is missing, unknown, out of range or there twice."""
    table = _table(Path(path))
    schema = table.pop("schema", None)
    if schema != SCHEMA:
        raise _error(path, f"schema is {schema!r}, and this version reads {SCHEMA!r}")
    try:
        found = msgspec.convert(table, Calibration)
    except msgspec.ValidationError as error:
        raise _error(path, str(error)) from error
    _refuse_unknown(table, path)
    _refuse_control(found, path)
    pairs = [(fit.gpu, fit.runtime) for fit in found.fits]
    twice = next((pair for pair in pairs if pairs.count(pair) > 1), None)
    if twice is not None:
        raise _error(path, f"there are two fits of {twice[1]} on {twice[0]}")
    return found


def _table(path: Path) -> dict[str, Any]:
    try:
        return read_table(path, MAX_FILE_BYTES)
    except Unreadable as error:
        raise _error(path, "No such file, or no regular one" if error.kind == "absent" else error.reason) from error


def _refuse_unknown(table: dict[str, Any], path: str | Path) -> None:
    unknown = [key for key in table if key not in Calibration.__struct_fields__]
    unknown += [key for fit in table["fits"] for key in fit if key not in Fit.__struct_fields__]
    if unknown:
        raise _error(path, f"the key {unknown[0][:80]!r} is not known here")


def _refuse_control(found: Calibration, path: str | Path) -> None:
    """Names are printed, so they hold nothing that steers a terminal."""
    for fit in found.fits:
        if not (fit.gpu + fit.runtime + fit.source).isprintable():
            raise _error(path, "a name holds a control character")


def _error(path: str | Path, problem: str) -> FivefoldError:
    return FivefoldError(
        f"Calibration file {str(path)[:200]!r}: {problem}. Correct it, or write a new one with fivefold calibrate.",
        code="bad-calibration-file",
        option="--calibration",
        value=str(path)[:200],
    )
