"""Profiles are data: complete, sourced, found by name, alias and version, and refused where nothing is modelled."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from fivefold import __version__
from fivefold.errors import FivefoldError
from fivefold.runtime import OTHER_VERSIONS, PROFILES, Profile, load_runtime, profiles_of, runtimes

# Fields that describe or name rather than claim something measurable.
_NOT_FACTS = {
    "name",
    "versions",
    "oldest",
    "newest",
    "aliases",
    "sharding",
    "sources",
    "optimizers",
    "precisions",
    "zero_stages",
    "other_zero_stages",  # a sentence
    "device",
    "device_tensors",  # each with its own source
}
# What a framework does where its profile says nothing else.
_DEFAULTS = {f.name: f.default for f in msgspec.structs.fields(Profile) if f.default is not msgspec.NODEFAULT}
# Behaviours of the framework itself, which its name already gives the source of.
_BEHAVIOURS = {
    "cached_wgrad_buffers",
    "head_wgrad_placeholder",
    "grad_buckets",
    "prefetch_blocks",
    "tp_beside_wgrad_hidden",
    "ep_overlap_hidden",
    "fused_glu",
    "vocab_multiple",
    "norms_fused_into_linears",
    "checkpoint_stops_early",
}


EVERY = (*PROFILES, *OTHER_VERSIONS)


@pytest.mark.parametrize("profile", EVERY, ids=lambda profile: f"{profile.name}, {profile.versions}")
def test_every_number_has_a_source(profile: Profile) -> None:
    usual = {name for name, value in _DEFAULTS.items() if getattr(profile, name) == value}
    unsourced = set(Profile.__struct_fields__) - usual - _NOT_FACTS - _BEHAVIOURS - set(profile.sources)
    assert not unsourced


@pytest.mark.parametrize("profile", EVERY, ids=lambda profile: f"{profile.name}, {profile.versions}")
def test_sources_name_fields(profile: Profile) -> None:
    assert set(profile.sources) <= set(Profile.__struct_fields__)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_found_by_every_name(profile: Profile) -> None:
    for name in (profile.name, *profile.aliases, profile.name.upper()):
        assert load_runtime(name) is profile
    assert profile.name in runtimes()


def test_names_are_unique() -> None:
    names = [name for profile in PROFILES for name in (profile.name, *profile.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name",
    "megatron@0.2 megatron@0.11 megatron@0.12 megatron@0.14.1 megatron@0.17 torchtitan@0.2 torchtitan@2026.9 "
    f"nanotron@0.5 nanotron@2026.4 fsdp@2.6 fsdp1@2.0 fivefold@{__version__}".split(),
)
def test_versions_inside_the_range(name: str) -> None:
    profile = load_runtime(name)
    runtime, _, version = name.partition("@")
    assert profile.name == runtime
    assert profile.oldest <= tuple(int(part) for part in version.split("."))[:2] <= profile.newest


@pytest.mark.parametrize("name", sorted({profile.name for profile in PROFILES}))
def test_versions_of_one_runtime_do_not_overlap(name: str) -> None:
    eras = sorted(profiles_of(name), key=lambda era: era.oldest)
    assert all(era.oldest <= era.newest for era in eras)
    assert all(older.newest < newer.oldest for older, newer in pairwise(eras))


def test_an_older_release_keeps_more() -> None:
    """Megatron-LM of 2023: the gate's activation and the logits' fp32 copies are tensors of their own."""
    old, new = load_runtime("megatron@0.4"), load_runtime("megatron")
    assert not old.fused_glu and new.fused_glu
    assert old.loss_bytes_per_logit > new.loss_bytes_per_logit
    assert load_runtime("megatron@0.5").fused_glu


@pytest.mark.parametrize("name", ["megatron@0.1", "megatron@0.18", "megatron@new", "torchtitan@0.1", "torchtitan@3"])
def test_other_versions_are_refused_with_the_range(name: str) -> None:
    with pytest.raises(FivefoldError) as refused:
        load_runtime(name)
    assert refused.value.option == "--runtime"
    assert load_runtime(name.partition("@")[0]).versions in refused.value.message


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_runtime_can_be_asked_for_on_a_device(device: str) -> None:
    for name in (f"fivefold@{device}", f"fivefold@{__version__}@{device}", f"Fivefold@{device.upper()}@{__version__}"):
        assert load_runtime(name).device == device
    assert load_runtime("fivefold").device == "cuda"


@pytest.mark.parametrize("name", ["fivefold@tpu", "fivefold@cpu@cuda", "fivefold@cpu@99", "megatron@cpu"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(FivefoldError) as refused:
        load_runtime(name)
    assert refused.value.option == "--runtime"


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(FivefoldError, match="Did you mean megatron"):
        load_runtime("megatrn")


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_shares_are_shares(profile: Profile) -> None:
    for name in ("tp_overlap_hidden", "ep_overlap_hidden", "tp_beside_dgrad_hidden", "tp_beside_wgrad_hidden"):
        assert 0 <= getattr(profile, name) <= 1
    assert profile.tie_spread < profile.time_spread
