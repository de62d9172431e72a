"""Run a function on several forked ranks over gloo, with a hard time limit and the failing rank's own traceback."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailure(AssertionError):  # noqa: N818 - a failure of a test, not an error of the harness
    """A rank raised, died or did not come back in time."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Call fn(rank, *args) in n forked processes that form one gloo world; the results, by rank.

    fn may be a local function: processes are forked, and only the result is pickled. All ranks are killed as soon as
    one fails or `timeout` seconds have passed, and RankFailure carries the failing rank's traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(n)]
        processes = [
            context.Process(target=_rank, args=(rank, n, store, pipes[rank][1], fn, args, timeout), daemon=True)
            for rank in range(n)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect({receiver: rank for rank, (receiver, _) in enumerate(pipes)}, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(waiting: dict[Connection, int], timeout: float) -> list[Any]:
    """The results of all ranks. Raises at the first failure, so that its peers' later complaints are not shown."""
    deadline = time.monotonic() + timeout
    results: list[Any] = [None] * len(waiting)
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise RankFailure(f"ranks {sorted(waiting.values())} did not finish within {timeout} s")
        for receiver in ready:
            rank = waiting.pop(receiver)  # type: ignore[arg-type]
            try:
                ok, value = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailure(f"rank {rank} died without a word") from None
            if not ok:
                raise RankFailure(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return results


def _rank(
    rank: int, n: int, store: str, sender: Connection, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float
) -> None:
    torch.set_num_threads(1)  # the parent's thread pool does not survive the fork
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=timedelta(seconds=timeout)
        )
        answer = (True, fn(rank, *args))
        dist.barrier()  # a rank that leaves early closes the connections of the others
    except BaseException:
        answer = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    os._exit(0)  # no clean-up of a forked interpreter: it would run the parent's handlers
