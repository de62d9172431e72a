"""Rules of packed documents: attention inside each document of a sequence, by a variable-length flash kernel."""

from __future__ import annotations

from fivefold.layout.rules.rule import Rule

DOCUMENTS: tuple[Rule, ...] = (
    Rule(
        id="documents-runtime",
        option="--document-length",
        field=None,
        runtimes=("fivefold",),
        values=lambda c, x: ["none"],
        holds=lambda c, x: x.work.document_length is None,
        message="fivefold's trainer attends over whole sequences and has no masks of documents (--document-length "
        "{document_length}).",
        source="fivefold.train.model",
    ),
    Rule(
        id="documents-cp",
        option="--cp",
        field="cp",
        runtimes=("torchtitan", "nanotron", "fsdp", "fsdp1"),
        holds=lambda c, x: c.cp == 1 if x.work.document_length is not None else True,
        message="Masks of documents are not known to work with context parallelism here: --cp {cp} has to be 1. "
        "(Megatron-Core splits packed sequences, THD, over context-parallel ranks.)",
        source="PyTorch context_parallel shards scaled_dot_product_attention, without block masks (from memory)",
    ),
)
