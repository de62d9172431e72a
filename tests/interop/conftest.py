"""Where the test scripts are, and small launches made of options. Makes the helpers beside these tests importable:
tests have no packages, and pytest's importlib mode adds no path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.interop.megatron.read import Asked, Reading, read_source

sys.path.insert(0, str(Path(__file__).parent))

SCRIPTS = Path(__file__).parent / "scripts"

BASE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 32 --bf16 --vocab-size 32000 --hidden-dropout 0"
)


@pytest.fixture
def scripts() -> Path:
    return SCRIPTS


Read = Callable[..., Reading]


@pytest.fixture
def read() -> Read:
    """read("--tensor-model-parallel-size 2", gpus=8, before="export X=1") of a small model; `without` drops options."""

    def call(
        options: str = "", *, gpus: int = 8, before: str = "", without: str = "", gpu: str | None = None
    ) -> Reading:
        words = BASE
        for name in without.split():
            at = words.split().index(name)
            parts = words.split()
            end = at + 1 + (at + 1 < len(parts) and not parts[at + 1].startswith("--"))
            words = " ".join(parts[:at] + parts[end:])
        text = f"{before}\ntorchrun --nproc_per_node {gpus} pretrain_gpt.py {words} {options}\n"
        return read_source(text, "x.sh", None, Asked(gpu=gpu))

    return call
