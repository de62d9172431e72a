"""The shipped runs by id, and one of them with other columns: what the tests of reading rows start from."""

from __future__ import annotations

from typing import Any

import msgspec

from fivefold.measure import Run, shipped_runs

RUNS = {run.id: run for run in shipped_runs().runs}


def changed(run_id: str, **fields: Any) -> Run:
    return msgspec.structs.replace(RUNS[run_id], **fields)


def experts(**fields: Any) -> Run:
    """A mixture of experts of Megatron-Bridge."""
    return changed("simumax-0002", framework="Megatron-Bridge", arch="moe", experts=8, topk=2, moe_ffn=1024, **fields)
