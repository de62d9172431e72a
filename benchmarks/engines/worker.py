"""One rank of one engine: sets up, then runs steps when it is told to and says how long they took.

Started by benchmarks/throughput.py in the engine's own interpreter, with torchrun's variables. Reads lines "FIRST
COUNT" from standard input, steps FIRST .. FIRST + COUNT - 1, and answers each with one line of JSON. What libraries
print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

SEQ, GLOBAL_BATCH, VOCAB = 256, 16, 2048
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": SEQ, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0, "tie_word_embeddings": False,
}  # fmt: skip
RATE, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


class Task(NamedTuple):
    """What an engine is to run. folder: holds tokens.npy, int64 [steps, GLOBAL_BATCH, SEQ + 1], and weights.pt, the
    initial weights under transformers' names. degrees: of the layout, by the names of fivefold.Layout."""

    engine: str
    kind: str
    folder: str
    ranks: int
    degrees: dict[str, Any]

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def micro_batch(self) -> int:
        return self.degrees["micro_batch"]

    @property
    def replicas(self) -> int:
        """Data-parallel ones: the ranks that no other axis takes."""
        others = ("tp", "cp", "pp")
        return self.ranks // int(np.prod([self.degrees.get(axis, 1) for axis in others]))

    def micro_batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, labels) of this rank's replica, [micro_batch, SEQ] each."""
        whole = torch.from_numpy(self._tokens[step % len(self._tokens)])
        mine = whole.chunk(self.replicas)[self.rank % self.replicas if self.replicas > 1 else 0]
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in mine.split(self.micro_batch)]

    @property
    def _tokens(self) -> np.ndarray:
        return np.load(Path(self.folder) / "tokens.npy", mmap_mode="r+")

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(Path(self.folder) / "weights.pt")


class Engine(NamedTuple):
    """step: number -> the mean loss over the global batch, on every rank that knows it, else None.
    settle: wait until everything that the last step started is done."""

    step: Callable[[int], float | None]
    settle: Callable[[], Any] = lambda: None
    version: str = ""


def serve(task: Task, answer: Callable[[dict[str, Any]], None]) -> None:
    engine: Engine = import_module(task.engine).start(task)
    answer({"ready": True, "version": engine.version, "torch": torch.__version__})
    for line in sys.stdin:
        first, count = map(int, line.split())
        gc.collect()
        start, busy = time.perf_counter(), time.process_time()
        losses = [engine.step(step) for step in range(first, first + count)]
        engine.settle()
        answer({"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - busy, "losses": losses})


def main() -> None:
    torch.set_num_threads(1)
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        told.write(json.dumps(message) + "\n")

    try:
        serve(Task(**json.loads(sys.argv[1])), answer)
    except BaseException as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"})
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.modules["worker"] = sys.modules["__main__"]
    main()
