"""Rules of torchtitan, most of which are PyTorch's own and hold for FSDP2 without it too.

torchtitan alone means release 0.2; torchtitan@2026.8 and later are the main branch by month, which counts tokens
instead of sequences, warns instead of hanging when micro-batches are fewer than stages, and cuts experts otherwise.
"b5bcd76c6" stands for a list of checks made from that revision (August 2026).

Not expressible in a layout, so left to the exporters: torch.compile for asynchronous TP, FlexAttention backends under
CP, stage weights other than 1, options renamed in August 2026.
"""

from __future__ import annotations

import numpy as np

from fivefold.layout.columns import ALL_LAYERS, CORE_ATTENTION_MASK, Columns
from fivefold.layout.rules.common import A2A, SELECTIVE, accounted, kv_divides, runs_schedule
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Holds, Rule

_ONLY = ("torchtitan",)
_NATIVE = ("torchtitan", "fsdp", "accelerate")
_FSDP = ("torchtitan", "fsdp", "accelerate", "fsdp1")
_TOKENS_SINCE = (2026, 8)
_NO_EXPERT_TP_SINCE = (2026, 9)
_PIPELINE = "torchtitan distributed/pipeline_parallel.py, read at 02ef790c79"
_DIMS = "torchtitan distributed/parallel_dims.py, read at 0119de156d"


def _etp(c: Columns, x: Context) -> Holds:
    if not x.is_moe:
        return True
    return np.where(c.ep > 1, (c.etp == 1) | (c.etp == c.tp), c.etp == c.tp)


def _ep(c: Columns, x: Context) -> Holds:
    """EP borrows all of cp, of tp unless the experts keep it, and part of the sharding ranks (which hold cp)."""
    if not x.is_moe:
        return True
    borrowed = np.where(c.etp == c.tp, 1, c.tp)
    whole = (c.ep % (c.cp * borrowed) == 0) & (c.dp_shard * borrowed % c.ep == 0)
    return (c.ep == 1) | whole


def _tokens(c: Columns, x: Context) -> Holds:
    tokens = c.micro_batch * x.work.seq_len
    unit = np.where(c.sp, c.tp, 1) * np.where(c.cp > 1, 2 * c.cp, 1)
    return (tokens % unit == 0) & ((tokens % (c.cp * c.tp) == 0) | (not x.is_moe))


def _reachable(c: Columns, x: Context) -> Holds:
    """Beyond the defaults of 1 and 2 chunks, their number comes from a whole number of layers per stage."""
    stages = np.maximum(c.pp * c.vpp, 1)
    weight = x.layers + 2
    per_stage = -(-weight // stages)
    return (c.vpp <= 2) | (-(-weight // per_stage) == stages)


FP8_MULTIPLE = 16


def _fp8_dims(c: Columns, x: Context) -> Holds:
    if x.work.precision != "fp8":
        return True
    held: Holds = x.model.hidden % FP8_MULTIPLE == 0
    for width in (*x.head_widths, *((x.dense_ffn,) if x.dense_ffn else ())):
        held = held & (width % (FP8_MULTIPLE * c.tp) == 0)
    if x.expert_ffn:
        held = held & (x.expert_ffn % (FP8_MULTIPLE * c.etp) == 0)
    return held


TORCHTITAN: tuple[Rule, ...] = (
    Rule(
        id="torchtitan-seq",
        moot_after=("heads-tp", "hidden-tp", "sequence-parallel-seq", "cp-ring-seq"),
        option="--seq-len",
        field=None,
        values=lambda c, x: _sequences(c, x),
        runtimes=("torchtitan", "fsdp"),
        before=_TOKENS_SINCE,
        holds=lambda c, x: x.work.seq_len % (2 * c.cp * c.tp) == 0,
        message="The sequence length {seq} is not a multiple of 2 · cp {cp} · tp {tp}.",
        source=f"{_DIMS}: seq_len_divisor",
    ),
    Rule(
        id="torchtitan-tokens",
        moot_after=("heads-tp", "hidden-tp", "sequence-parallel-seq", "cp-ring-seq"),
        option="--seq-len",
        field=None,
        values=lambda c, x: _sequences(c, x),
        runtimes=_ONLY,
        since=_TOKENS_SINCE,
        holds=_tokens,
        message="The {micro_tokens} tokens of a micro-batch are not a multiple of tp {tp} (with sequence parallelism) "
        "times 2 · cp {cp} (with context parallelism), nor, with experts, of cp · tp.",
        source="torchtitan b5bcd76c6",
    ),
    Rule(
        id="torchtitan-kv-heads",
        moot_after=("heads-tp",),
        option="--tp",
        field="tp",
        runtimes=_NATIVE,
        holds=kv_divides,
        message="--tp {tp} does not divide the {kv_heads} key/value heads, which are not replicated.",
        source="torchtitan b5bcd76c6: n_kv_heads % TP, latent attention exempt; transformers' own TP has the same",
    ),
    Rule(
        id="torchtitan-tp-needs-sp",
        option="--sequence-parallel",
        field="sp",
        runtimes=_ONLY,
        holds=lambda c, x: c.sp | (c.tp == 1),
        message="Its tensor-parallel plan always shards the sequence between the matrix products; TP without sequence "
        "parallelism is not there.",
        source="torchtitan 0.2 models' parallelize, from memory",
    ),
    Rule(
        id="torchtitan-cp-kind",
        option="--cp-kind",
        field="cp_kind",
        runtimes=_NATIVE,
        holds=lambda c, x: (c.cp == 1) | (c.cp_kind != A2A),
        message="Context parallelism here is ring attention (p2p), not all-to-all.",
        source="PyTorch torch.distributed.tensor.experimental context_parallel, from memory",
    ),
    Rule(
        id="torchtitan-etp",
        option="--etp",
        field="etp",
        runtimes=_NATIVE,
        before=_NO_EXPERT_TP_SINCE,
        holds=_etp,
        message="--etp {etp} has to equal --tp {tp}, or 1 when --ep is above 1: without EP the experts are "
        "split by TP.",
        source=f"{_DIMS}: ETP = TP or 1; without EP the experts take the TP mesh (from memory)",
    ),
    Rule(
        id="torchtitan-ep",
        moot_after=("world-divides", "torchtitan-etp"),
        option="--ep",
        field="ep",
        runtimes=_NATIVE,
        before=_TOKENS_SINCE,
        holds=_ep,
        message="--ep {ep} borrows whole cp {cp} (and tp {tp} when etp is 1) and a divisor of the {dp_shard} "
        "sharding ranks.",
        source=f"{_DIMS}: _validate",
    ),
    Rule(
        id="torchtitan-ep-mesh",
        moot_after=("world-divides",),
        option="--ep",
        field="ep",
        runtimes=_ONLY,
        since=_TOKENS_SINCE,
        holds=lambda c, x: c.dp_shard * c.tp % c.ep == 0 if x.is_moe else True,
        message="--ep {ep} does not divide the dp-shard · cp · tp = {dp_shard} · {tp} ranks that it is laid over.",
        source="torchtitan parallel_dims.py, b5bcd76c6",
    ),
    Rule(
        id="torchtitan-ep-tp",
        option="--ep",
        field="ep",
        others=("tp",),
        runtimes=_ONLY,
        since=_NO_EXPERT_TP_SINCE,
        holds=lambda c, x: c.ep >= c.tp if x.is_moe else True,
        message="With experts --ep {ep} has to be at least --tp {tp}: routed experts are no longer cut by TP.",
        source="torchtitan pull request 4794 (September 2026)",
    ),
    Rule(
        id="torchtitan-no-etp",
        option="--etp",
        field="etp",
        runtimes=_ONLY,
        since=_NO_EXPERT_TP_SINCE,
        holds=lambda c, x: c.etp == 1,
        message="--etp {etp}: tensor parallelism of routed experts was removed.",
        source="torchtitan pull request 4794 (September 2026)",
    ),
    Rule(
        id="torchtitan-uneven",
        option="--first-stage-layers",
        field="first_stage_layers",
        others=("last_stage_layers",),
        runtimes=_NATIVE,
        holds=lambda c, x: (c.first_stage_layers == 0) & (c.last_stage_layers == 0),
        message="Stages are split by weight (embedding and head count as one block each); a count for the "
        "first or last "
        "stage is not modelled.",
        source=_PIPELINE,
    ),
    Rule(
        id="torchtitan-schedule",
        option="--schedule",
        field="schedule",
        runtimes=_NATIVE,
        silent=True,
        holds=runs_schedule,
        message="The parameters here are always sharded by fully_shard, under which a schedule that splits the "
        "backward ({schedule}) gives wrong gradients.",
        source="measured on PyTorch 2.13: FSDP2 under InterleavedZeroBubble, ZBVZeroBubble and DualPipeV leaves "
        "gradients out or has them wrong by 43% to 100%, without an error",
    ),
    Rule(
        id="torchtitan-account",
        option="--account-for-embedding",
        field="account_for_embedding",
        others=("account_for_loss",),
        runtimes=_NATIVE,
        holds=lambda c, x: ~accounted(c),
        message="Embedding and head always count as one block each here; the switches are Megatron's.",
        source=_PIPELINE,
    ),
    Rule(
        id="torchtitan-stages",
        option="--pp",
        field="pp",
        others=("vpp",),
        runtimes=_NATIVE,
        holds=lambda c, x: (c.pp == 1) | (c.pp * c.vpp <= x.layers + 2),
        message="pp {pp} · vpp {vpp} stages are more than the {layers} blocks with embedding and head.",
        source=_PIPELINE,
    ),
    Rule(
        id="torchtitan-layers-per-stage",
        option="--vpp",
        field="vpp",
        others=("pp",),
        runtimes=_NATIVE,
        holds=_reachable,
        message="No whole number of layers per stage makes pp {pp} · vpp {vpp} stages of {layers} blocks "
        "with embedding and "
        "head.",
        source=_PIPELINE,
    ),
    Rule(
        id="torchtitan-micro-batches",
        moot_after=("world-divides", "global-batch-divides"),
        option="--pp",
        field="pp",
        others=("micro_batch",),
        runtimes=_ONLY,
        before=_TOKENS_SINCE,
        holds=lambda c, x: (c.pp == 1) | (c.num_micro_batches >= c.pp),
        message="The {m} micro-batches are fewer than the {pp} pipeline ranks.",
        source="torchtitan before b5bcd76c6: hangs; later only warns",
    ),
    Rule(
        id="torchtitan-tied-pp",
        option="--pp",
        field="pp",
        runtimes=_ONLY,
        holds=lambda c, x: c.pp == 1 if x.model.tied_embeddings else True,
        message="{model} shares its embedding with its head, and tied weights over a pipeline are not implemented.",
        source="torchtitan b5bcd76c6",
    ),
    Rule(
        id="torchtitan-mtp",
        option="--mtp",
        field=None,
        values=lambda c, x: [False],
        runtimes=(*_FSDP, "deepspeed", "deepspeed-zero", "nanotron"),
        holds=lambda c, x: x.model.mtp == 0,
        message="{runtime} as modelled trains no multi-token-prediction modules. Leave out --mtp and --mtp-modules.",
        source="not modelled; Megatron-DeepSpeed and nanotron have none (from memory)",
    ),
    Rule(
        id="torchtitan-recompute-layers",
        option="--recompute-layers",
        field="recompute_layers",
        runtimes=(*_FSDP, "deepspeed-zero", "nanotron"),
        holds=lambda c, x: c.recompute_layers == ALL_LAYERS,
        message="Full recompute covers every block; a number of layers cannot be given.",
        source="torchtitan activation checkpoint modes, from memory",
    ),
    Rule(
        id="torchtitan-recompute-selective",
        option="--recompute-modules",
        field="recompute_modules",
        runtimes=_ONLY,
        holds=lambda c, x: (c.recompute_kind != SELECTIVE) | (c.recompute_modules == CORE_ATTENTION_MASK),
        message="The selective mode of this runtime works on a list of operations: it keeps attention and every second "
        "matrix product of a block, and takes no modules. Choose --recompute selective alone, none or full.",
        source="torchtitan distributed/activation_checkpoint.py, per-op mode (from memory)",
    ),
    Rule(
        id="torchtitan-overlap-grad",
        option="--overlap-grad",
        field="overlap_grad",
        runtimes=_FSDP,
        holds=lambda c, x: c.overlap_grad,
        message="fully_shard always reduces gradients beside the backward; this cannot be turned off.",
        source="PyTorch documentation of fully_shard",
    ),
    Rule(
        id="torchtitan-overlap-param",
        option="--overlap-param",
        field="overlap_param",
        runtimes=_FSDP,
        holds=lambda c, x: c.overlap_param | (c.zero == 0) | ~c.overlap_grad,
        message="fully_shard always gathers the next block beside the current one; this cannot be turned off.",
        source="PyTorch documentation of fully_shard",
    ),
    Rule(
        id="torchtitan-overlap-ep",
        option="--overlap-ep",
        field="overlap_ep",
        runtimes=_FSDP,
        holds=lambda c, x: ~c.overlap_ep,
        message="The expert exchange is overlapped only in the DualPipeV schedule, which is not modelled.",
        source=_PIPELINE,
    ),
    Rule(
        id="torchtitan-grad-dtype",
        option="--grad-dtype",
        field=None,
        values=lambda c, x: ["fp32"],
        runtimes=_ONLY,
        # Plain FSDP takes any reduce_dtype; torchtitan's configuration offers fp32 alone.
        holds=lambda c, x: x.work.grad_dtype == "fp32",
        message="torchtitan reduces gradients in fp32 only; name the runtime fsdp for a bf16 reduce_dtype.",
        source="torchtitan 0.2 configuration (mixed_precision_reduce), from memory; PyTorch MixedPrecisionPolicy",
    ),
    Rule(
        id="fp8-dimensions",
        option="--tp",
        field="tp",
        others=("etp",),
        runtimes=("torchtitan", "megatron"),
        holds=_fp8_dims,
        message="FP8 matrix products need every dimension of a shard to be a multiple of 16: hidden "
        "{hidden}, head widths "
        "{head_widths}, feed-forward {dense_ffn} over tp {tp}, experts {expert_ffn} over etp {etp}.",
        source="torchtitan b5bcd76c6 (float8 dims % 16); Transformer Engine fp8 shape check",
    ),
)


def _sequences(c: Columns, x: Context) -> list[int]:
    unit = 2 * int(c.cp[0] * c.tp[0])
    below = x.work.seq_len // unit * unit
    return [length for length in (below, below + unit) if length > 0]
