"""Logits against transformers' own classes with the same weights, in fp64; names, stages and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from proofs import gpt2, llama
from torch import nn

from fivefold.errors import FivefoldError
from fivefold.model import ModelSpec, Rotary, load_model, model_tensors, read_config
from fivefold.train.init import initialise
from fivefold.train.model import Decoder, WindowedCore, attention_core, rotation, tensor_table

COMMON = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 5e4,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON, "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"model_type": "llama", **COMMON, "tie_word_embeddings": True, "num_key_value_heads": 6},
    "mistral": {"model_type": "mistral", **COMMON, "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", **COMMON},
    "qwen3": {"model_type": "qwen3", **COMMON, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "vocab_size": 97, "n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64},
}
GPT2_NAMES = {
    "embed_tokens.": "wte.", "embed_positions.": "wpe.", "layers.": "h.", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip


SPECS = [llama(), llama(tied=True), gpt2()]


class ExactRotary(nn.Module):
    """transformers computes the angles in fp32 whatever the model's dtype."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def exact(theirs: Any, theta: float) -> None:
    """Replace the parts that transformers runs in fp32 by the same formulas in fp64."""
    for name, module in list(theirs.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            fresh = nn.RMSNorm(module.weight.shape[0], module.variance_epsilon).double()
            fresh.weight = module.weight
            parent, _, leaf = name.rpartition(".")
            setattr(theirs.get_submodule(parent), leaf, fresh)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            config = theirs.config
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            parent, _, leaf = name.rpartition(".")
            setattr(theirs.get_submodule(parent), leaf, ExactRotary(head_dim, theta))


def load_theirs(theirs: Any, ours: dict[str, torch.Tensor], gpt: bool) -> None:
    """Give transformers' model our weights, under its names."""
    state = {}
    for name, value in ours.items():
        if gpt and "self_attn" in name and "o_proj" not in name:
            continue
        if gpt:
            for old, new in GPT2_NAMES.items():
                name = name.replace(old, new)
            name = name.replace("norm.", "ln_f.") if name.startswith("norm.") else name
            if any(part in name for part in ("c_proj.weight", "c_fc.weight")):
                value = value.t()
        state[name if name.startswith("lm_head") else ("transformer." if gpt else "model.") + name] = value
    for i in range(3 if gpt else 0):
        for kind in ("weight", "bias"):
            fused = torch.cat([ours[f"layers.{i}.self_attn.{p}_proj.{kind}"] for p in "qkv"])
            state[f"transformer.h.{i}.attn.c_attn.{kind}"] = fused.t() if kind == "weight" else fused
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_transformers(name: str, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_config(tmp_path / "config.json")
    gpt = name == "gpt2"
    ours = Decoder(spec, dtype=torch.float64)
    initialise(ours, spec, seed=3)
    with torch.no_grad():
        for parameter in ours.parameters():  # biases and norms of ones would hide a swapped use
            parameter += 0.05 * torch.randn(parameter.shape, dtype=torch.float64)

    kind = config["model_type"]
    made = transformers.AutoConfig.for_model(**{**config, "model_type": kind}, attn_implementation="sdpa")
    theirs = transformers.AutoModelForCausalLM.from_config(made).double().eval()
    exact(theirs, 5e4)
    load_theirs(theirs, dict(ours.named_parameters()), gpt)

    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    expected, got = theirs(tokens).logits, ours(tokens)
    assert torch.allclose(got, expected, rtol=0, atol=1e-10)
    expected.square().sum().backward()
    got.square().sum().backward()
    embedding = theirs.get_input_embeddings().weight.grad
    assert ours.embed_tokens is not None
    assert torch.allclose(ours.embed_tokens.weight.grad, embedding, rtol=1e-10, atol=1e-10)


def test_stretched_rotary_frequencies_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    rotary = Rotary(
        theta=5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192
    )
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    places = torch.tensor([0, 1, 17, 9000])
    ours = rotation(places, 128, rotary, torch.float32)
    cos, sin = theirs(torch.zeros(1, 4, 512), places[None])
    assert torch.allclose(ours.cos[0, :, 0], cos[0, :, :64], atol=2e-3)  # angles of 9,000 in fp32
    assert torch.allclose(ours.sin[0, :3, 0], sin[0, :3, :64], atol=1e-5)
    assert not torch.allclose(ours.sin, rotation(places, 128, Rotary(theta=5e5), torch.float32).sin, atol=0.1)


@pytest.mark.parametrize(
    "spec", [llama(), llama(tied=True), gpt2()], ids=lambda spec: f"{spec.name}-{spec.tied_embeddings}"
)
def test_parameters_are_the_tensors_of_the_planner(spec: ModelSpec) -> None:
    model = Decoder(spec, device="meta")
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        t.name: t.shape for t in model_tensors(spec)
    }


@pytest.mark.parametrize(
    "spec", [llama(), llama(tied=True), gpt2()], ids=lambda spec: f"{spec.name}-{spec.tied_embeddings}"
)
def test_stages_in_a_row_are_the_whole_model(spec: ModelSpec) -> None:
    whole = Decoder(spec, dtype=torch.float64)
    cuts = [(range(1), True, False), (range(1, 1), False, False), (range(1, 4), False, True)]
    stages = [Decoder(spec, layers, first, last, dtype=torch.float64) for layers, first, last in cuts]
    for model in (whole, *stages):
        initialise(model, spec, seed=5)
    x = tokens = torch.arange(16).reshape(2, 8)
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens))


def test_positions_may_be_given_in_any_order() -> None:
    """A token's output depends on its position and on which tokens its mask shows, not on where it stands."""
    model = Decoder(llama(), dtype=torch.float64)
    initialise(model, llama())
    tokens = torch.arange(12).reshape(1, 12)
    shifted = model(tokens, torch.arange(5, 17))
    assert torch.allclose(shifted, model(tokens), atol=1e-12)  # rotary attention knows distances only
    per_sample = model(tokens.expand(2, -1), torch.stack((torch.arange(12), torch.arange(5, 17))))
    assert torch.allclose(per_sample[0], per_sample[1], atol=1e-12)


def test_a_window_hides_older_tokens() -> None:
    q, k, v = torch.randn(3, 1, 10, 4, 8, dtype=torch.float64).unbind(0)
    out = WindowedCore(3)(q, k, v)
    assert torch.allclose(out[:, 9:], attention_core(q[:, 9:], k[:, 7:], v[:, 7:], causal=False))
    assert torch.equal(WindowedCore(10)(q, k, v), attention_core(q, k, v))


def test_a_tied_head_alone_stands_for_the_embedding() -> None:
    spec = llama(tied=True)
    head = Decoder(spec, range(3, 4), embedding=False, head=True)
    assert "lm_head.weight" in dict(head.named_parameters())
    assert tensor_table(spec)["lm_head.weight"].name == "embed_tokens.weight"


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_what_does_not_run_is_refused(name: str) -> None:
    with pytest.raises(FivefoldError, match=r"dense|multi-token") as caught:
        Decoder(load_model(name), device="meta")
    assert caught.value.code == "model-not-trainable"
