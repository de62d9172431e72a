"""FLOPs against torch's own counter running transformers' models, and against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.model import (
    attention_flops_per_token,
    count_params,
    forward_flops_per_token,
    keys_per_query,
    load_model,
    models,
    simple,
    training_flops_per_token,
)
from fivefold.model.catalogue import entry

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama-3-8b",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 101,
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101}),
    "qwen3": (
        "qwen3-0.6b",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 101,
        },
    ),
    "qwen3_moe": (
        "qwen3-30b-a3b",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "vocab_size": 101,
        },
    ),
    "mixtral": (
        "mixtral-8x7b",
        {
            "hidden_size": 64,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 101,
        },
    ),
    "deepseek_v2": (
        "deepseek-v2-lite",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "vocab_size": 101,
        },
    ),
    "deepseek_v3": (
        "deepseek-v3",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 2,
            "vocab_size": 101,
        },
    ),
}


@pytest.mark.parametrize("family", SMALL)
def test_forward_flops_against_torch(family: str, transformers_model: Callable[..., Any]) -> None:
    """Eager attention multiplies the whole score matrix, so this is the noncausal convention, to the last FLOP."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    base, sizes = SMALL[family]
    config = {**entry(base).config, **sizes}
    config = {key: value for key, value in config.items() if key not in ("rope_scaling",)}
    model = transformers_model(config, device="cpu", attn_implementation="eager", experts_implementation="eager").eval()
    batch, seq_len = 2, 12
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(batch * seq_len).reshape(batch, seq_len) % 101, use_cache=False)
    # transformers makes the rotary angles with a matrix product over positions; we do not count rotary embedding.
    rotary = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    measured = counter.get_total_flops() - rotary
    assert measured == batch * seq_len * forward_flops_per_token(load_model(config), seq_len, "noncausal")


def test_backward_is_twice_the_forward(transformers_model: Callable[..., Any]) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    base, sizes = SMALL["gpt2"]
    config = {**entry(base).config, **sizes}
    model = transformers_model(config, device="cpu", attn_implementation="eager").train()
    tokens = torch.arange(24).reshape(2, 12) % 101
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    assert counter.get_total_flops() == 24 * training_flops_per_token(load_model(config), 12)


@pytest.mark.parametrize("name", models())
def test_six_parameters_per_token(name: str) -> None:
    """The closed form: 6 per active parameter that multiplies, + 12 (heads head_dim) s per layer of plain attention."""
    model = load_model(name)
    counts = count_params(model)
    linears = counts.active - counts.embedding + (0 if counts.head else model.vocab * model.hidden)
    s = 1024
    attention = sum(3 * run.count * attention_flops_per_token(run.block.mixer, s) for run in model.runs)
    # Norms and biases are parameters that do not multiply: under 0.2% even of the smallest model.
    assert training_flops_per_token(model, s) == pytest.approx(6 * linears + attention, rel=2e-3)


def test_gpt_formula_of_korthikanti() -> None:
    model = load_model("gpt-175b")
    exact = 64 * 2048 * training_flops_per_token(model, 2048)
    assert exact == pytest.approx(simple.gpt_model_flops(64, 2048, 96, 12288, 51200), rel=1e-12)


def test_latent_attention_by_hand() -> None:
    mixer = load_model("deepseek-v3").kinds[0].mixer
    assert attention_flops_per_token(mixer, 4096) == 2 * 128 * (128 + 64) * 4096 + 2 * 128 * 128 * 4096
    assert attention_flops_per_token(mixer, 4096, "causal") == 128 * (128 + 64 + 128) * 4096


@given(seq_len=st.integers(1, 300), window=st.one_of(st.none(), st.integers(1, 400)))
def test_keys_per_query_against_the_mask(seq_len: int, window: int | None) -> None:
    """causal counts half of the diagonal: between the mask's mean without and with the diagonal."""
    reach = min(window or seq_len, seq_len)
    with_diagonal = sum(min(i + 1, reach) for i in range(seq_len)) / seq_len
    causal = keys_per_query(window, seq_len, "causal")
    assert causal == pytest.approx(with_diagonal - reach / (2 * seq_len))
    assert causal <= keys_per_query(window, seq_len, "noncausal") == reach


def test_unknown_convention() -> None:
    with pytest.raises(FivefoldError, match="causal"):
        keys_per_query(None, 8, "half")  # type: ignore[arg-type]


def test_mtp_adds_a_block_a_projection_and_a_head() -> None:
    base, with_mtp = load_model("deepseek-v3"), load_model("deepseek-v3", mtp=True)
    extra = forward_flops_per_token(with_mtp, 4096) - forward_flops_per_token(base, 4096)
    shorter = load_model("deepseek-v3", layers=60)
    block = forward_flops_per_token(base, 4096) - forward_flops_per_token(shorter, 4096)
    assert extra == block + 2 * 2 * 7168 * 7168 + 2 * 7168 * 129280
