"""The parameters of the feed-forwards: dense, and routed experts with the shared ones beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fivefold.model.spec import Experts, Feed, FeedForward
from fivefold.model.tensors.tensor import Tensor, linear


def feed_tensors(feed: Feed | None, hidden: int) -> Iterator[Tensor]:
    """The parameters of a feed-forward; none where a block has none."""
    return FEEDS[type(feed)](feed, hidden)


def _none(feed: None, hidden: int) -> Iterator[Tensor]:
    return iter(())


def _feed_forward(feed: FeedForward, hidden: int) -> Iterator[Tensor]:
    return _projections("mlp", hidden, feed.ffn, feed.gated, feed.bias)


def _projections(name: str, hidden: int, ffn: int, gated: bool, bias: bool) -> Iterator[Tensor]:
    if gated:
        yield from linear(f"{name}.gate_proj", ffn, hidden, "column", bias)
    yield from linear(f"{name}.up_proj", ffn, hidden, "column", bias)
    yield from linear(f"{name}.down_proj", hidden, ffn, "row", bias)


def _experts(e: Experts, hidden: int) -> Iterator[Tensor]:
    yield from linear("mlp.gate", e.num_experts, hidden, "replicated", e.router_bias)
    width = e.latent or hidden
    if e.latent:
        yield from linear("mlp.fc1_latent_proj", e.latent, hidden, "replicated")
        yield from linear("mlp.fc2_latent_proj", hidden, e.latent, "replicated")
    for name in ("gate_proj", "up_proj") if e.gated else ("up_proj",):
        yield Tensor(f"mlp.experts.{name}", (e.num_experts, e.ffn, width), "expert_column")
        if e.bias:
            yield Tensor(f"mlp.experts.{name}_bias", (e.num_experts, e.ffn), "expert_column")
    yield Tensor("mlp.experts.down_proj", (e.num_experts, width, e.ffn), "expert_row")
    if e.bias:
        yield Tensor("mlp.experts.down_proj_bias", (e.num_experts, width), "expert_whole")
    if e.shared_ffn:
        yield from _projections("mlp.shared_experts", hidden, e.shared_ffn, e.gated, bias=False)
        if e.shared_gate:
            yield from linear("mlp.shared_expert_gate", 1, hidden, "replicated")


# Any: a table from a type to the function for that type, which the type system has no word for.
FEEDS: dict[type, Callable[[Any, int], Iterator[Tensor]]] = {
    type(None): _none,
    FeedForward: _feed_forward,
    Experts: _experts,
}
