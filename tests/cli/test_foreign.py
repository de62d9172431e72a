"""Configurations of other frameworks are named as such, and not read as a launch that says too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import FivefoldError
from fivefold.interop.foreign import FOREIGN
from fivefold.interop.megatron.read import Asked, read_file
from fivefold.runtime import load_runtime

FILES = {
    "nanotron": (
        "run.yaml",
        "general: {seed: 1}\nparallelism: {dp: 2, tp: 2}\nmodel: {model_config: {hidden_size: 8}}\n",
    ),
    "accelerate": ("default_config.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n"),
    "DeepSpeed": ("ds_config.json", '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'),
    "torchtitan": ("llama.toml", "[job]\nx = 1\n[parallelism]\ntensor_parallel_degree = 2\n"),
}


@pytest.mark.parametrize("name", FILES)
def test_its_framework_and_what_to_try_are_named(name: str, run_check) -> None:
    file, text = FILES[name]
    message = run_check(file, text)
    runtime = next(each.runtime for each in FOREIGN if each.name == name)
    assert f"a configuration of {name}" in message and f"--runtime {runtime}" in message
    assert load_runtime(runtime).name == runtime


@pytest.fixture
def run_check(run, tmp_path: Path):
    """What `fivefold check` says of a file."""

    def check(file: str, text: str) -> str:
        path = tmp_path / file
        path.write_text(text)
        outcome = run("check", str(path), "--gpu", "h100-sxm")
        assert outcome.code == 2
        return outcome.err

    return check


def test_a_plan_file_and_files_of_megatrons_are_not_foreign(tmp_path: Path, run_check) -> None:
    assert "is a plan file" in run_check("plan.toml", 'schema = "fivefold-plan/1"\n')
    path = tmp_path / "arguments.yaml"
    path.write_text("MODEL_ARGS: {--num-layers: 2}\n")
    with pytest.raises(FivefoldError, match="--hidden-size is not given"):
        read_file(path, Asked(gpus=8))
