"""What an estimate takes for granted about a model's less common blocks, as rows of its assumptions."""

from __future__ import annotations

from typing import Any

from fivefold.estimate.result import Assumption
from fivefold.layout.features import features
from fivefold.model.spec import ModelSpec

_SCAN = (
    "the public kernels' bytes at the rate of other bandwidth-bound kernels plus their products at FlashAttention 2's; "
    "within 12% of the forward times published for H20 and H100, 2.3 times too fast for B300; backward unverified"
)
# By feature of the model: field, value, where it comes from.
_ROWS: dict[str, tuple[str, Any, str]] = {
    "sparse-attention": (
        "model.sparse_attention",
        "trained sparsely",
        "the stage after the indexer's warm-up (DeepSeek-V3.2, section 2.1.1): attention over the picked keys at flash "
        "attention's rate, the indexer whole on every rank of tp and trained by a loss of its own",
    ),
    "gated-delta-net": ("model.gated_delta_net", "flash-linear-attention, chunks of 64", _SCAN),
    "mamba": ("model.mamba", "mamba_ssm selective_scan_fn", f"{_SCAN}; its multiply-adds are the vector units'"),
    "mamba2": ("model.mamba2", "mamba_ssm mamba_split_conv1d_scan_combined", _SCAN),
    "side-by-side": ("model.mamba2", "mamba_ssm mamba_split_conv1d_scan_combined", _SCAN),
    "parallel-blocks": (
        "model.parallel_blocks",
        "unfused",
        "attention and feed-forward gather their input and scatter their output each; fused they would do so once",
    ),
}


def mixer_assumptions(model: ModelSpec) -> list[Assumption]:
    """A row for each less common kind of block that the model has, and one for what it computes and nothing prices."""
    found = features(model)
    rows = {row[0]: row for name, row in _ROWS.items() if name in found}
    listed = [Assumption(field=field, value=value, source=source) for field, value, source in rows.values()]
    if model.peculiar:
        source = "the model computes it besides; it shapes no tensor and is not priced"
        listed.append(Assumption(field="model.peculiar", value="; ".join(model.peculiar), source=source))
    return listed
