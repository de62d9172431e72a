"""Launch scripts in the styles that people use, each against what its author meant, written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import FivefoldError
from fivefold.interop.megatron.commands import ScriptInputs
from fivefold.interop.megatron.read import Asked, Reading, read_file, read_source
from fivefold.model import count_params, load_model

# Script, what the user adds, and what is meant: model, work and layout fields by dotted name, GPUs, GPUs per node.
STYLES: dict[str, tuple[Asked, dict[str, Any], int, int | None]] = {
    "variables.sh": (
        Asked(),
        {"model.layers": 32, "model.hidden": 4096, "model.vocab": 32000, "work.seq_len": 4096, "work.global_batch": 64,
         "layout.tp": 2, "layout.pp": 2, "layout.sequence_parallel": True, "layout.zero": 1,
         "layout.overlap.grad": True, "layout.overlap.param": True, "layout.micro_batch": 1,
         "work.tokens": 1000 * 64 * 4096},
        16, 8,
    ),
    "arrays.sh": (
        Asked(),
        {"model.layers": 32, "work.precision": "fp8", "work.global_batch": 128, "layout.tp": 2, "model.vocab": 128257,
         "layout.overlap.grad": False, "work.tokens": 100000 * 8192},
        8, 8,
    ),
    "heredoc.sh": (
        Asked(),
        {"model.layers": 24, "model.hidden": 4096, "work.seq_len": 2048, "work.global_batch": 256, "layout.tp": 4,
         "layout.micro_batch": 2, "layout.zero": 0, "layout.sequence_parallel": False},
        32, 8,
    ),
    "srun_wrapper.sh": (
        Asked(),
        {"model.layers": 80, "layout.tp": 8, "layout.pp": 8, "layout.vpp": 2, "layout.recompute.kind": "selective",
         "work.global_batch": 512, "model.vocab": 32000, "work.seq_len": 4096},
        128, 8,
    ),
    "conda_preamble.sh": (
        Asked(),
        {"model.layers": 24, "model.hidden": 2048, "work.precision": "fp16", "layout.tp": 1, "layout.micro_batch": 4,
         "model.learned_positions": 2048, "model.tied_embeddings": True},
        8, 4,
    ),
    "sourced.sh": (
        Asked(),
        {"model.layers": 40, "model.hidden": 5120, "layout.tp": 4, "layout.pp": 2, "work.global_batch": 256},
        32, 8,
    ),
    "strings_eval.sh": (
        Asked(),
        {"model.layers": 48, "model.hidden": 6144, "layout.tp": 4, "layout.pp": 4, "layout.micro_batch": 2,
         "work.global_batch": 1024, "model.vocab": 50305},
        64, 8,
    ),
    "case_if.sh": (
        Asked(script=ScriptInputs(arguments=("70b",), sets={"NNODES": "8", "SEQ_LEN": "16384"})),
        {"model.layers": 80, "model.hidden": 8192, "layout.tp": 8, "layout.pp": 4, "layout.cp": 2,
         "work.seq_len": 16384, "layout.sequence_parallel": True},
        64, 8,
    ),
    "functions.sh": (
        Asked(),
        {"model.layers": 36, "model.hidden": 2560, "layout.tp": 2, "layout.pp": 1, "layout.zero": 1,
         "work.precision": "bf16", "layout.micro_batch": 4},
        8, 8,
    ),
    "nemo_overrides.sh": (
        Asked(),
        {"model.name": "llama-3-70b", "layout.tp": 4, "layout.pp": 4, "layout.vpp": 5, "layout.cp": 2,
         "work.global_batch": 128, "layout.overlap.param": True, "layout.recompute.modules": ("mlp",)},
        32, 8,
    ),
    "gpt_config.yaml": (
        Asked(gpus=16),
        {"model.layers": 24, "model.hidden": 2048, "layout.tp": 2, "layout.pp": 2, "layout.recompute.kind": "full",
         "work.global_batch": 128, "model.tied_embeddings": False, "layout.sequence_parallel": True},
        16, None,
    ),
    "bridge_overrides.yaml": (
        Asked(gpus=32, gpus_per_node=8, model="qwen3-30b-a3b"),
        {"model.name": "qwen3-30b-a3b", "layout.tp": 4, "layout.pp": 2, "layout.ep": 4, "layout.etp": 1,
         "work.grad_dtype": "fp32", "layout.micro_batch": 2},
        32, 8,
    ),
}  # fmt: skip


def field(reading: Reading, name: str) -> Any:
    value: Any = reading
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", STYLES)
def test_every_style_is_understood(name: str, scripts: Path) -> None:
    asked, meant, gpus, per_node = STYLES[name]
    reading = read_file(scripts / name, asked)
    assert {key: field(reading, key) for key in meant} == meant
    assert (reading.gpus, reading.gpus_per_node) == (gpus, per_node)
    assert reading.violations == [] or name in ("heredoc.sh",)


def test_every_script_is_a_case(scripts: Path) -> None:
    assert {path.name for path in scripts.iterdir() if path.suffix in (".sh", ".yaml")} == set(STYLES)


def test_the_model_has_the_published_parameters(scripts: Path) -> None:
    """Built from options, Llama-2-7B and GPT-2's like count the same as from their configurations."""
    reading = read_file(scripts / "variables.sh")
    assert count_params(reading.model).total == count_params(load_model("llama-2-7b")).total
    reading = read_file(scripts / "srun_wrapper.sh")
    assert count_params(reading.model).total == count_params(load_model("llama-2-70b")).total


def test_a_deepseek_launch_is_the_catalogues_model() -> None:
    text = (
        "torchrun --nproc_per_node 8 --nnodes 32 pretrain_gpt.py --num-layers 61 --hidden-size 7168 "
        "--ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 "
        "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 "
        "--moe-layer-freq '([0]*3+[1]*58)' --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
        "--moe-router-topk 8 --swiglu --normalization RMSNorm --disable-bias-linear --qk-layernorm "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 4096 "
        "--max-position-embeddings 4096 --vocab-size 129280 --micro-batch-size 1 --global-batch-size 1024 --bf16 "
        "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 "
        "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout 'Et|(tt|)*30L' --moe-grouped-gemm"
    )
    reading = read_source(text, "x.sh", None)
    assert count_params(reading.model).total == count_params(load_model("deepseek-v3")).total
    assert (reading.layout.vpp, reading.layout.ep, reading.layout.etp) == (4, 32, 1) or reading.notes
    assert reading.violations == []


def test_places_and_assumptions(scripts: Path) -> None:
    reading = read_file(scripts / "sourced.sh")
    assert str(reading.given.place("--num-layers")) == "sourced_model.inc:3"
    assert str(reading.given.place("--tensor-model-parallel-size")) == "sourced_cluster.env:4"
    assert reading.launch.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert [shown for _, shown, _ in reading.launch.files.not_read] == ["/opt/site/secrets.sh"]  # type: ignore[union-attr]
    reading = read_file(scripts / "variables.sh")
    assert {each.field for each in reading.assumed} == {"--vocab-size", "variables.sh:6"}
    assert read_file(scripts / "heredoc.sh").gpu == "a100"


def test_what_is_missing_is_asked_for_by_name(scripts: Path) -> None:
    text = "TP=$SIZE\ntorchrun --nproc_per_node $N pretrain_gpt.py --num-layers 4 --tensor-model-parallel-size $TP"
    with pytest.raises(FivefoldError) as caught:
        read_source(text, "x.sh", None)
    message = caught.value.message
    for part in (
        "--hidden-size",
        "--micro-batch-size",
        "--seq-length",
        "--set SIZE=",
        "--set N=",
        "--bf16",
        "--vocab-size",
    ):
        assert part in message, part
    with pytest.raises(FivefoldError, match="no command in it"):
        read_file(scripts / "case_if.sh", Asked(script=ScriptInputs(arguments=("900b",))))


def test_the_users_additions_win(scripts: Path) -> None:
    extra = "--tensor-model-parallel-size 4 --vocab-size 1000"
    reading = read_file(scripts / "variables.sh", Asked(extra=extra, gpus=32, script=ScriptInputs(sets={"NODES": "4"})))
    assert (reading.layout.tp, reading.model.vocab, reading.gpus, reading.work.global_batch) == (4, 1000, 32, 128)


def test_several_launches_are_named_by_line() -> None:
    one = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {} --hidden-size 64 --num-attention-heads 4 {}"
    rest = "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --bf16 --vocab-size 100"
    text = f"if [ -d /ckpt ]; then\n{one.format(2, rest)}\nelse\n{one.format(4, rest)}\nfi\n"
    with pytest.raises(FivefoldError, match=r"2 launches that differ \(x.sh:2, x.sh:4\)"):
        read_source(text, "x.sh", None)
    reading = read_source(text, "x.sh", None, Asked(script=ScriptInputs(launch=4)))
    assert reading.model.layers == 4
    assert any("condition" in note for note in reading.notes)


def test_nothing_to_read_says_so() -> None:
    for text in ("echo hello\n", "python tools/preprocess_data.py --num-layers 3 --workers 4\n", ""):
        with pytest.raises(FivefoldError, match="no command in it starts training"):
            read_source(text, "x.sh", None)


def test_other_launchers(read) -> None:
    options = "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 "
    options += "--max-position-embeddings 64 --micro-batch-size 1 --vocab-size 100"
    cases = {
        "srun -N 4 --ntasks-per-node=8 python": (32, 8),
        "srun -n 16 -N 2 python -u": (16, 8),
        "mpirun -np 64 -npernode 8 python": (64, 8),
        "deepspeed --num_nodes 2 --num_gpus 4": (8, 4),
        "torchrun --nnodes 1:4 --nproc-per-node 2": (8, 2),
        "torchrun": (1, 1),
        "srun --nodes 2 torchrun --nnodes 2 --nproc_per_node=4": (8, 4),
        "#SBATCH -N 3\n#SBATCH --ntasks-per-node=4\nsrun python": (12, 4),
        "#SBATCH --nodes=2\ntorchrun --nnodes $SLURM_NNODES --nproc_per_node 8": (16, 8),
        "accelerate launch --num_processes 16 --num_machines 2": (16, 8),
        "WORLD_SIZE=24\nmylauncher": (24, None),
    }
    for front, expected in cases.items():
        reading = read_source(f"{front} {options}\n", "x.sh", None)
        assert (reading.gpus, reading.gpus_per_node) == expected, front


MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 32 --bf16 --vocab-size 32000"
)


@pytest.mark.parametrize(
    "line", ["-A x -p batch -N 4 --ntasks-per-node=8 --exclusive", "-N4 --mem=0 --ntasks-per-node 8"]
)
def test_one_directive_line_holds_several_options(line: str) -> None:
    reading = read_source(f"#SBATCH {line}\nsrun python pretrain_gpt.py {MODEL} --seed $SLURM_NNODES\n", "x.sh", None)
    assert (reading.gpus, reading.gpus_per_node) == (32, 8)
    assert reading.given.integer("--seed") == 4


def test_words_of_unknown_programs_are_named_where_something_is_missing() -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py $(make_args 7b) {MODEL.replace('--num-layers 8', '')}\n"
    with pytest.raises(FivefoldError, match=r"--num-layers is not given.*words at x.sh:1 are not known.*make_args 7b"):
        read_source(text, "x.sh", None)


NEMO = (
    "torchrun --nproc-per-node 8 {program} trainer.num_nodes=1 trainer.precision={precision} model.num_layers=8 "
    "model.hidden_size=1024 model.num_attention_heads=16 model.encoder_seq_length=2048 model.micro_batch_size=1 "
    "model.global_batch_size=32 model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=1 {more}"
)


def test_keys_of_nemo_1() -> None:
    more = (
        "model.normalization=rmsnorm model.activation=fast-swiglu model.bias=false "
        "model.optim.name=distributed_fused_adam model.activations_checkpoint_granularity=selective"
    )
    text = NEMO.format(program="megatron_gpt_pretraining.py", precision="16", more=more)
    reading = read_source(text, "x.sh", None, Asked(extra="--vocab-size 32000"))
    block = reading.model.kinds[0]
    assert (block.norm, reading.work.precision, reading.layout.zero) == ("rmsnorm", "fp16", 1)
    assert reading.layout.recompute.kind == "selective"
    assert not reading.layout.overlap.grad
    assert not reading.unknown
    assert field(reading, "model.kinds")[0].feed.gated
    with pytest.raises(FivefoldError, match=r"1\. --vocab-size is not given") as raised:
        read_source(text, "x.sh", None)
    assert "--model" not in str(raised.value)


def test_what_a_recipe_sets_is_assumed_and_said() -> None:
    text = NEMO.format(program="pretrain.py --recipe llama3_8b_pretrain_config", precision="bf16-mixed", more="")
    reading = read_source(text, "x.sh", None, Asked(model="llama-3-8b"))
    overlap = reading.layout.overlap
    assert (reading.layout.zero, overlap.grad, overlap.param) == (1, True, True)
    said = " ".join(each.field for each in reading.assumed)
    assert "ddp.use_distributed_optimizer" in said
    assert "model.sequence_parallel" in said
    off = read_source(text + " ddp.use_distributed_optimizer=false", "x.sh", None, Asked(model="llama-3-8b"))
    assert (off.layout.zero, off.layout.overlap.param) == (0, False)
    tuned = read_source(text.replace("pretrain_config", "sft_config"), "x.sh", None, Asked(model="llama-3-8b"))
    assert (tuned.layout.zero, tuned.layout.overlap.grad) == (1, False)


def test_a_manifest_is_no_configuration() -> None:
    with pytest.raises(FivefoldError, match="Kubernetes manifest"):
        read_source("apiVersion: v1\nkind: Pod\nspec: {}\n", "x.yaml", None)


def test_options_of_old_releases_name_their_heirs() -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} --activations-checkpoint-method uniform\n"
    with pytest.raises(FivefoldError, match="--recompute-granularity full"):
        read_source(text, "x.sh", None)
