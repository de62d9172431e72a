"""Multi-head latent attention, and the indexer of its sparse kind."""

from __future__ import annotations

import numpy as np

from fivefold.estimate.ledger import Attend, Gemm, Ledger, Saved, Stream, Weight, Working
from fivefold.estimate.sublayers.attention import AttentionWriter
from fivefold.estimate.sublayers.linears import SINGLE
from fivefold.model.spec import Indexer, LatentAttention

_INDEX = 4  # bytes of a picked key's position


class LatentWriter(AttentionWriter):
    def _latent_attention(self, ledger: Ledger, mixer: LatentAttention) -> None:
        s, h = self.shard, self.hidden
        heads = mixer.heads / s.tp
        qk, v = mixer.qk_head_dim, mixer.v_head_dim
        norm_tokens = s.norm_tokens
        if mixer.q_lora_rank is None:
            self._column_parallel(ledger, "q_proj", "mixer", heads * qk, bias=False)
        else:
            self._replicated(ledger, "q_down", h, mixer.q_lora_rank, norm_tokens, bias=mixer.bias)
            self._latent_norm(ledger, "q_latent_norm", mixer.q_lora_rank)
            self._up_projection(ledger, "q_up", mixer.q_lora_rank, heads * qk)
        latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        self._replicated(ledger, "kv_down", h, latent, norm_tokens, bias=mixer.bias)
        self._latent_norm(ledger, "kv_latent_norm", mixer.kv_lora_rank)
        self._up_projection(ledger, "kv_up", mixer.kv_lora_rank, heads * (mixer.qk_nope_head_dim + v))
        moved = self.element_bytes * s.tokens * heads * 2 * qk
        ledger.streams.append(Stream("rotary_and_concatenate", "mla_up_proj", 2 * moved, 2 * moved, 2, 2))
        ledger.saved.append(
            Saved("query_key_value", "mla_up_proj", self.element_bytes * s.tokens * heads * (2 * qk + v))
        )
        if mixer.indexer is not None:
            self._indexer(ledger, mixer.indexer, mixer.q_lora_rank or h)
        self._core_attention(ledger, heads, qk, v, heads, mixer.indexer.top_k if mixer.indexer else None)
        self._row_parallel(ledger, "out_proj", "mixer", heads * v, bias=mixer.bias)
        ledger.working.append(
            Working(
                "gradients of query, key, value",
                self.element_bytes * (s.tokens * heads * (2 * qk + 2 * v) + s.norm_tokens * h),
            )
        )

    def _latent_norm(self, ledger: Ledger, name: str, width: int) -> None:
        elements = self.shard.norm_tokens * width
        ledger.weights.append(Weight(name, width, matrix=False))
        ledger.streams.append(
            Stream(name, "mixer", 2 * self.element_bytes * elements, 3 * self.element_bytes * elements)
        )
        ledger.saved.append(Saved(f"{name}.input", "mixer", self.element_bytes * elements))
        ledger.saved.append(Saved(f"{name}.output", "mixer", self.linear_input_bytes * elements))

    def _up_projection(self, ledger: Ledger, name: str, width: int, out: np.ndarray) -> None:
        """A column-parallel projection from a latent; its gathered input is small beside the hidden state."""
        s = self.shard
        ledger.weights.append(Weight(name, width * out, factored=width + out))
        ledger.gemms.append(Gemm(name, "mla_up_proj", s.tokens, out, width, input_shared=self.gathered_shared))
        self._gather_for_column(ledger, name, s.tokens * width, "mla_up_proj")

    def _indexer(self, ledger: Ledger, indexer: Indexer, queries_from: int) -> None:
        """What picks keys for a query (DeepSeek-V3.2, section 2.1), in its sparse stage of training: attention runs
        over the picked keys only, and the indexer learns from a loss of its own on them, on a detached input.

        Assumed: a kernel that skips what was not picked at flash attention's rate; every rank of tp has the whole
        indexer and runs it for all tokens, so that all pick the same keys (Megatron-Core's dsa.py gathers its input);
        index scores are made blockwise and kept for the picked keys only.
        """
        s = self.shard
        width, seq = indexer.heads * indexer.head_dim, self.work.seq_len
        self._replicated(ledger, "indexer.queries", queries_from, width, s.tokens, bias=False)
        self._replicated(ledger, "indexer.key", self.hidden, indexer.head_dim, s.tokens, bias=False)
        self._replicated(ledger, "indexer.weights", self.hidden, indexer.heads, s.tokens, bias=False)
        ledger.weights.append(Weight("indexer.key_norm", 2 * indexer.head_dim, matrix=False))
        # Every head scores every key before the query; the heads are weighed and summed.
        pairs = self._pairs(None)
        scores = 2 * indexer.heads * (indexer.head_dim + 1) * pairs
        ledger.attends.append(Attend("indexer scores", s.tokens * scores, seq / s.cp, indexer.head_dim))
        made = width + indexer.head_dim + indexer.heads
        moved = self.element_bytes * s.tokens * (width + 2 * indexer.head_dim)
        ledger.streams.append(Stream("indexer norm and rotary", "mixer", 2 * moved, 2 * moved, 3, 3))
        picked = s.tokens * min(indexer.top_k, seq)
        ledger.streams.append(Stream("indexer choice", "mixer", (SINGLE + _INDEX) * picked, 2 * SINGLE * picked, 2, 2))
        # Its products and its loss need what it made, the scores that it gave to the picked keys and their positions.
        ledger.saved.append(Saved("indexer queries, keys and weights", "mixer", self.element_bytes * s.tokens * made))
        ledger.saved.append(Saved("indexer scores of picked keys", "mixer", SINGLE * picked))
        ledger.saved.append(Saved("positions of picked keys", "mixer", _INDEX * picked))
