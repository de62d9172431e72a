"""Small models in fp64, their gradients in one process, and the same on forked ranks with tp and cp applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

from fivefold.layout import Overlap, Recompute, ResolvedLayout
from fivefold.layout.grids import rank_coordinates
from fivefold.model import Attention, Block, BlockRun, FeedForward, ModelSpec, model_tensors
from fivefold.train.init import seed_of, shard_of
from fivefold.train.loss import IGNORED, cross_entropy_sum
from fivefold.train.mesh import Mesh
from fivefold.train.model import Decoder, tensor_table
from fivefold.train.parallel import context, recompute, tensor
from fivefold.train.parallel.vocabulary import VocabCrossEntropy

BATCH, SEQ = 2, 24
BOUND = 1e-12

Gradients = dict[str, torch.Tensor]


def model(name: str, layers: int = 2) -> ModelSpec:
    """A tiny model of the family `name`; its vocabulary of 37 divides over no number of ranks."""
    attention, feed, block, extra = _FAMILIES[name]
    spec = Block(
        mixer=Attention(**{"heads": 4, "kv_heads": 2, "head_dim": 6, **attention}),
        feed=FeedForward(**{"ffn": 20, **feed}),
        **block,
    )
    return ModelSpec(
        **{
            "name": name,
            "family": name,
            "hidden": 24,
            "vocab": 37,
            "max_position": 64,
            "runs": (BlockRun(layers, spec),),
            **extra,
        }
    )


_LAYERNORM = {"norm": "layernorm", "norm_bias": True}
_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}, {}, {}),
    "llama-mha": ({"kv_heads": 4}, {}, {}, {}),
    "llama-mqa": ({"kv_heads": 1}, {}, {}, {"tied_embeddings": True}),
    "llama-6-heads": ({"heads": 6, "kv_heads": 3, "head_dim": 4}, {"ffn": 21}, {}, {}),
    "mistral": ({"window": 5}, {}, {}, {}),
    "qwen2": ({"qkv_bias": True}, {}, {}, {"tied_embeddings": True}),
    "qwen3": ({"qk_norm": True, "head_dim": 8}, {}, {}, {}),
    "gpt2": (
        {"kv_heads": 4, "qkv_bias": True, "out_bias": True, "rope": False},
        {"gated": False, "bias": True, "activation": "gelu_tanh"},
        _LAYERNORM,
        {"learned_positions": 26, "tied_embeddings": True, "final_norm": "layernorm", "final_norm_bias": True},
    ),
}


@cache
def weights(spec: ModelSpec) -> Mapping[str, torch.Tensor]:
    """Full tensors, large enough that no gradient drowns, and norms and biases that are not one and zero."""
    return {
        t.name: _random(t.name, t.shape) * 0.3 + (1.0 if "norm.weight" in t.name else 0.0) for t in all_tensors(spec)
    }


def all_tensors(spec: ModelSpec):
    return model_tensors(spec)


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed_of(1, name)))


def whole(spec: ModelSpec) -> Decoder:
    """The decoder in this process, with these weights."""
    decoder = Decoder(spec, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights(spec)[name])
    return decoder


def batch(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [BATCH, SEQ]; unevenly many of the labels count."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, vocab, (BATCH, SEQ), generator=generator)
    labels = torch.randint(0, vocab, (BATCH, SEQ), generator=generator)
    labels[0, 2:9] = IGNORED
    labels[1, 15] = IGNORED
    return tokens, labels


@cache
def reference(spec: ModelSpec) -> tuple[float, Gradients]:
    """Loss and gradients in this process."""
    decoder = whole(spec)
    tokens, labels = batch(spec.vocab)
    loss = cross_entropy_sum(decoder(tokens), labels) / int((labels != IGNORED).sum())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


def layout(
    tp: int = 1, cp: int = 1, cp_kind: str = "p2p", sp: bool = False, overlap_tp: bool = False
) -> ResolvedLayout:
    return ResolvedLayout(
        tp=tp, cp=cp, cp_kind=cp_kind, pp=1, vpp=1, ep=1, etp=1, dp=1, edp=tp * cp, dp_shard=1, dp_replicate=1, zero=0,
        sequence_parallel=sp, micro_batch=BATCH, num_micro_batches=1, schedule="1f1b", stages=(((0, 2),),),
        recompute=Recompute(), overlap=Overlap(param=False, tp=overlap_tp),
    )  # fmt: skip


def build(spec: ModelSpec, mesh: Mesh, ulysses: int | None = None, again: Recompute | None = None) -> Decoder:
    """The decoder with whole weights, then cut."""
    decoder = whole(spec)
    tensor.apply(decoder, mesh, mesh.layout.sequence_parallel, mesh.layout.overlap.tp)
    context.apply(decoder, mesh, mesh.layout.cp_kind, ulysses)
    recompute.apply(decoder, again or Recompute())
    return decoder


def sum_partial(decoder: Decoder, mesh: Mesh) -> None:
    """Sums gradients over the tp ranks that each hold a term, as the trainer does bucket by bucket."""
    parameters = dict(decoder.named_parameters())
    for name, group in tensor.partial_gradients(decoder, mesh, mesh.layout.sequence_parallel).items():
        if (gradient := parameters[name].grad) is not None:
            dist.all_reduce(gradient, group=group)


def step(decoder: Decoder, mesh: Mesh, ulysses: int | None = None, reduce: bool = True) -> tuple[float, Gradients]:
    """One forward and backward of this rank's tokens; the loss over all ranks, and this rank's reduced gradients."""
    decoder.zero_grad()
    kind = mesh.layout.cp_kind
    tokens, labels = batch(decoder.spec.vocab)
    valid = int((labels != IGNORED).sum())
    positions = context.split(torch.arange(SEQ), mesh, kind, dim=0, ulysses=ulysses)
    here = [context.split(x, mesh, kind, ulysses=ulysses) for x in (tokens, labels)]
    loss = VocabCrossEntropy(mesh, decoder.spec.vocab)(decoder(here[0], positions), here[1]) / valid
    loss.backward()
    if reduce:
        sum_partial(decoder, mesh)
    total = loss.detach().clone()
    if mesh.group("cp") is not None:
        for tensor_ in (total, *(p.grad for p in decoder.parameters() if p.grad is not None)):
            dist.all_reduce(tensor_, group=mesh.group("cp"))
    return total.item(), {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}


def on_ranks(
    spec: ModelSpec,
    plan: ResolvedLayout,
    ulysses: int | None = None,
    again: Recompute | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[tuple[float, Gradients]]:
    def rank_step(rank: int) -> tuple[float, Gradients]:
        mesh = Mesh(plan, rank)
        with around():
            return step(build(spec, mesh, ulysses, again), mesh, ulysses)

    return run_ranks(plan.tp * plan.cp, rank_step)


def worst(spec: ModelSpec, plan: ResolvedLayout, rank: int, got: Gradients) -> tuple[float, str]:
    """The largest error of a gradient of `rank`, in units of what the gate allows per 1e-12; missing ones are infinite.

    The scale of a tensor is its own norm, or a thousandth of an even share of the model's where its own vanishes.
    """
    table = tensor_table(spec)
    _, expected = reference(spec)
    whole = sqrt(sum(float(g.norm()) ** 2 for g in expected.values()))
    floor = 1e-3 * whole / sqrt(len(expected))
    where = {"tp": (rank_coordinates(plan, rank)["tp"], plan.tp)}
    errors = [(float("inf"), name) for name in expected.keys() ^ got.keys()]
    for name in expected.keys() & got.keys():
        wanted = shard_of(expected[name], table[name], where)
        error = float((got[name] - wanted).norm()) / max(float(expected[name].norm()), floor)
        errors.append((error, name))
    return max(errors)


def check(spec: ModelSpec, plan: ResolvedLayout, results: list[tuple[float, Gradients]]) -> None:
    expected_loss, _ = reference(spec)
    for rank, (loss, got) in enumerate(results):
        assert abs(loss - expected_loss) <= BOUND * expected_loss
        error, name = worst(spec, plan, rank, got)
        assert error <= BOUND, f"rank {rank}: {name} is off by {error:.1e}"
