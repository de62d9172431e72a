"""Recomputation: the same numbers to the bit, and less kept."""

from __future__ import annotations

import axes
import pytest
import torch
from ranks import run_ranks

from fivefold.errors import FivefoldError
from fivefold.layout import Recompute
from fivefold.train.loss import cross_entropy_sum
from fivefold.train.mesh import Mesh
from fivefold.train.model import Decoder
from fivefold.train.parallel import recompute

FULL = Recompute(kind="full")
MODULES = [("core_attn",), ("mlp",), ("layernorm",), ("core_attn", "mlp", "layernorm")]
ALL = [FULL, Recompute(kind="full", layers=1), Recompute(kind="selective")] + [
    Recompute(kind="selective", modules=modules) for modules in MODULES
]


def decoder(name: str, how: Recompute, layers: int = 3) -> Decoder:
    model = axes.whole(axes.model(name, layers))
    recompute.apply(model, how)
    return model


def kept_bytes(model: Decoder, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Logits, and the bytes of distinct storages kept for backward when forward is over, parameters apart."""
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits = model(tokens)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in kept}
    return logits, sum(s.nbytes() for s in storages.values() if s.data_ptr() not in own)


@pytest.mark.parametrize("how", ALL, ids=lambda h: f"{h.kind}-{h.layers}-{'+'.join(h.modules)}")
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mistral"])
def test_gradients_are_the_same_to_the_bit(name: str, how: Recompute) -> None:
    tokens, labels = axes.batch(37)
    grads = []
    for choice in (Recompute(), how):
        model = decoder(name, choice)
        cross_entropy_sum(model(tokens), labels).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


@pytest.mark.parametrize("how", [FULL, *ALL[2:]], ids=lambda h: f"{h.kind}-{'+'.join(h.modules)}")
@pytest.mark.parametrize(
    "plan",
    [axes.layout(tp=2, sp=True), axes.layout(tp=2), axes.layout(cp=2), axes.layout(cp=2, cp_kind="a2a")],
    ids=["tp+sp", "tp", "ring", "ulysses"],
)
def test_on_ranks_too(plan: axes.ResolvedLayout, how: Recompute) -> None:
    spec = axes.model("llama")

    def on_rank(rank: int) -> bool:
        mesh = Mesh(plan, rank)
        plain = axes.step(axes.build(spec, mesh), mesh)
        again = axes.step(axes.build(spec, mesh, again=how), mesh)
        return plain[0] == again[0] and all(torch.equal(plain[1][n], again[1][n]) for n in plain[1])

    assert run_ranks(2, on_rank) == [True, True]


def test_what_is_kept() -> None:
    """In elements per token and block: hidden 24, 4 heads, ffn 20."""
    tokens, _ = axes.batch(37)
    unit = 8 * tokens.numel() * 3
    none = kept_bytes(decoder("llama", Recompute()), tokens)[1] / unit
    dropped = {how: none - kept_bytes(decoder("llama", how), tokens)[1] / unit for how in ALL}
    core, mlp, norms, all_three = (dropped[Recompute(kind="selective", modules=modules)] for modules in MODULES)
    assert norms == pytest.approx(2 * 24)  # the outputs of two norms
    assert mlp == pytest.approx(3 * 20)  # gate, up and the product
    assert core == pytest.approx(4)  # log-sum-exp; the output is the next projection's input
    assert all_three == pytest.approx(norms + mlp + core)
    assert dropped[Recompute(kind="selective")] == core
    # The block's input stays, and what all blocks share: rotary table, embedding, head.
    assert dropped[FULL] > 0.8 * none
    assert dropped[Recompute(kind="full", layers=1)] == pytest.approx(dropped[FULL] / 3, rel=0.01)


@pytest.mark.parametrize(("layers", "expected"), [(None, 3), (1, 1), (2, 2), (9, 3)])
def test_number_of_blocks_recomputed(layers: int | None, expected: int) -> None:
    model = decoder("llama", Recompute(kind="full", layers=layers))
    runs = []
    for index, block in model.layers.items():
        block.input_layernorm.register_forward_hook(lambda *_, index=index: runs.append(index))
    tokens, labels = axes.batch(37)
    cross_entropy_sum(model(tokens), labels).backward()
    assert len(runs) == 3 + expected
    assert set(runs[3:]) == {str(i) for i in range(expected)}


def test_several_micro_batches_in_flight() -> None:
    """Two forwards before the two backwards, in either order, as a pipeline does."""
    tokens, labels = axes.batch(37)
    grads = []
    for choice, order in ((Recompute(), (0, 1)), (ALL[-1], (0, 1)), (ALL[-1], (1, 0)), (FULL, (1, 0))):
        model = decoder("llama", choice)
        losses = [cross_entropy_sum(model(tokens[i : i + 1]), labels[i : i + 1]) for i in range(2)]
        for i in order:
            losses[i].backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for other in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(other[name], grad, rtol=1e-13, atol=1e-13)


def test_evaluation_keeps_norms_whole() -> None:
    model = decoder("llama", Recompute(kind="selective", modules=("layernorm",)))
    tokens, _ = axes.batch(37)
    with torch.no_grad():
        assert torch.equal(model(tokens), decoder("llama", Recompute())(tokens))


def test_modules_of_other_models_are_refused() -> None:
    with pytest.raises(FivefoldError, match="moe_act") as error:
        recompute.apply(Decoder(axes.model("llama"), device="meta"), Recompute(kind="selective", modules=("moe_act",)))
    assert error.value.legal == ["core_attn", "mlp", "layernorm"]
