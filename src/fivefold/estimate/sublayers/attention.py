"""Softmax attention: projections, what is done to queries and keys, the core, and context parallelism around it."""

from __future__ import annotations

import numpy as np

from fivefold.estimate.ledger import Attend, Exchange, Ledger, Saved, Stream, Weight, Working
from fivefold.estimate.sublayers.linears import MASK, SINGLE, LinearWriter
from fivefold.model.flops import keys_per_query
from fivefold.model.spec import Attention


class AttentionWriter(LinearWriter):
    def _attention(self, ledger: Ledger, mixer: Attention) -> None:
        s, h = self.shard, self.hidden
        heads = mixer.heads / s.tp
        kv_heads = np.maximum(mixer.kv_heads / s.tp, 1)  # replicated when tp exceeds them
        q, kv = heads * mixer.head_dim, kv_heads * mixer.head_dim
        out = q + 2 * kv
        if mixer.gate:
            out = out + q
        self._column_parallel(ledger, "qkv_proj", "mixer", out, bias=mixer.qkv_bias)
        self._separate(ledger, "qkv_proj input", "mixer", 3)
        if mixer.sinks:
            # Read and not kept: a sink's gradient follows from the log-sum-exp and the output (gpt-oss, Transformer
            # Engine's "learnable" softmax; both from memory).
            ledger.weights.append(Weight("sinks", heads, matrix=False))
        if mixer.qk_norm:
            self._qk_norm(ledger, mixer, q, kv)
        if mixer.rope:
            self._rotary(ledger, s.tokens * (q + kv))
        ledger.saved.append(Saved("query_key_value", "mixer", self.element_bytes * s.tokens * (q + 2 * kv)))
        if self.runtime.repeats_keys_and_values and mixer.heads > mixer.kv_heads:
            self._repeated(ledger, q, kv)
        self._core_attention(ledger, heads, mixer.head_dim, mixer.head_dim, kv_heads, mixer.window, mixer.chunk)
        if mixer.gate:
            self._output_gate(ledger, q)
        self._row_parallel(ledger, "out_proj", "mixer", q, bias=mixer.out_bias)
        gradients = s.tokens * (2 * q + 2 * kv) + s.norm_tokens * h
        if mixer.gate:
            gradients = gradients + s.tokens * q
        ledger.working.append(Working("gradients of query, key, value", self.element_bytes * gradients))

    def _repeated(self, ledger: Ledger, q: np.ndarray, kv: np.ndarray) -> None:
        """Keys and values copied for every query head, which attention keeps instead; their gradients are summed."""
        unit = 2 * self.element_bytes * self.shard.tokens
        moved = unit * (q + kv)
        ledger.streams.append(Stream("repeated keys and values", "mixer", moved, moved, 2, 2))
        ledger.saved.append(Saved("repeated keys and values", "mixer", unit * (q - kv)))

    def _qk_norm(self, ledger: Ledger, mixer: Attention, q: np.ndarray, kv: np.ndarray) -> None:
        """A norm of queries and keys; its input is kept beside its output, which attention keeps."""
        s = self.shard
        over, fixed = mixer.qk_norm_over, mixer.qk_norm_kind == "layernorm_fixed"
        widths = {
            "head": 2 * mixer.head_dim,
            "all": (mixer.heads + mixer.kv_heads) * mixer.head_dim,  # whole on every rank of tp
            "each": q + kv,
        }
        ledger.weights.append(Weight("qk_norm", 0 if fixed else widths[over], matrix=False))
        moved = self.element_bytes * s.tokens * (q + kv)
        ledger.streams.append(Stream("qk_norm", "mixer", 2 * moved, 3 * moved, 2, 2))
        ledger.saved.append(Saved("qk_norm.input", "mixer", moved))
        if over == "all" and int(s.tp.max(initial=1)) > 1:
            # Each rank has some of the heads: the sums over all of them, one fp32 number a token for queries and one
            # for keys, are reduced both ways.
            sums = np.where(s.tp > 1, 2 * SINGLE * s.tokens, 0.0)
            ledger.exchanges += [
                Exchange("qk_norm sums", "tp", "all_reduce", sums, when) for when in ("forward", "backward")
            ]

    def _output_gate(self, ledger: Ledger, q: np.ndarray) -> None:
        """The output times the sigmoid of a projection: both are kept, and the product, the next linear's input."""
        elements = self.shard.tokens * q
        moved = self.element_bytes * elements
        ledger.streams.append(Stream("output_gate", "mixer", 3 * moved, 5 * moved))
        ledger.saved.append(Saved("output_gate", "mixer", moved))
        ledger.saved.append(Saved("gated attention_output", "mixer", self.linear_input_bytes * elements))

    def _core_attention(
        self,
        ledger: Ledger,
        heads: np.ndarray,
        qk_dim: int,
        v_dim: int,
        kv_heads: np.ndarray,
        window: int | None,
        chunk: int | None = None,
    ) -> None:
        """The two products and the softmax between them. window, chunk: as of Attention; keys that an indexer picks
        count as a window of as many."""
        s = self.shard
        reach = min((size for size in (window, chunk) if size is not None), default=None)
        seq, unfused = self.work.seq_len, self.work.attention == "unfused"
        seen = seq if unfused else self.work.attended_seq
        pairs = seq if unfused else self._pairs(window) if chunk is None else self._pairs_in_chunks(window, chunk)
        per_pair = 2 * heads * (qk_dim + v_dim)
        scores = s.tokens * heads * seq if unfused else 0
        ledger.attends.append(
            Attend(
                "core_attention",
                s.tokens * pairs * per_pair,
                # Each step of a ring sees one rank's keys only, in a kernel of its own.
                np.where(s.ulysses, seen, seen / s.cp) if reach is None else min(reach, seen),
                qk_dim,
                scores,
                np.where(s.ulysses, 1, s.cp),
            )
        )
        if unfused:
            ledger.saved.append(Saved("attention scores", "core_attn", self._score_bytes() * scores))
        ledger.saved.append(Saved("attention_output", "mixer", self.element_bytes * s.tokens * heads * v_dim))
        ledger.saved.append(Saved("log_sum_exp", "core_attn", SINGLE * s.tokens * heads))
        self._context_exchanges(ledger, self.element_bytes * s.tokens * heads, qk_dim, v_dim, kv_heads / heads)

    def _score_bytes(self) -> int:
        """Bytes that are kept of a score: softmax's output, which the product with the values keeps too, and dropout's
        output and mask (Korthikanti et al. 2022, section 4)."""
        softmax = self.element_bytes + (SINGLE if self.runtime.scores_kept_fp32 else 0)
        return softmax + (self.element_bytes + MASK if self.work.dropout else 0)

    def _pairs(self, window: int | None) -> float:
        """Keys per query that a flash kernel works through on average."""
        seq = self.work.attended_seq
        return seq / 2 if window is None or window >= seq else window * (1 - window / (2 * seq))

    def _pairs_in_chunks(self, window: int | None, chunk: int) -> float:
        """The same where a token sees its own chunk only: a kernel gets the chunks as sequences of their own."""
        return keys_per_query(window, self.work.attended_seq, "causal", chunk)

    def _context_exchanges(
        self, ledger: Ledger, unit: np.ndarray, qk_dim: int, v_dim: int, kv_ratio: np.ndarray
    ) -> None:
        """Ring attention passes keys and values around; Ulysses exchanges heads for sequence before and after."""
        s = self.shard
        if int(s.cp.max(initial=1)) == 1:
            return
        kv_bytes = unit * kv_ratio * (qk_dim + v_dim)
        ring = np.where(s.ulysses, 0.0, 1.0)
        a2a = np.where(s.ulysses & (s.cp > 1), 1.0, 0.0)
        if self.runtime.ring_gathers:
            kv_ratio = np.ones_like(kv_ratio) if self.runtime.repeats_keys_and_values else kv_ratio
            ledger.exchanges += self._gathered_ring(ring * (s.cp > 1) * unit * kv_ratio * (qk_dim + v_dim))
        else:
            steps = np.maximum(s.cp - 1, 1) * (s.cp > 1)
            ledger.exchanges += [
                Exchange("ring keys and values", "cp", "send", ring * kv_bytes, "forward", ring_steps=steps),
                Exchange(
                    "ring keys, values and gradients", "cp", "send", 2 * ring * kv_bytes, "backward", ring_steps=steps
                ),
            ]
        # After each step the partial output (bf16) joins the running one (fp32); backward adds to fp32 gradients of
        # queries, and of keys and values as they pass.
        joins = ring * (s.cp - 1) * (unit / self.element_bytes)
        ledger.streams.append(
            Stream(
                "ring merge",
                "core_attn",
                joins * v_dim * (self.element_bytes + 2 * SINGLE),
                joins * (qk_dim + kv_ratio * (qk_dim + v_dim)) * (self.element_bytes + 2 * SINGLE),
                2,
                3,
            )
        )
        moved = unit * (qk_dim + v_dim) + kv_bytes
        ledger.exchanges += [
            Exchange("heads for sequence", "cp", "all_to_all", a2a * moved, when) for when in ("forward", "backward")
        ]

    def _gathered_ring(self, kv_bytes: np.ndarray) -> list[Exchange]:
        """PyTorch's ring: one gather of all keys and values in each pass, after they were put into one buffer; in
        backward their gradients leave after every step, the last one's too, from one buffer as well."""
        cp, exact = self.shard.cp, kv_bytes * SINGLE / self.element_bytes
        return [
            *(
                Exchange("gather keys and values", "cp", "all_gather", cp * kv_bytes, when, copied=2 * kv_bytes)
                for when in ("forward", "backward")
            ),
            Exchange("ring gradients", "cp", "send", exact, "backward", ring_steps=cp, copied=2 * cp * exact),
        ]
