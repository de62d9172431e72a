"""What offloading to the host's memory does: bytes leave the GPU, cross its host link, and are updated by the CPUs.

Optimizer: master weights, states and (where the framework keeps them sharded) gradients live in host memory. A step
copies gradients down, updates on the CPUs and copies new weights up: three stages that follow each other chunk by
chunk, so that the slowest counts. A framework that sends gradients down during backward has the first one hidden.
Parameters: every gather first fetches the shard, beside compute like the gather itself. Activations: a share of each
block's saved tensors goes down during its forward and comes back during its backward; what the pass does not hide is
exposed.
"""

from __future__ import annotations

import numpy as np

from fivefold.errors import FivefoldError
from fivefold.estimate.adapter_model import AdapterModel
from fivefold.estimate.arrays import dot
from fivefold.estimate.memory import MASTER_BYTES
from fivefold.estimate.problem import Problem
from fivefold.estimate.reduction import ReductionGroups
from fivefold.estimate.variants import Variants

# Of a host's datasheet bandwidth, what an Adam update on its CPUs moves: 1 to 10 billion parameters in 0.22 to 2.57 s
# on the two sockets of a DGX-2 (ZeRO-Offload, Ren et al. 2021, table 4; from memory), 28 bytes each, of 256 GB/s.
ADAM_SHARE = 0.43
# Host memory of one training process beside what is offloaded: CUDA's and Python's libraries, data loading (from
# memory: 5 to 8 GB).
PROCESS_BYTES = 6_000_000_000
_GRADIENT_BYTES = 4  # the copy that the CPU's update reads is fp32


def check_host(problem: Problem) -> None:
    """FivefoldError where something is offloaded to a host whose numbers are not known."""
    cluster = problem.cluster
    if not problem.work.offload.anything:
        return
    for name in ("host_memory_bytes", "host_link_bandwidth_per_s", "host_memory_bandwidth_per_s"):
        if getattr(cluster, name) is None:
            raise FivefoldError(
                f"--offload needs {name} of {cluster.name}, which is not known. Give it in a cluster file, for example "
                f'base = "{cluster.name}" and {name} = ...',
                code="unknown-host",
                option="--offload",
                value=problem.work.offload.words,
                legal="none, or a cluster whose hosts are known",
            )


class HostModel(AdapterModel):
    """Memory and reductions of a problem that may keep some bytes in host memory."""

    def fits(self, rows: np.ndarray, reserved: np.ndarray) -> np.ndarray:
        """Whether the layouts fit the GPU, given what they need there, and the host, [n] bool."""
        fits = reserved <= self.problem.cluster.gpu.memory_bytes
        if not self.problem.work.offload.anything:
            return fits
        return fits & (self.host_bytes(rows) <= (self.problem.cluster.host_memory_bytes or 0))

    def host_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Memory that one host needs, its ranks taken to be like the worst, [n]; 0 where nothing is offloaded."""
        offload, cluster = self.problem.work.offload, self.problem.cluster
        if not offload.anything:
            return np.zeros(len(rows))
        sharded = self._sharded(rows)
        states = MASTER_BYTES + self.state_bytes(rows, np.add(*self.rank_parameters(rows))) + _GRADIENT_BYTES
        held = offload.optimizer * sharded * states
        if self.problem.fully_sharded and not self.trains:
            held = held + offload.parameters * AdapterModel.static_memory(self, rows)["weights"]
        else:
            held = held + offload.parameters * self.problem.runtime.sharded_weight_bytes * sharded
        plan, v = self.plan[rows], self.variants.offloaded[self.variant[rows]]
        held = held + dot(self.table.held_plain[plan], v)
        worst = np.where(self.table.exists[plan], held, 0).max(axis=1)
        return (worst + PROCESS_BYTES) * min(cluster.gpus_per_node, cluster.gpus)

    def static_memory(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        parts = super().static_memory(rows)
        offload = self.problem.work.offload
        if not offload.anything:
            return parts
        for name in ("master", "optimizer", *(("gradients",) if self.problem.fully_sharded else ())):
            parts[name] = parts[name] * (1 - offload.optimizer)
        if self.problem.fully_sharded and not self.trains:
            parts["weights"] = parts["weights"] * (1 - offload.parameters)
        elif self.problem.fully_sharded:
            # The 16-bit shard that gathers read, where the framework keeps one beside the fp32 one.
            parts["weights"] = parts["weights"] * (1 - offload.parameters)
        return parts

    def reduction_seconds(
        self, rows: np.ndarray, dense: np.ndarray, expert: np.ndarray, groups: ReductionGroups | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """With offloaded shards: gradients go down after a scatter, parameters come up before a gather."""
        reduce_s, gather_s = super().reduction_seconds(rows, dense, expert, groups)
        offload, link = self.problem.work.offload, self.problem.cluster.host_link_bandwidth_per_s
        if not self.problem.fully_sharded or link is None or not offload.anything:
            return reduce_s, gather_s
        over_dense, over_expert = self.shards(rows)
        shard = dense / over_dense + expert / over_expert
        down = offload.optimizer * self.grad_bytes * shard / link
        up = offload.parameters * self.problem.work.compute_bytes * shard / link
        return reduce_s + down, gather_s + up

    def host_update_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of an update on the CPUs with its copies, if all of it is there, [n]."""
        cluster, runtime = self.problem.cluster, self.problem.runtime
        link, memory = cluster.host_link_bandwidth_per_s, cluster.host_memory_bandwidth_per_s
        if link is None or memory is None:
            return np.zeros(len(rows))
        sharded = self._sharded(rows)
        states = self.state_bytes(rows, np.add(*self.rank_parameters(rows)))
        # Reads gradient, master and states, writes master, states and the weight.
        moved = sharded * (_GRADIENT_BYTES + 2 * (MASTER_BYTES + states) + self.problem.work.compute_bytes)
        update = moved / (ADAM_SHARE * memory / min(cluster.gpus_per_node, cluster.gpus))
        in_backward = self.problem.fully_sharded or runtime.offloads_in_backward
        down = np.zeros_like(update) if in_backward else self.grad_bytes * sharded / link
        up = self.problem.work.compute_bytes * sharded / link
        if self.problem.work.offload.parameters:
            up = np.zeros_like(up)  # the next gather fetches them
        slowest = np.maximum(update, np.maximum(down, up))
        return np.where(self.table.exists[self.plan[rows]], slowest, 0).max(axis=1)

    def _sharded(self, rows: np.ndarray) -> np.ndarray:
        """Parameters whose states each rank holds, [n, C]."""
        return self.trained_shard(rows)

    def _variants(self) -> tuple[np.ndarray, np.ndarray, Variants]:
        inverse, first, table = super()._variants()
        share, link = self.problem.work.offload.activations, self.problem.cluster.host_link_bandwidth_per_s
        if share and link is not None:
            _offload_activations(table, share, link, len(self.problem.model.kinds))
        return inverse, first, table


def _offload_activations(table: Variants, share: float, link: float, blocks: int) -> None:
    """Of every block `share` of its saved tensors; one block's are on their way, whole, at any moment. What
    recomputation keeps stays: the two do not go together (rule offload-activations-recompute)."""
    moved = np.zeros_like(table.saved)
    moved[:, :blocks] = share * table.saved[:, :blocks]
    table.copy_forward = np.maximum(moved / link - table.forward.sum(axis=2), 0)
    table.copy_backward = np.maximum(moved / link - table.backward.sum(axis=2), 0)
    table.offloaded = moved
    table.working = table.working + moved
    table.saved = table.saved - moved
    table.total()
