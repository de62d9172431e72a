"""Every model of the catalogue is priced: finite, between bounds that no machine passes, alone and in parallel."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.layout import Layout
from fivefold.model import count_params, load_model, models
from fivefold.model.flops import training_flops_per_token

ONE = np.arange(1)
H100_BF16_FLOPS = 989.4e12


@pytest.mark.parametrize("name", models())
def test_every_model_has_a_memory_and_a_time(name: str, kernel_of) -> None:
    model = load_model(name)
    seq = min(2048, model.max_position)
    kernel = kernel_of(model, [Layout(micro_batch=4)], gpus=1, seq_len=seq, global_batch=16)
    seconds = float(kernel.step_seconds(ONE)[0])
    flops = training_flops_per_token(model, seq, "causal") * 16 * seq
    assert 0.004 < flops / seconds / H100_BF16_FLOPS < 0.8
    states = 18 * count_params(model).total  # bf16 weight, fp32 gradient, master and Adam's two
    kept = float(kernel.peak_memory(ONE).max())
    assert states < kept < states + 4 * seq * (400 * model.layers * model.hidden + 40 * model.vocab)


@pytest.mark.parametrize("name", models())
def test_a_rank_of_two_holds_and_does_less_of_every_model(name: str, kernel_of) -> None:
    """Tensor parallelism halves what is divided and repeats what is not: more than half and less than the whole."""
    model = load_model(name)
    seq = min(2048, model.max_position)
    one, two = (kernel_of(model, [Layout(tp=tp)], gpus=tp, seq_len=seq, global_batch=4) for tp in (1, 2))
    parameters = [sum(float(part.sum()) for part in kernel.rank_parameters(ONE)) for kernel in (one, two)]
    assert parameters[0] / 2 <= parameters[1] < parameters[0]
