"""Megatron-FSDP: Megatron-Core's layers and Transformer Engine's kernels, parameters sharded as FSDP2 shards them."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.runtime.megatron import PROFILE as MEGATRON

PROFILE = replace(
    MEGATRON,
    name="megatron-fsdp",
    versions="core 0.12 to 0.17",
    aliases=(),
    optimizers=("adamw", "sgd"),
    sharding="fully_sharded",
    weight_bytes=0,
    zero_stages=(2, 3),
    other_zero_stages="Stages 0 and 1 are --runtime megatron.",
    cached_wgrad_buffers=False,
    grad_buckets=0,
    gradients_checked=False,
    gradients_scaled=False,
    prefetch_blocks=1,
    sources={
        **MEGATRON.sources,
        "weight_bytes": "Megatron-FSDP documentation: optim_grads_params shards all, the gathered copy is 16-bit",
        "optimizers": "Megatron-LM arguments.py at 000c4ac24f and of early 2026, read: validate_args asserts that Muon "
        "runs without use_megatron_fsdp; issues 3179 and 5533 ask for it",
        "gradients_checked": "its shards' own passes are not counted",
        "gradients_scaled": "likewise",
        "prefetch_blocks": "from memory: the next block is gathered while the current one computes",
    },
)
