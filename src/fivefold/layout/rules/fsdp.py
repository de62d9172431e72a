"""Rules of PyTorch's FSDP: FSDP2 as accelerate's ParallelismConfig sets it up (`accelerate`), and FSDP1.

FSDP2 with PyTorch's own axes around it obeys torchtitan's rules, which are in their file.
"""

from __future__ import annotations

from fivefold.layout.rules.common import SELECTIVE
from fivefold.layout.rules.rule import Rule

_ACCELERATE = "accelerate parallelism_config.py, read at 0422db7e10: the mesh is dp_replicate, dp_shard, cp, tp"


def _only_one(runtime: str, field: str, message: str, source: str) -> Rule:
    return Rule(
        id=f"{runtime}-{field}",
        option=f"--{field}",
        field=field,
        runtimes=(runtime,),
        holds=lambda c, x: getattr(c, field) == 1,
        message=message,
        source=source,
    )


FSDP: tuple[Rule, ...] = (
    Rule(
        id="fsdp-needs-shards",
        option="--tp",
        field="tp",
        others=("pp", "dp_replicate"),
        runtimes=("fsdp", "accelerate"),
        holds=lambda c, x: (c.dp_shard > 1) | (x.world == 1),
        message="FSDP needs more than one rank to shard over, and dp·cp / dp-replicate is {dp_shard}.",
        source="accelerate ParallelismConfig (PR 4180): dp_shard·cp > 1, unless there is one process",
    ),
    Rule(
        id="fsdp-recompute-selective",
        option="--recompute",
        field="recompute_kind",
        runtimes=("fsdp", "accelerate", "fsdp1", "deepspeed-zero", "nanotron"),
        holds=lambda c, x: c.recompute_kind != SELECTIVE,
        message="Activation checkpointing of {runtime} wraps whole blocks; what a policy of one's own would keep is "
        "not modelled: choose none or full.",
        source="accelerate fsdp_activation_checkpointing; transformers gradient_checkpointing; nanotron "
        "recompute_layer (all from memory)",
    ),
    Rule(
        id="accelerate-sp",
        option="--sequence-parallel",
        field="sp",
        runtimes=("accelerate",),
        holds=lambda c, x: ~c.sp,
        message="Tensor parallelism here is transformers' own, whose plans all-reduce and do not shard the sequence. "
        "Choose --no-sequence-parallel.",
        source="transformers base_model_tp_plan: colwise and rowwise (from memory)",
    ),
    _only_one("accelerate", "pp", "--pp {pp}: accelerate trains without a pipeline.", _ACCELERATE),
    _only_one("accelerate", "ep", "--ep {ep}: accelerate's mesh has no axis for experts.", _ACCELERATE),
    *(
        _only_one(
            "fsdp1",
            axis,
            f"--{axis} {{{axis}}}: FSDP1 is modelled as data parallelism alone. Choose --runtime fsdp for FSDP2, which "
            "combines.",
            "PyTorch documentation of FullyShardedDataParallel; its experimental 2-D mode is not modelled",
        )
        for axis in ("tp", "cp", "pp", "ep")
    ),
    Rule(
        id="fsdp1-hybrid",
        moot_after=("world-divides", "dp-replicate-divides", "dp-replicate-range"),
        option="--dp-replicate",
        field="dp_replicate",
        runtimes=("fsdp1",),
        holds=lambda c, x: (c.dp_replicate == 1) | (c.dp_shard == x.gpus_per_node),
        message="HYBRID_SHARD shards inside a node of {gpus_per_node} GPUs and replicates across nodes: "
        "--dp-replicate is the number of whole nodes, and shards over {dp_shard} do not fit.",
        source="PyTorch FSDP1 HYBRID_SHARD: the default group size is the GPUs of a node and no more than the world "
        "(instructlab/training pull request 682)",
    ),
)
