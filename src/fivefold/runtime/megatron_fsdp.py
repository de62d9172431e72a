"""Megatron-FSDP: Megatron-Core's layers and Transformer Engine's kernels, parameters sharded as FSDP2 shards them."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.runtime.megatron import PROFILE as MEGATRON

PROFILE = replace(
    MEGATRON,
    name="megatron-fsdp",
    versions="core 0.12 to 0.17",
    aliases=(),
    sharding="fully_sharded",
    weight_bytes=0,
    zero_stages=(2, 3),
    other_zero_stages="Stages 0 and 1 are --runtime megatron.",
    cached_wgrad_buffers=False,
    grad_buckets=0,
    prefetch_blocks=1,
    sources={
        **MEGATRON.sources,
        "weight_bytes": "Megatron-FSDP documentation: optim_grads_params shards all, the gathered copy is 16-bit",
        "prefetch_blocks": "from memory: the next block is gathered while the current one computes",
    },
)
