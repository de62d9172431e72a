"""The ledgers of fivefold's own trainer, as it is: what differs from the frameworks' in estimate/blocks.py.

Saved are the inputs of every linear layer and of every norm with its statistics, rotated queries and keys, values,
the attention output with its log-sum-exp, both inputs of the gate, and the loss's log-probabilities
(fivefold.train.ops, loss, parallel.vocabulary). tests/train/test_agreement.py holds all of it to what the trainer does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fivefold.estimate.items import ItemWriter
from fivefold.estimate.ledger import Column, Exchange, Ledger, Module, Pass, Saved, Working
from fivefold.model.spec import Attention, Block, FeedForward

_SINGLE = 4  # bytes of an fp32 element
_INDEX, _MASK = 8, 1  # of a token or label, and of a boolean


class TrainerWriter(ItemWriter):
    """Dense blocks as fivefold.train runs them; what the trainer does not run is left to the frameworks' ledger."""

    # ---------------------------------------------------------------- blocks

    def block(self, block: Block) -> Ledger:
        ledger = super().block(block)
        if isinstance(block.mixer, Attention) and isinstance(block.feed, FeedForward):
            self._backward_moments(ledger, block.feed, block.norm == "layernorm")
            self._owe(ledger, block.mixer, block.feed, block.norm == "layernorm")
        return ledger

    def _norm(self, ledger: Ledger, name: str, block: Block, module: Module, *, keeps_input: bool = True) -> None:
        super()._norm(ledger, name, block, module, keeps_input=keeps_input)
        self._statistics(ledger, name, block.norm == "layernorm", self.shard.norm_tokens)

    def _statistics(self, ledger: Ledger, name: str, layernorm: bool, rows: Column, module: Module = "mixer") -> None:
        """One fp32 number a row for RMSNorm (fivefold.train.ops); mean and inverse deviation for PyTorch's layer norm,
        in the dtype that the device's kernel has them in."""
        each = 2 * (self.runtime.layernorm_statistic_bytes or self.element_bytes) if layernorm else _SINGLE
        ledger.saved.append(Saved(f"{name}.statistics", module, each * rows))

    def _attention(self, ledger: Ledger, mixer: Attention) -> None:
        super()._attention(ledger, mixer)
        if mixer.qk_norm:
            heads = mixer.heads / self.shard.tp + self._kv_heads(mixer)
            self._statistics(ledger, "qk_norm", False, self.shard.tokens * heads)
        if self.runtime.attention_state_bytes:
            ledger.saved.append(Saved("random state", "core_attn", self.runtime.attention_state_bytes))
        ledger.working.clear()

    def _kv_heads(self, mixer: Attention) -> np.ndarray:
        return np.maximum(mixer.kv_heads / self.shard.tp, 1)

    def _pairs(self, window: int | None) -> float:
        """Keys per query that the kernel works through: a mask other than the causal one saves it nothing."""
        seq = self.work.seq_len
        return seq / 2 if window is None or window >= seq else seq

    def _context_exchanges(
        self, ledger: Ledger, unit: np.ndarray, qk_dim: int, v_dim: int, kv_ratio: np.ndarray
    ) -> None:
        super()._context_exchanges(ledger, unit, qk_dim, v_dim, kv_ratio)
        if int(self.shard.cp.max(initial=1)) > 1:
            ledger.exchanges = [row for row in ledger.exchanges if row.axis != "cp"]
            self._ring(ledger, unit * kv_ratio * (qk_dim + v_dim))
            self._ulysses(ledger, unit, qk_dim, v_dim, kv_ratio)

    def _ring(self, ledger: Ledger, kv_bytes: np.ndarray) -> None:
        """Keys and values go round in both passes; in backward their fp32 gradients come along, one step behind."""
        s = self.shard
        size = np.where(s.ulysses, 0.0, kv_bytes)
        steps = np.maximum(s.cp - 1, 1) * (s.cp > 1)
        exact = size * _SINGLE / self.element_bytes

        def row(name: str, each: np.ndarray, when: Pass) -> Exchange:
            return Exchange(name, "cp", "send", each, when, ring_steps=steps, module="core_attn")

        ledger.exchanges += [
            row("ring keys and values", size, "forward"),
            row("ring keys and values", size, "backward"),
            row("ring gradients", exact, "backward"),
        ]

    def _ulysses(self, ledger: Ledger, unit: np.ndarray, qk_dim: int, v_dim: int, kv_ratio: np.ndarray) -> None:
        """Heads for sequence and back. KV heads that the ranks cannot share are repeated before they are sent, and what
        comes back from the exchange is another tensor than what went in."""
        s = self.shard
        on = s.ulysses & (s.cp > 1)
        heads = unit / (self.element_bytes * s.tokens)
        kv_heads = kv_ratio * heads
        repeated = kv_ratio * np.maximum(s.cp / kv_heads, 1)
        query, kv = unit * qk_dim, unit * (qk_dim + v_dim)
        there, back = np.where(on, query + repeated * kv, 0.0), np.where(on, unit * v_dim, 0.0)
        for when in ("forward", "backward"):
            ledger.exchanges += [
                Exchange("heads for sequence", "cp", "all_to_all", there, when, module="core_attn"),
                # Nothing that backward needs is made after it, so that a recomputed core stops before it.
                Exchange("sequence for heads", "cp", "all_to_all", back, when),
            ]
        ledger.saved.append(Saved("repeated keys and values", "core_attn", np.where(on, (repeated - kv_ratio) * kv, 0)))
        ledger.saved.append(Saved("attention output of own heads", "core_attn", back))

    # ---------------------------------------------------------------- collectives that a checkpoint does not repeat

    def _row_parallel(
        self, ledger: Ledger, name: str, module: Module, width: np.ndarray, *, bias: bool, ends_block: bool = False
    ) -> None:
        """The sum of a row layer's outputs ends what its checkpoint has to run again, as its product does."""
        before = len(ledger.exchanges)
        super()._row_parallel(ledger, name, module, width, bias=bias, ends_block=ends_block)
        if ends_block:
            ledger.exchanges[before:] = [_ending(row) for row in ledger.exchanges[before:]]

    # ---------------------------------------------------------------- moments of backward

    def _backward_moments(self, ledger: Ledger, feed: FeedForward, layernorm: bool) -> None:
        """What is alive beside the block's saved tensors while its feed-forward runs backward, before anything of its
        attention does: later moments hold less, as saved tensors go.

        down: gradient of the down projection's output, whole under tensor parallelism, of its input, of its weight.
        gate: gradients of the gate's inputs beside that of its output. columns: the input of the gate and up
        projections gathered again, its gradient, and the gradients of both weights.
        """
        s, b, h = self.shard, self.element_bytes, self.hidden
        width = feed.ffn / s.tp
        inputs = 2 if feed.gated else 1
        act = b * s.tokens * width
        mine, whole = b * s.norm_tokens * h, b * s.tokens * h
        gathered = np.where(s.sp, whole, 0.0)
        rearranged = np.where(s.sp & (s.micro_batch > 1), whole, 0.0)
        product = b * h * width
        weight = np.where(self._fused(), 0.0, product)
        down = mine + gathered + rearranged + act + weight
        gate = mine + (1 + inputs) * act - act
        # By then the product and the gate's inputs are gone, and their gradients are there.
        left = mine - act
        scattered = np.where(s.sp, mine, 0.0)
        columns = left + gathered + rearranged + whole + rearranged + scattered + inputs * weight
        alone = left + inputs * whole + weight
        ledger.working += [
            Working("down projection", down, first=True),
            Working("gate", gate),
            Working("gate and up projections", np.where(s.tp > 1, columns, alone)),
            # The norm's output is gone, and the gradient that goes around it is there.
            Working("norm", self._norm_moment(mine, layernorm) - inputs * act - act),
            # Of a backward that is split: its last norm, with nothing let go, and a product for a weight.
            Working("norm at the end", self._norm_moment(mine, layernorm)),
            Working("weight", product),
        ]

    def _fused(self) -> np.ndarray:
        """Where the weight gradients of linear layers are added to the buffer by their product, so that none exists by
        itself: without tensor parallelism, in the dtype that computes (fivefold.train.parallel.fused_gradients)."""
        same = {"fp32": 4, "bf16": 2}[self.work.grad_dtype] == self.element_bytes
        return (self.shard.tp == 1) & same

    def _owe(self, ledger: Ledger, mixer: Attention, feed: FeedForward, layernorm: bool) -> None:
        """A schedule that splits the backward keeps, with everything that forward saved, the gradients that arrived at
        the layers with weights. Column layers under tensor parallelism give all their gradients at once: what waits are
        those of the weights (fivefold.train.parallel.split_backward)."""
        s, b, h = self.shard, self.element_bytes, self.hidden
        mine, whole = b * s.norm_tokens * h, b * s.tokens * h
        outputs = mixer.heads / s.tp * mixer.head_dim + 2 * self._kv_heads(mixer) * mixer.head_dim
        outputs = outputs + (2 if feed.gated else 1) * feed.ffn / s.tp
        norms = 2 * mine if layernorm else 0.0
        ledger.owed_bytes = np.where(s.tp > 1, 2 * whole + b * h * outputs, 2 * mine + b * s.tokens * outputs) + norms

    def _norm_moment(self, mine: np.ndarray, layernorm: bool = False) -> np.ndarray:
        """A norm's backward: the gradients of its output and its input, and for RMSNorm, in fp32, the input, the
        gradient, their product and what becomes the input's gradient (fivefold.train.ops)."""
        if layernorm:
            return 2 * mine
        exact = _SINGLE / self.element_bytes
        half = self.element_bytes < _SINGLE
        return mine * (1 + (4 if half else 2) * exact + (1 if half else 0))

    # ---------------------------------------------------------------- items beside the blocks

    def embedding(self) -> Ledger:
        s = self.shard
        ledger = super().embedding()
        masks = np.where(s.tp > 1, (_INDEX + _MASK) * s.tokens, np.where(s.cp > 1, _INDEX * s.tokens, 0.0))
        ledger.saved.append(Saved("tokens", "mixer", masks))
        rows = self.padded_vocab() / s.tp
        mine = self.element_bytes * s.norm_tokens * self.hidden
        ledger.owed_bytes = mine
        ledger.working = [Working("gradient of embedding", self.element_bytes * rows * self.hidden + mine, first=True)]
        return ledger

    def head(self) -> Ledger:
        ledger = super().head()
        s = self.shard
        columns = self.padded_vocab() / s.tp
        logits = s.tokens * columns
        # Targets and masks; sums of exponentials and which tokens are another rank's, where the vocabulary is cut.
        per_token = np.where(s.tp > 1, _INDEX + 2 * _MASK + _SINGLE, _INDEX + _MASK)
        ledger.saved.append(Saved("log-probabilities", "head", _SINGLE * logits))
        ledger.saved.append(Saved("targets", "head", per_token * s.tokens))
        ledger.working = self._loss_moments(logits, columns)
        # The log-probabilities are gone; the gradient of the logits waits, or that of the projection's weight.
        b, h = self.element_bytes, self.hidden
        ledger.owed_bytes = np.where(s.tp > 1, b * columns * h, b * logits) - _SINGLE * logits
        return ledger

    def _final_norm(self, ledger: Ledger) -> None:
        super()._final_norm(ledger)
        layernorm = self.model.final_norm == "layernorm"
        self._statistics(ledger, "final_norm", layernorm, self.shard.norm_tokens, "head")

    def _loss_moments(self, logits: np.ndarray, columns: np.ndarray) -> list[Working]:
        """Beside the log-probabilities: in forward logits, their fp32 copy where there is one; in backward the gradient
        of the logits, and once they are gone what the head's backward makes."""
        s, b, h = self.shard, self.element_bytes, self.hidden
        half = b < _SINGLE
        padded = (s.tp > 1) & (self.model.vocab % s.tp > 0)
        copies = _SINGLE if half else np.where(padded, _SINGLE, 0)
        mine, whole = b * s.norm_tokens * h, b * s.tokens * h
        gathered = np.where(s.sp, whole, 0.0)
        rearranged = np.where(s.sp & (s.micro_batch > 1), whole, 0.0)
        weight = np.where(self._fused() & (not self.model.tied_embeddings), 0.0, b * columns * h)
        gradient = (b if half else _SINGLE) * logits
        at_head = np.where(
            s.tp > 1,
            gathered + rearranged + whole + rearranged + np.where(s.sp, mine, 0.0) + weight,
            whole + weight,
        )
        return [
            Working("loss", b * logits + copies * logits, first=True),
            Working("gradient of logits", gradient if half else 0 * logits, first=True),
            Working("head", gradient - _SINGLE * logits + at_head, first=True),
            # Of what the head keeps the norm's input alone is left.
            Working(
                "final norm",
                self._norm_moment(mine, self.model.final_norm == "layernorm") - mine - _SINGLE * logits,
                first=True,
            ),
        ]

    def _loss_exchanges(self, ledger: Ledger) -> None:
        """Two all-reduces: the largest logit of each token; the sum of exponentials with the target's logit."""
        s = self.shard
        for name, numbers in (("maximum", 1), ("sum of exponentials and target logit", 2)):
            size = np.where(s.tp > 1, numbers * _SINGLE * s.tokens, 0.0)
            ledger.exchanges.append(Exchange(f"loss {name}", "tp", "all_reduce", size, "forward", module="head"))


def _ending(row: Exchange) -> Exchange:
    """The same exchange, not run again where its checkpoint stops early."""
    return replace(row, ends_block=row.when == "forward")
