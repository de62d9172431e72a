"""Routed experts: router, dispatch, grouped products, combination, and the shared experts beside them."""

from __future__ import annotations

import numpy as np

from fivefold.cluster import drawn
from fivefold.estimate.ledger import Exchange, Gemm, Ledger, Saved, Stream, Weight, Working
from fivefold.estimate.sublayers.feed import FeedWriter
from fivefold.estimate.sublayers.linears import SINGLE
from fivefold.layout.workload import QUANTISED
from fivefold.model.spec import Experts

# PyTorch operations of Megatron-Core's router with a load-balancing loss, unfused, forward and backward: ten of top-k,
# softmax and the map of tokens, seven of them again for the loss, seven of the loss and its log; their gradients
# (transformer/moe/router.py and moe_utils.py, read at 005742ff1f).
_ROUTING_OPS = (24, 13)


class ExpertWriter(FeedWriter):
    def _experts(self, ledger: Ledger, feed: Experts) -> None:
        s = self.shard
        sent = s.norm_tokens * feed.top_k
        # The busiest rank of an expert-parallel group sets the pace and the peak; without ep nothing can be uneven.
        received = sent * s.etp * np.where(s.ep > 1, self.work.moe_imbalance, 1.0)
        self._routed_weights(ledger, feed)
        if feed.latent:
            self._latent_projections(ledger, feed)
        self._routing(ledger, feed)
        self._permutation(ledger, sent, received, feed)
        self._expert_exchanges(ledger, feed, received)
        self._expert_mlp(ledger, feed, sent, received)
        if feed.shared_ffn:
            self._mlp(ledger, "shared_experts", "shared_experts", feed.shared_ffn, feed.gated, bias=False)
            if feed.shared_gate:
                self._shared_gate(ledger)

    def _routed_weights(self, ledger: Ledger, feed: Experts) -> None:
        s, h = self.shard, feed.latent or self.hidden
        local = feed.num_experts / s.ep
        width = feed.ffn / s.etp
        into = (2 if feed.gated else 1) * width
        ledger.weights += [
            Weight("router", self.hidden * feed.num_experts, factored=self.hidden + feed.num_experts, part="feed"),
            Weight(
                "experts.fc1", local * h * into, expert=True, factored=local * (h + into), copies=local, part="feed"
            ),
            Weight(
                "experts.fc2", local * h * width, expert=True, factored=local * (h + width), copies=local, part="feed"
            ),
        ]
        self._expert_biases(ledger, feed)

    def _routing(self, ledger: Ledger, feed: Experts) -> None:
        """Every token's score for every expert, in fp32, and the choice of its experts."""
        tokens = self.shard.norm_tokens
        scores = SINGLE * tokens * feed.num_experts
        ledger.gemms.append(Gemm("router", "moe", tokens, feed.num_experts, self.hidden, sixteen_bit=True))
        ledger.streams.append(Stream("routing", "moe", 8 * scores, 4 * scores, 6, 4, host_ops=_ROUTING_OPS))
        ledger.saved.append(Saved("router probabilities", "moe", 2 * scores))

    def _expert_mlp(self, ledger: Ledger, feed: Experts, sent: np.ndarray, received: np.ndarray) -> None:
        """What a rank's experts compute of the tokens that it received, as products grouped by expert."""
        s, h = self.shard, feed.latent or self.hidden
        local = feed.num_experts / s.ep
        inputs = 2 if feed.gated else 1
        width = feed.ffn / s.etp
        ledger.saved.append(Saved("experts.fc1 input", "moe", self.linear_input_bytes * received * h))
        rows = received / local
        fused = self.runtime.fused_experts and self.work.precision in QUANTISED
        ledger.gemms += [
            Gemm(
                "experts.fc1", "moe", rows, inputs * width, h, groups=local, grouped=True,
                comes_quantised=(False, fused),
            ),
            Gemm(
                "experts.fc2", "moe", rows, h, width, groups=local, grouped=True, ends_block=True,
                comes_quantised=(fused, False),
            ),
        ]  # fmt: skip
        act = self.element_bytes * received * width
        self._activation(ledger, "experts", "moe", "moe_act", act, inputs, in_products=fused)
        if self.runtime.expert_extras_apart:
            self._extras(ledger, feed, act, received * h, local)
        ledger.working += [
            Working("gradient of experts.fc1 output", self.element_bytes * received * h + inputs * act),
            Working("dispatched and permuted gradients", self.element_bytes * (sent + 2 * received) * h),
        ]

    def _extras(self, ledger: Ledger, feed: Experts, act: np.ndarray, out: np.ndarray, local: np.ndarray) -> None:
        """Clamps in PyTorch, each half alone and joined again; biases expert by expert, scaled by the probability.

        Bytes count what each operation reads and writes. The probability is fp32 where the dispatcher takes no other
        (DeepEP), and with it everything up to a last cast.
        """
        if feed.clamped:
            # Two halves read and written, then both joined; backward each half's gradient with its input, then split.
            ledger.streams.append(Stream("experts.clamp", "moe", 8 * act, 10 * act, 3, 3, also="moe_act"))
            ledger.saved.append(Saved("experts.clamped", "moe_act", 2 * act))
        if feed.bias:
            unit = SINGLE if self.runtime.tokens_sent_once else self.element_bytes
            cast = unit + self.element_bytes if unit != self.element_bytes else 0
            # Product, sum, joined. Backward two products, each summed, and gradients joined; casts where it was fp32.
            ahead = unit + (self.element_bytes + 2 * unit) + 2 * unit + cast
            back = 6 * unit + 2 * self.element_bytes + 2 * cast
            ledger.streams.append(
                Stream("experts.fc2 bias", "moe", ahead * out, back * out, 2, 4, groups=local, by_group=True)
            )

    def _copies(self, top_k: int) -> np.ndarray:
        """Copies of a token that are sent, over the experts it goes to: with equal chances one for each rank hit."""
        ep = self.shard.ep
        return np.where((ep > 1) & self.runtime.tokens_sent_once, drawn(ep, top_k) / top_k, 1.0)

    def _permutation(self, ledger: Ledger, sent: np.ndarray, received: np.ndarray, feed: Experts) -> None:
        """Tokens in the order of ranks before they are sent and, where a rank has several experts, of experts after;
        sent once, only the latter."""
        unit = self.element_bytes * (feed.latent or self.hidden)
        if self.runtime.tokens_sent_once:
            both = unit * (received + self._copies(feed.top_k) * sent)
            ledger.streams += [Stream(name, "moe", both, both) for name in ("permute", "unpermute")]
            return
        kernels = 1 if self.runtime.fused_permutation else 2
        by_rank, by_expert = 2 * unit * sent, 2 * unit * received * (feed.num_experts > self.shard.ep)
        padded = 2 * unit * received
        for name in ("permute", "unpermute"):
            ledger.streams += [
                Stream(name, "moe", by_rank, by_rank, kernels, kernels),
                Stream(f"{name} by expert", "moe", by_expert, by_expert, kernels, kernels),
            ]
            if self.runtime.experts_padded and self.work.precision in QUANTISED:
                ledger.streams.append(Stream(f"pad, {name}", "moe", padded, padded))

    def _expert_biases(self, ledger: Ledger, feed: Experts) -> None:
        """The last one is added after the reduction over etp, so that every rank of it has it whole."""
        s = self.shard
        local = feed.num_experts / s.ep
        if feed.router_bias:
            ledger.weights.append(Weight("router.bias", feed.num_experts, matrix=False, part="feed"))
        if feed.bias:
            into = (2 if feed.gated else 1) * feed.ffn / s.etp
            ledger.weights += [
                Weight("experts.fc1.bias", local * into, expert=True, matrix=False, part="feed"),
                Weight(
                    "experts.fc2.bias", local * (feed.latent or self.hidden), expert=True, matrix=False, part="feed"
                ),
            ]

    def _shared_gate(self, ledger: Ledger) -> None:
        """The shared experts' output times the sigmoid of one number a token, for whose gradient the output is kept."""
        s, h = self.shard, self.hidden
        self._replicated(ledger, "shared_gate", h, 1, s.norm_tokens, bias=False, module="moe")
        moved = self.element_bytes * s.norm_tokens * h
        ledger.streams.append(Stream("shared_gate", "moe", 2 * moved, 3 * moved))
        ledger.saved.append(Saved("shared_gate.input", "moe", moved))

    def _latent_projections(self, ledger: Ledger, feed: Experts) -> None:
        """Into the width that tokens are sent in and back, whole on every tensor-parallel rank (parallel_mode
        "duplicated" in Megatron-Core's moe_layer.py, from memory); the second reads what was combined."""
        s, h = self.shard, self.hidden
        self._replicated(ledger, "fc1_latent", h, feed.latent, s.norm_tokens, bias=False, module="moe")
        self._replicated(ledger, "fc2_latent", feed.latent, h, s.norm_tokens, bias=False, module="moe")
        ledger.saved.append(Saved("fc2_latent input", "moe", self.linear_input_bytes * s.norm_tokens * feed.latent))
        if not feed.shared_ffn:  # which keep the same input
            ledger.saved.append(Saved("fc1_latent input", "moe", self.linear_input_bytes * s.norm_tokens * h))

    def _expert_exchanges(self, ledger: Ledger, feed: Experts, received: np.ndarray) -> None:
        s, h, top_k = self.shard, feed.latent or self.hidden, feed.top_k
        imbalance = np.where(s.ep > 1, self.work.moe_imbalance, 1.0)
        one_copy = self.element_bytes * s.norm_tokens * h * imbalance
        a2a = one_copy * top_k * self._copies(top_k)
        once = (one_copy, top_k) if self.runtime.tokens_sent_once else None
        gathered = np.where(s.etp > 1, self.element_bytes * received * h, 0.0)
        for when in ("forward", "backward"):
            ledger.exchanges += [
                Exchange("dispatch", "ep", "all_to_all", a2a, when, module="moe", relayed=once),
                Exchange("combine", "ep", "all_to_all", a2a, when, module="moe", relayed=once),
                Exchange("gather tokens", "etp", "all_gather", gathered, when, module="moe"),
                Exchange("scatter tokens", "etp", "reduce_scatter", gathered, when, module="moe"),
            ]
