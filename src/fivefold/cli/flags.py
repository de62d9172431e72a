"""The flags, the same in all commands, as groups of text that values.py and problem.py read.

Flags with several values take a comma-separated list, so their type here is text. A flag that is not given is None,
which lets a plan file, or a documented default, have its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from fivefold.errors import FivefoldError

CLUSTER = Group("Cluster", sort_key=1)
WORKLOAD = Group("Workload", sort_key=2)
DEGREES = Group("Layout: degrees (one value, or a set such as 2,4,8)", sort_key=3)
OPTIONS = Group("Layout: other options", sort_key=4)
SEARCH = Group("Search", sort_key=5)
OUTPUT = Group("Output", sort_key=9)

# Thousands may be set apart, by one separator or the other: 8,192 or 8_192.
WHOLE = re.compile(r"[0-9]{1,12}|[0-9]{1,3}(?:,[0-9]{3}){1,3}|[0-9]{1,3}(?:_[0-9]{3}){1,3}")


def whole_number(_: Any, tokens: Sequence[Token]) -> int:
    """Reads an integer flag, as the parser's own reading would round 8.5 to 8."""
    token = tokens[0]
    digits = token.value.removeprefix("-")
    if not WHOLE.fullmatch(digits):
        option = token.keyword or "the argument"
        raise FivefoldError(
            f"{option} {token.value[:60]} is not a whole number. Write it out, as in {option} 8.",
            code="bad-number",
            option=token.keyword,
            value=token.value[:60],
            legal="a whole number",
        )
    return int(token.value.replace(",", "").replace("_", ""))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Changes to the model."""

    layers: Annotated[int | None, Parameter(group=WORKLOAD, converter=whole_number)] = None
    "Keep only the first so many blocks of the model."

    mtp: Annotated[bool, Parameter(group=WORKLOAD, negative="", show_default=False)] = False
    "Also train the multi-token-prediction modules that the configuration states."

    mtp_modules: Annotated[int | None, Parameter(group=WORKLOAD, converter=whole_number)] = None
    "So many of them instead, each a block like the model's last, whatever the configuration states; 0 for none."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """What it runs on."""

    gpu: Annotated[str | None, Parameter(group=CLUSTER)] = None
    "GPU or node of the catalogue, as h100-sxm, dgx-h100 or p5.48xlarge (fivefold gpus). Default: h100-sxm."

    gpus: Annotated[int | None, Parameter(group=CLUSTER, converter=whole_number)] = None
    "Number of GPUs of the job."

    gpus_per_node: Annotated[int | None, Parameter(group=CLUSTER, converter=whole_number)] = None
    "GPUs of one host. Default: the system's."

    cluster: Annotated[str | None, Parameter(group=CLUSTER)] = None
    "TOML file with your own numbers, or a node of the catalogue, in place of --gpu."

    calibration: Annotated[str | None, Parameter(group=CLUSTER)] = None
    "Factors fitted to your own runs (fivefold calibrate --save); none drops a plan file's."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkFlags:
    """One step's work."""

    seq_len: Annotated[str | None, Parameter(name=("--seq-len", "--seq"), group=WORKLOAD)] = None
    "Tokens per sequence. Default: the model's longest, 8192 at most."

    global_batch: Annotated[str | None, Parameter(name=("--global-batch", "--gbs"), group=WORKLOAD)] = None
    "Sequences per step. Default: about 4M tokens that the GPUs divide."

    tokens_per_batch: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "The global batch in tokens, such as 4M, in place of --global-batch."

    precision: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "bf16 (default), fp16, fp8, mxfp8, nvfp4, or fp32 on fivefold itself."

    optimizer: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "adamw (default), sgd, adafactor, muon or adamw8bit."

    grad_dtype: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "Gradients are accumulated in fp32 (default) or bf16."

    moe_imbalance: Annotated[float | None, Parameter(group=WORKLOAD)] = None
    "Tokens on the busiest expert rank over the mean. Default: 1.0."

    tokens: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "Token budget of the whole run, such as 1.4T: gives days and GPU hours."

    price: Annotated[float | None, Parameter(group=WORKLOAD)] = None
    "Price of one GPU for one hour: gives the cost of --tokens."

    gpu_mtbf_hours: Annotated[float | None, Parameter(group=WORKLOAD)] = None
    "Hours between failures, per GPU, for the wall clock of --tokens. Default: 50000, as Llama 3 had."

    checkpoint_gb_per_s: Annotated[float | None, Parameter(group=WORKLOAD)] = None
    "Rate at which the job's checkpoints are written. Default: 1 per node."

    restart_minutes: Annotated[float | None, Parameter(group=WORKLOAD)] = None
    "From a failure to the next step. Default: 10."

    offload: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "Kept in host memory: optimizer, parameters, activations, each with a share: optimizer,activations:0.5; or none."

    moe_dispatcher: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "alltoall (default), or deepep, which sends a token to each rank once."

    cuda_graphs: Annotated[bool | None, Parameter(group=WORKLOAD)] = None
    "Replay blocks as CUDA graphs, so that launches cost nothing (Megatron, dense models). Default: off."

    dropout: Annotated[bool | None, Parameter(group=WORKLOAD)] = None
    "Train with dropout, which keeps a mask of one byte an element (Megatron). Default: off."

    document_length: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "Mean tokens of the documents packed into a sequence, each attending within itself: 2000, 2000:equal, none."

    lora_rank: Annotated[int | None, Parameter(group=WORKLOAD, converter=whole_number)] = None
    "Train low-rank adapters of this rank, such as 16, beside a frozen model."

    lora_targets: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "Projections with an adapter: all (default), or some of q,k,v,o,gate,up,down."

    base_precision: Annotated[str | None, Parameter(group=WORKLOAD)] = None
    "How the frozen matrices are held: compute (default), or nf4 for QLoRA."

    ramp: Annotated[str | None, Parameter(name=("--ramp", "--ramp-up"), group=WORKLOAD)] = None
    "Batch ramp-up START:END:TOKENS, such as 3072:15360:469B."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RuntimeFlags:
    """Which framework runs it."""

    runtime: Annotated[str | None, Parameter(group=CLUSTER)] = None
    (
        "megatron (default), megatron-fsdp, torchtitan, fsdp, accelerate, fsdp1, deepspeed, deepspeed-zero, nanotron "
        "or fivefold, with a version or a device: megatron@0.16, torchtitan@2026.8, fivefold@cpu."
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LayoutFlags:
    """How it is split."""

    tp: Annotated[str | None, Parameter(group=DEGREES)] = None
    "Tensor parallelism."

    cp: Annotated[str | None, Parameter(group=DEGREES)] = None
    "Context parallelism."

    pp: Annotated[str | None, Parameter(group=DEGREES)] = None
    "Pipeline stages."

    vpp: Annotated[str | None, Parameter(group=DEGREES)] = None
    "Chunks per pipeline stage (interleaving)."

    ep: Annotated[str | None, Parameter(group=DEGREES)] = None
    "Expert parallelism."

    etp: Annotated[str | None, Parameter(group=DEGREES)] = None
    "Tensor parallelism inside experts."

    micro_batch: Annotated[str | None, Parameter(name=("--micro-batch", "--mbs"), group=DEGREES)] = None
    "Sequences per micro-batch."

    no_tp: Annotated[bool, Parameter(group=DEGREES, negative="", show_default=False)] = False
    "The same as --tp 1; likewise the next three."

    no_cp: Annotated[bool, Parameter(group=DEGREES, negative="", show_default=False)] = False
    "--cp 1."

    no_pp: Annotated[bool, Parameter(group=DEGREES, negative="", show_default=False)] = False
    "--pp 1."

    no_ep: Annotated[bool, Parameter(group=DEGREES, negative="", show_default=False)] = False
    "--ep 1."

    zero: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "ZeRO stage, 0 to 3."

    dp_replicate: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "HSDP: replicas outside the sharding groups."

    recompute: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "none, selective or full."

    recompute_modules: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "Parts that selective recomputation drops, such as layernorm,mlp; / parts alternatives."

    recompute_layers: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "Blocks per stage that full recomputation covers, or all."

    cp_kind: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "p2p (ring) or a2a (Ulysses)."

    schedule: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "Such as afab, 1f1b or interleaved; an unknown name is answered with all."

    first_stage_layers: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "Blocks on the first pipeline stage."

    last_stage_layers: Annotated[str | None, Parameter(group=OPTIONS)] = None
    "Blocks on the last pipeline stage."

    account_for_embedding: Annotated[bool | None, Parameter(group=OPTIONS)] = None
    "In an even split the embedding counts as one block."

    account_for_loss: Annotated[bool | None, Parameter(group=OPTIONS)] = None
    "In an even split the head counts as one block."

    sequence_parallel: Annotated[bool | None, Parameter(group=OPTIONS)] = None
    "Default: on when tp > 1."

    overlap_grad: Annotated[bool | None, Parameter(group=OPTIONS)] = None
    "Gradient reduction beside backward. Default: on."

    overlap_param: Annotated[bool | None, Parameter(group=OPTIONS)] = None
    "Parameter gathers beside forward. Default: on with ZeRO."

    overlap_tp: Annotated[bool | None, Parameter(group=OPTIONS)] = None
    "TP collectives beside matrix products. Default: off."

    overlap_ep: Annotated[bool | None, Parameter(group=OPTIONS)] = None
    "Expert exchanges beside compute. Default: off."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """How it is printed."""

    json: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False
    "Print one JSON document on standard output."

    color: Annotated[Literal["auto", "always", "never"], Parameter(group=OUTPUT)] = "auto"
    "auto follows the terminal, FORCE_COLOR and NO_COLOR."
