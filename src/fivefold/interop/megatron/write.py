"""A plan as Megatron-LM's command line: options, environment, and what a plan leaves open.

Options and what they demand of each other: Megatron-LM megatron/training/arguments.py, read at 000c4ac24f, and
Megatron-Core 0.16.1, transformer_config.py. The layout's options are those of layout_options.py, which reading shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fivefold.cluster import Cluster
from fivefold.errors import FivefoldError
from fivefold.interop.launch.job import Job, Need, Options, Value, Variable, checked, nodes_of, slug
from fivefold.interop.megatron.layout_options import layout_options
from fivefold.interop.megatron.options import OPTION_OF, OPTIONS
from fivefold.interop.megatron.write_model import model_options
from fivefold.layout import Layout, RampPlan, Workload
from fivefold.layout.workload import QUANTISED
from fivefold.model.spec import ModelSpec

# What --pipeline-model-parallel-layout replaces, and does not go with (arguments.py; transformer_config.py).
_COUNTS = frozenset(
    OPTION_OF[f"layout.{field}"].name
    for field in (
        "layers_per_chunk",
        "vpp",
        "first_stage_layers",
        "last_stage_layers",
        "account_for_embedding",
        "account_for_loss",
    )
)
_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
_ROUTER = (
    "A plan does not hold how the router scores and balances: Megatron-LM's defaults apply until you add "
    "--moe-router-score-function, --moe-router-load-balancing-type and the like."
)
_DIRECTORY = Need("MEGATRON_DIR", "the directory of a checkout of Megatron-LM, with pretrain_gpt.py in it")
_DATA = Need("DATA_PATH", "the prefix of the preprocessed data set, without .bin or .idx")
_TOKENIZER = Need("TOKENIZER_MODEL", "the tokenizer, as a Hugging Face name or a folder")
_ITERATIONS = Need("TRAIN_ITERS", "how many steps to train, since the plan has no token budget")
_SAMPLES = Need("TRAIN_SAMPLES", "how many sequences to train, since the plan has no token budget")
_CHECKPOINTS = Need("CHECKPOINT_DIR", "Where checkpoints are written to and read from.", "checkpoints")
_RATE = Need("LR", "Peak learning rate and its end, cosine between them. Part of the recipe, not of the plan.", "3e-4")
_LOWEST_RATE = Need("MIN_LR", "The end of the learning rate.", "3e-5")
_SAVE_INTERVAL = Need("SAVE_INTERVAL", "Steps between two checkpoints.", "500")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is trained on. path, tokenizer: None leaves a variable that has to be set. mock: Megatron-LM's own random
    tokens, which need neither. steps: a fixed number of steps without checkpoints, for measuring."""

    path: str | None = None
    tokenizer: str | None = None
    mock: bool = False
    steps: int | None = None


def megatron_job(
    model: ModelSpec,
    cluster: Cluster,
    work: Workload,
    layout: Layout,
    *,
    data: Data | None = None,
    ramp: RampPlan | None = None,
    stages: str | None = None,
    name: str | None = None,
    about: tuple[str, ...] = (),
) -> Job:
    """Megatron-LM's pretrain_gpt.py for a plan whose layout obeys the rules of the megatron runtime.

    stages: --pipeline-model-parallel-layout in place of the layout's own counts. Raises FivefoldError for what
    Megatron-LM's command line cannot express, or a plan cannot know.
    """
    data = data or Data()
    nodes, per_node = nodes_of(cluster)
    shape, unknown = model_options(model, work.seq_len)
    if work.moe_dispatcher == "deepep":
        shape["--moe-token-dispatcher-type"] = "flex"
    if work.dropout:
        shape |= {"--attention-dropout": "0.1", "--hidden-dropout": "0.1"}
    if data.mock:
        # The tokenizer of mock data adds an end-of-document token of its own.
        shape["--vocab-size"] = str(model.vocab - 1)
    length, length_needs = _length(work, ramp, data)
    source, source_needs = _data(data)
    keeping, keeping_needs = _keeping(work, data)
    groups: tuple[tuple[str, Options], ...] = (
        ("model", shape),
        ("parallel", {**_parallel(layout, model, stages), **_experts(model, work)}),
        ("batch", {**_batch(work, ramp), **length}),
        ("precision", _precision(work)),
        ("optimizer", {**_optimizer(work), **_offload(work, model)}),
        ("data", source),
        ("run", keeping),
    )
    return Job(
        name=slug(name or model.name),
        about=(*about, _ROUTER) if model.is_moe else about,
        nodes=nodes,
        gpus_per_node=per_node,
        program=(Variable(_DIRECTORY.name, "/pretrain_gpt.py"),),
        groups=groups,
        environment=environment(cluster, layout, graphs=work.cuda_graphs),
        needs=(_DIRECTORY, *unknown, *source_needs, *length_needs, _RATE, _LOWEST_RATE, *keeping_needs),
        resumes=data.steps is None,
    )


def environment(cluster: Cluster, layout: Layout, *, graphs: bool = False) -> dict[str, str]:
    """Variables that Megatron-LM demands or that the predicted memory rests on.

    One connection makes kernels start in the order of their launch, which overlap of TP and CP relies on; before
    Blackwell Megatron-LM refuses to start without it. Overlapped expert exchanges want many.
    """
    blackwell = "nvfp4" in cluster.gpu.peak_flops_per_s
    connections = {} if blackwell and not layout.overlap.ep else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if layout.overlap.ep:
        connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    return {
        **connections,
        # CUDA graphs need their memory where it was captured.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False" if graphs else "expandable_segments:True",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "1",
    }


def _refused(what: str, option: str, value: Any, legal: list[Any], remedy: str) -> FivefoldError:
    return FivefoldError(
        f"Megatron-LM's command line cannot run this plan: {what}. {remedy}",
        code="megatron-cannot-express",
        option=option,
        value=value,
        legal=legal,
    )


# ---------------------------------------------------------------- the plan's own


def _parallel(layout: Layout, model: ModelSpec, stages: str | None) -> Options:
    """The layout's options; several values as several words. A text of stages excludes every count of them."""
    options = layout_options(layout, model.layers, model.is_moe)
    if stages is not None:
        options = {name: value for name, value in options.items() if name not in _COUNTS}
        options[OPTION_OF["layout.stage_text"].name] = stages
    several = {name for name in options if OPTIONS[name].kind in ("texts", "ints")}
    return {name: tuple(value.split()) if name in several else value for name, value in options.items()}


def _experts(model: ModelSpec, work: Workload) -> Options:
    if not model.is_moe:
        return {}
    options: Options = {"--moe-grouped-gemm": work.precision != "fp16"}
    return {**options, "--moe-enable-deepep": True} if work.moe_dispatcher == "deepep" else options


def _batch(work: Workload, ramp: RampPlan | None) -> Options:
    if work.document_length is not None:
        raise _refused(
            "its documents attend within themselves, and --reset-attention-mask, which pretraining has for that, "
            "writes masks out instead of leaving pairs out", "--document-length", work.document_length, ["none"],
            "Plan it with --document-length none, or use Megatron-Bridge's packed sequences.",
        )  # fmt: skip
    options: dict[str, Value] = {
        "--seq-length": str(work.seq_len),
        "--global-batch-size": str(work.global_batch),
    }
    if ramp is not None:
        options["--rampup-batch-size"] = tuple(str(number) for number in ramp.megatron_rampup)
    return options


def _length(work: Workload, ramp: RampPlan | None, data: Data) -> tuple[Options, tuple[Need, ...]]:
    """How long it trains: in samples where there is a budget or a ramp, which Megatron-LM takes with samples only."""
    if data.steps is not None:
        if ramp is not None:
            raise _refused("a ramp-up has no place in a measurement", "--ramp", None, [], "Leave out --ramp.")
        return {"--train-iters": str(data.steps)}, ()
    if work.tokens is not None:
        return {"--train-samples": str(max(round(work.tokens / work.seq_len), 1))}, ()
    if ramp is not None:
        return {"--train-samples": Variable(_SAMPLES.name)}, (_SAMPLES,)
    return {"--train-iters": Variable(_ITERATIONS.name)}, (_ITERATIONS,)


def _precision(work: Workload) -> Options:
    options: dict[str, Value] = {"--fp16" if work.precision == "fp16" else "--bf16": True}
    if work.precision in QUANTISED:
        if work.precision != "fp8":
            raise _refused(
                f"its precision is {work.precision}", "--precision", work.precision, ["bf16", "fp16", "fp8"],
                "Plan it with another --precision.",
            )  # fmt: skip
        # Delayed scaling, the default, does not go with the recomputation of norms and of experts' activations.
        options |= {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"}
    if work.grad_dtype == "bf16":
        options["--grad-reduce-in-bf16"] = True
    else:
        options["--accumulate-allreduce-grads-in-fp32"] = True
    if work.cuda_graphs:
        options |= {"--enable-cuda-graph": True, "--te-rng-tracker": True}
    if work.attention == "unfused":
        options["--attention-backend"] = "unfused"
    return options


def _offload(work: Workload, model: ModelSpec) -> Options:
    """States and saved tensors in host memory. The copies of states are priced beside the update, so they run so."""
    options: dict[str, Value] = {}
    if work.offload.optimizer:
        options |= {
            "--optimizer-cpu-offload": True,
            "--optimizer-offload-fraction": f"{work.offload.optimizer:g}",
            "--overlap-cpu-optimizer-d2h-h2d": True,
            "--use-precision-aware-optimizer": True,
        }
    if work.offload.activations:
        blocks = work.offload.activations * model.layers
        if abs(blocks - round(blocks)) > 1e-6:
            raise _refused(
                f"it offloads the activations of {blocks:g} blocks", "--offload", work.offload.words,
                [f"activations:{number}/{model.layers} of a whole number of blocks" for number in (int(blocks),)],
                f"Choose a share that makes a whole number of the {model.layers} blocks.",
            )  # fmt: skip
        options["--cpu-offloading-num-layers"] = str(round(blocks))
    return options


def _optimizer(work: Workload) -> Options:
    if work.trained != "all":
        raise _refused(
            "it trains adapters, for which Megatron-LM has no options", "trained", work.trained, ["all"],
            "Plan it with all weights trained, or use Megatron-Bridge.",
        )  # fmt: skip
    if work.optimizer not in _OPTIMIZERS:
        raise _refused(
            f"it has no optimizer {work.optimizer}", "--optimizer", work.optimizer, [*_OPTIMIZERS],
            "Plan it with another --optimizer.",
        )  # fmt: skip
    return {
        "--optimizer": _OPTIMIZERS[work.optimizer],
        "--lr": Variable(_RATE.name),
        "--min-lr": Variable(_LOWEST_RATE.name),
        "--lr-decay-style": "cosine",
        "--lr-warmup-fraction": "0.01",
        "--weight-decay": "0.1",
        "--adam-beta1": "0.9",
        "--adam-beta2": "0.95",
        "--clip-grad": "1.0",
    }


# ---------------------------------------------------------------- what a plan leaves open


def _data(data: Data) -> tuple[Options, tuple[Need, ...]]:
    if data.mock:
        for option, value in (("--data-path", data.path), ("--tokenizer-model", data.tokenizer)):
            if value is not None:
                raise FivefoldError(
                    f"--mock-data trains on random tokens, and {option} names real ones; give one of them.",
                    code="contradiction",
                    option=option,
                    value=value[:100],
                )
        return {"--mock-data": True, "--tokenizer-type": "NullTokenizer"}, ()
    options: dict[str, Value] = {
        "--data-path": Variable(_DATA.name) if data.path is None else checked("--data-path", data.path),
        "--split": "99,1,0",
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": Variable(_TOKENIZER.name)
        if data.tokenizer is None
        else checked("--tokenizer-model", data.tokenizer),
    }
    pairs = ((data.path, _DATA), (data.tokenizer, _TOKENIZER))
    return options, tuple(need for given, need in pairs if given is None)


def _keeping(work: Workload, data: Data) -> tuple[Options, tuple[Need, ...]]:
    """Checkpoints, signals and logs; a measurement keeps nothing."""
    logs: dict[str, Value] = {"--log-interval": "1", "--log-throughput": True}
    muon = {"--ckpt-format": "torch"} if work.optimizer == "muon" else {}
    if data.steps is not None:
        return {**logs, **muon, "--eval-iters": "0"}, ()
    return {
        **logs,
        **muon,
        "--eval-iters": "10",
        "--save": Variable(_CHECKPOINTS.name),
        "--load": Variable(_CHECKPOINTS.name),
        "--save-interval": Variable(_SAVE_INTERVAL.name),
        # SIGTERM makes every rank save and end.
        "--exit-signal-handler": True,
    }, (_CHECKPOINTS, _SAVE_INTERVAL)
