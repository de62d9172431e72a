"""What only a process of its own shows: start, pipes, what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def fivefold(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fivefold", *words], capture_output=True, text=True, check=False, **options
    )


def test_version() -> None:
    from fivefold import __version__

    done = fivefold("--version")
    assert (done.returncode, done.stdout.split()[-1], done.stderr) == (0, __version__, "")


def test_the_exit_code_is_the_processs() -> None:
    assert fivefold("estimate", "gpt2", "--gpus", "8", "--tp", "3", "--gbs", "8").returncode == 1
    assert fivefold("nonsense").returncode == 2


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from fivefold.cli.main import main; sys.exit(main(['explain', 'rules']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


def test_help_imports_no_numpy_and_planning_no_torch() -> None:
    code = (
        "import sys; from fivefold.cli.main import main; main(sys.argv[1:]); "
        "sys.stderr.write(' '.join(name for name in ('numpy', 'torch', 'pandas', 'scipy') if name in sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert shown.stderr == ""
    words = ["plan", "gpt2", "--gpus", "2", "--gbs", "8"]
    planned = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert planned.stderr == "numpy"


def test_plain_ascii_output_where_nothing_else_can_be_written() -> None:
    done = fivefold(
        "estimate", "gpt2", "--gpus", "4", env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
    assert "####" in done.stdout


def test_a_plan_where_only_ascii_can_be_written() -> None:
    env = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["plan", "gpt2", "--gpus", "4", "--gbs", "16"]
    done = fivefold(*words, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    document = json.loads(fivefold(*words, "--json", env=env).stdout)
    assert "·" in json.dumps(document, ensure_ascii=False)  # escaped, and not replaced


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", ["models", "models --json", "models --help", "--version", "plan nothing --json"])
def test_a_full_disk_is_one_sentence(words: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fivefold", *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "error: The answer could not be written to standard output: No space left on device.\n"


def test_bytes_that_are_not_utf_8_are_shown_as_such() -> None:
    done = fivefold("plan", "\udcff", "--gpus", "8", "--json")
    assert (done.returncode, done.stderr) == (2, "")
    assert json.loads(done.stdout)["inputs"]["arguments"][1] == "?"


def test_an_interrupt_while_the_command_line_is_imported_is_one_word() -> None:
    code = (
        "import runpy, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'cyclopts': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "runpy.run_module('fivefold', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_progress_is_told_on_standard_error(capsys, monkeypatch) -> None:
    from time import sleep

    from fivefold.cli import progress

    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    with progress.progress("Searching"):
        sleep(0.1)
    printed = capsys.readouterr()
    assert (printed.out, printed.err.startswith("Searching ...")) == ("", True)
    monkeypatch.setattr(progress, "PATIENCE_S", 10.0)
    with progress.progress("Searching"):
        pass
    assert capsys.readouterr().err == ""
