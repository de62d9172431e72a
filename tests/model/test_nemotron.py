"""Nemotron 3: experts in a latent space, and modules of multi-token prediction of attention and experts."""

from __future__ import annotations

import pytest

from fivefold.errors import FivefoldError
from fivefold.model import count_params, load_model, read_config
from fivefold.model.catalogue import entry
from fivefold.model.flops.totals import forward_flops_per_token
from fivefold.model.spec import Attention, Experts


def _config(**changes):
    return {**entry("nemotron-3-super").config, **changes}


def test_latent_experts_count_as_published():
    """120B-A12B and 550B-A55B, as their names say."""
    for name, total, active in (("nemotron-3-super", 120, 12), ("nemotron-3-ultra", 550, 55)):
        counted = count_params(load_model(name))
        assert counted.total / 1e9 == pytest.approx(total, rel=0.01)
        assert counted.active / 1e9 == pytest.approx(active, rel=0.07)


def test_a_latent_space_makes_experts_smaller_by_its_ratio():
    whole, latent = (read_config(_config(moe_latent_size=size)) for size in (None, 1024))
    for model, size in ((whole, 0), (latent, 1024)):
        feed = model.runs[-1].block.feed
        assert isinstance(feed, Experts) and feed.latent == size
    experts = 40 * 512 * 2 * 2688 * (4096 - 1024)
    projections = 40 * 2 * 4096 * 1024
    assert count_params(whole).total - count_params(latent).total == experts - projections
    token = 40 * 2 * (22 * 2 * 2688 * (4096 - 1024) - 2 * 4096 * 1024)
    assert forward_flops_per_token(whole, 1024) - forward_flops_per_token(latent, 1024) == pytest.approx(token)


def test_a_module_is_attention_and_experts():
    model = load_model("nemotron-3-super", mtp=True)
    assert model.mtp == 2
    assert model.mtp_block.mixer == next(kind.mixer for kind in model.kinds if isinstance(kind.mixer, Attention))
    assert model.mtp_block.feed == model.runs[-1].block.feed
    for changes in ({"mtp_hybrid_override_pattern": "ME"}, {"mtp_hybrid_override_pattern": None}):
        with pytest.raises(FivefoldError, match="mtp_hybrid_override_pattern"):
            read_config(_config(**changes))
