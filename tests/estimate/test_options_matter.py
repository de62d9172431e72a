"""No option is accepted and ignored: each one moves memory, time or traffic, and in the direction that it should."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.estimate import estimate
from fivefold.layout import Layout, Overlap, Recompute, Workload
from fivefold.model import load_model

GIB = 1024**3


def memory(est, name: str, stage: int = 0) -> int:
    return est.memory.stages[stage].breakdown[name]


def seconds(est) -> float:
    return est.step.seconds.value


def part(est, name: str) -> float:
    return est.step.breakdown_s[name]


@pytest.fixture(scope="module")
def big(price):
    """Llama-3-8B on 16 H100, 4096 tokens, 64 sequences, tp 2 and pp 2 unless asked."""
    model = load_model("llama-3-8b")

    def run(*, runtime: str = "megatron", gpus: int = 16, layout: Layout | None = None, work=(), **more):
        base = Layout(tp=2, pp=2) if runtime == "megatron" else Layout(zero=3)
        load = {"seq_len": 4096, "global_batch": 64} | dict(work)
        return price(model, replace(layout or base, **more), gpus=gpus, runtime=runtime, **load)

    return run


@pytest.fixture(scope="module")
def moe(price):
    """Mixtral 8x7B on 16 H100, tp 2 and ep 4 unless asked."""
    model = load_model("mixtral-8x7b")

    def run(*, runtime: str = "megatron", layout: Layout | None = None, work=(), **more):
        base = Layout(tp=2, ep=4) if runtime == "megatron" else Layout(zero=3, ep=4)
        load = {"seq_len": 4096, "global_batch": 64} | dict(work)
        return price(model, replace(layout or base, **more), runtime=runtime, **load)

    return run


# ---------------------------------------------------------------- overlap


@pytest.mark.parametrize("overlap", [Overlap(grad=False), Overlap(param=False)], ids=["grad", "param"])
def test_without_overlap_reduction_is_exposed(big, overlap):
    base, exposed = big(), big(overlap=overlap)
    assert part(exposed, "dp") > part(base, "dp")
    assert seconds(exposed) > seconds(base)


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
def test_tensor_parallel_overlap_hides_communication(big, runtime):
    layout = Layout(tp=2, zero=1 if runtime == "megatron" else 3)
    base = big(runtime=runtime, layout=layout)
    hidden = big(runtime=runtime, layout=layout, overlap=Overlap(tp=True))
    assert 0 < part(hidden, "tp") < part(base, "tp")
    assert seconds(hidden) < seconds(base)


def test_expert_overlap_hides_exchanges(moe):
    base, hidden = moe(), moe(overlap=Overlap(ep=True))
    assert 0 < part(hidden, "ep") < part(base, "ep")
    assert seconds(hidden) < seconds(base)


# ---------------------------------------------------------------- workload


def test_imbalance_slows_and_fills_the_busiest_rank(moe):
    even, uneven = moe(), moe(work={"moe_imbalance": 1.5})
    assert part(uneven, "compute") > part(even, "compute")
    assert part(uneven, "ep") > part(even, "ep")
    assert seconds(uneven) > seconds(even)
    assert memory(uneven, "activations") > memory(even, "activations")


def test_gradients_in_half_precision(big):
    single, half = big(), big(work={"grad_dtype": "bf16"})
    assert memory(half, "gradients") * 2 == memory(single, "gradients")
    assert part(half, "dp") < part(single, "dp")
    assert seconds(half) < seconds(single)


def test_fp8_is_faster_and_trades_weights_for_activations(big):
    bf16, fp8 = big(), big(work={"precision": "fp8"})
    assert part(fp8, "compute") < 0.9 * part(bf16, "compute")  # the head stays in 16 bit, and operands are cast
    assert memory(fp8, "activations") < memory(bf16, "activations")
    # An fp8 copy and its transpose beside each matrix of a block, and none beside the embedding (tests of quantised).
    assert 1.5 * memory(bf16, "weights") < memory(fp8, "weights") < 2 * memory(bf16, "weights")


def test_fp16_costs_what_bf16_does(big):
    """Two bytes and the same matrix units; its loss scale is one number and its check of gradients is not modelled."""
    assert big(work={"precision": "fp16"}).memory.stages == big().memory.stages


def test_mfu_is_over_the_peak_of_the_precision(big):
    bf16, fp8 = big(), big(work={"precision": "fp8"})
    ratio = (fp8.step.mfu.causal / bf16.step.mfu.causal) * (seconds(fp8) / seconds(bf16))
    assert ratio == pytest.approx(0.5, rel=0.02)  # H100: the dense fp8 peak is twice the bf16 peak


STATES = {"adamw": 8, "sgd": 4, "adamw8bit": 2.03125}


@pytest.mark.parametrize("optimizer", STATES)
def test_states_of_each_optimizer(big, optimizer):
    est = big(runtime="torchtitan", work={"optimizer": optimizer})
    assert memory(est, "optimizer") == pytest.approx(est.params.total * STATES[optimizer] / 16, rel=1e-9)


def test_order_of_optimizer_states(big):
    found = [memory(big(runtime="torchtitan", work={"optimizer": o}), "optimizer") for o in ("adafactor", "muon")]
    sgd, adamw = (memory(big(runtime="torchtitan", work={"optimizer": o}), "optimizer") for o in ("sgd", "adamw"))
    assert 0 < found[0] < sgd < found[1] < adamw


def test_factored_states_by_hand(price, small):
    """Adafactor keeps a row and a column per matrix, and whole second moments of vectors (norm weights), in fp32."""
    h, q, kv, ffn, vocab, layers = 1024, 1024, 512, 4096, 4096, 16
    block = (h + q + 2 * kv) + (q + h) + (h + 2 * ffn) + (ffn + h) + 2 * h
    total = layers * block + 2 * (vocab + h) + h
    est = price("llama", Layout(zero=3), runtime="torchtitan", optimizer="adafactor", gpus=4)
    assert memory(est, "optimizer") == pytest.approx(4 * total / 4, abs=1)


def test_muon_by_hand(price):
    """fp32 momentum for hidden matrices; embedding, head and norms keep AdamW's two moments."""
    h, layers, vocab = 1024, 16, 4096
    block = h * 2048 + h * h + 3 * h * 4096
    vectors = 2 * vocab * h + (2 * layers + 1) * h
    est = price("llama", Layout(zero=3), runtime="torchtitan", optimizer="muon", gpus=4)
    assert memory(est, "optimizer") == (4 * layers * block + 8 * vectors) // 4


def test_muon_takes_longer_than_adamw(big):
    adamw, muon = (big(runtime="torchtitan", work={"optimizer": o}) for o in ("adamw", "muon"))
    assert part(muon, "optimizer") > part(adamw, "optimizer")


# ---------------------------------------------------------------- sharding


def test_zero_stages_of_torchtitan(big):
    two, three = big(runtime="torchtitan", zero=2), big(runtime="torchtitan", zero=3)
    assert memory(two, "gathered") > memory(three, "gathered")
    assert part(two, "dp") < part(three, "dp")
    gathers = [sum(row.count for row in est.traffic if row.collective == "all_gather") for est in (two, three)]
    assert gathers[0] < gathers[1]


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
def test_replicated_shards(big, runtime):
    """HSDP: states double, and an all-reduce over the replicas joins the reduce-scatter."""
    once, twice = big(runtime=runtime), big(runtime=runtime, dp_replicate=2)
    for name in ("master", "optimizer"):
        assert memory(twice, name) == pytest.approx(2 * memory(once, name), abs=2)
    assert any(row.axis == "dp_replicate" for row in twice.traffic)
    assert not any(row.axis == "dp_replicate" for row in once.traffic)


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
def test_replicated_shards_of_experts(moe, runtime):
    """The experts' shards are replicated as well: their states, too, are shared by edp / dp_replicate ranks."""
    layout = Layout(ep=4, zero=1 if runtime == "megatron" else 3)
    once, twice = moe(runtime=runtime, layout=layout), moe(runtime=runtime, layout=layout, dp_replicate=2)
    assert memory(twice, "optimizer") == pytest.approx(2 * memory(once, "optimizer"), abs=2)
    assert seconds(twice) != seconds(once)


def test_sequence_parallelism_saves_activations(big):
    assert memory(big(sequence_parallel=False), "activations") > memory(big(), "activations")


@pytest.mark.parametrize("cp_kind", ["p2p", "a2a"])
def test_context_parallelism_halves_what_is_saved(big, cp_kind):
    whole, split = big(), big(cp=2, cp_kind=cp_kind)
    assert memory(split, "activations") == pytest.approx(memory(whole, "activations") / 2, rel=1e-9)
    collective = "send" if cp_kind == "p2p" else "all_to_all"
    assert [row.collective for row in split.traffic if row.axis == "cp"] == [collective]


def test_ring_hides_behind_attention_and_all_to_all_does_not(big):
    ring, exchange = big(cp=2), big(cp=2, cp_kind="a2a")
    assert part(ring, "cp") < part(exchange, "cp")


def test_expert_tensor_parallelism(moe):
    base, split = moe(), moe(etp=2)
    assert memory(split, "weights") < memory(base, "weights")
    assert any(row.axis == "etp" for row in split.traffic)
    assert part(split, "ep") > part(base, "ep")


def test_micro_batch(big):
    one, two = big(), big(micro_batch=2)
    assert memory(two, "activations") == 2 * memory(one, "activations")
    assert part(two, "bubble") > part(one, "bubble")
    assert part(two, "tp") < part(one, "tp")  # the same bytes in half the messages


# ---------------------------------------------------------------- pipeline


@pytest.mark.parametrize(("where", "stage"), [("first_stage_layers", 0), ("last_stage_layers", 1)])
def test_fewer_layers_at_an_end_lighten_it(big, where, stage):
    even, uneven = big(), big(**{where: 14})
    assert uneven.memory.stages[stage].peak_bytes < even.memory.stages[stage].peak_bytes
    assert uneven.memory.stages[1 - stage].peak_bytes > even.memory.stages[1 - stage].peak_bytes
    assert seconds(uneven) != seconds(even)


@pytest.mark.parametrize("switch", ["account_for_embedding", "account_for_loss"])
def test_items_counted_as_blocks_move_blocks(price, with_layers, switch):
    model = with_layers(load_model("llama-3-8b"), 31)
    counted = price(model, Layout(pp=4, **{switch: True}))
    lengths = [last - first for ((first, last),) in counted.layout.stages]
    assert lengths == ([7, 8, 8, 8] if switch == "account_for_embedding" else [8, 8, 8, 7])
    norm_and_tables = [128256 * 4096, 0, 0, 128256 * 4096 + 4096]
    block = (model_params(model) - sum(norm_and_tables)) // 31
    for stage, (length, extra) in enumerate(zip(lengths, norm_and_tables, strict=True)):
        assert memory(counted, "weights", stage) == 2 * (length * block + extra)


def model_params(model) -> int:
    from fivefold.model import count_params

    return count_params(model).total


def test_interleaving_holds_more_and_waits_less(big):
    plain, interleaved = big(), big(vpp=2)
    assert memory(interleaved, "activations") > memory(plain, "activations")
    assert part(interleaved, "bubble") < part(plain, "bubble")


def test_interleaving_by_korthikanti(price, small):
    """The first stage's saved activations times 1 + (p - 1) / (p v), where all stages and chunks are alike."""
    p, v = 4, 2
    plain, interleaved = (price("llama", Layout(pp=p, vpp=chunks)).memory.stages[0] for chunks in (1, v))
    assert plain.in_flight == p
    assert interleaved.in_flight == p * (1 + (p - 1) / (p * v))


def test_all_forwards_first_holds_every_micro_batch(big):
    layout = Layout(pp=2, zero=3)
    f1b1, afab = (big(runtime="torchtitan", layout=layout, schedule=kind) for kind in ("1f1b", "afab"))
    assert f1b1.memory.stages[0].in_flight == 2
    assert afab.memory.stages[0].in_flight == afab.layout.num_micro_batches == 8
    assert memory(afab, "activations") > 3 * memory(f1b1, "activations")


def chunk_peaks(kernel) -> list[float]:
    """Bytes held by each rank at the worst moment of the schedule, from the schedule room's moments."""
    from fivefold.schedule import in_flight_moments

    layout, schedule, m, _ = kernel.plans[0]
    saved = (layout.plain @ kernel.variants.saved[0] + layout.again @ kernel.variants.kept[0]).reshape(layout.vpp, -1)
    moments = in_flight_moments(schedule, layout.pp, m, layout.vpp)
    return (moments * saved.T).sum(axis=-1).max(axis=0).tolist()


@pytest.mark.parametrize("layout", [Layout(pp=2, vpp=2), Layout(pp=4, vpp=2), Layout(pp=4, vpp=4)], ids=range(3))
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_unequal_chunks_at_their_worst_moment(layout, family, kernel_of):
    """Chunks of a rank differ where they hold dense and expert blocks, or the head: no one moment is worst for all."""
    kernel = kernel_of(family, [layout], every_rank=True)
    table, v = kernel.table, kernel.variants
    held = table.held_plain[0] @ v.saved[0] + table.held_again[0] @ v.kept[0]
    by_rank = [max(held[table.rank[0] == rank]) for rank in range(layout.pp)]
    assert by_rank == pytest.approx(chunk_peaks(kernel), rel=1e-12)


def test_the_copies_of_a_tied_embedding_are_reduced(price):
    """Megatron sums the gradients of a tied embedding over the first and the last stage, once per step."""
    est = price("gpt2", Layout(pp=2))
    assert any(row.collective == "all_reduce" for row in est.traffic)


# ---------------------------------------------------------------- recomputation


@pytest.mark.parametrize("module", ["core_attn", "mlp"])
def test_each_dense_module(big, module):
    base = big()
    again = big(recompute=Recompute(kind="selective", modules=(module,)))
    full = big(recompute=Recompute(kind="full"))
    assert memory(full, "activations") < memory(again, "activations") < memory(base, "activations")
    assert seconds(base) < seconds(again) < seconds(full)
    assert 0 == part(base, "recompute") < part(again, "recompute") < part(full, "recompute")


@pytest.mark.parametrize("module", ["core_attn", "moe", "moe_act", "layernorm", "mla_up_proj", "mlp", "shared_experts"])
def test_each_module_of_latent_attention_and_experts(price, module):
    layout, model = Layout(ep=8), load_model("deepseek-v2-lite")
    base = price(model, layout)
    again = price(model, replace(layout, recompute=Recompute(kind="selective", modules=(module,))))
    assert memory(again, "activations") < memory(base, "activations")
    assert part(again, "recompute") > 0
    assert seconds(again) > seconds(base)


def test_recomputing_the_experts_covers_their_activation(moe):
    whole = moe(recompute=Recompute(kind="selective", modules=("moe",)))
    both = moe(recompute=Recompute(kind="selective", modules=("moe", "moe_act")))
    assert memory(whole, "activations") == memory(both, "activations")
    assert seconds(whole) == seconds(both)


def test_recomputing_experts_repeats_their_exchanges(moe):
    base, again = moe(), moe(recompute=Recompute(kind="selective", modules=("moe",)))
    counts = [
        sum(row.count for row in est.traffic if (row.axis, row.collective) == ("ep", "all_to_all"))
        for est in (base, again)
    ]
    assert counts[1] == counts[0] * 3 / 2  # two in forward, two in backward, the two of forward once more


def test_each_recomputed_block_counts(big):
    found = [big(recompute=Recompute(kind="full", layers=n)) for n in (1, 4, 16)]
    sizes = [memory(est, "activations") for est in found]
    times = [part(est, "recompute") for est in found]
    assert sizes == sorted(sizes, reverse=True)
    assert times[1] == pytest.approx(4 * times[0], rel=1e-9)
    assert times[2] == pytest.approx(16 * times[0], rel=1e-9)


def test_hardware_flops_count_what_is_recomputed(big):
    none, full = big(), big(recompute=Recompute(kind="full"))
    assert none.flops_per_token.hardware == none.flops_per_token.causal
    model = load_model("llama-3-8b")
    head = 2 * model.hidden * model.vocab
    forward_of_blocks = full.flops_per_token.causal / 3 - head
    assert full.flops_per_token.hardware - full.flops_per_token.causal == pytest.approx(forward_of_blocks, rel=1e-9)


def test_selective_recompute_of_torchtitan_redoes_every_second_product(small):
    """Its policy by operation lies between keeping everything and recomputing whole blocks."""
    cluster, work = load_cluster("h100-sxm", gpus=8), Workload(seq_len=4096, global_batch=64)
    none, selective, full = (
        estimate(small["llama"], cluster, work, Layout(zero=3, recompute=Recompute(kind=kind)), "torchtitan")
        for kind in ("none", "selective", "full")
    )
    assert selective.valid
    assert memory(full, "activations") < memory(selective, "activations") < memory(none, "activations")
    assert 0 == part(none, "recompute") < part(selective, "recompute") < part(full, "recompute")


def test_fp8_of_torchtitan_saves_no_activations(big):
    bf16, fp8 = (big(runtime="torchtitan", work={"precision": p}) for p in ("bf16", "fp8"))
    assert memory(fp8, "activations") == memory(bf16, "activations")


# ---------------------------------------------------------------- multi-token prediction


def test_a_prediction_module_costs(price, small):
    plain, more = (price(replace(small["deepseek"], mtp=n), Layout(ep=8)) for n in (0, 1))
    assert more.params.total > plain.params.total
    for name in ("weights", "gradients", "master", "optimizer", "activations"):
        assert memory(more, name) > memory(plain, name)
    assert part(more, "compute") > part(plain, "compute")


def test_it_lies_on_the_last_stage_with_a_copy_of_the_embedding(price, small):
    model = small["deepseek"]
    plain, more = (price(replace(model, mtp=n), Layout(ep=4, pp=2)) for n in (0, 1))
    assert memory(more, "weights", 0) == memory(plain, "weights", 0)
    assert memory(more, "weights", 1) > memory(plain, "weights", 1) + 2 * model.vocab * model.hidden


def test_its_logits_are_held_beside_the_main_ones(price, small):
    wide = replace(small["deepseek"], vocab=131072)
    plain, more = (price(replace(wide, mtp=n), Layout(ep=8)) for n in (0, 1))
    assert memory(more, "logits") > memory(plain, "logits")


def test_what_graphs_take_away_is_the_wait_for_the_host(price) -> None:
    """A few tokens over tp 8 take less than their launches."""
    layout = Layout(tp=8)
    without = price("llama", layout, gpus=8, seq_len=512, global_batch=8)
    with_graphs = price("llama", layout, gpus=8, seq_len=512, global_batch=8, cuda_graphs=True)
    assert part(with_graphs, "host") == 0 < 0.2 * seconds(without) < part(without, "host")
    assert part(without, "compute") == part(with_graphs, "compute")
    assert seconds(without) - seconds(with_graphs) == pytest.approx(part(without, "host"))
