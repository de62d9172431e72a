"""The split of blocks over stages against brute force, the event simulator, `estimate` and the text's two readers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.estimate import Kernel, Problem, estimate
from fivefold.interop.megatron.stage_text import spread
from fivefold.layout import Columns, Layout, Recompute, Workload
from fivefold.model import load_model
from fivefold.model.spec import BlockRun
from fivefold.runtime import load_runtime
from fivefold.schedule import actions, simulate
from fivefold.search import splits
from fivefold.search.splits import layout_text
from fivefold.search.stages import balance, price_splits

FULL = Recompute(kind="full")


def problem(name: str, layers: int, gpus: int = 8, batch: int = 32, **work) -> Problem:
    """A catalogue model cut to so many blocks; its vocabulary is as large as before, so that its head weighs a lot."""
    model = load_model(name)
    *front, last = model.runs
    if front and layers <= sum(run.count for run in front):
        front, layers = [], layers
    rest = layers - sum(run.count for run in front)
    model = replace(model, runs=(*front, BlockRun(rest, last.block)), mtp=work.pop("mtp", 0))
    load = Workload(**({"seq_len": 2048, "global_batch": batch} | work))
    return Problem(model, load_cluster("h100-sxm", gpus=gpus), load, load_runtime("megatron"))


def simulated(asked: Problem, layout: Layout, counts: tuple[int, ...]) -> float:
    """The pipeline of a split, by the event simulator, from seconds of single blocks and items."""
    columns = Columns.from_layouts([layout], asked.cluster.gpus, asked.work)
    kernel = Kernel(asked, columns)
    v, kinds = kernel.variants, asked.model.kinds
    again = v.again_s[0] if layout.recompute.kind != "none" else np.zeros_like(v.forward_s[0])
    order = [kinds.index(run.block) for run in asked.model.runs for _ in range(run.count)]
    forward, backward, at = [], [], 0
    for stage, count in enumerate(counts):
        pieces = order[at : at + count]
        at += count
        items = [len(kinds)] if stage == 0 else []
        items += [len(kinds) + 1] + [len(kinds) + 2] * asked.model.mtp if stage == len(counts) - 1 else []
        forward.append(sum(float(v.forward_s[0, each]) for each in [*pieces, *items]))
        backward.append(
            sum(float(v.backward_s[0, each]) for each in [*pieces, *items]) + sum(float(again[each]) for each in pieces)
        )
    schedule = "interleaved" if layout.vpp > 1 else "1f1b"
    m = int(columns.num_micro_batches[0])
    transfer = float(kernel.exchange_seconds(np.arange(1))[0])
    return simulate(actions(schedule, layout.pp, m, layout.vpp), forward, backward, transfer).makespan_s


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Loops over all counts, at least one block on each stage between the ends."""
    ranges = [range(0 if at in (0, stages - 1) else 1, layers + 1) for at in range(stages)]
    return [counts for counts in product(*ranges) if sum(counts) == layers]


SMALL = st.sampled_from(
    [
        ("llama-3-8b", 6, Layout(pp=2)),
        ("llama-3-8b", 9, Layout(pp=4)),
        ("llama-3-8b", 7, Layout(pp=4, tp=2)),
        ("llama-3-8b", 6, Layout(pp=2, vpp=2)),
        ("llama-3-8b", 7, Layout(pp=2, vpp=2, recompute=FULL)),
        ("llama-3-8b", 8, Layout(pp=4, recompute=FULL)),
        ("mixtral-8x7b", 6, Layout(pp=2, ep=2)),
        ("deepseek-v3", 7, Layout(pp=2, ep=4)),
    ]
)


@given(st.integers(2, 5), st.integers(0, 5))
def test_all_splits_and_the_moves_between_them(stages: int, more: int) -> None:
    layers = stages + more
    every = every_split(layers, stages)
    assert sorted(splits.every_split(layers, stages)) == sorted(every)
    assert splits.number_of_splits(layers, stages) == len(every)
    for counts in every[:20]:
        near = [other for other in every if sum(abs(a - b) for a, b in zip(counts, other, strict=True)) == 2]
        assert sorted(splits.moves(counts)) == sorted(near)


def test_moves_alone_find_the_best_split() -> None:
    """From a start that is far off, without the two better starts."""
    asked = replace_gpu(problem("llama-3-8b", 16, batch=64), 10**15)
    far = Layout(pp=4, first_stage_layers=1, last_stage_layers=1)
    found = balance(asked, far, "megatron", exact=0)
    whole = balance(asked, far, "megatron", exact=10**6)
    assert found.free.seconds == pytest.approx(whole.free.seconds, rel=1e-9)
    assert found.free.blocks != found.given.blocks


@settings(max_examples=10, deadline=None)
@given(SMALL, st.sampled_from((8, 16)), st.sampled_from((0, 4096)))
def test_the_best_split_is_the_best_of_all(case, batch: int, exact: int) -> None:
    """exact 0: by moving blocks one at a time; else by comparing every split."""
    name, layers, layout = case
    asked = problem(name, layers, batch=batch * 8)
    asked = replace_gpu(asked, 10**15)
    found = balance(asked, layout, "megatron", exact=exact)
    times = {counts: simulated(asked, layout, counts) for counts in every_split(layers, layout.pp * layout.vpp)}
    assert found.exact == (exact > 0)
    if exact:
        assert found.compared == len(times)
    # Gradient reductions and the optimizer differ a little too, and are part of what is chosen by.
    assert times[found.free.blocks] <= min(times.values()) * 1.02
    best = min(times, key=lambda counts: (times[counts], counts))
    assert found.free.seconds <= priced(asked, layout, best) * (1 + 1e-9)


def priced(asked: Problem, layout: Layout, counts: tuple[int, ...]) -> float:
    return price_splits(asked, layout, [counts])[0].seconds


def replace_gpu(asked: Problem, memory_bytes: int) -> Problem:
    cluster = replace(asked.cluster, gpu=replace(asked.cluster.gpu, memory_bytes=memory_bytes))
    return Problem(asked.model, cluster, asked.work, asked.runtime)


@pytest.mark.parametrize(
    ("name", "layers", "layout"),
    [
        ("llama-3-8b", 32, Layout(pp=4)),
        ("llama-3-8b", 30, Layout(pp=4, vpp=2, account_for_embedding=True, account_for_loss=True)),
        ("llama-3-70b", 80, Layout(tp=4, pp=2, first_stage_layers=42)),
        ("deepseek-v3", 61, Layout(pp=8, first_stage_layers=7, last_stage_layers=6, recompute=FULL)),
    ],
)  # fmt: skip
def test_splits_are_priced_as_layouts_are(name: str, layers: int, layout: Layout) -> None:
    """Those that a layout expresses, by `estimate`."""
    asked = replace_gpu(problem(name, layers), 10**15)
    found = balance(asked, layout, "megatron")
    for split in (found.given, found.counted):
        assert split.layout is not None
        whole = estimate(asked.model, asked.cluster, asked.work, split.layout)
        assert whole.valid
        assert whole.step is not None and whole.memory is not None
        assert split.seconds == pytest.approx(whole.step.seconds.value, rel=1e-12)
        assert split.reserved_bytes == pytest.approx(whole.memory.reserved_bytes, rel=1e-9)
        ranks = [sum(last - first for first, last in rank) for rank in whole.layout.stages]
        assert ranks == [sum(split.blocks[rank :: layout.pp]) for rank in range(layout.pp)]
    assert found.free.seconds <= found.counted.seconds <= found.given.seconds


def test_a_heavy_head_takes_blocks_from_the_last_stage() -> None:
    found = balance(problem("llama-3-8b", 32, gpus=16, batch=128, seq_len=8192), Layout(pp=4), "megatron")
    assert found.counted.blocks[-1] < 8
    assert found.counted.seconds < 0.95 * found.given.seconds


def test_multi_token_prediction_takes_more() -> None:
    asked = [problem("deepseek-v3", 32, gpus=64, batch=64, mtp=mtp) for mtp in (0, 1)]
    plain, mtp = (balance(replace_gpu(each, 10**15), Layout(pp=4, ep=8), "megatron") for each in asked)
    assert mtp.free.blocks[-1] < plain.free.blocks[-1]
    assert mtp.free.text.endswith("mL")


def test_the_split_that_fits_is_preferred_to_a_faster_one() -> None:
    asked = problem("llama-3-8b", 32, gpus=16, batch=128, seq_len=8192)
    free = balance(asked, Layout(pp=4), "megatron")
    tight = replace_gpu(asked, free.free.reserved_bytes - 10**8)
    found = balance(tight, Layout(pp=4), "megatron")
    assert found.free.fits
    assert found.free.seconds > free.free.seconds


@given(st.lists(st.integers(0, 6), min_size=2, max_size=24), st.integers(0, 2))
def test_the_text_says_the_counts(counts: list[int], mtp: int) -> None:
    """By the reader of Megatron-LM's scripts."""
    stages = (spread(layout_text(tuple(counts), mtp)) or "").split("|")
    assert [stage.count("t") for stage in stages] == counts
    assert [at for at, stage in enumerate(stages) if "E" in stage] == [0]
    assert [at for at, stage in enumerate(stages) if "L" in stage] == [len(counts) - 1]
    assert stages[-1].endswith("m" * mtp + "L")


@pytest.mark.parametrize(("layout", "said"), [(Layout(tp=2), "one stage"), (Layout(pp=8, vpp=8), "do not fill")])
def test_what_cannot_be_balanced_is_refused(layout: Layout, said: str) -> None:
    with pytest.raises(FivefoldError, match=said):
        balance(problem("llama-3-8b", 32), layout, "megatron")
