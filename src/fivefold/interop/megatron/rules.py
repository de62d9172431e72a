"""What Megatron-LM refuses about options that a layout does not hold, each rule with its source.

arguments.py: validate_args in Megatron-LM megatron/training/arguments.py, read at 000c4ac24f. transformer_config and
later checks: as listed from d98e8a64dd. Rules about degrees, batch, recompute and overlap are in layout/rules/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fivefold.interop.megatron.given import Given
from fivefold.interop.megatron.model import ModelParts
from fivefold.interop.megatron.options import ARGUMENTS
from fivefold.layout import Layout, Workload
from fivefold.layout.mixers import softmax_attention
from fivefold.model.spec import ModelSpec

_CORE = "Megatron-Core transformer_config, d98e8a64dd"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at. connections: CUDA_DEVICE_MAX_CONNECTIONS as the launch sets it, None where it does not.
    blackwell: the GPU is of that generation or later. dp: data-parallel ranks, 0 where the degrees do not divide."""

    given: Given
    model: ModelSpec
    layout: Layout
    work: Workload
    parts: ModelParts
    dp: int
    connections: str | None
    blackwell: bool
    allocator: str


@dataclass(frozen=True, slots=True)
class OptionRule:
    """holds: whether it is obeyed. message: by the facts. legal: values that obey it."""

    id: str
    option: str
    holds: Callable[[Facts], bool]
    message: str
    source: str = ARGUMENTS
    legal: tuple[Any, ...] = ()


_FSDP = ("--use-megatron-fsdp", "--use-torch-fsdp2")


def _on(option: str) -> Callable[[Facts], bool]:
    return lambda f: f.given.flag(option)


def _implies(first: str, holds: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    """Where `first` is given, `holds` has to hold."""
    return lambda f: not (first in f.given and f.given.flag(first)) or holds(f)


def _both(f: Facts, *options: str) -> bool:
    return all(option in f.given for option in options)


def _positions(f: Facts) -> str:
    if f.given.flag("--use-rotary-position-embeddings"):
        return "rope"
    return f.given.text("--position-embedding-type") or "learned_absolute"


def _connections(f: Facts) -> bool:
    free = f.blackwell or f.given.flag("--overlap-moe-expert-parallel-comm")
    return f.connections in (None, "1") or free or (f.layout.tp == 1 and f.layout.cp == 1)


def _graphs(f: Facts) -> bool:
    kind = f.given.text("--cuda-graph-impl") if "--cuda-graph-impl" in f.given else "none"
    return (kind or "none") != "none" or f.given.flag("--enable-cuda-graph") or f.given.flag("--external-cuda-graph")


def _chunk(f: Facts) -> bool:
    per_chunk = f.given.integer("--num-layers-per-virtual-pipeline-stage")
    counted = f.model.layers + f.layout.account_for_embedding + f.layout.account_for_loss
    share = counted // f.layout.pp
    return per_chunk is None or (share >= per_chunk and share % per_chunk == 0)


def _group(f: Facts) -> bool:
    """Group size between pp and the micro-batches, and a remainder of 0 or at least pp."""
    group = f.given.integer("--microbatch-group-size-per-virtual-pipeline-stage")
    if group is None or f.layout.vpp == 1 or f.dp == 0:
        return True
    m = f.work.global_batch // (f.layout.micro_batch * f.dp)
    return f.layout.pp <= group <= max(m, 1) and (m % group == 0 or m % group >= f.layout.pp)


def _eval(f: Facts) -> bool:
    batch = f.given.integer("--eval-global-batch-size")
    size = f.given.integer("--eval-micro-batch-size") or f.layout.micro_batch
    return batch is None or f.dp == 0 or batch % (size * f.dp) == 0


def _hierarchical(f: Facts) -> bool:
    product = 1
    for size in f.given.texts("--hierarchical-context-parallel-sizes"):
        product *= int(size) if size.isdigit() and len(size) < 7 else 0
    return "--hierarchical-context-parallel-sizes" not in f.given or product == f.layout.cp


def _divides_kv(f: Facts) -> bool:
    found = (softmax_attention(kind.mixer) for kind in f.model.kinds)
    mixers = [mixer for mixer in found if mixer is not None]
    return all(mixer.heads % getattr(mixer, "kv_heads", 1) == 0 for mixer in mixers)


def _number(f: Facts, option: str) -> float:
    return f.given.number(option) or 0.0


def _dispatcher(f: Facts) -> str:
    return f.given.text("--moe-token-dispatcher-type") or "allgather"


RULES: tuple[OptionRule, ...] = (
    OptionRule("one-precision", "--fp16", lambda f: not (f.given.flag("--fp16") and f.given.flag("--bf16")),
        "--fp16 and --bf16 exclude each other."),
    OptionRule("one-scaling", "--fp4-format", lambda f: not _both(f, "--fp4-format", "--fp8-format"),
        "--fp4-format and --fp8-format exclude each other."),
    OptionRule("mtp-positions", "--position-embedding-type",
        lambda f: not f.given.integer("--mtp-num-layers") or _positions(f) not in (
            "learned_absolute", "relative", "mrope"),
        "--mtp-num-layers needs --position-embedding-type rope or none.", legal=("rope", "none")),
    OptionRule("no-positions", "--no-position-embedding",
        _implies("--no-position-embedding", lambda f: _positions(f) == "rope"),
        "--no-position-embedding goes with --position-embedding-type rope only; --position-embedding-type none is its "
        "heir."),
    OptionRule("one-data-source", "--mock-data", _implies("--mock-data", lambda f: "--data-path" not in f.given),
        "--mock-data and --data-path exclude each other."),
    OptionRule("deterministic", "--deterministic-mode",
        _implies("--deterministic-mode", lambda f: not (
            f.given.flag("--use-flash-attn") or f.given.flag("--cross-entropy-loss-fusion"))),
        "--deterministic-mode does not go with --use-flash-attn or --cross-entropy-loss-fusion."),
    OptionRule("replication", "--replication-jump",
        _implies("--replication", lambda f: "--replication-jump" in f.given),
        "--replication needs --replication-jump."),
    OptionRule("main-params", "--no-load-optim", _implies("--load-main-params-from-ckpt", _on("--no-load-optim")),
        "--load-main-params-from-ckpt needs --no-load-optim."),
    OptionRule("max-position", "--max-position-embeddings",
        lambda f: (f.given.integer("--max-position-embeddings") or f.work.seq_len) >= f.work.seq_len,
        "--max-position-embeddings has to be at least the --seq-length of {seq}."),
    OptionRule("max-position-given", "--max-position-embeddings", lambda f: "--max-position-embeddings" in f.given,
        "--max-position-embeddings is not given, and Megatron-LM has no default for it."),
    OptionRule("heads-kv", "--num-query-groups", _divides_kv,
        "--num-query-groups does not divide the {heads} attention heads.",
        "Megatron-Core pull request 5756 (September 2026); before it such a model fails or computes something else"),
    OptionRule("mla-excludes-gqa", "--group-query-attention",
        _implies("--multi-latent-attention", lambda f: not f.given.flag("--group-query-attention")),
        "--group-query-attention does not go with --multi-latent-attention.", _CORE),
    OptionRule("activation", "--swiglu",
        _implies("--swiglu", lambda f: not (f.given.flag("--squared-relu") or f.given.flag("--quick-geglu"))),
        "--swiglu does not go with --squared-relu or --quick-geglu."),
    OptionRule("connections", "CUDA_DEVICE_MAX_CONNECTIONS", _connections,
        "CUDA_DEVICE_MAX_CONNECTIONS is {connections}; with TP or CP above 1 it has to be 1 on GPUs before Blackwell.",
        legal=("1",)),
    OptionRule("fsdp-connections", "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda f: f.connections != "1" or not any(f.given.flag(each) for each in _FSDP),
        "FSDP needs CUDA_DEVICE_MAX_CONNECTIONS to be unset or above 1."),
    OptionRule("fsdp2-pipeline", "--use-torch-fsdp2", _implies("--use-torch-fsdp2", lambda f: f.layout.pp == 1),
        "--use-torch-fsdp2 does not go with pipeline parallelism."),
    OptionRule("fsdp2-experts", "--use-torch-fsdp2", _implies("--use-torch-fsdp2", lambda f: f.layout.ep == 1),
        "--use-torch-fsdp2 does not go with expert parallelism."),
    OptionRule("fsdp2-optimizer", "--use-torch-fsdp2",
        _implies("--use-torch-fsdp2", lambda f: not f.given.flag("--use-distributed-optimizer")),
        "--use-torch-fsdp2 does not go with --use-distributed-optimizer."),
    OptionRule("fsdp2-fusion", "--no-gradient-accumulation-fusion",
        _implies("--use-torch-fsdp2", _on("--no-gradient-accumulation-fusion")),
        "--use-torch-fsdp2 needs --no-gradient-accumulation-fusion."),
    OptionRule("fsdp2-tied", "--untie-embeddings-and-output-weights",
        _implies("--use-torch-fsdp2", _on("--untie-embeddings-and-output-weights")),
        "--use-torch-fsdp2 needs --untie-embeddings-and-output-weights."),
    OptionRule("fsdp2-fp16", "--fp16", _implies("--use-torch-fsdp2", lambda f: not f.given.flag("--fp16")),
        "--use-torch-fsdp2 does not go with --fp16."),
    OptionRule("fsdp2-checkpoint", "--ckpt-format",
        _implies("--use-torch-fsdp2", lambda f: f.given.text("--ckpt-format") in (None, "torch_dist", "torch_dcp")),
        "--use-torch-fsdp2 needs --ckpt-format torch_dist or torch_dcp.", legal=("torch_dist", "torch_dcp")),
    OptionRule("mfsdp-overlap", "--overlap-grad-reduce", lambda f: f.layout.zero != 2 or f.layout.overlap.grad,
        "--data-parallel-sharding-strategy optim_grads needs --overlap-grad-reduce.",
        "Megatron-FSDP megatron_fsdp.py, MegatronFSDP.__init__"),
    OptionRule("mfsdp-checkpoint", "--ckpt-format",
        _implies("--use-megatron-fsdp", lambda f: f.given.text("--ckpt-format") == "fsdp_dtensor"),
        "--use-megatron-fsdp needs --ckpt-format fsdp_dtensor.", legal=("fsdp_dtensor",)),
    OptionRule("one-chunk-option", "--num-virtual-stages-per-pipeline-rank",
        lambda f: sum(option in f.given for option in (
            "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage",
            "--pipeline-model-parallel-layout")) <= 1,
        "Only one of --num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank and "
        "--pipeline-model-parallel-layout may be given."),
    OptionRule("chunks-of-uneven", "--num-layers-per-virtual-pipeline-stage",
        lambda f: not ("--num-layers-per-virtual-pipeline-stage" in f.given and (
            "--decoder-first-pipeline-num-layers" in f.given or "--decoder-last-pipeline-num-layers" in f.given)),
        "With a count for the first or last stage, chunks are given by --num-virtual-stages-per-pipeline-rank."),
    OptionRule("chunk-divides", "--num-layers-per-virtual-pipeline-stage", _chunk,
        "--num-layers-per-virtual-pipeline-stage does not divide the layers of a pipeline rank. Earlier revisions "
        "dropped the rest silently."),
    OptionRule("chunks-without-overlap", "--no-overlap-p2p-communication",
        lambda f: f.layout.vpp == 1 or f.layout.pp > 2 or not f.given.flag("--no-overlap-p2p-communication"),
        "Interleaving without overlapped transfers needs a pipeline-model-parallel-size above 2."),
    OptionRule("chunk-group", "--microbatch-group-size-per-virtual-pipeline-stage", _group,
        "The group of micro-batches has to lie between the pipeline's {pp} ranks and the {m} micro-batches, and leave "
        "a remainder of 0 or of at least {pp}.", "Megatron-Core pipeline_parallel/schedules, d98e8a64dd"),
    OptionRule("full-needs-method", "--recompute-method",
        lambda f: f.given.word("--recompute-granularity") != "full" or _both(
            f, "--recompute-method", "--recompute-num-layers"),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers.", _CORE,
        legal=("uniform", "block")),
    OptionRule("selective-has-no-method", "--recompute-method",
        lambda f: f.layout.recompute.kind != "selective" or "--recompute-method" not in f.given,
        "--recompute-method does not go with selective recomputation."),
    OptionRule("distributed-checkpoints", "--distribute-saved-activations",
        _implies("--distribute-saved-activations", lambda f: f.layout.tp > 1 and f.layout.recompute.kind == "full"
                 and not f.layout.sequence_parallel),
        "--distribute-saved-activations needs TP above 1, full recomputation and no sequence parallelism."),
    OptionRule("ep-fp16", "--fp16", lambda f: f.layout.ep == 1 or not f.given.flag("--fp16"),
        "Expert parallelism does not go with --fp16."),
    OptionRule("grouped-gemm", "--moe-grouped-gemm", _implies("--moe-grouped-gemm", _on("--bf16")),
        "--moe-grouped-gemm needs --bf16."),
    OptionRule("moe-act-grouped", "--moe-grouped-gemm",
        lambda f: "moe_act" not in f.layout.recompute.modules or f.given.flag("--moe-grouped-gemm"),
        "Recomputing moe_act needs --moe-grouped-gemm.", "Megatron-Core 0.16.1, transformer_config"),
    OptionRule("one-expert-softmax", "--moe-router-pre-softmax",
        lambda f: all(getattr(kind.feed, "top_k", 2) > 1 for kind in f.model.kinds)
        or (f.given.text("--moe-router-score-function") or "softmax") != "softmax"
        or "sinkhorn" in f.given.texts("--moe-router-load-balancing-type")
        or f.given.flag("--moe-router-pre-softmax"),
        "With --moe-router-topk 1 a softmax over the chosen expert is always 1; --moe-router-pre-softmax is needed.",
        "Megatron-Core 0.16.1, transformer_config"),
    OptionRule("ep-overlap-dispatcher", "--moe-token-dispatcher-type",
        _implies("--overlap-moe-expert-parallel-comm", lambda f: _dispatcher(f) in ("alltoall", "flex")),
        "--overlap-moe-expert-parallel-comm needs --moe-token-dispatcher-type alltoall or flex.", _CORE,
        legal=("alltoall", "flex")),
    OptionRule("ep-overlap-shared", "--moe-shared-expert-overlap",
        _implies("--overlap-moe-expert-parallel-comm", lambda f: not f.given.flag("--moe-shared-expert-overlap")),
        "--overlap-moe-expert-parallel-comm does not go with --moe-shared-expert-overlap.", _CORE),
    OptionRule("deepep-flex", "--moe-token-dispatcher-type",
        _implies("--moe-enable-deepep", lambda f: _dispatcher(f) == "flex"),
        "--moe-enable-deepep needs --moe-token-dispatcher-type flex.", _CORE, legal=("flex",)),
    OptionRule("fp8-gather", "--fp8-param-gather",
        _implies("--fp8-param-gather", lambda f: f.layout.zero >= 1 or f.given.flag("--use-torch-fsdp2")
                 or f.given.flag("--use-megatron-fsdp")),
        "--fp8-param-gather needs --use-distributed-optimizer or FSDP."),
    OptionRule("offload-precision", "--use-precision-aware-optimizer",
        _implies("--optimizer-cpu-offload", _on("--use-precision-aware-optimizer")),
        "--optimizer-cpu-offload needs --use-precision-aware-optimizer."),
    OptionRule("muon-checkpoint", "--ckpt-format",
        lambda f: f.work.optimizer != "muon" or f.given.text("--ckpt-format") in (None, "torch", "torch_dist"),
        "Muon needs --ckpt-format torch or torch_dist.",
        "Megatron-LM arguments.py of early 2026, validate_args, read; at 000c4ac24f it has to be torch",
        legal=("torch", "torch_dist")),
    OptionRule("hierarchical-cp", "--hierarchical-context-parallel-sizes", _hierarchical,
        "The product of --hierarchical-context-parallel-sizes has to be the context-parallel-size of {cp}."),
    OptionRule("graphs-recompute", "--recompute-granularity",
        lambda f: not _graphs(f) or f.layout.recompute.kind != "full",
        "Full recomputation does not go with CUDA graphs."),
    OptionRule("graphs-allocator", "PYTORCH_CUDA_ALLOC_CONF",
        lambda f: not _graphs(f) or "expandable_segments:True" not in f.allocator,
        "CUDA graphs do not go with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF."),
    OptionRule("one-length", "--train-iters", lambda f: not _both(f, "--train-iters", "--train-samples"),
        "--train-iters and --train-samples exclude each other."),
    OptionRule("ramp-by-samples", "--rampup-batch-size", lambda f: not _both(f, "--train-iters", "--rampup-batch-size"),
        "--rampup-batch-size needs a run counted in --train-samples, not in --train-iters."),
    OptionRule("decay-by-iterations", "--lr-decay-samples",
        lambda f: not _both(f, "--train-iters", "--lr-decay-samples"),
        "--lr-decay-samples needs a run counted in --train-samples."),
    OptionRule("decay-by-samples", "--lr-decay-iters", lambda f: not _both(f, "--train-samples", "--lr-decay-iters"),
        "--lr-decay-iters needs a run counted in --train-iters."),
    OptionRule("warmup-by-iterations", "--lr-warmup-samples",
        lambda f: "--train-iters" not in f.given or _number(f, "--lr-warmup-samples") == 0,
        "--lr-warmup-samples needs a run counted in --train-samples."),
    OptionRule("warmup-by-samples", "--lr-warmup-iters",
        lambda f: "--train-samples" not in f.given or _number(f, "--lr-warmup-iters") == 0,
        "--lr-warmup-iters needs a run counted in --train-iters."),
    OptionRule("save-interval", "--save-interval",
        lambda f: "--save" not in f.given or "--save-interval" in f.given or "--persistent-save-interval" in f.given,
        "--save needs --save-interval."),
    OptionRule("learning-rates", "--min-lr",
        lambda f: not _both(f, "--lr", "--min-lr") or _number(f, "--min-lr") <= _number(f, "--lr"),
        "--min-lr is above --lr."),
    OptionRule("eval-batch", "--eval-global-batch-size", _eval,
        "--eval-global-batch-size has to be a multiple of the evaluation's micro-batch size times {dp} replicas.",
        "Megatron-LM d98e8a64dd: eval_global_batch % (eval_mbs * DP); Megatron-Bridge issue 1697"),
)  # fmt: skip
