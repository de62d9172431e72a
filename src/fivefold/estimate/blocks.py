"""The ledger of a Transformer block from those of its sublayers; estimate/items.py has what lies beside the blocks.

What is saved follows the runtime's own kernels: Transformer Engine saves a norm's input and output, rotated queries and
keys, values, the attention output, both inputs of the gate and its product; eager PyTorch saves the activated gate
besides. The sums were checked against allocations of published Megatron-LM runs (docs/accuracy.md).

A block whose mixer and feed-forward run side by side is written as Megatron-Core's linear layers would run it: each has
a gather and a scatter of its own. Whoever fuses the two has one of each (PaLM, section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fivefold.estimate.ledger import Ledger, Module, Saved
from fivefold.estimate.sublayers.delta_net import DeltaNetWriter
from fivefold.estimate.sublayers.experts import ExpertWriter
from fivefold.estimate.sublayers.latent import LatentWriter
from fivefold.estimate.sublayers.state_space import StateSpaceWriter
from fivefold.model.spec import (
    Attention,
    Block,
    Experts,
    Feed,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Mamba2,
    Mixer,
    SideBySide,
)

# Names of the norms before the mixer and the feed-forward, and of those after.
_BEFORE = ("input_norm", "feed_norm")
_AFTER = ("mixer_output_norm", "feed_output_norm")


class BlockWriter(LatentWriter, DeltaNetWriter, StateSpaceWriter, ExpertWriter):
    """Writes ledgers for one model, workload and runtime over one set of keys."""

    def block(self, block: Block) -> Ledger:
        """One block: what comes before its sublayers, the sublayers, what comes after, the residuals."""
        s = self.shard
        ledger = Ledger(name="block", keys=len(s), input_bytes=self.element_bytes * s.norm_tokens * self.hidden)
        if block.mixer is not None:
            self._before(ledger, block, 0, block.mixer)
            self._sublayer(ledger, block.mixer)
            self._after(ledger, block, 0)
            self._dropout(ledger, "mixer_dropout")
            self._residual(ledger, "mixer_residual")
        if block.feed is not None:
            if not (block.shared_norm and block.mixer is not None):
                self._before(ledger, block, 1, block.feed)
            self._sublayer(ledger, block.feed)
            self._after(ledger, block, 1)
            self._dropout(ledger, "feed_dropout")
            if block.norms != "pre" or self.work.dropout:
                _runs_to_its_end(ledger)
            self._residual(ledger, "feed_residual")
        return ledger

    def _sublayer(self, ledger: Ledger, sublayer: Mixer | Feed) -> None:
        # Any: a table from a type to the method for that type, which the type system has no word for.
        writers: dict[type, Callable[[Ledger, Any], None]] = {
            Attention: self._attention,
            LatentAttention: self._latent_attention,
            GatedDeltaNet: self._gated_delta_net,
            Mamba: self._mamba,
            Mamba2: self._mamba2,
            SideBySide: self._side_by_side,
            FeedForward: self._feed_forward,
            Experts: self._experts,
        }
        writers[type(sublayer)](ledger, sublayer)

    def _side_by_side(self, ledger: Ledger, mixer: SideBySide) -> None:
        """Attention and a state space read one norm's output; their sum is one more addition of hidden states."""
        self._attention(ledger, mixer.attention)
        self._mamba2(ledger, mixer.state_space)
        self._residual(ledger, "sum of attention and state space")

    def _before(self, ledger: Ledger, block: Block, at: int, sublayer: Mixer | Feed) -> None:
        """The norm of what a sublayer reads, or without one what its first linear keeps of the residual stream."""
        if block.norms == "post":
            elements = self.shard.norm_tokens * self.hidden
            ledger.saved.append(Saved(f"{_BEFORE[at]}.output", "mixer", self.linear_input_bytes * elements))
            return
        # Side by side both norms read the same tensor, which is kept once.
        again = block.parallel and at == 1 and block.mixer is not None
        module = self._norm_module(block, sublayer)
        if again:
            self._norm(ledger, _BEFORE[at], block, module, keeps_input=False)
        else:
            self._norm(ledger, _BEFORE[at], block, module)

    def _norm_module(self, block: Block, sublayer: Mixer | Feed) -> Module:
        """What recomputes a norm. Fused into the linear after it, it cannot be recomputed alone; with the dense
        feed-forward it can. Latent attention and experts have no such linear, nor a norm that two sublayers read."""
        alone = isinstance(sublayer, LatentAttention | SideBySide | Experts) or block.shared_norm
        if alone or not self.runtime.norms_fused_into_linears:
            return "layernorm"
        return "mlp" if isinstance(sublayer, FeedForward) else "mixer"

    def _after(self, ledger: Ledger, block: Block, at: int) -> None:
        if block.norms != "pre":
            self._output_norm(ledger, _AFTER[at], block)


def _runs_to_its_end(ledger: Ledger) -> None:
    """What comes after the feed-forward keeps something for backward (a norm its input, dropout its mask), so that no
    checkpoint stops before the last product, whose output it is made of."""
    ledger.gemms = [replace(row, ends_block=False) for row in ledger.gemms]
    ledger.exchanges = [replace(row, ends_block=False) for row in ledger.exchanges]
