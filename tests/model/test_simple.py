"""The simple view against the numbers that the papers print, and against the exact count."""

from __future__ import annotations

import pytest

from fivefold.errors import FivefoldError
from fivefold.model import count_params, load_model, models, simple

MEGATRON = [name for name in models() if name.startswith("gpt-") and load_model(name).family == "gpt2"]


@pytest.mark.parametrize("name", [*MEGATRON, "gpt2", "gpt2-xl", "gpt3-175b"])
def test_parameters_are_the_exact_count_without_positions(name: str) -> None:
    model = load_model(name)
    exact = count_params(model).total - model.learned_positions * model.hidden
    assert simple.parameters(model.layers, model.hidden, model.vocab) == exact


@pytest.mark.parametrize(("billions", "gigabytes"), [(1, 20), (7, 140), (70, 1400), (405, 8100)])
def test_twenty_bytes(billions: int, gigabytes: int) -> None:
    assert simple.state_bytes(billions * 1e9, "bf16-and-fp32-gradients")["total"] == gigabytes * 1e9


def test_bytes_per_parameter() -> None:
    assert [simple.state_bytes(1, recipe)["total"] for recipe in simple.STATE_BYTES] == [16, 18, 20]
    assert simple.state_bytes(1) == {"weights": 2, "gradients": 2, "master": 4, "optimizer": 8, "total": 16}


def test_selective_recompute_of_gpt3() -> None:
    """Korthikanti et al. 2022, section 5: 2.7% more FLOPs for 70% less activation memory; section 4.3: 5as/h = 80."""
    for h, a, layers, cost, saving in ((12288, 96, 96, 0.027, 0.70), (20480, 128, 105, 0.016, 0.65)):  # and of 530B
        flops = {kind: simple.gpt_hardware_flops(1, 2048, layers, h, 51200, kind) for kind in ("none", "selective")}
        kept = {kind: simple.activation_bytes_per_layer(2048, 1, h, a, variant=kind) for kind in flops}
        assert flops["selective"] / flops["none"] - 1 == pytest.approx(cost, abs=0.0005)
        assert 1 - kept["selective"] / kept["none"] == pytest.approx(saving, abs=0.005)


def test_activations() -> None:
    s, b, h, a, t = 2048, 2, 12288, 96, 8
    unit = s * b * h
    per_unit = {
        variant: simple.activation_bytes_per_layer(s, b, h, a, t, variant) / unit
        for variant in simple.ACTIVATION_VARIANTS
        if variant not in ("none", "selective")
    }
    assert per_unit == pytest.approx(
        {"tp": 10 + 3 + 10, "tp-sp": 114 / 8, "tp-selective": 13, "tp-sp-selective": 34 / 8, "full": 2, "full-sp": 0.25}
    )
    assert simple.activation_bytes_per_layer(s, b, h, a) == unit * 114
    assert simple.activation_bytes_per_layer(s, b, h, a, variant="selective") == unit * 34


def test_tp_variants_meet_the_plain_ones_at_one_rank() -> None:
    args = (512, 1, 1024, 16, 1)
    plain = simple.activation_bytes_per_layer(*args, "none")
    assert simple.activation_bytes_per_layer(*args, "tp") == pytest.approx(plain)
    assert simple.activation_bytes_per_layer(*args, "tp-sp") == pytest.approx(plain)


def test_plain_variant_with_tensor_parallelism_is_refused() -> None:
    for variant in ("none", "selective"):
        with pytest.raises(FivefoldError, match="tp-sp"):
            simple.activation_bytes_per_layer(512, 1, 1024, 16, 8, variant)
    with pytest.raises(FivefoldError, match="legal"):
        simple.activation_bytes_per_layer(512, 1, 1024, 16, 1, "some")  # type: ignore[arg-type]


def test_pipeline_factors() -> None:
    assert simple.bubble_fraction(4, 8) == 3 / 8
    assert simple.bubble_fraction(4, 8, vpp=2) == 3 / 16
    assert simple.interleaving_factor(8, 1) == 1
    assert simple.interleaving_factor(8, 3) == pytest.approx(1 + 7 / 24)
    assert [simple.in_flight(4, 8, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert simple.in_flight(4, 2) == 2
    assert simple.in_flight(8, 64, vpp=3) == pytest.approx(8 * (1 + 7 / 24))
    with pytest.raises(FivefoldError, match="first stage"):
        simple.in_flight(8, 64, stage=1, vpp=3)


def test_trillion_parameters_on_3072_a100() -> None:
    """Narayanan et al. 2021, Table 1: 163 teraFLOP/s per GPU, 52% of 312, with full recompute; model MFU about 39%."""
    hardware = simple.gpt_hardware_flops(1, 2048, 128, 25600, 51200, "full")
    closed = 96 * 2048 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
    assert hardware == pytest.approx(closed, rel=1e-9)
    model = simple.gpt_model_flops(1, 2048, 128, 25600, 51200)
    assert 0.52 * model / hardware == pytest.approx(0.39, abs=0.005)


def test_compute_per_step() -> None:
    assert simple.compute_flops(7e9, 1e12) == 6 * 7e9 * 1e12
    full = simple.compute_flops(0, 10, L=2, attention_width=64, s=128)
    assert full == 10 * 12 * 2 * 64 * 128
    assert simple.compute_flops(0, 10, L=2, attention_width=64, s=128, causal=True) == full / 2


def test_unknown_recipe() -> None:
    with pytest.raises(FivefoldError, match="bf16-gradients"):
        simple.state_bytes(1, "fp4")
