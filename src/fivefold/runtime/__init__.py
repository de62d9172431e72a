"""Runtimes: one profile per framework and version range, as data that the estimate reads."""

from __future__ import annotations

from difflib import get_close_matches

from fivefold.errors import FivefoldError
from fivefold.runtime.megatron import PROFILE as MEGATRON
from fivefold.runtime.profile import Profile
from fivefold.runtime.torchtitan import PROFILE as TORCHTITAN

PROFILES: tuple[Profile, ...] = (MEGATRON, TORCHTITAN)
_BY_NAME = {name: profile for profile in PROFILES for name in (profile.name, *profile.aliases)}


def runtimes() -> tuple[str, ...]:
    """Names of the runtimes that can be planned for."""
    return tuple(profile.name for profile in PROFILES)


def load_runtime(name: str) -> Profile:
    """The profile of `name` or of one of its aliases.

    Raises FivefoldError for an unknown name, and for a version (`name@version`) that no profile covers.
    """
    base, at, version = name.partition("@")
    profile = _BY_NAME.get(base.lower())
    if profile is None:
        near = get_close_matches(base.lower(), _BY_NAME, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise FivefoldError(
            f"Unknown runtime '{base}'. Legal: {', '.join(sorted(_BY_NAME))}.{hint}",
            code="unknown-runtime",
            option="--runtime",
            value=name,
            legal=sorted(_BY_NAME),
        )
    if at and not _covers(profile, version):
        raise FivefoldError(
            f"The {profile.name} profile describes versions {profile.versions}; '{version}' is not modelled. "
            f"Leave out the version to plan for {profile.versions}.",
            code="unknown-runtime-version",
            option="--runtime",
            value=name,
            legal=[profile.versions],
        )
    return profile


def _covers(profile: Profile, version: str) -> bool:
    try:
        asked = tuple(int(part) for part in version.split("."))[:2]
    except ValueError:
        return False
    return profile.oldest <= asked <= profile.newest


__all__ = ["MEGATRON", "PROFILES", "TORCHTITAN", "Profile", "load_runtime", "runtimes"]
