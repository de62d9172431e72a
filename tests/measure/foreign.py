"""A row as other people write it: what the tests of such rows start from."""

from __future__ import annotations

from typing import Any

from fivefold.measure import Run, convert
from fivefold.measure.convert import Case

LLAMA: dict[str, Any] = {
    "model": "llama3-8b", "arch": "dense", "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "vocab": 128256, "gated_mlp": 1,
}  # fmt: skip
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp")
NO_SIZES: dict[str, Any] = dict.fromkeys(SIZES)


def written(**changes) -> Run:
    """A row of Llama 3 8B on 64 H100 with other columns."""
    fields: dict[str, Any] = {
        "id": "other-1", "framework": "Megatron-LM", "source_date": "2025-06", "seq": 4096, "mbs": 1, "gbs": 128,
        "gpu": "H100-80GB-SXM", "gpus": 64, "gpus_per_node": 8, "interconnect": "NVLink + IB", "tp": 1, "cp": 1,
        "pp": 1, "ep": 1, "precision_kind": "bf16", "recompute_kind": "full", **LLAMA,
    }  # fmt: skip
    return Run(**{**fields, **changes})


def read(**changes) -> Case:
    """What such a row is read as."""
    return convert(written(**changes))


def block_of(**changes) -> Any:
    """The first block of its model."""
    return read(**changes).model.runs[0].block
