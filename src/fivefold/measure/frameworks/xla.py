"""Frameworks that XLA compiles, where their models run on GPUs."""

from __future__ import annotations

from msgspec.structs import replace

from fivefold.measure.frameworks.line import Framework

# What XLA makes of a step: it drops what backward does not need, its programs run without a host between operations,
# and a weight's gradient is a product that writes 16 bit, as wide as the weight that was cast for it. Collectives of
# tensor parallelism run beside nothing, even with measured latencies (MaxText issue 1005). Its shapes are static, so
# that no count of tokens goes back to a host; chains of operations that go element by element are one kernel, and
# Megatron-Core's copies around quantised experts are its own. The loss is three reductions over 16-bit logits (maximum,
# sum of exponentials, the label's) and a kernel that writes their gradient, with casts and exponentials in each
# (MaxText's cross_entropy_with_logits, which is t5x's; that XLA fuses them so is from memory).
_XLA = {
    "checkpoint_stops_early": True,
    "launch_host_s": 0.0,
    "op_host_s": 0.0,
    "group_launch_host_s": 0.0,
    "dispatch_host_s": 0.0,
    "unpack_host_s": 0.0,
    "expert_extras_apart": False,
    "experts_padded": False,
    "stretched_rotary_apart": False,
    "wgrad_bytes": 2,
    "loss_moved_bytes": (6.0, 4.0),
    "loss_bytes_per_logit": 4,
    "gradients_checked": False,
    "gradients_scaled": False,
    "tp_beside_dgrad_hidden": 0.0,
}
# XLA for TPUs takes products with sharded inputs apart, so that collectives of tensor parallelism run beside them
# (openxla/xla discussion 8865), and runs those of parameters and gradients beside compute (MaxText's
# benchmarks/xla_flags_library.py). What held GPUs back is of GPUs.
_ON_TPUS = {"overlap": "on", "changes": {name: _XLA[name] for name in _XLA if name != "tp_beside_dgrad_hidden"}}
_SIXTEEN_BIT_GRADIENTS = (
    "gathers and scatters move BF16 weights and gradients (JAX-Toolbox docs/GPU_performance.md, read at 0f87cf9208)"
)

# What their lines have in common: FSDP meshes, and programs that compile every block alike.
_LINE = Framework(
    starts=("jax",),
    runtime="megatron-fsdp",
    sharded="megatron-fsdp",
    stands_in=True,
    zero=3,
    recomputes_in_part=False,
    sharded_grad_dtype="bf16",
    changes=_XLA,
    on_tpus=_ON_TPUS,
    source="an FSDP mesh (from memory), as MaxText's",
)

LINES: tuple[Framework, ...] = (
    replace(
        _LINE,
        starts=("maxtext",),
        policies=("minimal_flash", "save_qkv_proj", "full"),
        shard_nodes=(1, 16),
        tuned="vendor's recipe",
        source="its GPU configurations: minimal_flash for 7B and 8B (configs/models/gpu/llama2_7b.yml, llama3_8b.yml), "
        "save_qkv_proj and 16 nodes for 70B (configs/a3/llama_2_70b/bf16/128vm.sh, 3a8163225f; dgxc-benchmarking's "
        "maxtext/configure.sh, 0b71cfda51), one node for 7B (configs/a3/llama_2_7b/128vm.sh), full for 405B and by "
        "default (llama3.1_405b.yml, base.yml); most scan over blocks, and one policy holds for all; "
        f"{_SIXTEEN_BIT_GRADIENTS}",
    ),
    replace(
        _LINE,
        starts=("paxml",),
        policies=("save_dot_only", "save_qkv_out_proj", "save_nothing"),
        shard_nodes=(1, 16),
        overlap="off",
        tuned="vendor's recipe",
        source="dgxc-benchmarking's paxml_mod_configs.py and configure.sh (paxml, 143b90dd91): SAVE_DOT_ONLY and one "
        "node for 5B, SAVE_QKV_OUT_PROJ and 16 nodes for 175B; praxis saves nothing by default. Their container is of "
        "March 2024: until July XLA ran collectives of scanned blocks under such policies on compute's own stream "
        "(openxla/xla issue 14397), and the recipe leaves double buffering and measured latencies off; "
        f"{_SIXTEEN_BIT_GRADIENTS}",
    ),
    replace(
        _LINE,
        starts=("axlearn",),
        policies=("minimal_flash", "save_dot_with_context_except_mlp"),
        shard_nodes=(1, 16),
        source="axlearn's experiments/text/gpt/common.py, update_model_remat_config: with flash attention what "
        "build_remat_spec names of attention and of the feed-forward, later of attention alone (read; the names, "
        "projections, context and both linear layers, from memory); fuji.py, 01ebc3ff2c: 8 GPUs of H100 for 7B, 128 "
        "for 70B",
    ),
    replace(
        _LINE,
        starts=("levanter",),
        policies=("full",),
        source="models/llama.py, 02be56f672: gradient_checkpointing=True",
    ),
    replace(
        _LINE,
        starts=("easylm",),
        unfused_until="9999",
        policies=("full",),
        source="models/llama/llama_model.py, 134105f0f9: remat_block='nothing_saveable'; scan_attention=False, which "
        "materialises the scores",
    ),
    replace(
        _LINE,
        starts=("nxd",),
        runtime="megatron",
        zero=1,
        sharded_grad_dtype="fp32",
        overlap="off",
        source="NeuronX Distributed's tutorials for Llama (awsdocs-neuron.readthedocs-hosted.com): tensor, sequence "
        "and pipeline parallelism with ZeRO-1, whose optimizer scatters gradients in its step (torch_xla's "
        "zero_redundancy_optimizer.py, from memory)",
    ),
    _LINE,
)
