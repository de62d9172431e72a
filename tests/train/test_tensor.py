"""Tensor and sequence parallelism against one process, per parameter, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import axes
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.errors import FivefoldError
from fivefold.train.init import initialise, shard_of
from fivefold.train.mesh import Mesh
from fivefold.train.model import Decoder, tensor_table
from fivefold.train.parallel import collectives, overlap, tensor
from fivefold.train.parallel.vocabulary import VocabCrossEntropy

CASES = [
    *[(name, 2) for name in ("llama", "qwen2", "qwen3", "gpt2", "mistral")],
    ("llama-6-heads", 3),
    ("llama-mha", 4),
    ("llama", 4),  # 2 KV heads on 4 ranks
    ("llama-mqa", 4),
    ("qwen2", 4),  # with biases of replicated KV heads
    ("qwen3", 4),
    ("gpt2", 4),
]


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize(("name", "tp"), CASES)
def test_gradients_equal_one_process(name: str, tp: int, sp: bool) -> None:
    spec, plan = axes.model(name), axes.layout(tp=tp, sp=sp)
    axes.check(spec, plan, axes.on_ranks(spec, plan))


@pytest.mark.parametrize(
    ("name", "tp"), [("llama", 2), ("llama-mqa", 4), ("llama-6-heads", 3), ("qwen2", 4), ("gpt2", 4)]
)
def test_overlapped_gradients_equal_one_process(name: str, tp: int) -> None:
    spec, plan = axes.model(name), axes.layout(tp=tp, sp=True, overlap_tp=True)
    axes.check(spec, plan, axes.on_ranks(spec, plan))


def test_overlap_starts_a_reduce_scatter_before_the_second_half_of_the_product() -> None:
    """Of a row layer: two pieces, the first on its way while the second is multiplied; and no piece without a row."""

    def on_rank(rank: int) -> list[int]:
        group = Mesh(axes.layout(tp=2), rank).group("tp")
        started: list[bool] = []

        class Calls(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.name() in ("aten::mm", "c10d::_reduce_scatter_base_"):
                    started.append(func.name().startswith("c10d"))
                return func(*args, **(kwargs or {}))

        for rows in (6, 2):
            x = torch.randn(1, rows, 4, dtype=torch.float64)
            with Calls():
                overlap.scattered_product(x, torch.randn(4, 5, dtype=torch.float64), group)
        return started

    assert run_ranks(2, on_rank)[0] == [False, True, False, True, False, True]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_initialised_after_the_cut_is_the_same_as_cut_after(name: str) -> None:
    """A model that was only ever shapes, cut, and then filled has the parts of the whole model."""
    spec, plan = axes.model(name), axes.layout(tp=4, sp=True)

    def on_rank(rank: int) -> None:
        mesh = Mesh(plan, rank)
        late = Decoder(spec, device="meta", dtype=torch.float64)
        tensor.apply(late, mesh, True)
        late.to_empty(device="cpu")
        if spec.tied_embeddings:
            late.lm_head.weight = late.embed_tokens.weight  # to_empty makes two of a shared parameter
        initialise(late, spec, 5, mesh.coordinates)
        early = Decoder(spec, dtype=torch.float64)
        initialise(early, spec, 5)
        whole = {n: p.detach().clone() for n, p in early.named_parameters()}
        tensor.apply(early, mesh, True)
        table = tensor_table(spec)
        for (n, a), b in zip(late.named_parameters(), early.parameters(), strict=True):
            assert torch.equal(a, b), n
            assert torch.equal(b, shard_of(whole[n], table[n], mesh.coordinates)), n
            assert b.untyped_storage().nbytes() == b.numel() * b.element_size(), f"{n} keeps the whole tensor alive"
        if spec.tied_embeddings:
            assert early.lm_head.weight is early.embed_tokens.weight

    run_ranks(4, on_rank)


def test_heads_that_ranks_would_share_in_part_are_refused() -> None:
    spec = axes.model("llama-6-heads")

    def on_rank(rank: int) -> list[int]:
        with pytest.raises(FivefoldError) as error:
            tensor.apply(Decoder(spec, device="meta"), Mesh(axes.layout(tp=2), rank), False)
        return error.value.legal

    assert run_ranks(2, on_rank)[0] == [1, 3, 6]


@given(data=st.data(), vocab=st.integers(2, 12), scale=st.sampled_from([1.0, 300.0]))
@settings(max_examples=40, deadline=None)
def test_cross_entropy_of_one_rank(data: st.DataObject, vocab: int, scale: float) -> None:
    labels = torch.tensor([data.draw(st.lists(st.sampled_from([-100, *range(vocab)]), min_size=5, max_size=5))])
    logits = (torch.randn(1, 5, vocab, dtype=torch.float64) * scale).requires_grad_()
    mesh = Mesh(axes.layout())
    got = VocabCrossEntropy(mesh, vocab)(logits, labels)
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    a, b = (torch.autograd.grad(loss * 0.3, logits)[0] for loss in (got, wanted))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_cross_entropy_with_ranks_that_hold_padding_only() -> None:
    """5 rows over 4 ranks are 2 each: half of rank 2's and all of rank 3's are padding."""
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 4, 2], [3, -100, 1]])
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (grad,) = torch.autograd.grad(wanted, logits)
    padded = F.pad(logits.detach(), (0, 3), value=50.0)  # what a padded row says does not matter

    def on_rank(rank: int) -> tuple[float, torch.Tensor]:
        own = padded[..., 2 * rank : 2 * rank + 2].clone().requires_grad_()
        loss = VocabCrossEntropy(Mesh(axes.layout(tp=4), rank), 5)(own, labels)
        loss.backward()
        return loss.item(), own.grad

    results = run_ranks(4, on_rank)
    assert all(abs(loss - wanted.item()) < 1e-12 for loss, _ in results)
    whole = torch.cat([g for _, g in results], dim=-1)
    torch.testing.assert_close(whole, F.pad(grad, (0, 3)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.06), (torch.float32, 5e-6)], ids=["bf16", "fp32"])
def test_lower_precision_comes_near(dtype: torch.dtype, bound: float) -> None:
    """Two ranks in bf16 and in fp32 agree with one process in fp64 as far as the type does."""
    spec, plan = axes.model("llama"), axes.layout(tp=2, sp=True)

    def on_rank(rank: int) -> axes.Gradients:
        mesh = Mesh(plan, rank)
        return axes.step(axes.build(spec, mesh).to(dtype), mesh)[1]

    for rank, got in enumerate(run_ranks(2, on_rank)):
        error, name = axes.worst(spec, plan, rank, {n: g.double() for n, g in got.items()})
        assert error < bound, name


# -------------------------------------------------------------------- negative controls


class Tampered:
    """Counts the reductions of a step and spoils one: dropped (each rank keeps its own term) or doubled."""

    def __init__(self, patch: pytest.MonkeyPatch, target: int, how: str) -> None:
        self.seen: list[str] = []
        self.target, self.how = target, how
        self._all_reduce, self._reduce_scatter = dist.all_reduce, collectives.reduce_scatter_into
        patch.setattr(dist, "all_reduce", self.all_reduce)
        patch.setattr(collectives, "reduce_scatter_into", self.reduce_scatter)

    def hit(self, kind: str) -> bool:
        self.seen.append(kind)
        return len(self.seen) - 1 == self.target

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False):
        own = x.clone()
        self._all_reduce(x, op=op, group=group)
        if self.hit("max" if op == dist.ReduceOp.MAX else "all_reduce"):
            self.spoil(x, own)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False):
        self._reduce_scatter(out, x, group=group)
        if self.hit("reduce_scatter"):
            self.spoil(out, x.chunk(group.size())[group.rank()])

    def spoil(self, x: torch.Tensor, own: torch.Tensor) -> None:
        x.copy_(own if self.how == "drop" else 2 * x)


def spoil_each(spec: Any, plan: Any, how: str) -> list[list[tuple[str, float]]]:
    """By rank: for every reduction of a step its kind and the worst relative error when it alone is spoiled."""
    axes.reference(spec)

    def on_rank(rank: int) -> list[tuple[str, float]]:
        mesh = Mesh(plan, rank)
        decoder = axes.build(spec, mesh)
        tensor.partial_gradients(decoder, mesh, plan.sequence_parallel)
        found: list[tuple[str, float]] = []
        target, count = -1, 0
        while target < count:
            with pytest.MonkeyPatch.context() as patch:
                tampered = Tampered(patch, target, how)
                loss, got = axes.step(decoder, mesh)
            count = len(tampered.seen)
            if target >= 0 and target < count:
                wrong_loss = abs(loss - axes.reference(spec)[0])
                found.append((tampered.seen[target], max(wrong_loss, axes.worst(spec, plan, rank, got)[0])))
            target += 1
        return found

    return run_ranks(plan.tp * plan.cp, on_rank)


@pytest.mark.parametrize("how", ["drop", "double"])
@pytest.mark.parametrize(("name", "tp", "sp"), [("qwen3", 2, False), ("gpt2", 2, True), ("qwen3", 4, True)])
def test_every_spoiled_reduction_is_caught(name: str, tp: int, sp: bool, how: str) -> None:
    by_rank = spoil_each(axes.model(name, layers=1), axes.layout(tp=tp, sp=sp), how)
    kinds = [kind for kind, _ in by_rank[0]]
    assert len(kinds) >= 8
    for index, kind in enumerate(kinds):
        if kind == "max" and how == "double":
            continue  # any common number may be subtracted in a softmax
        worst = max(errors[index][1] for errors in by_rank)
        assert worst > 1e-6, f"reduction {index} ({kind}) can be spoiled unnoticed"


@pytest.mark.parametrize(("name", "sp"), [("llama", True), ("qwen3", False)])
def test_leaving_partial_gradients_unsummed_is_caught(name: str, sp: bool) -> None:
    spec, plan = axes.model(name, layers=1), axes.layout(tp=4, sp=sp)

    def on_rank(rank: int) -> float:
        mesh = Mesh(plan, rank)
        return axes.worst(spec, plan, rank, axes.step(axes.build(spec, mesh), mesh, reduce=False)[1])[0]

    assert min(run_ranks(4, on_rank)) > 1e-3


# -------------------------------------------------------------------- traffic


def test_columns_that_share_an_input_communicate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block gathers twice and scatters twice in forward; backward repeats the gathers of inputs besides."""
    spec, plan = axes.model("llama", layers=3), axes.layout(tp=2, sp=True)

    def on_rank(rank: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for where, name in ((dist, "all_reduce"), (collectives, "gather_into"), (collectives, "reduce_scatter_into")):
            monkeypatch.setattr(where, name, _counting(getattr(where, name), name, counts))
        mesh = Mesh(plan, rank)
        axes.step(axes.build(spec, mesh), mesh, reduce=False)
        return counts

    blocks = 3
    assert run_ranks(2, on_rank)[0] == {
        # forward 2 inputs, backward the same again and 2 gradients of outputs; head 1 + 1; embedding 1 gradient
        "gather_into": blocks * 6 + 2 + 1,
        "reduce_scatter_into": blocks * 4 + 1 + 1,
        "all_reduce": 2,  # cross-entropy
    }


def _counting(call: Callable[..., Any], name: str, counts: dict[str, int]) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return call(*args, **options)

    return counted
