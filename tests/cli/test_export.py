"""`fivefold export` and `fivefold sweep`: files that are written, answers that are no, and bad input."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fivefold.estimate.planfile import load_plan

MODEL = ("llama-3-70b", "--gpus", "64", "--gbs", "512")
LLAMA = (*MODEL, "--tp", "4", "--pp", "4", "--cp", "2")
UNFIT = (*MODEL, "--zero", "0", "--cp", "2")


def test_a_plan_file_becomes_scripts_that_bash_accepts(run, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    assert run("estimate", *LLAMA, "--save", str(plan)).code == 0
    done = run("export", str(plan), "--launcher", "torchrun,slurm", "--partition", "gpu", "-o", str(out))
    assert done.code == 0, done.err
    assert sorted(path.name for path in out.iterdir()) == ["llama-3-70b.sbatch", "llama-3-70b.sh"]
    for path in out.iterdir():
        assert subprocess.run(["bash", "-n", str(path)], timeout=30).returncode == 0
        assert path.stat().st_mode & 0o100
    assert "DATA_PATH" in done.out
    assert "#SBATCH --partition=gpu" in (out / "llama-3-70b.sbatch").read_text()


def test_the_answer_as_json(run, tmp_path: Path) -> None:
    done = run("export", *LLAMA, "-o", str(tmp_path), "--launcher", "kubernetes", "--image", "x", "--json")
    document = done.document
    assert done.code == 0
    assert (document["kind"], document["to"], document["reason"]) == ("export", "megatron", None)
    assert document["files"] == [str(tmp_path / "llama-3-70b.trainjob.yaml")]
    assert "DATA_PATH" in document["needs"]


def test_checking_what_was_exported_says_the_same_as_the_estimate(run, tmp_path: Path) -> None:
    exported = run("export", *LLAMA, "-o", str(tmp_path), "--launcher", "slurm", "--json").document
    checked = run("check", str(tmp_path / "llama-3-70b.sbatch"), "--gpu", "h100-sxm", "--json")
    assert checked.code == 0, checked.err
    found = checked.document["estimate"]
    assert found["layout"] == exported["layout"]
    assert found["step"]["seconds"] == exported["step"]["seconds"]
    assert found["memory"]["peak_bytes"] == exported["memory"]["peak_bytes"]
    assert checked.document["unknown_options"] == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*MODEL, "--tp", "3"), "does not divide"),
        (UNFIT, "not to fit"),
        ((*LLAMA, "--ramp", "101:512:1B"), "ramp is not possible"),
    ],
)
def test_what_would_not_start_or_fit_is_not_written(run, tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    done = run("export", *flags, "-o", str(tmp_path / "out"))
    assert done.code == 1, done.err
    assert said in " ".join(done.out.split())
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_written_by_force(run, tmp_path: Path) -> None:
    done = run("export", *UNFIT, "--force", "-o", str(tmp_path))
    assert done.code == 0, done.err
    assert (tmp_path / "llama-3-70b.sh").exists()


def test_our_own_trainer_gets_the_plan_beside_its_script(run, tmp_path: Path) -> None:
    done = run("export", "llama-3-8b", "--gpus", "8", "--tp", "2", "--to", "fivefold", "-o", str(tmp_path))
    assert done.code == 0, done.err
    saved = load_plan(tmp_path / "plan.toml")
    assert (saved.runtime, saved.layout.tp) == ("fivefold", 2)
    words = (tmp_path / "llama-3-8b.sh").read_text().replace("\\\n", " ").split()
    assert words[words.index("-m") :][:4] == ["-m", "fivefold", "train", str(tmp_path / "plan.toml")]


def test_a_plan_of_fivefolds_own_is_written_for_it(run, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.toml")
    assert run("estimate", "llama-3-8b", "--gpus", "8", "--tp", "2", "--runtime", "fivefold", "--save", plan).code == 0
    done = run("export", plan, "-o", str(tmp_path / "out"), "--json")
    assert done.code == 0, done.err
    assert (done.document["to"], done.document["planned_for"]) == ("fivefold", None)
    forced = run("export", plan, "--to", "megatron", "-o", str(tmp_path / "other"), "--json")
    assert (forced.document["to"], forced.document["planned_for"]) == ("megatron", "fivefold")


@pytest.mark.parametrize(("runtime", "zero", "code"), [("deepspeed", "1", 0), ("fsdp", "3", 1)])
def test_a_plan_of_another_framework_says_whose_files_and_numbers_these_are(
    run, tmp_path: Path, runtime: str, zero: str, code: int
) -> None:
    """It used to become Megatron-LM's without a word, or be refused by a rule of a framework that nobody named."""
    plan = str(tmp_path / "plan.toml")
    asked = ("--tp", "4", "--zero", zero, "--runtime", runtime, "--save", plan)
    assert run("estimate", "llama-3-8b", "--gpus", "8", *asked).code == 0
    done = run("export", plan, "-o", str(tmp_path / "out"))
    assert done.code == code, done.err
    assert f"The plan is for {runtime}, and what export writes starts megatron" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        (("--to", "nanotron"), "--to"),
        (("--launcher", "make"), "--launcher"),
        (("--launcher", "kubernetes"), "--image"),
        (("--launcher", "kubernetes", "--image", "x", "--kind", "pod"), "--kind"),
        (("--launcher", "slurm", "--partition", "a b"), "--partition"),
        (("--mock-data", "--data-path", "x"), "--data-path"),
    ],
)
def test_bad_input_names_its_option(run, tmp_path: Path, flags: tuple[str, ...], option: str) -> None:
    done = run("export", *LLAMA, *flags, "-o", str(tmp_path / "out"), "--json")
    assert done.code == 2
    assert done.document["error"]["option"] == option
    assert not (tmp_path / "out").exists()


def test_a_hostile_name_and_path_do_not_run(run, tmp_path: Path) -> None:
    hostile = "$(touch pwned)'; touch pwned #"
    flags = ("--name", hostile, "--data-path", hostile, "--tokenizer-model", hostile, "--launcher", "torchrun,slurm")
    done = run("export", *LLAMA, *flags, "-o", str(tmp_path / "out"))
    assert done.code == 0, done.err
    stand_in = tmp_path / "torchrun"
    stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > words\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MASTER_ADDR": "a", "MEGATRON_DIR": "/m", "TRAIN_ITERS": "9"}
    (script,) = (tmp_path / "out").glob("*.sh")
    started = subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, timeout=30)
    assert started.returncode == 0
    assert (tmp_path / "words").read_text().splitlines().count(hostile) == 2
    assert not (tmp_path / "pwned").exists()


def test_stages_are_balanced_by_counts_where_they_do(run, tmp_path: Path) -> None:
    flags = ("llama-3-8b", "--gpus", "16", "--pp", "4", "--gbs", "128", "--balance-stages")
    balance = run("estimate", *flags, "--json").document["balance"]
    assert sum(balance["counted"]["blocks"]) == 32
    assert balance["counted"]["seconds"] < balance["given"]["seconds"]
    done = run("export", *flags, "-o", str(tmp_path), "--json")
    assert done.document["layout"]["stages"][-1] == [[32 - balance["counted"]["blocks"][-1], 32]]
    assert "--decoder-last-pipeline-num-layers" in (tmp_path / "llama-3-8b.sh").read_text()
    assert "Balanced stages" in run("estimate", *flags).out


def test_stages_that_no_counts_express_become_a_text(run, tmp_path: Path) -> None:
    done = run("export", *LLAMA, "--vpp", "5", "--balance-stages", "-o", str(tmp_path))
    assert done.code == 0, done.err
    text = (tmp_path / "llama-3-70b.sh").read_text()
    assert text.count("--pipeline-model-parallel-layout 'Et") == 1
    for count in ("--num-layers-per-virtual", "--num-virtual", "--decoder-", "--account-for"):
        assert count not in text


# ---------------------------------------------------------------- sweep

SMALL = ("llama-3-8b", "--gpus", "8", "--gbs", "64", "--seq", "4096")


def sweep(run, tmp_path: Path, *flags: str) -> tuple[Path, dict[str, Any]]:
    out = tmp_path / "a sweep"
    done = run("sweep", *SMALL, "--top", "4", "-o", str(out), "--json", *flags)
    assert done.code == 0, done.err
    return out, done.document


def test_a_sweeps_first_command_names_its_file_without_an_empty_folder(run, tmp_path: Path) -> None:
    done = run("sweep", *SMALL, "--top", "1", "-o", f"{tmp_path / 'swept'}/", "--json")
    assert done.document["start"] == f"sbatch {tmp_path / 'swept'}/sweep.sbatch"


def test_a_sweep_is_an_array_of_the_best_layouts(run, tmp_path: Path) -> None:
    out, document = sweep(run, tmp_path)
    text = (out / "sweep.sbatch").read_text()
    assert "#SBATCH --array=0-3%1" in text
    assert subprocess.run(["bash", "-n", str(out / "sweep.sbatch")], timeout=30).returncode == 0
    for at in range(4):
        saved = load_plan(out / f"candidates/{at}/plan.toml").estimate()
        assert json.loads(json.dumps(saved.layout.to_dict())) == document["plans"][at]["layout"]
        script = (out / f"candidates/{at}/rank.sh").read_text()
        assert f"--tensor-model-parallel-size {saved.layout.tp}\n" in script
        assert "--mock-data" in script
        assert "--train-iters 20" in script


def test_an_array_s_task_runs_its_candidate_and_logs_it(run, tmp_path: Path) -> None:
    out, _ = sweep(run, tmp_path)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    commands = {
        "scontrol": "echo node-1",
        "srun": 'while [ "$1" != bash ]; do shift; done\nexport SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8\n"$@"',
        "python": 'echo "$@"',
    }
    for name, body in commands.items():
        (binaries / name).write_text(f"#!/bin/bash\n{body}\n")
        (binaries / name).chmod(0o755)
    environment = {
        "PATH": f"{binaries}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node-1",
        "SLURM_ARRAY_TASK_ID": "2", "MEGATRON_DIR": "/m",
    }  # fmt: skip
    subprocess.run(["bash", str(out / "sweep.sbatch")], cwd=tmp_path, env=environment, check=True, timeout=30)
    log = (out / "candidates/2/log.txt").read_text()
    tp = load_plan(out / "candidates/2/plan.toml").layout.tp
    assert log.startswith("-u /m/pretrain_gpt.py --num-layers 32")
    assert f"--tensor-model-parallel-size {tp} " in log


def test_collecting_ranks_by_what_was_measured(run, tmp_path: Path) -> None:
    """Logs of Megatron-LM's form for two candidates, a failure for the third, nothing for the fourth."""
    out, _ = sweep(run, tmp_path)
    slow, fast = 9000.0, 5000.0
    for at, milliseconds in ((0, slow), (1, fast)):
        lines = [
            f" [2026-01-01 00:00:0{step}] iteration {step:8}/      20 | consumed samples: {step * 64:12} | elapsed "
            f"time per iteration (ms): {milliseconds * (10 if step < 4 else 1):.1f} | learning rate: 1.000000E-06 |"
            for step in range(1, 8)
        ]
        lines.insert(2, "[Rank 3] (after 1 iterations) memory (MB) | allocated: 1.0 | max reserved: 61480.0")
        (out / f"candidates/{at}/log.txt").write_text("\n".join(lines))
    (out / "candidates/2/log.txt").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    done = run("sweep", str(out), "--collect", "--json")
    assert done.code == 0, done.err
    found = done.document["candidates"]
    assert [each["number"] for each in found] == [1, 0, 3, 2]
    assert [each["outcome"] for each in found] == ["measured", "measured", "not run", "out of memory"]
    assert [each["step_s"] for each in found] == [5.0, 9.0, None, None]
    assert found[0]["peak_bytes"] == 61480 << 20
    assert found[0]["ratio"] == pytest.approx(5.0 / found[0]["predicted_s"])
    assert "measured" in run("sweep", str(out), "--collect").out


def test_our_trainer_s_steps_are_collected(run, tmp_path: Path) -> None:
    out, _ = sweep(run, tmp_path, "--to", "fivefold", "--launcher", "torchrun")
    assert "--log-file" in (out / "candidates/0/run.sh").read_text()
    steps = [json.dumps({"step": at, "step_s": 1.0 + at, "peak_memory_bytes": 1000 + at}) for at in range(8)]
    (out / "candidates/3/steps.jsonl").write_text("\n".join([*steps, '{"step": 8, "st']))
    (out / "candidates/3/log.txt").write_text("")
    best = run("sweep", str(out), "--collect", "--json").document["candidates"][0]
    assert (best["number"], best["step_s"], best["steps"], best["peak_bytes"]) == (3, 6.0, 8, 1007)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((*SMALL,), "--out"),
        ((*SMALL, "-o", "x", "--steps", "4"), "--steps"),
        ((*SMALL, "-o", "x", "--ramp", "8:64:1B"), "--ramp"),
        ((*SMALL, "-o", "x", "--launcher", "kubernetes"), "--launcher"),
        (("nothing-here", "--collect"), "MODEL"),
        (("nothing-here", "--collect", "-o", "x"), "--out"),
    ],
)
def test_bad_sweeps_name_their_option(run, words: tuple[str, ...], option: str) -> None:
    done = run("sweep", *words, "--json")
    assert done.code == 2
    assert done.document["error"]["option"] == option


def test_nothing_measured_is_a_no(run, tmp_path: Path) -> None:
    out, _ = sweep(run, tmp_path)
    assert run("sweep", str(out), "--collect").code == 1


def test_a_second_sweep_does_not_mix_with_the_first(run, tmp_path: Path) -> None:
    out, _ = sweep(run, tmp_path)
    done = run("sweep", *SMALL, "--top", "2", "-o", str(out), "--json")
    assert done.code == 2
    assert done.document["error"]["option"] == "--out"
    assert (out / "candidates" / "3").is_dir()
