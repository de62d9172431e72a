"""Linear layers, norms and residuals with their collectives: what every sublayer is written with.

Bytes per element: activations are 2 (bf16, fp16) or 4 (fp32); under the fp8 recipe the inputs of linear layers are
saved in fp8, 1 byte.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fivefold.estimate.ledger import Column, Exchange, Gemm, Ledger, Module, Pass, Saved, Stream, Weight
from fivefold.estimate.shard import Shard
from fivefold.layout.workload import QUANTISED, QUANTISED_BYTES, Workload
from fivefold.model.spec import Block, ModelSpec, Norm
from fivefold.runtime import Profile

SINGLE = 4  # bytes of an fp32 element
MASK = 1  # bytes of an element of a dropout mask (PyTorch native_dropout: a boolean tensor)
# (bytes per element, kernels) forward and backward of what PyTorch runs operation by operation in fp32. An RMS norm:
# cast (6), square (8), mean (4), times the inverse root (8), cast (6), times the weight (4); backward the casts, two
# products each way and two sums. A rotary embedding: cast, complex product, cast (PyTorch's rms_norm before 2.9,
# transformers' LlamaRMSNorm and torchtitan's apply_rotary_emb; counted from memory of them).
_EAGER_NORM = ((36, 6), (56, 9))
_EAGER_ROTARY = ((20, 3), (20, 3))
# In 16 bit: halves negated and swapped, two products, their sum, joined; backward likewise. Queries and keys each
# (Megatron-Core rope_utils.py, _apply_rotary_pos_emb_bshd, counted from memory of it).
_APART_ROTARY = ((24, 12), (20, 10))
# Families whose modules make query, key and value by one layer (transformers' modeling files, from memory).
_JOINT_PROJECTIONS = frozenset(("bloom", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "phi3"))


class LinearWriter:
    """Writes rows for one model, workload and runtime over one set of keys."""

    def __init__(self, model: ModelSpec, work: Workload, runtime: Profile, shard: Shard) -> None:
        self.model = model
        self.work = work
        self.runtime = runtime
        self.shard = shard
        self.hidden = model.hidden
        self.element_bytes = work.compute_bytes
        # The fp8 recipes of Transformer Engine quantise a linear's input once and keep the quantised copy; torchao's
        # keep the input as it came.
        quantised = work.precision in QUANTISED and runtime.fp8_saves_inputs
        self.linear_input_bytes = QUANTISED_BYTES[work.precision] if quantised else self.element_bytes
        gathers_quantised = work.precision in QUANTISED and runtime.quantised_gathers
        self.gathered_bytes = QUANTISED_BYTES[work.precision] if gathers_quantised else self.element_bytes
        self.scaled_by_row = work.precision == "fp8" and runtime.scaled_by_row
        # Ranks that quantise what they gather together.
        self.gathered_shared = np.where(shard.sp & gathers_quantised, shard.tp, 1)

    # ---------------------------------------------------------------- norms and residuals

    def _norm(self, ledger: Ledger, name: str, block: Block, module: Module, *, keeps_input: bool = True) -> None:
        """A norm before linear layers: its input and its output, which is theirs, are kept.

        keeps_input: False where another operation of the block keeps the same tensor."""
        elements = self.shard.norm_tokens * self.hidden
        self._norm_weights(ledger, name, self.hidden, block.norm, block.norm_bias)
        self._norm_stream(ledger, name, module, elements, block.norm)
        if self.runtime.norms_kept_fp32 and block.norm == "rmsnorm":
            # The square and the scaling keep the fp32 copy, the product with the weight the normalised value.
            ledger.saved.append(Saved(f"{name}.fp32 input", module, SINGLE * elements))
            ledger.saved.append(Saved(f"{name}.normalised", module, self.element_bytes * elements))
        elif keeps_input:
            ledger.saved.append(Saved(f"{name}.input", "mixer", self.element_bytes * elements))
        ledger.saved.append(Saved(f"{name}.output", module, self.linear_input_bytes * elements))

    def _output_norm(self, ledger: Ledger, name: str, block: Block) -> None:
        """A norm of what a sublayer gives, before the residual: its output is added and not kept."""
        elements = self.shard.norm_tokens * self.hidden
        self._norm_weights(ledger, name, self.hidden, block.norm, block.norm_bias)
        self._norm_stream(ledger, name, "mixer", elements, block.norm)
        ledger.saved.append(Saved(f"{name}.input", "mixer", self.element_bytes * elements))

    def _norm_weights(self, ledger: Ledger, name: str, width: Column, kind: Norm, bias: bool) -> None:
        if kind != "layernorm_fixed":
            ledger.weights.append(Weight(name, width * (2 if bias else 1), matrix=False))

    def _norm_stream(
        self, ledger: Ledger, name: str, module: Module, elements: Column, kind: Norm = "layernorm"
    ) -> None:
        if self.runtime.unfused_norms and kind == "rmsnorm":
            ledger.streams.append(_eager(name, module, elements, _EAGER_NORM))
            return
        moved = self.element_bytes * elements
        ledger.streams.append(Stream(name, module, 2 * moved, 3 * moved))

    def _rotary(self, ledger: Ledger, elements: Column) -> None:
        if self.runtime.unfused_norms:
            ledger.streams.append(_eager("rotary", "mixer", elements, _EAGER_ROTARY))
            return
        if self.runtime.stretched_rotary_apart and self.model.rotary.scaling == "yarn":
            ledger.streams.append(_eager("rotary", "mixer", elements, _APART_ROTARY))
            return
        moved = self.element_bytes * elements
        ledger.streams.append(Stream("rotary", "mixer", 2 * moved, 2 * moved, 2, 2))

    def _residual(self, ledger: Ledger, name: str) -> None:
        moved = self.element_bytes * self.shard.norm_tokens * self.hidden
        ledger.streams.append(Stream(name, "mixer", 3 * moved, 3 * moved))

    def _dropout(self, ledger: Ledger, name: str) -> None:
        """Dropout of a hidden state, in the kernel that adds bias and residual: it writes a mask, which is kept, and in
        backward reads it beside the gradient, which it writes once more."""
        if not self.work.dropout:
            return
        elements = self.shard.norm_tokens * self.hidden
        mask = MASK * elements
        ledger.saved.append(Saved(f"{name} mask", "mixer", mask))
        ledger.streams.append(Stream(f"{name} mask", "mixer", mask, mask + 2 * self.element_bytes * elements, 0, 0))

    # ---------------------------------------------------------------- linear layers and their collectives

    def _column_parallel(self, ledger: Ledger, name: str, module: Module, out: np.ndarray, *, bias: bool) -> None:
        s, h = self.shard, self.hidden
        ledger.weights.append(Weight(name, h * out, factored=h + out, part=_part(module)))
        if bias:
            ledger.weights.append(Weight(f"{name}.bias", out, matrix=False))
        ledger.gemms.append(Gemm(name, module, s.tokens, out, h, input_shared=self.gathered_shared))
        self._gather_for_column(ledger, name, s.tokens * h, module)

    def _largest_values(self, ledger: Ledger, name: str, module: Module, ahead: int, back: int) -> None:
        """What torchao's ranks reduce before they cast what they share: the largest value of a tensor, or of every row
        that lies over them; as often in each pass."""
        s = self.shard
        if self.work.precision != "fp8" or not self.runtime.compiled_casts or int(s.tp.max(initial=1)) == 1:
            return
        size = np.where(s.tp > 1, SINGLE * (s.tokens if self.scaled_by_row else 1), 0.0)
        passes: tuple[tuple[Pass, int], ...] = (("forward", ahead), ("backward", back))
        ledger.exchanges += [
            Exchange(f"largest values of {name}", "tp", "all_reduce", size, when, module=module, times=times)
            for when, times in passes
            if times
        ]

    def _separate(self, ledger: Ledger, name: str, module: Module, layers: int) -> None:
        """`layers` linear layers that read one input and are written here as one: what adds up its gradients, and what
        is known of them before they are cast. With a scale for every row, gradients and weights lie over the ranks."""
        self._largest_values(ledger, name, module, *((0, 2 * layers) if self.scaled_by_row else (1, layers)))
        more = self.runtime.input_gradient_bytes * (layers - 1)
        if more and self.model.family not in _JOINT_PROJECTIONS:
            ledger.streams.append(
                Stream(f"{name} gradients", module, 0, more * self.shard.tokens * self.hidden, 0, layers - 1)
            )

    def _gather_for_column(
        self, ledger: Ledger, name: str, elements: np.ndarray, module: Module, *, sixteen_bit: bool = False
    ) -> None:
        """Sequence parallelism gathers the input (again in backward, behind dgrad) and scatters its gradient behind
        wgrad; plain tensor parallelism all-reduces the input's gradient behind wgrad (Megatron-LM's linear layers).

        sixteen_bit: the product is not quantised."""
        s = self.shard
        if int(s.tp.max(initial=1)) == 1:
            return
        full = self.element_bytes * elements
        with_sp = np.where(s.sp, full, 0.0)
        gathered = with_sp * (1.0 if sixteen_bit else self.gathered_bytes / self.element_bytes)
        without = np.where(s.sp, 0.0, full)
        if self.runtime.gathered_inputs_kept:
            # Beside the norm's own output, which is kept too.
            ledger.saved.append(Saved(f"{name} gathered input", module, with_sp))
        again = 0.0 if self.runtime.gathered_inputs_kept else gathered
        after_gather, before_scatter = self._laid_out(gathered, after=True), self._laid_out(with_sp)
        gather = f"gather {name} input"
        ledger.exchanges += [
            _over_tp(gather, "all_gather", gathered, "forward", module, copied=after_gather),
            _over_tp(gather, "all_gather", again, "backward", module, behind=(name, "dgrad")),
            _over_tp(
                f"scatter {name} gradient", "reduce_scatter", with_sp, "backward", module,
                behind=(name, "wgrad"), copied=before_scatter,
            ),
            _over_tp(f"reduce {name} gradient", "all_reduce", without, "backward", module, behind=(name, "wgrad")),
        ]  # fmt: skip

    def _row_parallel(
        self, ledger: Ledger, name: str, module: Module, width: np.ndarray, *, bias: bool, ends_block: bool = False
    ) -> None:
        s, h = self.shard, self.hidden
        ledger.weights.append(Weight(name, width * h, factored=width + h, part=_part(module)))
        if bias:
            ledger.weights.append(Weight(f"{name}.bias", h, matrix=False))
        ledger.gemms.append(
            Gemm(name, module, s.tokens, h, width, ends_block=ends_block, gradient_shared=self.gathered_shared)
        )
        if int(s.tp.max(initial=1)) == 1:
            return
        self._largest_values(ledger, name, module, *((2, 0) if self.scaled_by_row else (1, 1)))
        full = self.element_bytes * s.tokens * h
        scattered = np.where(s.sp, full, 0.0)
        gathered = scattered * (self.gathered_bytes / self.element_bytes)
        after_gather, before_scatter = self._laid_out(gathered, after=True), self._laid_out(scattered)
        ledger.exchanges += [
            _over_tp(
                f"scatter {name} output", "reduce_scatter", scattered, "forward", module,
                ends_block=ends_block, copied=before_scatter,
            ),
            _over_tp(f"gather {name} gradient", "all_gather", gathered, "backward", module, copied=after_gather),
            _over_tp(
                f"reduce {name} output", "all_reduce", full - scattered, "forward", module, ends_block=ends_block
            ),
        ]  # fmt: skip

    def _laid_out(self, moved: Column, *, after: bool = False) -> Column:
        """Bytes that a copy of a whole tensor moves beside its collective over the sequence: after a gather only where
        it brings more than one sequence, whose parts lie apart then. Where TP overlaps, the product takes the parts as
        they are, unless they are quantised in between."""
        if not self.runtime.sequence_second:
            return 0
        fused = self.shard.overlap_tp & (not (after and self.scaled_by_row))
        return np.where(fused | (after & (self.shard.micro_batch == 1)), 0.0, 2.0 * np.asarray(moved))

    def _replicated(
        self, ledger: Ledger, name: str, k: int, n: int, tokens: np.ndarray, *, bias: bool, module: Module = "mixer"
    ) -> None:
        """A small projection that every tensor-parallel rank holds whole and applies to `tokens`."""
        ledger.weights.append(Weight(name, k * n, factored=k + n, part=_part(module)))
        if bias:
            ledger.weights.append(Weight(f"{name}.bias", n, matrix=False))
        ledger.gemms.append(Gemm(name, module, tokens, n, k))

    def _plain(self, ledger: Ledger, name: str, k: Column, n: Column) -> None:
        """A projection inside a mixer between tensors that this rank already has; collectives are the caller's."""
        ledger.weights.append(Weight(name, k * n, factored=k + n))
        ledger.gemms.append(Gemm(name, "mixer", self.shard.tokens, n, k))


def _over_tp(
    name: str,
    op: str,
    size: Column,
    when: Pass,
    module: Module,
    *,
    behind: tuple[str, Literal["dgrad", "wgrad"]] | None = None,
    ends_block: bool = False,
    copied: Column = 0,
) -> Exchange:
    """A collective of the tensor-parallel ranks, named after the linear layer that it belongs to."""
    return Exchange(name, "tp", op, size, when, behind=behind, module=module, ends_block=ends_block, copied=copied)


def _eager(name: str, module: Module, elements: Column, passes: tuple[tuple[int, int], tuple[int, int]]) -> Stream:
    (ahead, first), (back, second) = passes
    return Stream(name, module, ahead * elements, back * elements, first, second)


def _part(module: Module) -> Literal["mixer", "feed"]:
    """The sublayer that an operation's recomputation module belongs to."""
    return "feed" if module in ("mlp", "moe") else "mixer"
