"""The ledgers of the items beside the blocks: embedding, head with its loss, and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fivefold.estimate.blocks import BlockWriter
from fivefold.estimate.ledger import Exchange, Gemm, Ledger, Saved, Stream, Weight, Working
from fivefold.estimate.products import added_gradient_bytes

_SINGLE = 4  # bytes of an fp32 element


class ItemWriter(BlockWriter):
    """Writes the ledgers of blocks and of items."""

    def padded_vocab(self) -> np.ndarray:
        """Rows of the embedding after the runtime's padding, [K]."""
        multiple = self.runtime.vocab_multiple * self.shard.tp
        return np.ceil(self.model.vocab / multiple) * multiple

    def embedding(self) -> Ledger:
        """Token (and learned position) embedding, vocabulary-parallel."""
        s, h = self.shard, self.hidden
        ledger = Ledger(name="embedding", keys=len(s))
        rows = self.padded_vocab() / s.tp
        ledger.weights.append(Weight("embedding", rows * h, matrix=False, factored=rows + h))
        if self.model.learned_positions:
            ledger.weights.append(Weight("positions", self.model.learned_positions * h, matrix=False))
        if self.model.embedding_norm:
            # Its output is the first block's input, which that block keeps.
            elements = s.norm_tokens * h
            self._norm_weights(ledger, "embedding_norm", h, self.model.final_norm, self.model.final_norm_bias)
            self._norm_stream(ledger, "embedding_norm", "mixer", elements)
            ledger.saved.append(Saved("embedding_norm.input", "mixer", self.element_bytes * elements))
        self._dropout(ledger, "embedding_dropout")
        out = self.element_bytes * s.tokens * h
        ledger.streams.append(Stream("embedding lookup", "mixer", 2 * out, 2 * out, 2, 2))
        if self.work.trained == "all":
            self._dense_gradient(ledger, rows * h)
        if int(s.tp.max(initial=1)) > 1:
            ledger.exchanges += [
                Exchange("scatter embedding output", "tp", "reduce_scatter", np.where(s.sp, out, 0.0), "forward"),
                Exchange("gather embedding gradient", "tp", "all_gather", np.where(s.sp, out, 0.0), "backward"),
                Exchange("reduce embedding output", "tp", "all_reduce", np.where(s.sp, 0.0, out), "forward"),
            ]
        if self.runtime.head_wgrad_placeholder:
            ledger.working.append(Working("gradient of embedding", self.element_bytes * rows * h))
        return ledger

    def _dense_gradient(self, ledger: Ledger, elements: np.ndarray) -> None:
        """The embedding's gradient is as large as its weight, whatever was looked up: cleared (PyTorch's
        embedding_dense_backward), and added to the accumulator by a kernel of its own (Megatron-Core's
        distributed_data_parallel.py, nanotron's gradient_accumulator.py), unless it is scattered as it is. Its launches
        are no more than those of other weights' gradients, which are not counted either."""
        scattered = self.runtime.sharding == "fully_sharded"
        added = 0 if scattered else added_gradient_bytes(self.runtime, self.work)
        moved = (self.element_bytes + added) * elements
        ledger.streams.append(Stream("embedding gradient", "mixer", 0 * moved, moved, 0, 0))

    def head(self) -> Ledger:
        """Final norm, output projection and cross-entropy; the kernel adds the projection's weight."""
        ledger = Ledger(name="head", keys=len(self.shard))
        self._final_norm(ledger)
        if self.model.head_bias:
            ledger.weights.append(Weight("output_proj.bias", self.padded_vocab() / self.shard.tp, matrix=False))
        self._logits_and_loss(ledger)
        return ledger

    def _final_norm(self, ledger: Ledger) -> None:
        elements = self.shard.norm_tokens * self.hidden
        self._norm_weights(ledger, "final_norm", self.hidden, self.model.final_norm, self.model.final_norm_bias)
        ledger.streams.append(
            Stream("final_norm", "head", 2 * self.element_bytes * elements, 3 * self.element_bytes * elements)
        )
        ledger.saved.append(Saved("final_norm.input", "head", self.element_bytes * elements))
        ledger.saved.append(Saved("final_norm.output", "head", self.element_bytes * elements))

    def head_weight(self) -> np.ndarray:
        """Elements of the output projection per rank, [K]."""
        return self.padded_vocab() / self.shard.tp * self.hidden

    def _logits_and_loss(self, ledger: Ledger) -> None:
        s, h = self.shard, self.hidden
        columns = self.padded_vocab() / s.tp
        logits = s.tokens * columns
        ledger.gemms.append(Gemm("output_proj", "head", s.tokens, columns, h, sixteen_bit=True))
        self._gather_for_column(ledger, "output_proj", s.tokens * h, "head", sixteen_bit=True)
        ahead, back = (np.where(s.tp > 1, parted, alone) for alone, parted in self._loss_moved_bytes())
        ledger.streams.append(Stream("cross_entropy", "head", ahead * logits, back * logits, 6, 4))
        self._loss_exchanges(ledger)
        # The larger of two moments: the loss (logits and what it computes from them) and the head's backward (gradient
        # of the logits, placeholder of the weight gradient, gathered input, its gradient whole and scattered).
        whole = self.runtime.loss_bytes_per_logit
        at_loss = np.where(s.tp > 1, self.runtime.sharded_loss_bytes_per_logit or whole, whole) * logits
        at_backward = self.element_bytes * logits
        if self.runtime.head_wgrad_placeholder:
            at_backward = at_backward + self.element_bytes * columns * h
        gathered = np.where(s.sp, self.element_bytes * s.tokens * h + self.element_bytes * s.norm_tokens * h, 0.0)
        at_backward = at_backward + gathered + self.element_bytes * s.tokens * h
        ledger.logits_bytes = np.maximum(at_loss, at_backward)

    def _loss_moved_bytes(self) -> Iterator[tuple[float, float]]:
        """Of each pass, what the loss moves per logit with the whole vocabulary and with a part of it."""
        whole, parted = self.runtime.loss_moved_bytes, self.runtime.sharded_loss_moved_bytes
        return zip(whole, parted if any(parted) else whole, strict=True)

    def _loss_exchanges(self, ledger: Ledger) -> None:
        s = self.shard
        if int(s.tp.max(initial=1)) == 1:
            return
        per_token = np.where(s.tp > 1, _SINGLE * s.tokens, 0.0)
        for name in ("maximum", "target logit", "sum of exponentials"):
            ledger.exchanges.append(Exchange(f"loss {name}", "tp", "all_reduce", per_token, "forward"))

    def nothing(self, name: str) -> Ledger:
        """An item that the model does not have."""
        return Ledger(name=name, keys=len(self.shard))

    def mtp(self) -> Ledger:
        """One multi-token-prediction module (DeepSeek-V3, section 2.2): two norms, a 2h to h projection, one block of
        the last kind, and the shared head once more. Its embedding and head weights are the model's own."""
        s, h = self.shard, self.hidden
        ledger = self.block(self.model.runs[-1].block)
        ledger.name = "mtp"
        for name in ("mtp.hidden_norm", "mtp.embedding_norm"):
            elements = s.norm_tokens * h
            ledger.weights.append(Weight(name, h, matrix=False))
            ledger.streams.append(
                Stream(name, "mixer", 2 * self.element_bytes * elements, 3 * self.element_bytes * elements)
            )
            ledger.saved.append(Saved(f"{name}.input", "mixer", self.element_bytes * elements))
        ledger.weights.append(Weight("mtp.projection", 2 * h * h / s.tp, factored=2 * h + h / s.tp))
        ledger.gemms.append(Gemm("mtp.projection", "mixer", s.tokens, h / s.tp, 2 * h))
        ledger.saved.append(Saved("mtp.projection input", "mixer", 2 * self.linear_input_bytes * s.norm_tokens * h))
        ledger.streams.append(Stream("mtp embedding lookup", "mixer", 4 * s.tokens * h, 4 * s.tokens * h, 2, 2))
        self._final_norm(ledger)
        self._logits_and_loss(ledger)
        return ledger
