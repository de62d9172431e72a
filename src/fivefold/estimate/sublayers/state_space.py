"""State spaces: Mamba 1 as mamba_ssm's selective_scan_fn after causal-conv1d (ops/selective_scan_interface.py, read at
01887ed7d7), and Mamba 2 as Megatron-Core's MambaMixer (core/ssm/mamba_mixer.py, read at 00bebb45b9), which trains by
mamba_ssm's mamba_split_conv1d_scan_combined (ops/triton/ssd_combined.py): it saves its input and its output before
the gate, and makes convolution and states again in backward.
"""

from __future__ import annotations

import numpy as np

from fivefold.estimate.ledger import Exchange, Ledger, Saved, Scan, Stream, Weight, Working
from fivefold.estimate.sublayers.linears import SINGLE, LinearWriter
from fivefold.model.flops import attention_flops_per_token
from fivefold.model.spec import Mamba, Mamba2

# Tokens between two states that the kernel of Mamba 1 keeps (mamba_ssm csrc selective_scan, from memory).
_MAMBA_CHUNK = 2048


class StateSpaceWriter(LinearWriter):
    """Rows of state spaces. Channels (Mamba 1) or heads with their groups (Mamba 2) are split over tp."""

    # ---------------------------------------------------------------- Mamba 1

    def _mamba(self, ledger: Ledger, mixer: Mamba) -> None:
        s, b = self.shard, self.element_bytes
        inner, state, low = mixer.inner / s.tp, mixer.state, mixer.dt_rank + 2 * mixer.state
        self._column_parallel(ledger, "mamba.in_proj", "mixer", 2 * inner, bias=mixer.proj_bias)
        self._conv_weights(ledger, inner, mixer.conv, mixer.conv_bias)
        ledger.streams.append(Stream("mamba.conv", "mixer", 2 * b * s.tokens * inner, 3 * b * s.tokens * inner))
        self._low_rank(ledger, mixer, inner)
        ledger.weights.append(Weight("mamba.decay and skip", inner * (state + 1), matrix=False))

        def keep(name: str, each_bytes: np.ndarray | float) -> None:
            ledger.saved.append(Saved(name, "mixer", s.tokens * each_bytes))

        # Of the input projection one half is the convolution's input, the other the gate.
        keep("mamba.in_proj output", 2 * b * inner)
        keep("mamba.conv output", b * inner)
        keep("mamba.x_proj output", b * low * (2 if mixer.inner_norms else 1))
        keep("mamba.delta", b * inner)
        keep("mamba.states", 2 * SINGLE * inner * state / min(_MAMBA_CHUNK, self.work.seq_len))
        keep("mamba.output before the gate", b * inner)
        keep("mamba.out_proj input", self.linear_input_bytes * inner)
        flops = attention_flops_per_token(mixer, self.work.seq_len, "causal") / s.tp
        # Forward reads x, delta, gate and writes the output before and after the gate; backward reads five and writes
        # three. B and C are small beside them.
        ahead, back = b * (5 * inner + 2 * state), b * (8 * inner + 4 * state)
        ledger.scans.append(
            Scan("selective scan", "mixer", s.tokens * flops, s.tokens * ahead, s.tokens * back, None, 1, 1)
        )
        self._row_parallel(ledger, "mamba.out_proj", "mixer", inner, bias=mixer.proj_bias)
        ledger.working.append(Working("gradients of the selective scan", b * s.tokens * (4 * inner + 2 * state)))

    def _low_rank(self, ledger: Ledger, mixer: Mamba, inner: np.ndarray) -> None:
        """The step size, B and C of a token: from the channels of all ranks, which add up their parts."""
        s, b = self.shard, self.element_bytes
        low = mixer.dt_rank + 2 * mixer.state
        self._plain(ledger, "mamba.x_proj", inner, low)
        if mixer.inner_norms:
            ledger.weights.append(Weight("mamba.inner_norms", low, matrix=False))
            moved = b * s.tokens * low
            ledger.streams.append(Stream("mamba.inner_norms", "mixer", 2 * moved, 3 * moved, 3, 3))
        self._plain(ledger, "mamba.dt_proj", mixer.dt_rank, inner)
        ledger.weights.append(Weight("mamba.dt_proj.bias", inner, matrix=False))
        if int(s.tp.max(initial=1)) > 1:
            size = np.where(s.tp > 1, b * s.tokens * low, 0.0)
            ledger.exchanges += [
                Exchange("mamba.x_proj output", "tp", "all_reduce", size, when) for when in ("forward", "backward")
            ]

    # ---------------------------------------------------------------- Mamba 2

    def _mamba2(self, ledger: Ledger, mixer: Mamba2) -> None:
        s, b = self.shard, self.element_bytes
        inner, heads, shared = mixer.inner / s.tp, mixer.heads / s.tp, 2 * mixer.groups * mixer.state / s.tp
        convolved = inner + shared
        self._column_parallel(ledger, "mamba.in_proj", "mixer", inner + convolved + heads, bias=mixer.proj_bias)
        self._conv_weights(ledger, convolved, mixer.conv, mixer.conv_bias)
        ledger.weights.append(Weight("mamba.decay, skip and step", 3 * heads, matrix=False))
        # Context parallelism gives every rank whole sequences of some heads, and repeats B and C where a group's heads
        # are on several ranks (core/ssm/mamba_context_parallel.py).
        copies = np.maximum(s.cp * s.tp / mixer.groups, 1)
        made = 2 * inner + shared * np.where(s.cp > 1, copies, 1) + heads
        self._heads_for_sequence(ledger, made, inner)
        ledger.saved.append(Saved("mamba.in_proj output", "mixer", b * s.tokens * made))
        ledger.saved.append(Saved("mamba.output before the gate", "mixer", b * s.tokens * inner))
        # Turned to batch first, and the convolution's input to channels first and back.
        moved = b * s.tokens * (2 * made + 6 * convolved)
        ledger.streams.append(Stream("mamba.conv", "mixer", moved, 1.5 * moved, 4, 5))
        self._mamba2_scan(ledger, mixer, inner, shared)
        if mixer.norm:
            self._gated_norm(ledger, mixer, inner)
        ledger.saved.append(Saved("mamba.out_proj input", "mixer", self.linear_input_bytes * s.tokens * inner))
        self._row_parallel(ledger, "mamba.out_proj", "mixer", inner, bias=mixer.proj_bias)

    def _mamba2_scan(self, ledger: Ledger, mixer: Mamba2, inner: np.ndarray, shared: np.ndarray) -> None:
        """Five kernels: decays, states of the chunks, from state to state, C B^T of the groups, output and gate.
        States and C B^T are fp32 and pass through memory; backward makes them again and has their gradients."""
        s, b = self.shard, self.element_bytes
        chunk = min(mixer.chunk, self.work.seq_len)
        states = SINGLE * inner * mixer.state / chunk
        square = SINGLE * mixer.groups / s.tp * chunk
        # x is read for the states and for the output, B and C twice; gate read, output written before and after it.
        ahead = b * (5 * inner + 2 * shared) + 4 * states + 2 * square
        flops = attention_flops_per_token(mixer, self.work.seq_len, "causal") / s.tp
        ledger.scans.append(
            Scan(
                "chunk scan",
                "mixer",
                s.tokens * flops,
                s.tokens * ahead,
                3 * s.tokens * ahead,
                mixer.head_dim,
                5,
                12,
            )
        )
        # Backward: what the convolution gave, made again; gradients of the input and the output; states and C B^T with
        # their gradients.
        ledger.working.append(
            Working(
                "gradients of the chunk scan",
                s.tokens * (b * (4 * inner + 2 * shared) + 2 * states + 2 * square),
            )
        )

    def _gated_norm(self, ledger: Ledger, mixer: Mamba2, inner: np.ndarray) -> None:
        """The scan applied the gate; the norm over each group saves its input and one inverse deviation a group."""
        s, b = self.shard, self.element_bytes
        ledger.weights.append(Weight("mamba.norm", inner, matrix=False))
        self._norm_stream(ledger, "mamba.norm", "mixer", s.tokens * inner)
        kept = b * inner + SINGLE * mixer.groups / s.tp
        ledger.saved.append(Saved("mamba.norm input", "mixer", s.tokens * kept))

    def _heads_for_sequence(self, ledger: Ledger, made: np.ndarray, inner: np.ndarray) -> None:
        s = self.shard
        if int(s.cp.max(initial=1)) == 1:
            return
        moved = np.where(s.cp > 1, self.element_bytes * s.tokens * (made + inner), 0.0)
        ledger.exchanges += [
            Exchange("state space's heads for sequence", "cp", "all_to_all", moved, when)
            for when in ("forward", "backward")
        ]

    def _conv_weights(self, ledger: Ledger, channels: np.ndarray, taps: int, bias: bool) -> None:
        ledger.weights.append(Weight("mamba.conv", channels * (taps + bias), matrix=False))
