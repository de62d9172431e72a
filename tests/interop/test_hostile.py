"""Files that mean harm, or nothing: an error with a place, soon and in little memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.interop.megatron.read import Asked, read_file, read_source
from fivefold.interop.source import MAX_FILE_BYTES, decoded
from fivefold.interop.yaml_text import read_yaml

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    """benchmarks/fuzz_interop.py, which makes the files."""
    spec = importlib.util.spec_from_file_location("fuzz_interop", REPOSITORY / "benchmarks" / "fuzz_interop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_some_hundred_fuzzed_files(fuzz: ModuleType) -> None:
    # No speed is asserted here: a busy machine is slow at anything.
    found = [fuzz.outcome(name, content, priced=False) for name, content in fuzz.files(320, seed=11)]
    crashed = [each for each in found if "CRASH" in each]
    assert not crashed
    assert found.count("read") > 10


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=300), st.sampled_from(["x.sh", "x.yaml"]))
@example("$((\x00", "x.sh")
@example("a: &a [*a]", "x.yaml")
@example("\x01", "x.sh")
@example("[" * 5000, "x.yaml")
def test_any_text_is_read_or_refused(text: str, name: str) -> None:
    try:
        read_source(decoded(text.encode(errors="surrogatepass"), name), name, None, Asked(gpus=8))
    except FivefoldError as error:
        assert name in error.message


def test_large_binary_and_special_files(tmp_path: Path) -> None:
    cases = {"big.sh": b"#" * (MAX_FILE_BYTES + 1), "nul.sh": b"a=1\nb=\0\n", "pipe": None, "folder": None}
    for name, content in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        elif name == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
        with pytest.raises(FivefoldError, match=name):
            read_file(path)
    for path in ("/dev/zero", "no-such-file.sh", "a\0b"):
        with pytest.raises(FivefoldError):
            read_file(path)


def test_files_outside_the_scripts_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "outside.env").write_text("TP=8\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link.env").symlink_to(tmp_path / "outside.env")
    (inner / "own.env").write_text("PP=2\nsource own.env\n")
    launch = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --bf16 --vocab-size 100 "
        "--tensor-model-parallel-size ${TP:-1} --pipeline-model-parallel-size ${PP:-1}\n"
    )
    for named in (
        "../outside.env",
        "link.env",
        str(tmp_path / "outside.env"),
        "/etc/hostname",
        "own.env/../../outside.env",
    ):
        (inner / "x.sh").write_text(f"source {named}\nsource own.env\n{launch}")
        reading = read_file(inner / "x.sh")
        assert (reading.layout.tp, reading.layout.pp) == (1, 2), named
        assert reading.launch.files is not None and "own.env" in reading.launch.files.read
        assert any(named[:24] in note for note in reading.notes)  # long paths are cut


def test_nothing_in_a_script_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"touch {mark}\nx=$(touch {mark})\ny=`touch {mark}`\neval 'touch {mark}'\ncat <(touch {mark})\n"
    with pytest.raises(FivefoldError):
        read_source(text, "x.sh", tmp_path)
    assert not mark.exists()


def test_yaml_makes_plain_values_only(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"a: !!python/object/apply:os.system ['touch {mark}']\nb: !!python/name:os.system\nc: 1\nd: true\ne: 1e400\n"
    value, lines = read_yaml(text, "x.yaml")
    assert not mark.exists()
    assert value["c"] == 1 and value["d"] is True and lines["c"] == 3
    assert isinstance(value["a"], list) and isinstance(value["e"], str)


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
        "a: &a\n  b: *a\n",
        "- " * 3000,
        "a: {" * 400,
        "[" * 100_000,
        "a: *nobody\n",
        "\tx: 1\n y",
        "just a text",
        "a: [1, 2\nb: 3",
    ],
)
def test_yaml_that_explodes_or_is_none(text: str) -> None:
    with pytest.raises(FivefoldError, match=r"x\.yaml"):
        read_yaml(text, "x.yaml")


def test_reading_scripts_loads_no_yaml_and_no_torch() -> None:
    code = "import sys, fivefold.advise.check, fivefold.interop.megatron.read\n"
    code += "print({'yaml', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_control_characters_stay_out_of_messages(read) -> None:
    with pytest.raises(FivefoldError) as caught:
        read_source("torchrun x.py --num-layers $'\\x1b[31m' --hidden-size \x1b[31m\n", "x.sh", None)
    assert "\x00" not in caught.value.message and "\x01" not in caught.value.message
