"""Workload: how much is trained per step, in which precision, with which optimizer."""

from __future__ import annotations

from math import expm1
from typing import Literal

import msgspec

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "tf32", "fp32"]
# Whose tensors are fp32: products of TF32 round their operands on the way into the matrix units.
SINGLE = ("tf32", "fp32")
# Recipes that quantise the operands of linear layers.
QUANTISED = ("fp8", "mxfp8", "nvfp4")
# Bytes of one element of such an operand with its scales: one for a whole tensor, a byte per 32 elements (OCP
# Microscaling Formats 1.0, E8M0), a byte per 16 elements (NVFP4, E4M3).
QUANTISED_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
Optimizer = Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit"]


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """Shares, 0 to 1, of what is kept in host memory: master weights and optimizer states (with the gradients, where
    these are sharded), parameters, and the tensors that blocks save for backward."""

    optimizer: float = 0.0
    parameters: float = 0.0
    activations: float = 0.0

    @property
    def anything(self) -> bool:
        return max(self.optimizer, self.parameters, self.activations) > 0

    @property
    def words(self) -> str:
        """As the flag takes it: optimizer,activations:0.5; "none" for nothing."""
        shares = {name: getattr(self, name) for name in self.__struct_fields__}
        named = [name if share == 1 else f"{name}:{share:g}" for name, share in shares.items() if share]
        return ",".join(named) or "none"


LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al. 2021). rank: of each. targets: the projections that have one, of LORA_TARGETS; gate,
    up and down are those of dense layers, of every routed expert and of shared experts."""

    rank: int
    targets: tuple[str, ...] = LORA_TARGETS


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One training step's work.

    seq_len: tokens per sequence. global_batch: sequences per optimizer step.
    attention: "unfused" materialises the scores, as frameworks did before FlashAttention.
    dropout: whether what a mixer and a feed-forward give, the embedding, and scores that are materialised are dropped
        out, as GPT-2 was trained and Megatron-LM does by default.
    trained: "adapters" freezes every weight of the model; adapters are then those of `lora`, and without it they are
    taken to cost nothing.
    base_precision: how frozen matrices of blocks are held: in the compute precision, or in 4 bits (QLoRA).
    moe_imbalance: tokens on the most loaded expert-parallel rank over the mean, 1.0 when balanced.
    tokens: token budget of the whole run, for time and cost. price: cost of one GPU for one hour.
    gpu_mtbf_hours: hours between failures, per GPU; checkpoint_bytes_per_s: at which the job's checkpoints are written;
    restart_s: from a failure to the next step. None: the sourced defaults of the token budget's answer.
    document_length: mean tokens of the documents that are packed into a sequence and attend within themselves; None: a
        sequence is one document. document_lengths: how they are distributed.
    moe_dispatcher: what moves tokens to experts and back: an all-to-all of every copy, or kernels that send a token to
        each rank once and order it there (DeepEP).
    cuda_graphs: whether blocks are replayed as CUDA graphs, so that no launch makes the GPU wait; their static buffers
        are not priced.
    offload: what is kept in host memory instead of the GPU's.
    """

    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    attention: Literal["flash", "unfused"] = "flash"
    dropout: bool = False
    trained: Literal["all", "adapters"] = "all"
    moe_imbalance: float = 1.0
    tokens: float | None = None
    price: float | None = None
    gpu_mtbf_hours: float | None = None
    checkpoint_bytes_per_s: float | None = None
    restart_s: float | None = None
    offload: Offload = Offload()
    cuda_graphs: bool = False
    moe_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    document_length: float | None = None
    document_lengths: Literal["exponential", "equal"] = "exponential"
    lora: Lora | None = None
    base_precision: Literal["compute", "nf4"] = "compute"

    @property
    def sixteen_bit(self) -> Literal["fp16", "bf16"]:
        """Precision of what is not computed in a narrower or wider one."""
        return "fp16" if self.precision == "fp16" else "bf16"

    @property
    def tokens_per_batch(self) -> int:
        return self.seq_len * self.global_batch

    @property
    def attended_seq(self) -> float:
        """Length of the sequence in which causal attention sees as many keys per query as it does in the documents of
        this one; seq_len without documents.

        Documents of exponential length have a boundary anywhere at the same rate, so that a query after t tokens of the
        sequence sees d (1 - exp(-t / d)) keys, and on average over the sequence d (1 - d/s (1 - exp(-s / d))), twice
        which is this. Equal documents of d tokens have d / 2 keys per query.
        """
        mean, seq = self.document_length, self.seq_len
        if mean is None:
            return seq
        if self.document_lengths == "equal":
            return min(mean, seq)
        return 2 * mean * (1 + mean / seq * expm1(-seq / mean))

    @property
    def compute_bytes(self) -> int:
        """Of one element of an activation, and of a weight as it is multiplied: quantised recipes quantise operands."""
        return 4 if self.precision in SINGLE else 2
