"""The pipeline executor against one process: every parameter's gradient, in fp64, under all schedules."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from itertools import product

import axes
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from fivefold.errors import FivefoldError
from fivefold.layout import Overlap, Recompute, ResolvedLayout
from fivefold.model import Attention, Block, BlockRun, FeedForward, ModelSpec
from fivefold.schedule import SCHEDULES, Action, ActionKind, Direction, actions, in_flight, legal, placement
from fivefold.train.clock import Clock, HostClock
from fivefold.train.data import Batch
from fivefold.train.init import shard_of
from fivefold.train.loss import TokenLoss
from fivefold.train.mesh import Mesh
from fivefold.train.model import Decoder, tensor_table
from fivefold.train.parallel import tensor
from fivefold.train.parallel.peers import BoundaryTensor, releases
from fivefold.train.parallel.pipeline import Pipeline, PipelineStage, decoder_stage, tied_pair
from fivefold.train.parallel.split_backward import input_gradient
from fivefold.train.parallel.vocabulary import VocabCrossEntropy

CHUNKS = {"afab": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}
SPLITTING = [kind for kind, schedule in SCHEDULES.items() if schedule.splits_backward]
WIDTH, ROWS, SEQ = 6, 3, 6


@pytest.fixture(autouse=True)
def one_thread():
    """On tiny tensors a second thread only spins."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_schedule_is_tested():
    assert list(CHUNKS) == list(SCHEDULES)


# A model cut into stages


def tiny(layers: int, gpt2: bool = False, tied: bool = False) -> ModelSpec:
    mixer = Attention(
        heads=2, kv_heads=2 if gpt2 else 1, head_dim=4, qkv_bias=gpt2, out_bias=gpt2, qk_norm=not gpt2, rope=not gpt2
    )
    feed = FeedForward(ffn=12, gated=not gpt2, bias=gpt2, activation="gelu_tanh" if gpt2 else "silu")
    block = Block(mixer=mixer, feed=feed, norm="layernorm" if gpt2 else "rmsnorm", norm_bias=gpt2)
    return ModelSpec(
        name="tiny",
        family="tiny",
        hidden=8,
        vocab=11,
        max_position=16,
        runs=(BlockRun(layers, block),),
        tied_embeddings=tied,
        learned_positions=16 if gpt2 else 0,
        final_norm=block.norm,
        final_norm_bias=gpt2,
    )


def whole_model(spec: ModelSpec) -> Decoder:
    model = Decoder(spec, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


def data(m: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, 11, (2, m, 2, SEQ), generator=generator)
    labels[:, 0, 3:] = -100
    labels[m // 2] = -100  # a micro-batch without a valid token
    labels[0] = tokens[0]
    return [Batch(t, lab, torch.arange(SEQ)) for t, lab in zip(tokens, labels, strict=True)]


def loss_of(batches: list[Batch]) -> TokenLoss:
    return TokenLoss(sum(int((batch.labels != -100).sum()) for batch in batches))


def cuts(layers: int, of: int) -> list[range]:
    """Uneven on purpose: the first stage gets what is left over, and the last has no block when it has to."""
    each = layers // of
    sizes = [layers - each * (of - 1), *[each] * (of - 1)]
    if layers < of:
        sizes = [1] * layers + [0] * (of - layers)
    ends = [sum(sizes[: g + 1]) for g in range(of)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def part_of(model: Decoder, layers: range, first: bool, last: bool) -> Decoder:
    part = Decoder(model.spec, layers, embedding=first, head=last, dtype=torch.float64)
    whole = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(whole[name])
    return part


def build(kind, p, m, rank, model, batches, observe=None, split=True, wrap=lambda part: part):
    """This rank's Pipeline and the Decoders in it."""
    v, place = CHUNKS[kind], placement(kind)
    of = p * v
    stages, parts = [], []
    for index in (place.stage(rank, chunk, p) for chunk in range(v)):
        part = part_of(model, cuts(model.spec.layers, of)[index], index == 0, index == of - 1)
        parts.append(wrap(part))
        stages.append(decoder_stage(part, index, of, batches.__getitem__, loss_of(batches), split))
    if model.spec.tied_embeddings and tied_pair(place, p, v) is None and rank == 0:
        parts[1].lm_head.weight = parts[0].embed_tokens.weight
    boundary = BoundaryTensor((2, SEQ, 8), torch.float64)
    group = torch.distributed.group.WORLD
    observer = None if observe is None else Observed(observe)
    return Pipeline(actions(kind, p, m, v), rank, stages, place, group, boundary, observer=observer), parts


class Observed:
    """A function as a Pipeline's observer."""

    clock: Clock = HostClock()

    def __init__(self, tell):
        self._tell = tell

    def __call__(self, action, start, end):
        self._tell(action, start, end)


def gradients(parts) -> dict[str, torch.Tensor]:
    return {name: p.grad for part in parts for name, p in part.named_parameters() if p.grad is not None}


def run_case(rank, kind, p, m, model, sum_tied=True, split=True, wrap=lambda part: part):
    batches = data(m)
    runner, parts = build(kind, p, m, rank, model, batches, split=split, wrap=wrap)
    losses = runner.run()
    pair = tied_pair(placement(kind), p, CHUNKS[kind])
    if model.spec.tied_embeddings and pair is not None and sum_tied:
        group = torch.distributed.new_group(list(pair))  # by every rank
        if rank in pair:
            weight = parts[0].embed_tokens.weight if rank == pair[0] else parts[-1].lm_head.weight
            torch.distributed.all_reduce(weight.grad, group=group)
    return losses, gradients(parts)


def reference(model: Decoder, m: int):
    batches = data(m)
    loss = loss_of(batches)
    model.zero_grad()
    losses = []
    for tokens, labels, positions in batches:
        losses.append(loss(model(tokens, positions), labels))
        losses[-1].backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)}
    return [x.detach() for x in losses], grads


def worst(found: list[dict], expected: dict[str, torch.Tensor]) -> float:
    """The largest error over all parameters and holders, in units of the fp64 bound; infinite for one missing."""
    scale = torch.stack([g.norm() for g in expected.values()]).norm().item() / len(expected) ** 0.5
    seen, errors = set(), [0.0]
    for name, grad in ((n, g) for grads in found for n, g in grads.items()):
        seen.add(name)
        bound = 1e-12 * max(expected[name].norm().item(), 1e-3 * scale)
        errors.append((grad - expected[name]).norm().item() / bound)
    tied = {"lm_head.weight"} if torch.equal(expected["lm_head.weight"], expected["embed_tokens.weight"]) else set()
    return max(errors) if expected.keys() - seen <= tied else float("inf")


def check(results, cases, model):
    for place, (kind, p, m) in enumerate(cases):
        losses, grads = reference(model, m)
        by_rank = [result[place] for result in results]
        found = [rank_losses for rank_losses, _ in by_rank if rank_losses]
        assert len(found) == 1 and len(found[0]) == m, (kind, p, m)
        assert torch.allclose(torch.stack(found[0]), torch.stack(losses), rtol=1e-12, atol=0), (kind, p, m)
        assert worst([grads_of for _, grads_of in by_rank], grads) <= 1, (kind, p, m)


@pytest.mark.parametrize("kind", CHUNKS)
@pytest.mark.parametrize("p", [2, 4])
def test_gradients_and_losses_equal_one_process(kind, p):
    cases = [(kind, p, m) for m in {2: (1, 4, 5), 4: (3, 4, 8, 9)}[p] if legal(kind, p, m, CHUNKS[kind])]
    model = whole_model(tiny(p * CHUNKS[kind] + 1))
    assert cases
    results = run_ranks(p, lambda rank: [run_case(rank, *case, model) for case in cases])
    check(results, cases, model)


@pytest.mark.parametrize("tied", [False, True])
def test_learned_positions_biases_and_tied_embeddings(tied):
    model = whole_model(tiny(5, gpt2=True, tied=tied))
    cases = [(kind, 2, 4) for kind in CHUNKS]
    check(run_ranks(2, lambda rank: [run_case(rank, *case, model) for case in cases]), cases, model)


def test_stages_without_blocks():
    model = whole_model(tiny(2))
    cases = [(kind, 2, 4) for kind in CHUNKS]
    check(run_ranks(2, lambda rank: [run_case(rank, *case, model) for case in cases]), cases, model)


def test_a_tied_gradient_that_is_not_summed_is_caught():
    model = whole_model(tiny(3, tied=True))
    results = run_ranks(2, run_case, "1f1b", 2, 4, model, False)
    assert worst([grads for _, grads in results], reference(model, 4)[1]) > 1e6


def test_recomputed_layers_run_their_whole_backward_at_once():
    def recompute(part):
        for block in part.layers.values():
            plain = block.forward
            block.forward = lambda x, turn, f=plain: torch.utils.checkpoint.checkpoint(f, x, turn, use_reentrant=False)
        return part

    model = whole_model(tiny(5))
    cases = [(kind, 2, 4) for kind in SPLITTING]
    results = run_ranks(2, lambda rank: [run_case(rank, *case, model, split=False, wrap=recompute) for case in cases])
    check(results, cases, model)


def test_several_steps_reuse_one_pipeline():
    model, batches = whole_model(tiny(5)), data(4)

    def run(rank):
        runner, parts = build("zbv", 2, 4, rank, model, batches)
        once = [runner.run(), {name: grad.clone() for name, grad in gradients(parts).items()}]
        again = runner.run()
        ratios = [(grad - 2 * once[1][name]).norm().item() for name, grad in gradients(parts).items()]
        return max(ratios), [float(a - b) for a, b in zip(once[0], again, strict=True)]

    for difference, losses in run_ranks(2, run):
        assert difference < 1e-12 and not any(losses)


# Together with tensor parallelism


def run_with_tensor_parallel(rank, kind, m, model, sequence_parallel):
    """Two pipeline ranks of two tensor ranks each; this rank's gradients and where it is on tp."""
    v, place = CHUNKS[kind], placement(kind)
    plan = ResolvedLayout(
        tp=2, cp=1, cp_kind="p2p", pp=2, vpp=v, ep=1, etp=1, dp=1, edp=2, dp_shard=1, dp_replicate=1, zero=0,
        sequence_parallel=sequence_parallel, micro_batch=2, num_micro_batches=m, schedule="1f1b", stages=(),
        recompute=Recompute(), overlap=Overlap(param=False),
    )  # fmt: skip
    mesh, batches, of = Mesh(plan, rank), data(m), 2 * v
    loss = TokenLoss(loss_of(batches).valid_tokens, VocabCrossEntropy(mesh, model.spec.vocab))
    stages, parts = [], []
    for index in (place.stage(mesh.index("pp"), chunk, 2) for chunk in range(v)):
        part = part_of(model, cuts(model.spec.layers, of)[index], index == 0, index == of - 1)
        tensor.apply(part, mesh, sequence_parallel)
        parts.append(part)
        stages.append(decoder_stage(part, index, of, batches.__getitem__, loss))
    boundary = BoundaryTensor((2, SEQ // 2 if sequence_parallel else SEQ, 8), torch.float64)
    Pipeline(actions(kind, 2, m, v), mesh.index("pp"), stages, place, mesh.group("pp"), boundary).run()
    for part in parts:
        axes.sum_partial(part, mesh)
    return gradients(parts), (mesh.index("tp"), 2)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "dualpipev"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_stages(kind, sequence_parallel):
    """Collectives inside a stage, in backwards that are split, stay in step over the tensor ranks."""
    model, m = whole_model(tiny(4)), 4
    results = run_ranks(4, run_with_tensor_parallel, kind, m, model, sequence_parallel)
    table, (_, expected) = tensor_table(model.spec), reference(model, m)
    for tp in range(2):
        here = [grads for grads, where in results if where == (tp, 2)]
        assert worst(here, {n: shard_of(g, table[n], {"tp": (tp, 2)}) for n, g in expected.items()}) <= 1


# Memory


class _Box:
    """A saved tensor that can be watched."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def count_held(rank, kind, p, m, model):
    """(peak by the executor's own count, peak of micro-batches whose saved tensors live, how many live at the end)."""
    live: dict[tuple[int, int], int] = defaultdict(int)
    peaks = [0, 0]

    def after(action, start, end):
        peaks[0] = max(peaks[0], runner.activations_held)
        peaks[1] = max(peaks[1], sum(count > 0 for count in live.values()))

    runner, _ = build(kind, p, m, rank, model, data(m), observe=after)
    for chunk, stage in enumerate(runner._stages):
        runner._stages[chunk] = watched(stage, live)
    gc.disable()  # nothing may wait for the collector
    runner.run()
    gc.enable()
    return (*peaks, sum(live.values()))


def watched(stage: PipelineStage, live) -> PipelineStage:
    def forward(micro_batch, received):
        step = (micro_batch, stage.index)

        def pack(tensor):
            box = _Box(tensor.detach())  # an output kept whole would hold its own node
            live[step] += 1
            weakref.finalize(box, lambda: live.__setitem__(step, live[step] - 1))
            return box

        with saved_tensors_hooks(pack, lambda box: box.tensor):
            return stage.forward(micro_batch, received)

    return PipelineStage(stage.index, stage.of, forward, stage.body, stage.split)


@pytest.mark.parametrize("kind", CHUNKS)
def test_activations_live_as_long_as_the_schedule_says(kind):
    p, m = 4, 8
    model = whole_model(tiny(8))
    results = run_ranks(p, count_held, kind, p, m, model)
    expected = in_flight(kind, p, m, CHUNKS[kind]).tolist()
    assert [counted for counted, _, _ in results] == expected
    assert [alive for _, alive, _ in results] == expected
    assert [left for _, _, left in results] == [0] * p


@pytest.mark.parametrize("kind", CHUNKS)
def test_few_sent_tensors_stay_behind(kind):
    p, m, v = 4, 64, CHUNKS[kind]
    if kind == "afab":
        return  # its exchanges block, so nothing is left
    lists = actions(kind, p, m, v)
    for rank in range(p):
        sent = [t for a in lists[rank] for t in a.transfers if t.direction is Direction.SEND]
        known = [key for keys in releases(lists, rank, placement(kind)).values() for key in keys]
        assert len(known) == len(set(known))
        assert len(sent) - len(known) <= 4 * p * v, (kind, rank)


# Order of transfers


@pytest.mark.parametrize("kind", CHUNKS)
def test_two_ranks_agree_on_the_order_of_each_kind_of_tensor(kind):
    """What a transport needs that matches by order and not by name."""
    for p, m in product((2, 3, 4), (1, 4, 8, 12)):
        if not legal(kind, p, m, CHUNKS[kind]):
            continue
        order = defaultdict(lambda: {Direction.SEND: [], Direction.RECV: []})
        for rank, steps in enumerate(actions(kind, p, m, CHUNKS[kind])):
            for t in (t for a in steps for t in a.transfers):
                pair = (rank, t.peer) if t.direction is Direction.SEND else (t.peer, rank)
                order[pair, t.tensor][t.direction].append((t.micro_batch, t.virtual_stage))
        assert all(sides[Direction.SEND] == sides[Direction.RECV] for sides in order.values()), (p, m)


# The split backward on its own


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [layer for _ in range(3) for layer in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(WIDTH, 4, bias=False)).double()


def test_split_backward_equals_the_whole_one_and_costs_the_same_flops():
    from torch.utils.flop_counter import FlopCounterMode

    model = mlp()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(ROWS, 4, dtype=torch.float64)
    out = model(x)
    with FlopCounterMode(display=False) as whole:
        out.backward(seed)
    expected = [p.grad.clone() for p in model.parameters()]
    gradient = x.grad.clone()
    model.zero_grad()
    fired = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    out = model(x)
    with FlopCounterMode(display=False) as split:
        found, owed = input_gradient(get_gradient_edge(out), seed, get_gradient_edge(x))
        assert all(p.grad is None for p in model.parameters())
        owed.pay()
    assert torch.equal(found, gradient)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert split.get_total_flops() == whole.get_total_flops()
    assert len(fired) == len(expected)


class _Doubled(torch.autograd.Function):
    """A product whose backward stands for one with a collective in it."""

    runs = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx, grad):
        _Doubled.runs += 1
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.t(), 2 * x.t() @ grad


def test_a_python_function_runs_its_backward_once():
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    _Doubled.runs = 0
    out = _Doubled.apply(x.sin(), weight).cos()
    found, owed = input_gradient(get_gradient_edge(out), torch.ones_like(out), get_gradient_edge(x))
    owed.pay()
    expected = torch.autograd.grad((2 * x.sin() @ weight).cos().sum(), [x, weight])
    assert _Doubled.runs == 1
    assert torch.allclose(found, expected[0], rtol=1e-13) and torch.allclose(weight.grad, expected[1], rtol=1e-13)


def test_a_parameter_used_twice_in_a_stage_is_refused():
    layer = nn.Linear(WIDTH, WIDTH).double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    out = layer(layer(x))
    with pytest.raises(FivefoldError, match="two places of one pipeline stage"):
        input_gradient(get_gradient_edge(out), torch.ones_like(out), get_gradient_edge(x))


# What is refused


def lone_pipeline(stages, lists=None):
    lists = lists or actions("1f1b", 1, 1)
    return Pipeline(lists, 0, stages, placement("1f1b"), None, BoundaryTensor((1,), torch.float64))


def test_wrong_stages_are_refused():
    with pytest.raises(FivefoldError, match="has to hold"):
        lone_pipeline([PipelineStage(1, 2, lambda i, x: x)])


def test_an_action_that_a_pipeline_does_not_do_is_refused():
    lists = [[*actions("1f1b", 1, 1)[0], Action(ActionKind.REDUCE_GRAD, chunk=0)]]
    weight = torch.ones((), requires_grad=True)
    stage = PipelineStage(0, 1, lambda i, x: weight * 3)
    with pytest.raises(FivefoldError, match="does not do: reduce_grad"):
        lone_pipeline([stage], lists)
    assert lone_pipeline([stage]).run() == [3.0] and weight.grad == 3


def test_a_boundary_of_another_shape_is_refused():
    def run(rank):
        lists = actions("1f1b", 2, 1)
        stage = PipelineStage(rank, 2, lambda i, x: torch.ones(2, requires_grad=True) * 2)
        boundary = BoundaryTensor((3,), torch.float32)
        if rank == 0:
            with pytest.raises(FivefoldError, match="the pipeline moves"):
                Pipeline(lists, 0, [stage], placement("1f1b"), torch.distributed.group.WORLD, boundary).run()

    run_ranks(2, run)
