"""Rules of keeping bytes in host memory: which framework can, what goes together, and with which layouts."""

from __future__ import annotations

from fivefold.layout.columns import Columns
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Rule

_FSDP = ("torchtitan", "fsdp", "accelerate", "fsdp1")
# Of each part, the profiles whose framework offloads it, and where it says so.
_CAN: dict[str, tuple[str, ...]] = {
    "optimizer": ("megatron", "deepspeed", "deepspeed-zero", *_FSDP),
    "parameters": ("deepspeed-zero", *_FSDP),
    "activations": ("megatron",),
}
_SOURCES = {
    "optimizer": "Megatron-LM --optimizer-cpu-offload; DeepSpeed offload_optimizer; PyTorch CPUOffloadPolicy",
    "parameters": "DeepSpeed offload_param; PyTorch CPUOffloadPolicy",
    "activations": "Megatron-Core cpu_offloading (Transformer Engine); the others as modelled have no such option",
}


def _can(what: str) -> Rule:
    def holds(c: Columns, x: Context) -> bool:
        return not getattr(x.work.offload, what) or x.profile.name in _CAN[what]

    return Rule(
        id=f"offload-{what}-runtime",
        option="--offload",
        field=None,
        values=lambda c, x: [name for name, profiles in _CAN.items() if x.profile.name in profiles],
        holds=holds,
        message=f"{{runtime}} as modelled does not offload {what} to the host (--offload {{offload}}).",
        source=_SOURCES[what],
    )


def _nothing(c: Columns, x: Context) -> list[str]:
    return ["none"]


OFFLOAD: tuple[Rule, ...] = (
    *(_can(what) for what in _CAN),
    Rule(
        id="offload-fsdp-together",
        option="--offload",
        field=None,
        runtimes=_FSDP,
        values=lambda c, x: ["none", "optimizer,parameters"],
        holds=lambda c, x: (x.work.offload.optimizer, x.work.offload.parameters) in ((0, 0), (1, 1)),
        message="FSDP offloads parameters, gradients and optimizer states together and whole, not {offload}.",
        source="PyTorch torch/distributed/fsdp CPUOffloadPolicy; torchtitan training.enable_cpu_offload",
    ),
    Rule(
        id="offload-parameters-whole",
        option="--offload",
        field=None,
        runtimes=("deepspeed-zero",),
        values=lambda c, x: ["optimizer,parameters"],
        holds=lambda c, x: (
            x.work.offload.parameters == 0 or (x.work.offload.parameters == 1 and x.work.offload.optimizer == 1)
        ),
        message="ZeRO-3 offloads parameters whole, and only with the whole optimizer, not {offload}.",
        source="DeepSpeed configuration, offload_param; stage 3 keeps the fp32 masters where the optimizer is",
    ),
    Rule(
        id="offload-parameters-zero",
        option="--offload",
        field=None,
        values=_nothing,
        holds=lambda c, x: (c.zero == 3) | (x.work.offload.parameters == 0) if x.work.offload.parameters else True,
        message="Parameters can be offloaded only where they are sharded, with --zero 3, not {zero}.",
        source="DeepSpeed configuration, offload_param: valid only with stage 3",
    ),
    Rule(
        id="offload-optimizer-zero",
        option="--zero",
        field="zero",
        runtimes=("megatron", "deepspeed"),
        holds=lambda c, x: c.zero >= 1 if x.work.offload.optimizer else True,
        message="Offloading the optimizer needs sharded states: --zero 1, not {zero}.",
        source="Megatron-LM arguments.py: --optimizer-cpu-offload needs --use-precision-aware-optimizer, which needs "
        "the distributed optimizer; DeepSpeed configuration, offload_optimizer",
    ),
    Rule(
        id="offload-optimizer-adam",
        option="--optimizer",
        field=None,
        values=lambda c, x: ["adamw"],
        holds=lambda c, x: not x.work.offload.optimizer or x.work.optimizer == "adamw",
        message="The update on the CPUs is modelled for adamw, not for {optimizer}.",
        source="DeepSpeed CPUAdam; Megatron-Core HybridDeviceOptimizer; the others were not measured",
    ),
    Rule(
        id="offload-activations-pp",
        option="--pp",
        field="pp",
        runtimes=("megatron",),
        holds=lambda c, x: c.pp == 1 if x.work.offload.activations else True,
        message="Activations are offloaded without a pipeline only: --pp {pp} has to be 1.",
        source="Megatron-Core transformer_config: cpu_offloading with pipeline parallelism is refused",
    ),
    Rule(
        id="offload-activations-recompute",
        option="--recompute",
        field="recompute_kind",
        runtimes=("megatron",),
        holds=lambda c, x: c.recompute_kind == 0 if x.work.offload.activations else True,
        message="Activations are offloaded or recomputed, not both: --recompute {recompute_kind} has to be none.",
        source="Megatron-Core transformer_config: cpu_offloading with recomputation is refused",
    ),
)
