"""Runtimes: one profile per framework and version range, as data that the estimate reads."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from fivefold.errors import FivefoldError
from fivefold.runtime.deepspeed import PROFILE as DEEPSPEED
from fivefold.runtime.deepspeed import SHARDED as DEEPSPEED_ZERO
from fivefold.runtime.fivefold import BY_DEVICE as FIVEFOLD_BY_DEVICE
from fivefold.runtime.fivefold import PROFILE as FIVEFOLD
from fivefold.runtime.fsdp import ACCELERATE, FSDP1
from fivefold.runtime.fsdp import PROFILE as FSDP
from fivefold.runtime.megatron import PROFILE as MEGATRON
from fivefold.runtime.megatron_fsdp import PROFILE as MEGATRON_FSDP
from fivefold.runtime.megatron_older import ERA_2023, ERA_2024
from fivefold.runtime.nanotron import MAIN as NANOTRON_MAIN
from fivefold.runtime.nanotron import PROFILE as NANOTRON
from fivefold.runtime.profile import Profile
from fivefold.runtime.torchtitan import MAIN as TORCHTITAN_MAIN
from fivefold.runtime.torchtitan import PROFILE as TORCHTITAN

# The profile that a name alone means.
PROFILES: tuple[Profile, ...] = (
    MEGATRON,
    TORCHTITAN,
    FIVEFOLD,
    MEGATRON_FSDP,
    NANOTRON,
    DEEPSPEED,
    DEEPSPEED_ZERO,
    FSDP,
    ACCELERATE,
    FSDP1,
)
# Profiles of further versions, which only a version asks for.
OTHER_VERSIONS: tuple[Profile, ...] = (ERA_2024, ERA_2023, TORCHTITAN_MAIN, NANOTRON_MAIN)
_BY_NAME = {name: profile for profile in PROFILES for name in (profile.name, *profile.aliases)}
# Of runtimes that keep different things on different devices, the profile of each; the first is the usual one.
_BY_DEVICE: dict[str, dict[str, Profile]] = {FIVEFOLD.name: FIVEFOLD_BY_DEVICE}


class Asked(NamedTuple):
    """A runtime as it was asked for: NAME, NAME@VERSION, NAME@DEVICE or NAME@VERSION@DEVICE; None where not said."""

    name: str
    version: str | None = None
    device: str | None = None


def parse_runtime(text: str) -> Asked:
    """The parts of a runtime's name, in lower case. Raises FivefoldError where it has more than it may."""
    name, *parts = text.lower().split("@")
    devices = _BY_DEVICE.get(_BY_NAME[name].name, {}) if name in _BY_NAME else {}
    versions = [part for part in parts if part not in devices]
    named = [part for part in parts if part in devices]
    if len(versions) > 1 or len(named) > 1:
        raise FivefoldError(
            f"'{text[:60]}' names more than one version or device. Write {name}, {name}@VERSION"
            + (f" or {name}@{next(iter(devices))}." if devices else "."),
            code="unknown-runtime-version",
            option="--runtime",
            value=text[:60],
            legal=[name, *(f"{name}@{device}" for device in devices)],
        )
    return Asked(name, versions[0] if versions else None, named[0] if named else None)


def runtimes() -> tuple[str, ...]:
    """Names of the runtimes that can be planned for."""
    return tuple(profile.name for profile in PROFILES)


def load_runtime(name: str) -> Profile:
    """The profile of `name` or of one of its aliases, on the device that is asked for.

    Raises FivefoldError for an unknown name, and for a version (`name@version`) that no profile covers.
    """
    asked = parse_runtime(name)
    profile = _BY_NAME.get(asked.name)
    if profile is None:
        near = get_close_matches(asked.name, _BY_NAME, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise FivefoldError(
            f"Unknown runtime '{name.partition('@')[0]}'. Legal: {', '.join(sorted(_BY_NAME))}.{hint}",
            code="unknown-runtime",
            option="--runtime",
            value=name,
            legal=sorted(_BY_NAME),
        )
    devices = _BY_DEVICE.get(profile.name, {})
    if asked.version is not None:
        eras = profiles_of(profile.name)
        covering = next((era for era in eras if _covers(era, asked.version)), None)
        if covering is None:
            raise _unknown_version(profile, eras, name, asked.version, devices)
        profile = covering
    return devices[asked.device] if asked.device is not None else profile


def profiles_of(name: str) -> tuple[Profile, ...]:
    """Every profile of one runtime, by its name: the one that the name alone means, then those of other versions."""
    return tuple(profile for profile in (*PROFILES, *OTHER_VERSIONS) if profile.name == name)


def _unknown_version(
    profile: Profile, eras: tuple[Profile, ...], name: str, version: str, devices: dict[str, Profile]
) -> FivefoldError:
    ranges = "; ".join(era.versions for era in eras)
    names = f" It can be followed by a device instead: {', '.join(devices)}." if devices else ""
    return FivefoldError(
        f"The profiles of {profile.name} describe versions {ranges}; '{version}' is not modelled. "
        f"Leave out the version to plan for {profile.versions}.{names}",
        code="unknown-runtime-version",
        option="--runtime",
        value=name,
        legal=[*(era.versions for era in eras), *devices],
    )


def _covers(profile: Profile, version: str) -> bool:
    try:
        asked = tuple(int(part) for part in version.split("."))[:2]
    except ValueError:
        return False
    return profile.oldest <= asked <= profile.newest


__all__ = [
    "FIVEFOLD",
    "MEGATRON",
    "OTHER_VERSIONS",
    "PROFILES",
    "TORCHTITAN",
    "Asked",
    "Profile",
    "load_runtime",
    "parse_runtime",
    "profiles_of",
    "runtimes",
]
