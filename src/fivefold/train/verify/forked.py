"""Ranks as forked processes of this one, over gloo, with a hard time limit and the failing rank's own traceback.

Nothing is left behind: all ranks are killed as soon as one fails, dies or is late.
"""

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
from typing import Any, cast

import torch
import torch.distributed as dist

from fivefold.errors import FivefoldError


class RankFailedError(RuntimeError):
    """A rank raised (its traceback is the message), died, or did not come back in time."""


def run_forked(n: int, fn: Callable[[int], Any], timeout_s: float) -> list[Any]:
    """fn(rank) in n forked processes that form one gloo world; the results by rank, which have to pickle.

    Call torch.set_num_threads(1) before anything is computed here: a thread pool does not survive the fork.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise FivefoldError(
            "The ranks of a proof are forked, which this operating system cannot do. Run it on Linux or macOS.",
            code="needs-fork",
        )
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(n)]
        processes = [
            context.Process(target=_rank, args=(rank, n, store, sender, fn, timeout_s), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            return _collect({receiver: rank for rank, (receiver, _) in enumerate(pipes)}, timeout_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _collect(waiting: dict[Connection, int], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: list[Any] = [None] * len(waiting)
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            late = ", ".join(map(str, sorted(waiting.values())))
            raise RankFailedError(f"Ranks {late} did not finish within {timeout_s:g} s, and were stopped.")
        for receiver in ready:
            connection = cast(Connection, receiver)
            rank = waiting.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                raise RankFailedError(f"Rank {rank} died without a word.") from None
            if not succeeded:
                raise RankFailedError(f"Rank {rank} failed:\n{value}")
            results[rank] = value
    return results


def _rank(rank: int, n: int, store: str, sender: Connection, fn: Callable[[int], Any], timeout_s: float) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, n),  # pyright: ignore[reportPrivateImportUsage]
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=timeout_s + 10),  # the parent is the one who stops ranks
        )
        answer = (True, fn(rank))
        dist.barrier()  # a rank that leaves early closes the connections of the others
    except BaseException:
        answer = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    os._exit(0)  # without the clean-up of a forked interpreter, which would run the parent's handlers
