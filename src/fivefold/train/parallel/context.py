"""Context parallelism: the sequence over ranks, by replacing the attention core of a model.

Ring (p2p): keys and values travel around the ring while each rank's queries attend to the ones at hand, and partial
results merge by their log-sum-exp (Liu et al. 2023, arXiv 2310.01889). A causal mask is balanced by the zigzag: of 2n
chunks of the sequence, rank r holds chunks r and 2n-1-r, and every rank then computes as much at every step.

Ulysses (a2a): an all-to-all turns a part of the sequence with all heads into the whole sequence with a part of the
heads, and back (Jacobs et al. 2023, arXiv 2309.14509).

Combined: Ulysses inside groups of `ulysses` neighbouring ranks, a ring across the groups (USP, Fang and Zhao 2024,
arXiv 2405.07719).

Everything outside attention works on each token alone: it needs its tokens, its labels and their positions only, which
held_positions names and split takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.layout import CP_KINDS
from fivefold.layout.layout import CpKind
from fivefold.train.mesh import Group, Mesh
from fivefold.train.model import Attention, Core, Decoder, WindowedCore
from fivefold.train.parallel.collectives import all_to_all
from fivefold.train.parallel.flash import Kernel, accumulation_dtype, kernel_for

# -------------------------------------------------------------------- which tokens a rank holds


def held_positions(length: int, size: int, index: int, kind: CpKind, ulysses: int | None = None) -> Tensor:
    """The global positions of the tokens that rank `index` of `size` holds, in the order in which it holds them.

    length: tokens of the whole sequence. ulysses: ranks of one all-to-all, by default all for "a2a", 1 for "p2p".
    Returns int64 [length / size]. Raises FivefoldError when the sequence does not divide.
    """
    inner = _ulysses_ranks(size, kind, ulysses)
    ring = size // inner
    unit = size if ring == 1 else 2 * size
    if length % unit:
        raise FivefoldError(
            f"A sequence of {length} tokens does not divide into the {unit} parts that --cp {size} with --cp-kind "
            f"{kind} needs.",
            code="sequence-cp",
            option="--seq-len",
            value=length,
            legal=f"multiples of {unit}",
        )
    place = torch.arange(length)
    if ring > 1:
        chunks = place.chunk(2 * ring)
        place = torch.cat((chunks[index // inner], chunks[2 * ring - 1 - index // inner]))
    return place.chunk(inner)[index % inner]


def split(x: Tensor, mesh: Mesh, kind: CpKind, dim: int = 1, ulysses: int | None = None) -> Tensor:
    """This rank's part of x (tokens, labels, positions) along its sequence dimension."""
    where = held_positions(x.shape[dim], mesh.size("cp"), mesh.index("cp"), kind, ulysses)
    return x.index_select(dim, where.to(x.device))


def _ulysses_ranks(size: int, kind: CpKind, ulysses: int | None) -> int:
    if kind not in CP_KINDS:
        raise FivefoldError(f"No context parallelism '{kind}'.", option="--cp-kind", value=kind, legal=CP_KINDS)
    inner = ulysses if ulysses is not None else (size if kind == "a2a" else 1)
    if inner < 1 or size % inner:
        raise FivefoldError(f"{inner} ranks of one all-to-all do not divide --cp {size}.", option="--cp", value=inner)
    return inner


# -------------------------------------------------------------------- Ulysses


class Ulysses:
    """Exchanges heads for sequence around another core, which then sees the tokens of all ranks in their order.

    KV heads that the ranks cannot share evenly are repeated: with c ranks and k < c KV heads, each goes to c / k of
    them. One all-to-all of queries, keys and values together, one of the output.
    """

    def __init__(self, group: dist.ProcessGroup, inner: Core) -> None:
        self.group, self.inner = group, inner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        ranks = self.group.size()
        repeats = _repeats(q.shape[2], k.shape[2], ranks)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        widths = [x.shape[2] // ranks for x in (q, k, v)]
        # [b, s, heads, d] -> [ranks, b, s, heads / ranks, d], the three side by side in heads
        outgoing = torch.cat([x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)], dim=3)
        whole = all_to_all(outgoing, self.group).movedim(0, 1).flatten(1, 2)
        q, k, v = whole.split(widths, dim=2)
        out = self.inner(q, k, v, causal)
        back = all_to_all(out.unflatten(1, (ranks, -1)).movedim(1, 0), self.group)  # [ranks of heads, b, s, h, d]
        return back.movedim(0, 2).flatten(2, 3)


def _repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How many times each KV head has to be sent so that every rank has whole ones that its queries use."""
    if heads % ranks == 0:
        if kv_heads % ranks == 0:
            return 1
        if ranks % kv_heads == 0:
            return ranks // kv_heads
    raise FivefoldError(
        f"All-to-all context parallelism over {ranks} ranks needs whole heads on each: a rank of tp has {heads} query "
        f"heads, which {ranks} has to divide, and {kv_heads} KV heads, of which it has to be a divisor or a multiple.",
        code="cp-a2a-heads",
        option="--cp",
        value=ranks,
    )


# -------------------------------------------------------------------- ring


class Ring:
    """Attention over keys and values that travel around the ranks of a group, which hold zigzag parts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        if q.shape[1] % 2:
            raise FivefoldError(
                f"A rank of the ring holds two chunks of equal length, not {q.shape[1]} tokens.",
                option="--seq-len",
                value=q.shape[1],
            )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _Ring.apply(q, k, v, self.group, causal).transpose(1, 2)


class _Step(NamedTuple):
    """One rank's work on the keys of one source: rows of its queries, rows of the keys, and the mask."""

    queries: slice
    keys: slice
    causal: bool


_ALL = slice(None)


def _step(rank: int, source: int, tokens: int, causal: bool) -> _Step:
    """Of the zigzag parts of `rank` and `source`, the pairs that the causal mask leaves.

    A lower source's first chunk precedes both of ours and its second follows both; a higher one's both lie between
    ours; in our own, order within the part is order in the sequence.
    """
    if not causal:
        return _Step(_ALL, _ALL, False)
    if source == rank:
        return _Step(_ALL, _ALL, True)
    half = tokens // 2
    return _Step(_ALL, slice(half), False) if source < rank else _Step(slice(half, None), _ALL, False)


class _Ring(torch.autograd.Function):
    """q [b, heads, s, d], k and v [b, kv_heads, s, d] of this rank to the output like q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, causal: bool) -> Tensor:
        kernel, ring = kernel_for(q), _Neighbours(group)
        packed = torch.stack((k, v))
        merged: _Merged | None = None
        for source in ring.sources():
            coming = ring.pass_on(packed) if source != ring.last else None
            step = _step(ring.rank, source, q.shape[2], causal)
            key, value = packed[..., step.keys, :]
            part = kernel.forward(q[..., step.queries, :], key, value, step.causal)
            if merged is None:  # our own keys, which meet all our queries
                merged = _Merged(*part)
            else:
                merged.add(*part, step.queries)
            packed = coming.wait() if coming is not None else packed
        merged = cast(_Merged, merged)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.group, ctx.causal = group, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        kernel, ring = kernel_for(q), _Neighbours(ctx.group)
        grad = grads[0].contiguous()
        exact = accumulation_dtype(q)
        grad_q = torch.zeros(q.shape, dtype=exact, device=q.device)
        packed = torch.stack((k, v))
        own = torch.zeros(packed.shape, dtype=exact, device=q.device)
        coming_grads: _Coming | None = None
        for source in ring.sources():
            coming = ring.pass_on(packed) if source != ring.last else None
            step = _step(ring.rank, source, q.shape[2], ctx.causal)
            grad_rows, grad_keys = _block_gradients(kernel, grad, q, packed, out, lse, step)
            grad_q[..., step.queries, :] += grad_rows
            if source == ring.rank:
                own[..., step.keys, :] += grad_keys  # stays here
            else:
                # Sums for the keys at hand: the previous holder's, unless this is the first after their owner.
                travelling = coming_grads.wait() if coming_grads is not None else torch.zeros_like(own)
                travelling[..., step.keys, :] += grad_keys
                coming_grads = ring.pass_on(travelling)
            packed = coming.wait() if coming is not None else packed
        if coming_grads is not None:
            own = own + coming_grads.wait()  # home again
        own = own.to(q.dtype)
        return grad_q.to(q.dtype), own[0], own[1], None, None


def _block_gradients(
    kernel: Kernel, grad: Tensor, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, step: _Step
) -> tuple[Tensor, Tensor]:
    """Of this step's rows: gradients of the queries, and of keys and values stacked."""
    rows = step.queries
    key, value = packed[..., step.keys, :]
    got = kernel.backward(
        grad[..., rows, :], q[..., rows, :], key, value, out[..., rows, :], lse[..., rows], step.causal
    )
    return got.query, torch.stack((got.key, got.value))


class _Merged:
    """The attention output over the keys seen so far, with its log-sum-exp."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out.to(lse.dtype), lse

    def add(self, out: Tensor, lse: Tensor, rows: slice) -> None:
        old = self.lse[..., rows]
        new = torch.logaddexp(old, lse)
        self.out[..., rows, :] *= (old - new).exp()[..., None]
        self.out[..., rows, :] += out * (lse - new).exp()[..., None]
        self.lse[..., rows] = new


class _Coming:
    """A tensor on its way to this rank, while another is on its way from it."""

    def __init__(self, works: list[dist.Work], buffer: Tensor, sent: Tensor) -> None:
        self._works, self._buffer, self._sent = works, buffer, sent  # the sent one has to live until it is gone

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._buffer


class _Neighbours:
    """This rank's place in the ring: it sends to the next rank and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.last = (self.rank + 1) % self.size

    def sources(self) -> list[int]:
        """Whose keys are at hand, step by step: our own first, the next rank's last."""
        return [(self.rank - step) % self.size for step in range(self.size)]

    def pass_on(self, x: Tensor) -> _Coming:
        buffer = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=(self.rank - 1) % self.size),
        ]
        return _Coming(dist.batch_isend_irecv(ops), buffer, x)


# -------------------------------------------------------------------- application


def apply(model: Decoder, mesh: Mesh, kind: CpKind, ulysses: int | None = None) -> None:
    """Replace the attention core of every block by one over the ranks of cp. Nothing to do when cp is 1.

    ulysses: how many neighbouring ranks of cp exchange heads while rings run across them; by default all with "a2a"
    and 1 with "p2p". The model then takes the tokens and positions that split gives, and its parameters' gradients
    are terms of a sum over cp (reduced with data parallelism's, over "dp_cp").
    Raises FivefoldError where heads do not divide, and for sliding windows in a ring.
    """
    size = mesh.size("cp")
    if size == 1:
        return
    inner = _ulysses_ranks(size, kind, ulysses)
    rings, exchange = _groups(mesh, inner)
    for block in model.layers.values():
        attention = cast(Attention, block.self_attn)
        core = attention.core
        if rings is not None:
            if isinstance(core, WindowedCore):
                raise FivefoldError(
                    f"{model.spec.name} has sliding-window attention, which the ring does not do: use --cp-kind a2a.",
                    code="cp-window",
                    option="--cp-kind",
                    value=kind,
                    legal=["a2a"],
                )
            core = Ring(rings)
        if exchange is not None:
            spec, tp = attention.spec, mesh.size("tp")
            _repeats(spec.heads // tp, max(spec.kv_heads // tp, 1), inner)
            core = Ulysses(exchange, core)
        attention.core = core


def _groups(mesh: Mesh, inner: int) -> tuple[Group, Group]:
    """(the ring, the ranks of one all-to-all), None for one rank."""
    members, index = mesh.members("cp"), mesh.index("cp")
    neighbours = members[index - index % inner :][:inner]
    return mesh.subgroup(members[index % inner :: inner]), mesh.subgroup(neighbours)
