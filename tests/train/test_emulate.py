"""An emulated rank against the same rank of a real gloo job under the same tracker: everything is equal."""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch._dynamo  # fake tensors import it: once here, and not in every forked rank
import torch.distributed as dist
from msgspec.structs import replace
from proofs import BATCH, SEQ, VOCAB, gpt2, layout_of, llama
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

from fivefold.errors import FivefoldError
from fivefold.layout import Recompute, ResolvedLayout
from fivefold.model import Attention, Block, BlockRun, FeedForward, ModelSpec, count_params, model_tensors
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.emulate import Emulation, emulate_layout
from fivefold.train.emulate.emulate import record_step
from fivefold.train.emulate.flops import product_of
from fivefold.train.emulate.places import PLACES
from fivefold.train.emulate.recorder import Recorder
from fivefold.train.emulate.world import Fakes, Reals, fake_world
from fivefold.train.mesh import Mesh
from fivefold.train.trainer import Trainer

FULL = Recompute(kind="full")
NORMS = Recompute(kind="selective", modules=("layernorm",))
CORE = Recompute(kind="selective")

REAL: list[tuple[str, ModelSpec, int, dict[str, Any]]] = [
    ("fp32", llama(2), 1, {}),
    ("bf16", llama(2), 2, {"zero": 0, "micro_batch": 2}),
    ("bf16", llama(2), 2, {"zero": 1, "micro_batch": 2}),
    ("fp32", gpt2(2), 2, {"zero": 2, "micro_batch": 2}),
    ("bf16", llama(2), 2, {"zero": 3, "micro_batch": 2}),
    ("fp64", llama(2, tied=True), 2, {"tp": 2, "micro_batch": 4}),
    ("bf16", gpt2(2), 2, {"tp": 2, "sequence_parallel": False, "micro_batch": 4}),
    ("bf16", llama(2), 2, {"pp": 2, "micro_batch": 2}),
    ("fp32", llama(4), 2, {"pp": 2, "vpp": 2, "micro_batch": 2}),
    ("bf16", llama(2), 2, {"pp": 2, "schedule": "zb-h1", "micro_batch": 2}),
    ("bf16", llama(4, tied=True), 2, {"pp": 2, "vpp": 2, "schedule": "zbv", "micro_batch": 2}),
    ("fp32", llama(4), 2, {"pp": 2, "vpp": 2, "schedule": "dualpipev", "micro_batch": 2}),
    ("bf16", llama(2), 2, {"cp": 2, "micro_batch": 2}),
    ("bf16", llama(2), 2, {"cp": 2, "cp_kind": "a2a", "micro_batch": 2}),
    ("bf16", llama(2), 2, {"recompute": FULL, "micro_batch": 2}),
    ("bf16", llama(2), 2, {"recompute": NORMS, "tp": 2, "micro_batch": 4}),
    ("bf16", llama(2), 2, {"recompute": CORE, "cp": 2, "micro_batch": 2}),
    ("bf16", llama(2, tied=True), 4, {"pp": 2, "tp": 2, "micro_batch": 4}),
    ("bf16", llama(2), 4, {"zero": 3, "dp_replicate": 2, "micro_batch": 2}),
]


def facts(recorder: Recorder) -> dict[str, Any]:
    """What can be compared and pickled."""
    return {
        "collectives": dict(recorder.sent),
        "products": dict(recorder.products),
        "saved": recorder.saved,
        "resting": recorder.resting,
        "peaks": recorder.peaks,
    }


@pytest.mark.parametrize(("precision", "spec", "ranks", "degrees"), REAL, ids=lambda x: getattr(x, "name", str(x)))
def test_an_emulated_rank_is_the_real_one(precision: str, spec: ModelSpec, ranks: int, degrees: dict[str, Any]) -> None:
    """Peaks of every phase by category to the byte, collectives as a multiset, products, and what blocks keep."""
    layout = layout_of(spec, ranks, **degrees)
    setup = Setup(precision=precision)
    real = run_ranks(ranks, lambda rank: facts(record_step(spec, layout, Mesh(layout), setup, SEQ, Reals())))
    # The last stage and the first; ranks that differ in nothing else do the same.
    for rank in {ranks - 1, 0} if layout.pp > 1 else {ranks - 1}:
        with fake_world(rank, ranks):
            fake = facts(record_step(spec, layout, Mesh(layout, rank), setup, SEQ, Fakes()))
        for name, value in real[rank].items():
            assert fake[name] == value, f"{name} of rank {rank}"


def emulated(spec: ModelSpec, ranks: int, rank: int = 0, precision: str = "bf16", **degrees: Any) -> Emulation:
    return emulate_layout(spec, layout_of(spec, ranks, **degrees), rank, SEQ, Setup(precision=precision))


HEADS, KV_HEADS, WIDTH, FFN, HIDDEN = 4, 2, 8, 40, 32
PLAIN = ModelSpec(
    name="plain", family="llama", hidden=HIDDEN, vocab=VOCAB, max_position=SEQ,
    runs=(
        BlockRun(
            2,
            Block(mixer=Attention(heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH), feed=FeedForward(ffn=FFN)),
        ),
    ),
)  # fmt: skip


def block_forward_flops(tokens: int, tp: int) -> float:
    """By hand: projections, attention over half of the score matrix, feed-forward."""
    projections = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * FFN
    attention = 2 * HEADS * WIDTH * SEQ / 2
    return 2 * tokens * (projections + attention) / tp


@pytest.mark.parametrize("tp", [1, 2])
def test_flops_by_hand(tp: int) -> None:
    tokens = BATCH * SEQ
    vocab = -(-VOCAB // tp)
    flops = emulated(PLAIN, tp, tp=tp, micro_batch=4).flops
    head = 2 * tokens * HIDDEN * vocab
    assert flops.forward == 2 * block_forward_flops(tokens, tp) + head
    # Backward: two products for each of the forward's, and attention's scores once more.
    attention = 2 * 4 * tokens * HEADS * WIDTH * SEQ / 2 / tp
    by_name: dict[str, float] = {}
    for each in flops.products:
        if each.phase == "backward":
            by_name[each.name] = by_name.get(each.name, 0) + each.flops
    flash = by_name.pop("flash_attention_backward")
    assert flash == 2.5 * attention
    assert sum(by_name.values()) == 2 * (flops.forward - attention)
    assert flops.backward == sum(by_name.values()) + flash
    assert flops.recompute == 0


def test_recomputation_runs_the_blocks_again() -> None:
    again = emulated(PLAIN, 1, recompute=FULL, micro_batch=4).flops
    once = emulated(PLAIN, 1, micro_batch=4).flops
    assert (again.forward, again.backward) == (once.forward, once.backward)
    # PyTorch stops before the last product, whose output no backward needs.
    down = 2 * BATCH * SEQ * HIDDEN * FFN
    assert again.recompute == 2 * (block_forward_flops(BATCH * SEQ, 1) - down)


def test_what_a_block_keeps_by_hand() -> None:
    found = emulated(PLAIN, 1, micro_batch=2)
    tokens, half, single = 2 * SEQ, 2, 4
    # Of a token: both norms' inputs and outputs; q, k, v and attention's output; gate, up and their product.
    elements = 4 * HIDDEN + WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * FFN
    numbers = 2 + HEADS  # two norms' inverse roots, log-sum-exp
    [block] = [unit for unit in found.saved if unit.unit == "block"]
    assert block.layers == [0, 1]
    assert block.bytes == tokens * (half * elements + single * numbers)
    kept = emulated(PLAIN, 1, micro_batch=2, recompute=FULL)
    assert [unit.bytes for unit in kept.saved if unit.unit == "block"] == [tokens * HIDDEN * half]


@pytest.mark.parametrize(("rank", "held"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_a_pipeline_rank_holds_what_1f1b_says(rank: int, held: int) -> None:
    found = emulated(llama(4), 4, rank, pp=4)
    assert found.memory.in_flight == held


def test_collectives_by_hand() -> None:
    """Boundaries there and back for every micro-batch, one reduction of gradients and one gather of weights."""
    found = emulated(PLAIN, 4, pp=2, micro_batch=2)
    sent = {(each.axis, each.collective): each for each in found.collectives if each.payload_bytes > 16}
    assert set(sent) == {("pp", "send"), ("dp", "reduce_scatter"), ("dp", "all_gather")}
    micro_batches = BATCH // 2 // 2
    boundary = sent["pp", "send"]
    assert (boundary.count, boundary.payload_bytes) == (micro_batches, 2 * SEQ * HIDDEN * 2)
    parameters = sum(t.numel for t in model_tensors(PLAIN) if t.name.startswith(("embed", "layers.0")))
    for (_, collective), each in sent.items():
        if collective != "send":
            assert (each.count, each.ranks, each.grid) == (1, 2, "dense")
            assert 0 <= each.payload_bytes - parameters * (4 if collective == "reduce_scatter" else 2) <= 8
            assert each.bytes_sent_per_rank == each.payload_bytes / 2


def test_an_unknown_product_is_not_left_out() -> None:
    x = torch.ones(2, 2, dtype=torch.int8)
    with pytest.raises(FivefoldError, match="_int_mm"):
        product_of(torch.ops.aten._int_mm.default, (x, x), {})


def test_memory_adds_up_and_states_are_as_the_formulas_say() -> None:
    found = emulated(PLAIN, 2, zero=1, micro_batch=4)
    parameters = count_params(PLAIN).total
    memory = found.memory
    assert sum(memory.breakdown.values()) == memory.peak_bytes
    for phase in memory.phases:
        assert phase.breakdown is None or sum(phase.breakdown.values()) == phase.peak_bytes
    assert memory.peak_bytes == max(p.peak_bytes or 0 for p in memory.phases if p.phase != "build")
    padding = 64
    assert 0 <= memory.resting["weights"] - 2 * parameters <= padding
    assert 0 <= memory.resting["gradients"] - 4 * parameters <= 2 * padding
    assert 0 <= memory.resting["master"] - 4 * parameters / 2 <= padding
    counters = 4 * len(PLAIN.kinds) * 100
    assert 0 <= memory.resting["optimizer"] - 8 * parameters / 2 <= 2 * padding + counters


def test_a_model_that_fits_no_host() -> None:
    wide = replace(
        PLAIN, hidden=2**16,
        runs=(BlockRun(1, Block(mixer=Attention(heads=512, kv_heads=64, head_dim=128), feed=FeedForward(ffn=2**18))),),
    )  # fmt: skip
    found = emulated(wide, 1, micro_batch=8)
    assert found.memory.peak_bytes > 10**12
    assert found.host_peak_bytes < 4 * 10**9


def test_every_place_is_in_the_trainer() -> None:
    """A function of the trainer that is renamed would lose its category without a word."""
    for module, path in PLACES:
        thing: Any = import_module(f"fivefold.train.{module}")
        for name in path.split("."):
            thing = getattr(thing, name)
        assert callable(thing)


def test_nothing_is_left_behind() -> None:
    emulated(PLAIN, 2)
    assert not dist.is_initialized()
    assert "resize_" not in vars(torch.UntypedStorage)
    with pytest.raises(FivefoldError, match="ranks 0 to 1"):
        emulated(PLAIN, 2, 2)
    assert not dist.is_initialized()
    with fake_world(0, 2), pytest.raises(FivefoldError, match="already a rank"):
        emulated(PLAIN, 2)


def allocated(spec: ModelSpec, layout: ResolvedLayout, mesh: Mesh, setup: Setup) -> int:
    """The most bytes that the CPU's allocator held in one step beyond those at its start, by PyTorch's profiler and
    without the tracker."""
    trainer = Trainer(spec, layout, mesh, setup)
    trainer.update(0, 1.0)
    batches = Synthetic(spec.vocab, SEQ).micro_batches(0, layout, mesh.index("dp"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        trainer.step(1, batches)
    profiler: Any = watched.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held)


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp32", {}),
        ("bf16", {"micro_batch": 4}),
        ("bf16", {"micro_batch": 4, "recompute": FULL}),
        ("bf16", {"micro_batch": 4, "recompute": NORMS}),
        ("bf16", {"micro_batch": 4, "zero": 3}),
    ],
)
def test_the_peak_is_the_allocators(precision: str, options: dict[str, Any]) -> None:
    """Of one rank: gloo's collectives allocate for themselves too."""
    setup = Setup(precision=precision)
    layout = layout_of(PLAIN, 1, **options)
    memory = emulate_layout(PLAIN, layout, 0, SEQ, setup).memory
    [seen] = run_ranks(1, lambda rank: allocated(PLAIN, layout, Mesh(layout), setup))
    assert memory.peak_bytes - memory.resting_bytes == seen
