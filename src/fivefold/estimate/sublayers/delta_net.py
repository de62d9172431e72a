"""Linear attention by the gated delta rule, as Megatron-Core's core/ssm/gated_delta_net.py runs it (read at
00caa53af3): one input projection, the convolution of causal-conv1d, and flash-linear-attention's chunk_gated_delta_rule
(ops/gated_delta_rule/chunk.py, read at 0315a70ea5), whose forward saves q, k, v, the decay, beta and the inverted
triangle of every chunk, and whose backward makes everything else again.
"""

from __future__ import annotations

import numpy as np

from fivefold.estimate.ledger import Ledger, Saved, Scan, Stream, Weight, Working
from fivefold.estimate.sublayers.linears import SINGLE, LinearWriter
from fivefold.model.flops import DELTA_CHUNK, attention_flops_per_token
from fivefold.model.spec import GatedDeltaNet


class DeltaNetWriter(LinearWriter):
    """Rows of a gated delta net. Heads are split over tp; over the sequence nothing is (a rule refuses cp)."""

    def _gated_delta_net(self, ledger: Ledger, mixer: GatedDeltaNet) -> None:
        s, b = self.shard, self.element_bytes
        keys, values, heads = mixer.key_width / s.tp, mixer.value_width / s.tp, mixer.value_heads / s.tp
        convolved = 2 * keys + values
        self._column_parallel(ledger, "delta.in_proj", "mixer", convolved + values + 2 * heads, bias=False)
        ledger.weights += [
            Weight("delta.conv", convolved * mixer.conv, matrix=False),
            Weight("delta.decay", 2 * heads, matrix=False),
            Weight("delta.norm", mixer.value_dim, matrix=False),
        ]
        moved = b * s.tokens * convolved
        # Turned to channels first and back around a convolution whose activation is made again from its input; then
        # queries and keys are normed, and repeated for the value heads that share them.
        ledger.streams.append(Stream("delta.conv", "mixer", 6 * moved, 8 * moved, 3, 3))
        repeated = heads * mixer.key_dim
        normed = b * s.tokens * (2 * keys + repeated)
        ledger.streams.append(Stream("delta.qk_norm", "mixer", 2 * normed, 3 * normed, 4, 4))
        self._delta_saved(ledger, mixer, convolved, repeated, heads)
        self._delta_scan(ledger, mixer, heads)
        out = b * s.tokens * values
        ledger.streams.append(Stream("delta.gated_norm", "mixer", 3 * out, 5 * out))
        self._row_parallel(ledger, "delta.out_proj", "mixer", values, bias=False)

    def _delta_saved(
        self, ledger: Ledger, mixer: GatedDeltaNet, convolved: np.ndarray, repeated: np.ndarray, heads: np.ndarray
    ) -> None:
        s, b = self.shard, self.element_bytes
        values = heads * mixer.value_dim

        def keep(name: str, each_bytes: np.ndarray) -> None:
            ledger.saved.append(Saved(name, "mixer", s.tokens * each_bytes))

        keep("delta.conv input", b * convolved)
        # The norms of queries and keys save their outputs and one inverse length a head; where value heads share keys,
        # the kernel saves the repeated ones.
        norms = 2 * mixer.key_width / s.tp
        shared = mixer.value_heads > mixer.key_heads
        keep("delta.qk_norm output", b * norms * shared + SINGLE * 2 * mixer.key_heads / s.tp)
        keep("delta.query_key_value", b * (2 * repeated + values))
        # Cumulated decay and what softplus read, in fp32; beta and what its sigmoid read.
        keep("delta.decay and beta", (2 * SINGLE + 2 * b) * heads)
        keep("delta.triangles", b * DELTA_CHUNK * heads)
        # The gated norm saves its input, the gate and the inverse deviation of each head; its output feeds a linear.
        keep("delta.output and gate", 2 * b * values + SINGLE * heads)
        keep("delta.out_proj input", self.linear_input_bytes * values)

    def _delta_scan(self, ledger: Ledger, mixer: GatedDeltaNet, heads: np.ndarray) -> None:
        """Bytes are what the kernels read and write, one after the other: keys' products, inverse, its products with
        keys and values, states, output; backward makes these again and has five kernels of its own.

        In forward k is read four times, w written once and read once, q read once; v once, u and the corrected values
        twice each, the output once; the triangle is written and read in fp32 and in 16 bit; states written and read.
        """
        s, b = self.shard, self.element_bytes
        k, v = mixer.key_dim, mixer.value_dim
        state, triangle = k * v / DELTA_CHUNK, DELTA_CHUNK
        ahead = b * (7 * k + 6 * v + 2 * state) + (2 * SINGLE + 2 * b) * triangle
        back = b * (18 * k + 15 * v + 4 * state) + 3 * b * triangle
        flops = attention_flops_per_token(mixer, self.work.seq_len, "causal") / s.tp
        ledger.scans.append(
            Scan("delta rule", "mixer", s.tokens * flops, s.tokens * heads * ahead, s.tokens * heads * back, k, 6, 11)
        )
        # Its backward's own tensors: w, dw, dq, dk twice and u, corrected values, dv; states and their gradients.
        ledger.working.append(
            Working("gradients of the delta rule", b * s.tokens * heads * (5 * k + 3 * v + 2 * state))
        )
