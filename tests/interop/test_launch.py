"""Launch files do what they say: run by bash with stand-ins for torchrun and Slurm, and checked against schemas."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_schemas import SCHEMAS, faults

from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.interop.export import Data, Export, export, job_of
from fivefold.interop.launch.job import Job, Need, Variable, comment, in_shell, slug
from fivefold.interop.launch.kubernetes import KubernetesOptions, kubernetes
from fivefold.interop.launch.manifest import yaml
from fivefold.interop.launch.slurm import SlurmOptions, slurm
from fivefold.interop.launch.torchrun import torchrun
from fivefold.layout import Layout, Workload
from fivefold.model import load_model

HOSTILE = (
    "; touch pwned #",
    "$(touch pwned)",
    "`touch pwned`",
    "' ; touch pwned ; '",
    '" ; touch pwned ; "',
    "a b  c\\d*?[e]{f,g}~$HOME!",
    "${IFS}$0",
    "$(OUT)",
    "--option",
    "",
)
# A stand-in keeps its words, one per line of NUL-ended text.
_RECORD = '#!/bin/bash\nprintf "%s\\0" "$@" > "$OUT/{name}.words"\nenv -0 > "$OUT/{name}.env"\n{then}\n'


def job(**more: Any) -> Job:
    values: dict[str, Any] = {
        "name": "train",
        "about": ("A job.",),
        "nodes": 2,
        "gpus_per_node": 4,
        "program": ("train.py",),
        "groups": (("model", {"--layers": "4", "--switch": True, "--off": False, "--list": ("1", "2")}),),
        "environment": {"NAME": "value"},
    }
    return Job(**{**values, **more})


def llama(**more: Any) -> Export:
    return Export(
        model=load_model("llama-3-70b"),
        cluster=load_cluster("h100-sxm", gpus=64),
        work=Workload(seq_len=8192, global_batch=512),
        layout=Layout(tp=4, pp=4, cp=2),
        kubernetes=KubernetesOptions(image="registry/train:1"),
        **more,
    )


@pytest.fixture
def stand_ins(tmp_path: Path):
    """stand_ins(torchrun="exit 0"): commands on the path that record their words and then do that."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(**commands: str) -> dict[str, str]:
        for name, then in commands.items():
            path = folder / name
            path.write_text(_RECORD.format(name=name, then=then))
            path.chmod(0o755)
        return {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(tmp_path), "HOME": "/home/someone"}

    return make


def run(script: str, tmp_path: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script"
    path.write_text(script)
    return subprocess.run(
        ["bash", str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )


def words(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / f"{name}.words").read_text().split("\0")[:-1]


def text_of(files: dict[str, str]) -> str:
    (text,) = files.values()
    return text


# ---------------------------------------------------------------- bash


def test_torchrun_gets_the_nodes_the_program_and_every_option(tmp_path: Path, stand_ins) -> None:
    environment = stand_ins(torchrun="")
    done = run(text_of(torchrun(job())), tmp_path, environment | {"MASTER_ADDR": "node-1"})
    assert done.returncode == 0, done.stderr
    assert words(tmp_path, "torchrun") == [
        "--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node-1:29500",
        "--rdzv-id", "train", "train.py", "--layers", "4", "--switch", "--list", "1", "2",
    ]  # fmt: skip
    assert "NAME=value" in (tmp_path / "torchrun.env").read_text().split("\0")


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "DATA"])
def test_nothing_starts_without_what_a_plan_does_not_know(tmp_path: Path, stand_ins, missing: str) -> None:
    environment = stand_ins(torchrun="") | {"MASTER_ADDR": "node-1", "DATA": "/data"}
    del environment[missing]
    needs = (Need("DATA", "the data"), Need("RATE", "The rate.", "3e-4"))
    script = text_of(torchrun(job(needs=needs, program=("train.py", Variable("DATA", "/set")))))
    done = run(script, tmp_path, environment)
    assert done.returncode != 0
    assert missing in done.stderr
    assert not (tmp_path / "torchrun.words").exists()


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_user_s_runs(tmp_path: Path, stand_ins, text: str) -> None:
    environment = stand_ins(torchrun="") | {"DATA": text}
    hostile = job(
        nodes=1,
        about=(f"{text}\ntouch pwned", text),
        needs=(Need("DATA", "the data"),),
        program=("train.py", text, Variable("DATA", "/set")),
        groups=(("model", {"--name": text, "--list": (text, text)}),),
        environment={"NAME": text},
    )
    done = run(text_of(torchrun(hostile)), tmp_path, environment)
    assert done.returncode == (0 if text else 1), done.stderr
    assert not (tmp_path / "pwned").exists()
    if text:
        got = words(tmp_path, "torchrun")
        assert got[got.index("train.py") :] == ["train.py", text, f"{text}/set", "--name", text, "--list", text, text]
        assert f"NAME={text}" in (tmp_path / "torchrun.env").read_text().split("\0")


@given(st.text())
def test_a_comment_is_one_line_and_a_slug_is_a_name(text: str) -> None:
    assert len(comment(text).splitlines()) <= 1
    assert slug(text) == "" or slug(text)[0].isalpha()
    assert len(slug(text)) <= 40
    assert set(slug(text)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize("text", ["a\nb", "a\0b", "a\x1b[0m", "a\u2028b"])
def test_control_characters_are_refused(text: str) -> None:
    with pytest.raises(FivefoldError, match="control character"):
        in_shell(text)


# ---------------------------------------------------------------- Slurm

_SRUN = """
while [ "$1" != bash ]; do shift; done
export SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8
exec "$@"
"""


def site() -> SlurmOptions:
    return SlurmOptions(partition="gpu", account="team", time="1-00:00:00", cpus_per_gpu=12)


def slurm_environment(stand_ins, **commands: str) -> dict[str, str]:
    made = stand_ins(scontrol='[ "$1" = show ] && echo node-7 || true', scancel="", **commands)
    return made | {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node-[7-8]"}


def test_srun_places_one_rank_per_gpu(tmp_path: Path, stand_ins) -> None:
    environment = slurm_environment(stand_ins, srun=_SRUN, python="")
    done = run(text_of(slurm(job(), site())), tmp_path, environment)
    assert done.returncode == 0, done.stderr
    srun = words(tmp_path, "srun")
    assert srun[: srun.index("bash")] == [
        "--nodes", "2", "--ntasks-per-node", "4", "--cpus-per-task", "12", "--gpu-bind=none", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    assert words(tmp_path, "python") == ["-u", "train.py", "--layers", "4", "--switch", "--list", "1", "2"]
    there = set((tmp_path / "python.env").read_text().split("\0"))
    assert {"RANK=5", "LOCAL_RANK=1", "WORLD_SIZE=8", "MASTER_ADDR=node-7", "MASTER_PORT=19711"} <= there


def test_directives_come_first_and_say_the_shape() -> None:
    lines = text_of(slurm(job(resumes=True), site())).splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    first_command = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(lines.index(line) for line in directives) < first_command
    for expected in (
        "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=12", "--partition=gpu",
        "--account=team", "--time=1-00:00:00", "--requeue", "--signal=B:USR1@300", "--open-mode=append",
    ):  # fmt: skip
        assert f"#SBATCH {expected}" in directives


@pytest.mark.parametrize("option", ["partition", "account", "qos", "constraint", "reservation", "time"])
@pytest.mark.parametrize("text", ["gpu --wrap=x", "a\n#SBATCH --uid=0", "$(id)", ""])
def test_words_that_a_directive_cannot_hold_are_refused(option: str, text: str) -> None:
    with pytest.raises(FivefoldError, match="cannot stand in an #SBATCH line"):
        slurm(job(), SlurmOptions(**{option: text}))


@pytest.mark.parametrize("counts", [{"cpus_per_gpu": -3}, {"cpus_per_gpu": 0}, {"warn_s": -1}, {"warn_s": 65_536}])
def test_counts_that_slurm_would_refuse_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(FivefoldError, match="whole number from 1 to"):
        slurm(job(), SlurmOptions(**counts))


_CANCEL = 'kill -TERM "$(cat "$OUT/srun.pid")"\n'
_CANCEL_AND_WAIT = _CANCEL + 'while kill -0 "$(cat "$OUT/srun.pid")" 2>/dev/null; do sleep 0.05; done\n'


def stopped(tmp_path: Path, stand_ins, extra: dict[str, str], cancel: str = _CANCEL) -> tuple[int, list[str]]:
    """The batch script while its step runs, warned by USR1: its exit code and what scontrol was asked last."""
    step = "trap 'exit 0' TERM\ntouch \"$OUT/started\"\nfor _ in {1..300}; do sleep 0.1; done\n"
    environment = slurm_environment(stand_ins, srun=f'echo $$ > "$OUT/srun.pid"\n{step}') | extra
    (tmp_path / "bin" / "scancel").write_text(_RECORD.format(name="scancel", then=cancel))
    path = tmp_path / "script"
    path.write_text(text_of(slurm(job(resumes=True))))
    with subprocess.Popen(["bash", str(path)], cwd=tmp_path, env=environment) as process:
        for _ in range(300):
            if (tmp_path / "started").exists():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
        code = process.wait(timeout=60)
    return code, words(tmp_path, "scontrol")


@pytest.mark.parametrize("cancel", [_CANCEL, _CANCEL_AND_WAIT], ids=["the step lives on", "the step ends at once"])
def test_a_warning_ends_the_step_and_requeues_the_job(tmp_path: Path, stand_ins, cancel: str) -> None:
    code, asked = stopped(tmp_path, stand_ins, {}, cancel)
    assert words(tmp_path, "scancel") == ["--signal=TERM", "4711"]
    assert (code, asked) == (0, ["requeue", "4711"])


def test_of_a_job_array_only_the_task_is_requeued(tmp_path: Path, stand_ins) -> None:
    _, asked = stopped(tmp_path, stand_ins, {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"})
    assert asked == ["requeue", "4700_3"]


def test_a_failed_step_is_the_script_s_failure(tmp_path: Path, stand_ins) -> None:
    environment = slurm_environment(stand_ins, srun="exit 3")
    for resumes in (False, True):
        done = run(text_of(slurm(job(resumes=resumes))), tmp_path, environment)
        assert done.returncode == 3
        assert words(tmp_path, "scontrol")[0] == "show"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("write", [torchrun, slurm], ids=["torchrun", "slurm"])
@pytest.mark.parametrize(
    "made", [job(), job(resumes=True, nodes=1), job_of(llama())], ids=["plain", "resumes", "llama"]
)
def test_shellcheck_finds_nothing(tmp_path: Path, write, made: Job) -> None:
    path = tmp_path / "script.sh"
    path.write_text(text_of(write(made)))
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("made", [job(), job(nodes=1), job_of(llama())], ids=["plain", "one node", "llama"])
def test_manifests_obey_their_schema(kind: Any, made: Job) -> None:
    options = KubernetesOptions(kind=kind, image="registry/train:1", namespace="team")
    document = pyyaml.safe_load(text_of(kubernetes(made, options)))
    assert faults(document, SCHEMAS[kind]) == []


def test_the_schemas_can_fail() -> None:
    document = pyyaml.safe_load(text_of(kubernetes(job(), KubernetesOptions(kind="jobset", image="x"))))
    document["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] = "2"
    document["spec"]["surprise"] = {}
    assert len(faults(document, SCHEMAS["jobset"])) == 2


def container_of(kind: str, document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    if kind == "trainjob":
        return spec["trainer"]
    if kind == "pytorchjob":
        return spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]


def started(container: dict[str, Any], tmp_path: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The container as the kubelet starts it, without a shell: $(NAME) becomes the variable, $$ a dollar."""
    values = dict(environment)

    def replaced(text: str) -> str:
        return re.sub(
            r"\$\$|\$\((\w+)\)",
            lambda found: "$" if found[0] == "$$" else values.get(found[1], found[0]),
            text,
        )

    for each in container["env"]:
        values.setdefault(each["name"], replaced(each["value"]))
    values |= environment
    command = [replaced(word) for word in (*container["command"], *container["args"])]
    return subprocess.run(command, cwd=tmp_path, env=os.environ | values, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_pod_starts_only_with_everything_set(tmp_path: Path, stand_ins, kind: Any) -> None:
    environment = stand_ins(torchrun="")
    made = job(needs=(Need("DATA", "the data"),), program=(Variable("DATA", "/train.py"),))
    document = pyyaml.safe_load(text_of(kubernetes(made, KubernetesOptions(kind=kind, image="x"))))
    refused = started(container_of(kind, document), tmp_path, environment)
    assert refused.returncode == 64
    assert "DATA is not set" in refused.stderr
    assert not (tmp_path / "torchrun.words").exists()
    done = started(container_of(kind, document), tmp_path, environment | {"DATA": "/d", "JOB_COMPLETION_INDEX": "1"})
    assert done.returncode == 0, done.stderr
    got = words(tmp_path, "torchrun")
    assert got[got.index("/d/train.py") :] == ["/d/train.py", "--layers=4", "--switch", "--list", "1", "2"]
    if kind == "jobset":
        assert {"--node-rank=1", "--nnodes=2", "--master-addr=train-node-0-0.train"} <= set(got)


@pytest.mark.parametrize("text", [text for text in HOSTILE if text])
def test_no_text_of_a_user_s_runs_in_a_pod(tmp_path: Path, stand_ins, text: str) -> None:
    environment = stand_ins(torchrun="")
    made = job(about=(f"{text}\nkind: x",), program=("train.py", text), groups=(), environment={"NAME": text})
    document = pyyaml.safe_load(text_of(kubernetes(made, KubernetesOptions(image=text))))
    assert document["spec"]["trainer"]["image"] == text
    assert started(document["spec"]["trainer"], tmp_path, environment).returncode == 0
    assert words(tmp_path, "torchrun") == ["train.py", text]
    assert f"NAME={text}" in (tmp_path / "torchrun.env").read_text().split("\0")
    assert not (tmp_path / "pwned").exists()


def test_a_train_job_with_too_many_arguments_is_refused() -> None:
    many = job(groups=(("model", {f"--option-{at}": True for at in range(200)}),))
    with pytest.raises(FivefoldError, match="128 arguments"):
        kubernetes(many, KubernetesOptions(image="x"))
    assert kubernetes(many, KubernetesOptions(image="x", kind="jobset"))


def test_an_image_and_a_legal_namespace_are_asked_for() -> None:
    with pytest.raises(FivefoldError, match="--image"):
        kubernetes(job())
    with pytest.raises(FivefoldError, match="--image"):
        kubernetes(job(), KubernetesOptions(image=""))
    with pytest.raises(FivefoldError, match="no namespace"):
        kubernetes(job(), KubernetesOptions(image="x", namespace="Team A"))


_TEXTS = st.text() | st.sampled_from(["yes", "null", "1e3", "a: b", "- x", "#", "0x1", "\x85", "\ufeff", "\U0001f600"])
_VALUES = st.recursive(
    _TEXTS | st.booleans() | st.integers(-(10**6), 10**6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(_TEXTS.filter(lambda text: not _surrogates(text)), _VALUES, min_size=1, max_size=4))
def test_yaml_reads_back_as_what_was_written(document: dict[str, Any]) -> None:
    """By another implementation."""
    if _surrogates(str(document)):
        return
    assert pyyaml.safe_load(yaml(document)) == document


def _surrogates(text: str) -> bool:
    return any(0xD800 <= ord(each) <= 0xDFFF for each in text)


# ---------------------------------------------------------------- the whole


def test_llama_3_70b_for_every_launcher() -> None:
    files = export(llama(name="llama"), ("torchrun", "slurm", "kubernetes"))
    assert [*files] == ["llama.sh", "llama.sbatch", "llama.trainjob.yaml"]
    for text in files.values():
        assert "CUDA_DEVICE_MAX_CONNECTIONS" in text


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral-8x7b", "gpt2"])
def test_every_variable_that_a_model_needs_is_bash(tmp_path: Path, name: str) -> None:
    what = Export(
        model=load_model(name),
        cluster=load_cluster("h100-sxm", gpus=16),
        work=Workload(seq_len=1024, global_batch=64),
        layout=Layout(),
    )
    for number, text in enumerate(export(what, ("torchrun", "slurm")).values()):
        path = tmp_path / str(number)
        path.write_text(text)
        assert subprocess.run(["bash", "-n", str(path)], timeout=30).returncode == 0


@pytest.mark.parametrize("why", ["it's", "a $(b)", 'a "b"', "a `b`", "a } b", "a\nb"])
def test_a_reason_that_bash_would_not_read_as_words_is_a_mistake(why: str) -> None:
    with pytest.raises(ValueError, match="bash would not read"):
        Need("DATA", why)


def test_a_layout_that_would_not_start_is_never_written() -> None:
    broken = replace(llama(), layout=Layout(tp=3))
    with pytest.raises(FivefoldError, match="megatron would not start this plan"):
        export(broken, ("torchrun",))


def test_what_only_options_break_is_never_written() -> None:
    """Expert parallelism under fp16: every rule on layouts holds, and Megatron-LM's arguments.py refuses it."""
    what = Export(
        model=load_model("mixtral-8x7b"),
        cluster=load_cluster("h100-sxm", gpus=8),
        work=Workload(seq_len=4096, global_batch=64, precision="fp16"),
        layout=Layout(ep=8),
    )
    with pytest.raises(FivefoldError, match="Expert parallelism does not go with --fp16"):
        export(what, ("slurm",))


def test_our_own_trainer_starts_the_plan(tmp_path: Path, stand_ins) -> None:
    plan = str(tmp_path / "a plan; touch pwned.toml")
    what = replace(llama(), to="fivefold", runtime="fivefold", plan=plan, data=Data())
    environment = stand_ins(torchrun="") | {"MASTER_ADDR": "node-1"}
    done = run(text_of(torchrun(job_of(what))), tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert words(tmp_path, "torchrun")[-4:] == ["-m", "fivefold", "train", plan]
