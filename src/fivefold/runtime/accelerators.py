"""Which framework runs on whose accelerators, as far as it is certain.

A pair that is not listed is not refused: ports exist, and their speed is not known here. A pair that is listed can be
priced all the same, as a comparison of hardware; the answer then says that it is one. Launch files for it are refused.
"""

from __future__ import annotations

_XLA = "TPUs are programmed through XLA, and it launches CUDA or ROCm kernels and NCCL"
_NEURON = "Trainium is programmed through the Neuron compiler, and it launches CUDA or ROCm kernels and NCCL"
_NCCL = "it knows NCCL for GPUs and gloo for CPUs, and no other accelerator's library"
_UPSTREAM = "upstream needs CUDA or ROCm; the vendor maintains a port, whose speed is not known here"

# (vendor, runtime's name or "*") -> why it certainly does not run. DeepSpeed's accelerators are CUDA, ROCm, CPU, Gaudi
# and Ascend among others, and no TPU (deepspeed/accelerator, from memory); nanotron initialises NCCL only
# (nanotron/distributed.py, from memory).
_DOES_NOT_RUN: dict[tuple[str, str], str] = {
    ("google", "*"): _XLA,
    ("amazon", "*"): _NEURON,
    ("intel", "nanotron"): _NCCL,
    ("intel", "fivefold"): _NCCL,
    ("huawei", "nanotron"): _NCCL,
    ("huawei", "fivefold"): _NCCL,
}
# Where only a port runs (Intel's and Huawei's forks of Megatron-LM: from memory).
_PORTED: dict[tuple[str, str], str] = {
    (vendor, runtime): _UPSTREAM for vendor in ("intel", "huawei") for runtime in ("megatron", "megatron-fsdp")
}


def why_not(runtime: str, vendor: str) -> str | None:
    """Why the runtime of that name certainly does not run on a vendor's accelerators; None where it may.

    vendor: as in fivefold.cluster.Gpu.
    """
    return _DOES_NOT_RUN.get((vendor, runtime)) or _DOES_NOT_RUN.get((vendor, "*"))


def caveat(runtime: str, vendor: str) -> str | None:
    """What to know of a price for this runtime on that vendor's accelerators; None on those it is written for."""
    reason = why_not(runtime, vendor)
    if reason is not None:
        return f"priced as if {runtime} ran there; it does not: {reason}"
    return _PORTED.get((vendor, runtime))
