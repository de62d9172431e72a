"""What an estimate takes for granted about the workload's less common options, as rows of its assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.estimate.adapters import NF4_BYTES
from fivefold.estimate.host import ADAM_SHARE, PROCESS_BYTES
from fivefold.estimate.problem import Problem
from fivefold.estimate.result import Assumption


def option_assumptions(problem: Problem) -> Iterator[Assumption]:
    """Rows for offloading, adapters, documents and CUDA graphs where they are used."""
    work, cluster = problem.work, problem.cluster
    if work.offload.anything:
        for name in ("host_memory_bytes", "host_link_bandwidth_per_s", "host_memory_bandwidth_per_s"):
            yield Assumption(field=f"cluster.{name}", value=getattr(cluster, name), source=cluster.host_source)
        yield Assumption(
            field="host.adam_share",
            value=ADAM_SHARE,
            source="of the host's bandwidth, what an Adam update on the CPUs moves: ZeRO-Offload (Ren et al. 2021), "
            "table 4, from memory; copies over the host link run beside it",
        )
        yield Assumption(
            field="host.process_bytes", value=PROCESS_BYTES, source="host memory of one training process, from memory"
        )
    if work.document_length is not None:
        yield Assumption(
            field="workload.document_lengths",
            value=work.document_lengths,
            source="how lengths are distributed; a variable-length kernel leaves out the pairs between documents",
        )
    if work.lora is not None:
        yield Assumption(
            field="workload.lora",
            value=work.lora.rank,
            source="layers keep for backward what they keep when all is trained: an upper bound where few are adapted",
        )
    if work.base_precision == "nf4":
        yield Assumption(
            field="workload.base_bytes", value=NF4_BYTES, source="QLoRA (Dettmers et al. 2023), section 3: per weight"
        )
    if work.moe_dispatcher == "deepep":
        yield Assumption(
            field="workload.moe_dispatcher",
            value=work.moe_dispatcher,
            source="a token goes once to each rank, and between nodes once to each node, its experts drawn with equal "
            "chances; at the rates of an all-to-all",
        )
    if work.cuda_graphs:
        yield Assumption(
            field="workload.cuda_graphs", value=True, source="launches cost nothing; static buffers are not priced"
        )
