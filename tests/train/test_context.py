"""Context parallelism, alone and with tensor parallelism, against one process; the kernels against autograd."""

from __future__ import annotations

from typing import Any

import axes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.nn import functional as F  # noqa: N812

from fivefold.errors import FivefoldError
from fivefold.train.mesh import Mesh
from fivefold.train.model import Decoder
from fivefold.train.parallel import context, flash

# -------------------------------------------------------------------- gradients


CASES = [
    ("llama", "p2p"),
    ("llama", "a2a"),  # 2 KV heads: repeated at cp 4
    ("llama-mqa", "p2p"),
    ("llama-mqa", "a2a"),
    ("qwen3", "p2p"),
    ("gpt2", "p2p"),  # learned positions
    ("gpt2", "a2a"),
    ("mistral", "a2a"),  # a sliding window
]
SIX_HEADS = [("llama-6-heads", "p2p", 3), ("llama-6-heads", "a2a", 3)]


@pytest.mark.parametrize(
    ("name", "kind", "cp"), [(name, kind, cp) for name, kind in CASES for cp in (2, 4)] + SIX_HEADS
)
def test_gradients_equal_one_process(name: str, kind: str, cp: int) -> None:
    spec, plan = axes.model(name), axes.layout(cp=cp, cp_kind=kind)
    axes.check(spec, plan, axes.on_ranks(spec, plan))


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize(("name", "kind"), [("llama", "p2p"), ("llama", "a2a"), ("qwen3", "p2p"), ("gpt2", "a2a")])
def test_with_tensor_parallelism(name: str, kind: str, sp: bool) -> None:
    spec, plan = axes.model(name), axes.layout(tp=2, cp=2, cp_kind=kind, sp=sp)
    axes.check(spec, plan, axes.on_ranks(spec, plan))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rings_across_and_all_to_all_inside(name: str) -> None:
    spec, plan = axes.model(name), axes.layout(cp=4, cp_kind="p2p")
    axes.check(spec, plan, axes.on_ranks(spec, plan, ulysses=2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 0.02)])
def test_ring_attention_alone(dtype: torch.dtype, bound: float, causal: bool) -> None:
    check_ring(ranks=2, shape=(2, 4, 2, 24, 6), causal=causal, dtype=dtype, bound=bound)


def check_ring(
    ranks: int, shape: tuple[int, int, int, int, int], causal: bool, dtype: torch.dtype, bound: float
) -> None:
    """Output and gradients of a ring against SDPA in fp64 on one process."""
    b, heads, kv_heads, seq, dim = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(b, seq, h, dim, dtype=torch.float64, generator=generator).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    wanted_all = [wanted, *torch.autograd.grad(wanted, leaves, grad.double())]

    def on_rank(rank: int) -> list[torch.Tensor]:
        mesh = Mesh(axes.layout(cp=ranks), rank)
        local = [context.split(x, mesh, "p2p").requires_grad_() for x in (q, k, v)]
        out = context.Ring(mesh.group("cp"))(*local, causal)
        assert out.dtype == dtype
        return [out.detach(), *torch.autograd.grad(out, local, context.split(grad, mesh, "p2p"))]

    results = run_ranks(ranks, on_rank)
    held = torch.cat([context.held_positions(seq, ranks, i, "p2p") for i in range(ranks)])
    for i, whole in enumerate(wanted_all):
        got, expected = torch.cat([result[i] for result in results], dim=1).double(), whole[:, held]
        assert (got - expected).norm() <= bound * expected.norm(), ("out", "q", "k", "v")[i]


def test_half_precision_accumulates_exactly() -> None:
    """Over many blocks, bf16 gradients of a ring are as near to fp64 as those of one bf16 process are."""
    check_ring(ranks=4, shape=(1, 2, 1, 64, 8), causal=True, dtype=torch.bfloat16, bound=0.01)


# -------------------------------------------------------------------- negative controls


def test_each_message_of_the_ring_matters() -> None:
    """Losing any of the three messages of a ring of two: keys in forward, keys and gradients in backward."""
    spec, plan = axes.model("llama", layers=1), axes.layout(cp=2)
    axes.reference(spec)

    def on_rank(rank: int) -> list[float]:
        mesh = Mesh(plan, rank)
        decoder = axes.build(spec, mesh)
        return [error_without(decoder, mesh, message) for message in (None, 0, 1, 2)]

    def error_without(decoder: Decoder, mesh: Mesh, message: int | None) -> float:
        sent = 0
        pass_on = context._Neighbours.pass_on

        def losing(self: Any, x: torch.Tensor) -> Any:
            nonlocal sent
            coming = pass_on(self, x)
            if sent == message:
                coming.wait()
                coming = context._Coming([], torch.zeros_like(x), x)
            sent += 1
            return coming

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context._Neighbours, "pass_on", losing)
            got = axes.step(decoder, mesh)[1]
        assert sent == 3
        return axes.worst(spec, plan, mesh.rank, got)[0]

    for errors in run_ranks(2, on_rank):
        assert errors[0] <= axes.BOUND
        assert min(errors[1:]) > 1e-6


def test_gradients_of_one_rank_alone_are_caught() -> None:
    """Without the sum over cp, as when dp is 1 and only dp is reduced: a fault seen in published trainers."""
    spec, plan = axes.model("llama", layers=1), axes.layout(cp=2)
    axes.reference(spec)

    def on_rank(rank: int) -> float:
        mesh = Mesh(plan, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(axes.dist, "all_reduce", lambda *_, **__: None)
            return axes.worst(spec, plan, rank, axes.step(axes.build(spec, mesh), mesh)[1])[0]

    assert min(run_ranks(2, on_rank)) > 1e-3


def test_contiguous_parts_in_a_zigzag_ring_are_caught() -> None:
    spec, plan = axes.model("llama", layers=1), axes.layout(cp=2)
    axes.reference(spec)

    def on_rank(rank: int) -> float:
        mesh = Mesh(plan, rank)
        decoder = axes.build(spec, mesh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                context, "held_positions", lambda length, size, index, *_: torch.arange(length).chunk(size)[index]
            )
            return axes.worst(spec, plan, rank, axes.step(decoder, mesh)[1])[0]

    assert min(run_ranks(2, on_rank)) > 1e-3


# -------------------------------------------------------------------- who holds what

SHAPES = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (6, 2), (8, 4)])


@given(shape=SHAPES, multiple=st.integers(1, 3))
def test_every_token_is_held_once(shape: tuple[int, int], multiple: int) -> None:
    cp, ulysses = shape
    length = 2 * cp * multiple
    held = [context.held_positions(length, cp, i, "p2p", ulysses) for i in range(cp)]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    assert len({len(h) for h in held}) == 1


@given(cp=st.integers(1, 8), multiple=st.integers(1, 3))
def test_a_causal_ring_is_balanced(cp: int, multiple: int) -> None:
    """Each rank has the same number of (query, earlier key) pairs, and at each step but its own half of a square."""
    length = 2 * cp * multiple
    pairs = {int((context.held_positions(length, cp, i, "p2p") + 1).sum()) for i in range(cp)}
    assert len(pairs) == 1
    for rank in range(cp):
        mine = context.held_positions(length, cp, rank, "p2p")
        for source in range(cp):
            step = context._step(rank, source, len(mine), True)
            keys = context.held_positions(length, cp, source, "p2p")
            computed = torch.zeros(len(mine), len(keys), dtype=torch.bool)
            block = computed[step.queries, step.keys]
            block[:] = torch.ones_like(block).tril() if step.causal else True
            assert torch.equal(computed, mine[:, None] >= keys[None, :])


@pytest.mark.parametrize(("length", "cp", "kind"), [(12, 4, "p2p"), (9, 2, "a2a"), (6, 2, "p2p")])
def test_a_sequence_that_does_not_divide_is_refused(length: int, cp: int, kind: Any) -> None:
    with pytest.raises(FivefoldError, match="does not divide"):
        context.held_positions(length, cp, 0, kind)


@pytest.mark.parametrize(
    ("name", "tp", "kind", "code"),
    [("mistral", 1, "p2p", "cp-window"), ("llama-6-heads", 1, "a2a", "cp-a2a-heads"), ("llama", 2, "a2a", None)],
)
def test_what_a_kind_cannot_do_is_refused(name: str, tp: int, kind: str, code: str | None) -> None:
    """Windows in a ring; 6 heads over 4 ranks. One KV head of each tp rank over 2 ranks is repeated instead."""
    cp = 2 if tp == 2 else 4

    def on_rank(rank: int) -> str | None:
        mesh = Mesh(axes.layout(tp=tp, cp=cp, cp_kind=kind), rank)
        try:
            context.apply(Decoder(axes.model(name), device="meta"), mesh, kind)
        except FivefoldError as error:
            return error.code
        return None

    assert set(run_ranks(4, on_rank)) == {code}


# -------------------------------------------------------------------- kernels


@given(
    kernel=st.sampled_from([flash.CpuFlash(), flash.Math()]),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 9),
    parts=st.integers(1, 3),
    dim=st.sampled_from([1, 5, 8, 16]),
    causal=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_blocks_merge_to_the_whole_row(
    kernel: flash.Kernel, batch: int, kv_heads: int, group: int, queries: int, parts: int, dim: int, causal: bool
) -> None:
    """Forward over parts of the keys merged, and backward given the merged result, are SDPA's over all keys."""
    lengths = [queries] if causal else [3, 1, 4][:parts]
    torch.manual_seed(0)
    q, grad = (torch.randn(batch, kv_heads * group, queries, dim, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, sum(lengths), dim, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    wanted_grads = torch.autograd.grad(wanted, leaves, grad)

    blocks = list(zip(k.split(lengths, dim=2), v.split(lengths, dim=2), strict=True))
    merged = context._Merged(*kernel.forward(q, *blocks[0], causal))
    for key, value in blocks[1:]:
        merged.add(*kernel.forward(q, key, value, causal), slice(None))
    grads = [kernel.backward(grad, q, key, value, merged.out, merged.lse, causal) for key, value in blocks]
    got = (
        sum(g.query for g in grads),
        torch.cat([g.key for g in grads], dim=2),
        torch.cat([g.value for g in grads], dim=2),
    )
    for a, b in zip((merged.out, *got), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_kernel_follows_device_and_type() -> None:
    assert isinstance(flash.kernel_for(torch.empty(1, 1, 1, 7)), flash.CpuFlash)
    assert isinstance(flash.kernel_for(torch.empty(1, 1, 1, 8, device="meta")), flash.Math)
