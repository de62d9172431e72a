"""What a check says: the contract's `check` object as typed structs."""

from __future__ import annotations

from typing import Any

import msgspec

from fivefold.estimate.result import Estimate, Parts, envelope


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change to a launch within its own GPUs.

    kind: what it changes, one word per axis or option. options: {"old": ..., "new": ...}, each option to its value;
    None where it is not there, True for a switch. gain_s: seconds per step that it saves; None where the launch as it
    stands breaks a rule and so has no time. delta_bytes: device bytes that it adds (negative: frees) on the fullest
    stage; None likewise.
    """

    kind: str
    description: str
    options: Parts
    gain_s: float | None
    delta_bytes: int | None
    estimate: Estimate


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The answer about one file.

    understood: what was read, each value with its place. unknown_options: as written; `unknown` says more about each.
    waste: what keeps the step from being compute alone, largest first. starts, fits: the verdict.
    """

    source: str
    runtime: str
    understood: Parts
    unknown_options: tuple[str, ...]
    unknown: tuple[Parts, ...]
    estimate: Estimate
    starts: bool
    fits: bool
    summary: str
    waste: tuple[Parts, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether the launch starts and fits."""
        return self.starts and self.fits

    def to_dict(self) -> dict[str, Any]:
        """The contract's JSON."""
        fields = msgspec.to_builtins(self)
        fields["estimate"].pop("inputs")
        for change in fields["changes"]:
            # All estimates have the inputs of the first, but for the layout, which each one gives.
            change["estimate"].pop("inputs")
        return {**envelope("check", self.estimate.resolved_inputs()), **fields}
