"""Older releases of Megatron-LM / Megatron-Core, in two eras. What came when is Megatron-LM's CHANGELOG.md, read at
0a296d15ed; what the changelog does not say is from memory and says so."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.runtime.megatron import PROFILE as MEGATRON

_CHANGELOG = "Megatron-LM CHANGELOG.md, read at 0a296d15ed"

# 2024: layers of Transformer Engine, fused SwiGLU and rotary embedding; distributed optimizer with overlap.
ERA_2024 = replace(
    MEGATRON,
    versions="core 0.5 to 0.11",
    oldest=(0, 5),
    newest=(0, 11),
    optimizers=("adamw", "sgd"),
    precisions=("bf16", "fp16", "fp8"),
    ep_overlap_hidden=0.0,
    sources={
        **MEGATRON.sources,
        "fused_glu": f"{_CHANGELOG}: fused rotary embedding and SwiGLU came with 0.5",
        "ep_overlap_hidden": "no such switch (from memory: 0.14)",
    },
)
# 2023: modules of its own, or Transformer Engine's one by one; the gate's activation is PyTorch's.
ERA_2023 = replace(
    ERA_2024,
    versions="core 0.2 to 0.4, and Megatron-LM of 2023",
    oldest=(0, 2),
    newest=(0, 4),
    attention_kernels=("fa2",),
    norms_fused_into_linears=False,
    fp8_saves_inputs=False,
    fused_glu=False,
    cached_wgrad_buffers=False,
    head_wgrad_placeholder=False,
    precisions=("bf16", "fp16"),
    loss_bytes_per_logit=10,
    gradients_checked=False,
    tp_overlap_hidden=0.0,
    sources={
        **ERA_2024.sources,
        "attention_kernels": "from memory: --use-flash-attn calls the flash-attn package, version 2 since July 2023",
        "norms_fused_into_linears": "from memory: its own layers, a layer norm of apex before each linear",
        "fp8_saves_inputs": "from memory: fp8 needed Transformer Engine's whole layers, which are not modelled here",
        "fused_glu": f"{_CHANGELOG}: fused SwiGLU came with 0.5",
        "loss_bytes_per_logit": "from memory: 16-bit logits, fp32 copy, and the copy less its row's maximum",
        "gradients_checked": "from memory: it came with the buffers of core 0.5",
        "tp_overlap_hidden": "no such switch (from memory)",
    },
)
