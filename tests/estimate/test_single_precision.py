"""Attention whose tensors are fp32: its operands are too, on matrix units (TF32) or on vector ones."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.cluster import load_cluster, load_curve_of
from fivefold.estimate.kernels import core_seconds
from fivefold.estimate.ledger import Attend
from fivefold.layout import Workload

HEADS, SEQ, WIDTH = 32, 4096, 128


def core(precision, attention="flash"):
    """Forward and backward seconds of one long core on an A100."""
    cluster = load_cluster("a100")
    flops = np.array([4.0 * HEADS * SEQ**2 * WIDTH / (2 if attention == "flash" else 1)])
    row = Attend("core", flops=flops, seq=np.array([SEQ]), head_dim=WIDTH, scores=np.array([HEADS * SEQ**2]))
    work = Workload(seq_len=SEQ, global_batch=1, precision=precision, attention=attention)
    return np.concatenate(core_seconds(load_curve_of(cluster), cluster.gpu, row, flops, work, "bf16", None))


def test_no_flash_kernel_takes_fp32_and_what_does_reaches_the_same_share_of_its_peak():
    """156 of 312 TFLOP/s in TF32; 19.5 of vector units, which reach 1.15 of that share."""
    assert core("tf32") / core("bf16") == pytest.approx(2, rel=1e-9)
    assert core("fp32") / core("bf16") == pytest.approx(312 / 19.5 / 1.15, rel=1e-9)
    assert (core("fp8") == core("bf16")).all()


def test_scores_that_are_materialised_are_as_wide_as_other_tensors():
    """Twice the bytes between the products, at half the rate of these; in fp32 at an eighth of that."""
    assert core("tf32", "unfused") / core("bf16", "unfused") == pytest.approx(2, rel=0.15)
    assert (core("fp32", "unfused") > 3 * core("tf32", "unfused")).all()
