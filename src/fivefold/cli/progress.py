"""A line on standard error when something takes over two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

PATIENCE_S = 2.0
_ON_TERMINAL_S = 1.0  # a moving line
_IN_LOG_S = 30.0  # one line now and then


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Says `doing` and the seconds so far while its block runs, once that has taken two seconds."""
    done = threading.Event()
    thread = threading.Thread(target=_tell, args=(doing, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(doing: str, done: threading.Event) -> None:
    start, moving = perf_counter(), sys.stderr.isatty()
    if done.wait(PATIENCE_S):
        return
    while True:
        line = f"{doing} ... {perf_counter() - start:.0f} s"
        sys.stderr.write(f"\r{line}" if moving else f"{line}\n")
        sys.stderr.flush()
        if done.wait(_ON_TERMINAL_S if moving else _IN_LOG_S):
            break
    if moving:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()
