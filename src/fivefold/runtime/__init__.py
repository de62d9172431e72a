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
    base, _, version = name.partition("@")
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
    if version and not _covers(profile.versions, version):
        raise FivefoldError(
            f"The {profile.name} profile describes versions {profile.versions}; {version} is not modelled. "
            f"Leave out the version to plan for {profile.versions}.",
            code="unknown-runtime-version",
            option="--runtime",
            value=name,
            legal=[profile.versions],
        )
    return profile


def _covers(versions: str, version: str) -> bool:
    """Whether `version` lies in the first 'LOW to HIGH' of `versions` (or equals its only number)."""
    words = versions.replace("core ", "").split()
    low = words[0]
    high = words[2] if len(words) > 2 and words[1] == "to" else low
    try:
        parts = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    as_tuple = lambda text: tuple(int(part) for part in text.split(".")[:2])  # noqa: E731
    return as_tuple(low) <= parts <= as_tuple(high)


__all__ = ["MEGATRON", "PROFILES", "TORCHTITAN", "Profile", "load_runtime", "runtimes"]
