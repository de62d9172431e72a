"""Public cases of Megatron launches that failed, fitted or surprised, and what `check` says of them.

    python benchmarks/cases.py            print the tables of docs/cases.md
    python benchmarks/cases.py --write    put them there

Each case is retold as one launch, or several that it decides between, from the facts that its source states; what it
does not state takes Megatron-LM's defaults or what `assumed` says. Expected is what the source reports: "fits", "oom"
(starts and runs out of memory), "starts", "refused" (would not start, or trains something else than was asked for).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fivefold.advise.check import check
from fivefold.advise.result import Check
from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.interop.megatron.read import Asked, Reading, read_source

DOCUMENT = Path(__file__).parent.parent / "docs" / "cases.md"
BEGIN, END = "<!-- computed: begin -->", "<!-- computed: end -->"
ISSUES = "https://github.com/NVIDIA/Megatron-LM/issues"


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a case. options: after the base's, so that they win. environment: lines before it."""

    options: str
    expected: str
    gpus: int = 8
    gpu: str = "h100-sxm"
    runtime: str = "megatron"
    environment: str = "export CUDA_DEVICE_MAX_CONNECTIONS=1"


@dataclass(frozen=True, slots=True)
class Case:
    """id: as in the collection that it comes from. facts: what the source reports, in own words. explained: why the
    answer may differ from it."""

    id: str
    source: str
    facts: str
    launches: tuple[Launch, ...]
    assumed: str = ""
    explained: str = ""
    left_out: str = field(default="")


SMALL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 131072 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 --hidden-dropout 0 --attention-dropout 0 "
    "--position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
)
SEVEN = SMALL + "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
DEEPSEEK = SMALL + (
    "--num-layers 14 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--num-experts 256 "
    "--moe-layer-freq '([0]*3+[1]*11)' --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
    "--moe-router-topk 8 --mtp-num-layers 1 --normalization RMSNorm --vocab-size 129280 --qk-layernorm "
    "--moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --use-distributed-optimizer --global-batch-size 256 "
    "--pipeline-model-parallel-size 4 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 "
    "--pipeline-model-parallel-layout 'Ett|(tt|)*6mL' "
)
MOE = SMALL + "--num-experts 8 --expert-model-parallel-size 2 --moe-ffn-hidden-size 1024 "
EP_OVERLAP = MOE + "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall "
FSDP2 = SMALL + "--use-torch-fsdp2 --no-gradient-accumulation-fusion "
PIPE = SMALL + "--num-layers 24 "

CASES: tuple[Case, ...] = (
    Case("a02", f"{ISSUES}/606", "7B at sequence length 64 on 8 A100 of 40 GB, TP = PP = 1: out of memory",
         (Launch(SEVEN + "--seq-length 64 --global-batch-size 8", "oom", gpu="a100-40g-sxm"),),
         "no distributed optimizer, the default"),
    Case("a10", "https://github.com/NVIDIA/Megatron-LM/pull/6311",
         "DeepSeek-V3 proxy of 14 layers on 64 H100, PP4 EP16: runs, with 68,704 MB at the peak, 60,154 MB with "
         "full recomputation (72.0 and 63.1 GB where MB are MiB)",
         (Launch(DEEPSEEK, "fits", gpus=64),
          Launch(DEEPSEEK + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "fits",
                 gpus=64)),
         "DeepSeek-V3's sizes with its 3 dense layers, distributed optimizer"),
    Case("c01", f"{ISSUES}/468", "80 layers on PP16 with 2 virtual stages passes all checks and trains 64 layers",
         (Launch(SMALL + "--num-layers 80 --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 2",
                 "refused", gpus=16),)),
    Case("c02", f"{ISSUES}/1304", "30 layers on PP4 train as 28",
         (Launch(SMALL + "--num-layers 30 --pipeline-model-parallel-size 4", "refused"),)),
    Case("c03", f"{ISSUES}/1778", "a last-stage count of 1 at PP1 trains a model of 1 layer instead of 20",
         (Launch(SMALL + "--num-layers 20 --decoder-last-pipeline-num-layers 1", "refused"),)),
    Case("c04", "https://github.com/NVIDIA-NeMo/Speech/issues/14288",
         "interleaving on PP6 with 3 micro-batches raises ValueError",
         (Launch(PIPE + "--pipeline-model-parallel-size 6 --num-virtual-stages-per-pipeline-rank 2 "
                        "--global-batch-size 3",
                 "refused", gpus=6),)),
    Case("c05", "Megatron-LM megatron/core/pipeline_parallel/schedules.py at d98e8a64dd",
         "interleaved micro-batches have to be a multiple of the group, or leave at least PP over",
         (Launch(PIPE + "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
                        "--global-batch-size 12",
                 "refused"),
          Launch(PIPE + "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
                        "--global-batch-size 16",
                 "starts"))),
    Case("c06", "Megatron-LM num_microbatches_calculator.py at d98e8a64dd",
         "the global batch has to be a multiple of micro-batch x DP",
         (Launch(SMALL + "--micro-batch-size 2 --global-batch-size 24", "refused"),
          Launch(SMALL + "--micro-batch-size 2 --global-batch-size 32", "starts"))),
    Case("c16", "Megatron-LM transformer_config.py at d98e8a64dd",
         "TP8 on 4 key/value heads is legal now, and was not in older releases",
         (Launch(SMALL + "--group-query-attention --num-query-groups 4 --tensor-model-parallel-size 8", "starts"),
          Launch(SMALL + "--group-query-attention --num-query-groups 4 --tensor-model-parallel-size 8", "refused",
                 runtime="megatron@0.14"),
          Launch(SMALL + "--num-attention-heads 24 --kv-channels 64 --group-query-attention --num-query-groups 3 "
                 "--tensor-model-parallel-size 2", "refused"))),
    Case("c17", "https://github.com/NVIDIA/Megatron-LM/pull/5756", "heads have to be a multiple of the query groups",
         (Launch(SMALL + "--group-query-attention --num-query-groups 3", "refused"),)),
    Case("c18", "https://github.com/NVIDIA-NeMo/RL/pull/3563",
         "with CP and SP the sequence has to be a multiple of CP x lcm(2, TP); the command line only checks 2 x CP",
         (Launch(SMALL + "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel "
                         "--seq-length 2052",
                 "refused"),
          Launch(SMALL + "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel "
                         "--seq-length 2056",
                 "starts"),
          Launch(SMALL + "--context-parallel-size 2 --tensor-model-parallel-size 1 --seq-length 2050", "refused"))),
    Case("c21", "https://github.com/NVIDIA-NeMo/Speech/pull/8869",
         "FP8 with CP stops at a matrix of 184 tokens per rank: its width has to be a multiple of 16",
         (Launch(SMALL + "--fp8-format hybrid --context-parallel-size 2 --seq-length 368", "refused"),
          Launch(SMALL + "--fp8-format hybrid --context-parallel-size 2 --seq-length 384", "starts"))),
    Case("c22", "https://github.com/ROCm/Megatron-LM/pull/85",
         "a dense model with TP2 and without SP is refused with a message about MoE; with experts it has to be",
         (Launch(SMALL + "--tensor-model-parallel-size 2", "refused"),
          Launch(MOE + "--tensor-model-parallel-size 2", "refused")),
         explained="the refusal of the dense model was a bug of one fork's revision (the check stood outside its "
                   "guard), "
         "mended by the pull request; it is no rule here"),
    Case("c25", f"{ISSUES}/1459", "EP and CP can be combined: experts have a grid of their own",
         (Launch(MOE + "--context-parallel-size 2", "starts"),)),
    Case("c36", "https://github.com/epfLLM/Megatron-LLM/issues/103",
         "a vocabulary of 32,002 at TP2 is padded to 32,256",
         (Launch(SMALL + "--vocab-size 32002 --tensor-model-parallel-size 2", "padded 32256"),)),
    Case("c38", f"{ISSUES}/1754", "a vocabulary that TP does not divide gives another loss: worth a warning",
         (Launch(SMALL + "--vocab-size 50257 --make-vocab-size-divisible-by 1 --tensor-model-parallel-size 2",
                 "noted"),)),
    Case("c39", f"{ISSUES}/792", "the distributed optimizer with an odd DP works",
         (Launch(SMALL + "--use-distributed-optimizer --global-batch-size 63", "starts", gpus=3),)),
    Case("c40", "https://github.com/pytorch/torchtitan/issues/1147; Megatron-LM arguments.py at d98e8a64dd",
         "CUDA_DEVICE_MAX_CONNECTIONS has to be 1 with TP before Blackwell, and not 1 with FSDP",
         (Launch(SMALL + "--tensor-model-parallel-size 2", "refused",
                 environment="export CUDA_DEVICE_MAX_CONNECTIONS=32"),
          Launch(SMALL + "--tensor-model-parallel-size 2", "starts"),
          Launch(SMALL + "--tensor-model-parallel-size 2", "starts", gpu="b200",
                 environment="export CUDA_DEVICE_MAX_CONNECTIONS=32"),
          Launch(FSDP2, "refused"))),
    Case("c41", "Megatron-LM arguments.py at d98e8a64dd",
         "torch FSDP2 excludes PP, EP, the distributed optimizer, fused accumulation, tied embeddings and fp16",
         (Launch(FSDP2 + "--pipeline-model-parallel-size 2", "refused", environment=""),
          Launch(FSDP2 + "--num-experts 8 --expert-model-parallel-size 2", "refused", environment=""),
          Launch(FSDP2 + "--use-distributed-optimizer", "refused", environment=""),
          Launch(SMALL + "--use-torch-fsdp2", "refused", environment=""),
          Launch(FSDP2 + "--ckpt-format torch", "refused", environment=""))),
    Case("c42", "Megatron-LM transformer_config.py at d98e8a64dd",
         "overlap of the expert exchange needs interleaving with PP, EP above 1, alltoall or flex, no full recompute",
         (Launch(EP_OVERLAP + "--pipeline-model-parallel-size 2", "refused"),
          Launch(EP_OVERLAP + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "starts"),
          Launch(EP_OVERLAP + "--expert-model-parallel-size 1", "refused"),
          Launch(EP_OVERLAP + "--moe-token-dispatcher-type allgather", "refused"),
          Launch(EP_OVERLAP + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                 "refused"))),
    Case("c43", "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1697",
         "the evaluation batch has to be a multiple of its micro-batch x DP, or the run dies at the first evaluation",
         (Launch(SMALL + "--eval-global-batch-size 12", "refused"),
          Launch(SMALL + "--eval-global-batch-size 16", "starts"))),
)  # fmt: skip

LEFT_OUT: tuple[tuple[str, str], ...] = (
    ("a03", "NeMo Automodel's FSDP2 with a pipeline, not Megatron; the packed batch is not stated in full"),
    ("a04", "the micro-batch size is not stated, and Megatron-LM has no default for it"),
    ("a08", "no size of the model is stated"),
    ("a09", "a multimodal model whose modules are not stated"),
    ("a30", "neither the sizes of the model nor the GPUs are stated"),
    ("a37", "NeMo Automodel's FSDP, not Megatron"),
    ("c13", "transformers' and Automodel's own tensor parallelism, not Megatron"),
    ("c19", "the lengths of packed sub-sequences are data, not options"),
    ("c44", "a bug in slicing, closed as such; the configuration itself is legal"),
)


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one case."""

    case: Case
    said: tuple[str, ...]
    agrees: bool


def scores() -> list[Score]:
    """Every case, checked."""
    return [_score(case) for case in CASES]


def _score(case: Case) -> Score:
    said = tuple(verdict(launch) for launch in case.launches)
    agrees = all(_same(launch.expected, each) for launch, each in zip(case.launches, said, strict=True))
    return Score(case, said, agrees)


def _same(expected: str, said: str) -> bool:
    return said.startswith(expected) or (expected == "starts" and said.startswith(("fits", "oom")))


def verdict(launch: Launch) -> str:
    """ "fits 68.2 GB", "oom 121 GB", "refused (rule, ...)", or what a launch with another question asks for."""
    text = f"{launch.environment}\ntorchrun --nproc_per_node {min(launch.gpus, 8)} --nnodes {-(-launch.gpus // 8)} "
    try:
        reading = read_source(f"{text} pretrain_gpt.py {launch.options}\n", "case.sh", None, Asked(gpu=launch.gpu))
    except FivefoldError as error:
        return f"refused ({error.code})"
    found = check(reading, load_cluster(launch.gpu, reading.gpus, reading.gpus_per_node), launch.runtime, top=0)
    return _words(launch, found, reading)


def _words(launch: Launch, found: Check, reading: Reading) -> str:
    if launch.expected.startswith("padded"):
        return f"padded {reading.padded_vocab}"
    if launch.expected == "noted":
        return "noted" if any("padded" in note for note in found.notes) else "not noted"
    if not found.starts:
        return f"refused ({', '.join(dict.fromkeys(each.id for each in found.estimate.violations))})"
    memory = found.estimate.memory
    peak = f" {memory.peak_bytes / 1e9:.1f} GB" if memory is not None else ""
    return ("fits" if found.fits else "oom") + peak


def tables() -> Iterator[str]:
    """The page's computed part."""
    rows = scores()
    agreed = sum(row.agrees for row in rows)
    yield f"{agreed} of {len(rows)} cases agree ({agreed / len(rows):.0%})."
    yield ""
    yield "| case | reported | expected | said | |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        expected = "; ".join(launch.expected for launch in row.case.launches)
        mark = "agrees" if row.agrees else "**differs**"
        facts = f"{row.case.facts} ({row.case.source})" + (f". Assumed: {row.case.assumed}" if row.case.assumed else "")
        yield f"| {row.case.id} | {facts} | {expected} | {'; '.join(row.said)} | {mark} |"
    yield ""
    yield "Where the answer differs:"
    yield ""
    yield from (f"- {row.case.id}: {row.case.explained}." for row in rows if not row.agrees)
    yield ""
    yield "Left out, and what is missing:"
    yield ""
    yield from (f"- {name}: {why}." for name, why in LEFT_OUT)


def main(write: bool) -> None:
    """Print the tables, or put them into the page."""
    text = "\n".join(tables())
    if not write:
        print(text)
        return
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
