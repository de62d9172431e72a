"""Ledgers against independent counts: the model room's parameters and FLOPs, and closed forms of saved activations.

The unfused 34 s b h + 5 a s^2 b of Korthikanti et al. 2022 is not what fused kernels save; the closed forms here are
those of Transformer Engine's layers with flash attention, per token and with the tensor- and sequence-parallel cuts.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.layout import Layout
from fivefold.model import count_params, load_model, models
from fivefold.model.flops import forward_flops_per_token
from fivefold.model.spec import Attention, Block, BlockRun, Experts, FeedForward, LatentAttention
from fivefold.model.tensors import block_params, shard_counts

SEQ = 1024
ONE = np.arange(1)


def short(layout: Layout) -> str:
    """The fields that differ from the defaults, for test names."""
    default = Layout()
    given = {name: getattr(layout, name) for name in layout.__struct_fields__}
    return "-".join(f"{name}{value}" for name, value in given.items() if value != getattr(default, name)) or "one"


def one_rank(kernel_of, model, layout=None, **more):
    """A kernel on one GPU, or on as many as the layout needs."""
    return kernel_of(model, [layout or Layout()], **({"gpus": 1, "seq_len": SEQ} | more))


def held_parameters(kernel) -> float:
    dense, expert = kernel.rank_parameters(ONE)
    return float((dense + expert).sum())


@pytest.fixture(scope="module", params=models())
def catalogued(request):
    return load_model(request.param)


def test_parameters_of_every_model(catalogued, kernel_of):
    # torchtitan pads the vocabulary to a multiple of tp, so at tp 1 nothing is padded.
    kernel = one_rank(kernel_of, catalogued, runtime="torchtitan")
    assert held_parameters(kernel) == count_params(catalogued).total


def test_padding_is_all_that_megatron_adds(catalogued, kernel_of):
    rows = -(-catalogued.vocab // 128) * 128 - catalogued.vocab
    tables = 1 if catalogued.tied_embeddings else 2
    kernel = one_rank(kernel_of, catalogued)
    assert held_parameters(kernel) == count_params(catalogued).total + rows * (
        tables * catalogued.hidden + catalogued.head_bias
    )


def test_forward_flops_of_every_model(catalogued, kernel_of):
    kernel = one_rank(kernel_of, catalogued, runtime="torchtitan")
    counts = kernel.table.count[0, 0]
    executed = sum(count * cost.flops[0] for count, cost in zip(counts, kernel.costs, strict=True))
    expected = forward_flops_per_token(catalogued, SEQ, "causal")
    assert executed / SEQ == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_prediction_modules_count_too(name, kernel_of):
    model = replace(load_model(name), mtp=1)
    kernel = one_rank(kernel_of, model, runtime="torchtitan")
    counts = kernel.table.count[0, 0]
    executed = sum(count * cost.flops[0] for count, cost in zip(counts, kernel.costs, strict=True))
    assert held_parameters(kernel) == count_params(model).total
    assert executed / SEQ == pytest.approx(forward_flops_per_token(model, SEQ, "causal"), rel=1e-12)


def test_latent_attention_with_biases_has_them(small, kernel_of):
    run = small["deepseek"].runs[0]
    model = replace(
        small["deepseek"], runs=(BlockRun(4, replace(run.block, mixer=replace(run.block.mixer, bias=True))),)
    )
    assert held_parameters(one_rank(kernel_of, model)) == count_params(model).total


def test_attention_of_windows_counts_the_band_only(small, kernel_of):
    run = small["llama"].runs[0]
    model = replace(small["llama"], runs=(BlockRun(4, replace(run.block, mixer=replace(run.block.mixer, window=256))),))
    kernel = one_rank(kernel_of, model)
    executed = 4 * kernel.costs[0].flops[0] + kernel.costs[2].flops[0]
    assert executed / SEQ == pytest.approx(forward_flops_per_token(model, SEQ, "causal"), rel=1e-12)


LAYOUTS = [
    Layout(tp=2),
    Layout(tp=8),
    Layout(tp=16),  # beyond the 8 key/value heads, which are then replicated
    Layout(pp=4),
    Layout(tp=4, pp=2),
    Layout(tp=2, cp=2, pp=2),
    Layout(tp=2, ep=4, etp=1),
    Layout(tp=4, ep=2, etp=4, pp=2),
    Layout(tp=1, ep=8, etp=1, pp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=short)
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek", "gpt2"])
def test_shards_of_every_pipeline_rank(family, layout, small, kernel_of):
    model = small[family]
    if not model.is_moe and (layout.ep > 1 or layout.etp > 1):
        pytest.skip("no experts")
    kernel = kernel_of(model, [layout], gpus=64, every_rank=True)
    dense, expert = (part[0] for part in kernel.rank_parameters(ONE))
    blocks = [run.block for run in model.runs for _ in range(run.count)]
    per_rank = len(blocks) // layout.pp
    for rank in range(layout.pp):
        want_dense = want_expert = 0.0
        for block in blocks[rank * per_rank : (rank + 1) * per_rank]:
            split = shard_counts(block, model.hidden)
            want_dense += split["replicated"] + (split["column"] + split["row"]) / layout.tp
            want_dense += split["kv"] / min(layout.tp, getattr(block.mixer, "kv_heads", 1))
            want_expert += split["expert"] / (layout.ep * layout.etp)
        table = model.vocab * model.hidden / layout.tp
        final_norm = model.hidden * (2 if model.final_norm_bias else 1)
        if rank == 0:
            want_dense += table + model.learned_positions * model.hidden
        if rank == layout.pp - 1:
            own_head = not model.tied_embeddings or layout.pp > 1
            want_dense += final_norm + (table if own_head else 0)
        assert dense[rank] == pytest.approx(want_dense, rel=1e-12)
        assert expert[rank] == pytest.approx(want_expert, rel=1e-12)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek", "gpt2"])
def test_shards_times_ranks_are_the_model(family, small, kernel_of):
    """Whatever tensor parallelism cuts is whole again over its ranks; norms, routers and the like are held by each."""
    model, tp = small[family], 8
    kernel = kernel_of(model, [Layout(tp=tp)], gpus=tp)
    blocks = [run.block for run in model.runs for _ in range(run.count)]
    copied = sum(shard_counts(block, model.hidden)["replicated"] for block in blocks)
    copied += model.hidden * (2 if model.final_norm_bias else 1) + model.learned_positions * model.hidden
    experts = sum(shard_counts(block, model.hidden)["expert"] for block in blocks)
    dense, expert = (float(part.sum()) for part in kernel.rank_parameters(ONE))
    assert expert == experts
    assert tp * (dense - copied) + copied + experts == pytest.approx(count_params(model).total, rel=1e-12)


# ---------------------------------------------------------------- saved activations


def mixer_bytes_per_token(mixer, tp: int, shard: int) -> float:
    """Bytes saved by a mixer. shard: over how many ranks sequence parallelism spreads a token's unsplit parts."""
    if isinstance(mixer, LatentAttention):
        latent = 4 * (mixer.kv_lora_rank + (mixer.q_lora_rank or 0)) / shard  # norms of latents: input and output
        per_head = 2 * (2 * mixer.qk_head_dim + mixer.v_head_dim) + 2 * mixer.v_head_dim + 4
        return latent + per_head * mixer.heads / tp
    q, kv = mixer.heads * mixer.head_dim / tp, mixer.kv_heads * mixer.head_dim / min(tp, mixer.kv_heads)
    return 2 * (q + 2 * kv) + 2 * q + 4 * mixer.heads / tp


def feed_bytes_per_token(feed, tp: int, shard: int, etp: int, hidden: int) -> float:
    if isinstance(feed, FeedForward):
        return (2 * 2 + 2 if feed.gated else 2 + 2) * feed.ffn / tp  # into the activation and out of it
    assert isinstance(feed, Experts)
    # The router's logits and probabilities in fp32; per chosen expert its input, and three times its width.
    routed = feed.top_k / shard * etp * (2 * hidden + 6 * feed.ffn / etp)
    return 8 * feed.num_experts / shard + routed + 6 * feed.shared_ffn / tp


def block_bytes(block: Block, hidden: int, tokens: int, tp: int, sp: bool, etp: int) -> float:
    shard = tp if sp else 1
    norms = 8 * hidden / shard  # two norms, input and output, two bytes each
    return tokens * (
        norms + mixer_bytes_per_token(block.mixer, tp, shard) + feed_bytes_per_token(block.feed, tp, shard, etp, hidden)
    )


CUTS = [
    Layout(),
    Layout(micro_batch=2),
    Layout(tp=4),
    Layout(tp=4, sequence_parallel=False),
    Layout(tp=16),
    Layout(cp=4),
    Layout(tp=2, cp=2, micro_batch=4),
    Layout(tp=4, etp=4, ep=2),
    Layout(tp=4, etp=1, ep=8),
]


@pytest.mark.parametrize("layout", CUTS, ids=short)
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek", "gpt2"])
def test_saved_bytes_of_a_megatron_block(family, layout, small, kernel_of):
    model = small[family]
    kernel = kernel_of(model, [layout], gpus=64, seq_len=SEQ, global_batch=256)
    tokens = layout.micro_batch * SEQ // layout.cp
    sp = layout.tp > 1 if layout.sequence_parallel is None else layout.sequence_parallel
    for block, cost in zip(model.kinds, kernel.costs, strict=False):
        want = block_bytes(block, model.hidden, tokens, layout.tp, sp, layout.etp)
        assert cost.saved_bytes[0] == pytest.approx(want, rel=1e-12)


def test_a_dense_block_per_token_by_letters(small, kernel_of):
    """8 h + 2 (q + 2 kv) + 2 q + 4 a + 6 f bytes per token: Llama-like, nothing split."""
    mixer, feed = small["llama"].runs[0].block.mixer, small["llama"].runs[0].block.feed
    assert isinstance(mixer, Attention)
    assert isinstance(feed, FeedForward)
    h, a, q, kv, f = 1024, mixer.heads, 1024, 512, feed.ffn
    kernel = one_rank(kernel_of, "llama")
    assert kernel.costs[0].saved_bytes[0] == SEQ * (8 * h + 2 * (q + 2 * kv) + 2 * q + 4 * a + 6 * f)


def test_eager_pytorch_saves_the_activated_gate_besides(small, kernel_of):
    ffn = small["llama"].runs[0].block.feed.ffn
    fused, eager = (
        one_rank(kernel_of, "llama", runtime=name).costs[0].saved_bytes[0] for name in ("megatron", "torchtitan")
    )
    repeated = 2 * (16 - 8) * 64  # keys and values of the query heads that have none of their own
    assert eager - fused == SEQ * 2 * (ffn + repeated)


@pytest.mark.parametrize(
    ("family", "kind", "module", "per_token"),
    [
        ("llama", 0, "core_attn", 4 * 16),
        # the norm is fused into fc1, so its output goes with the feed-forward
        ("llama", 0, "mlp", 6 * 4096 + 2 * 1024),
        ("llama", 0, "layernorm", 0),
        ("deepseek", 1, "layernorm", 4 * 1024),
        ("deepseek", 1, "core_attn", 4 * 16),
        ("deepseek", 1, "mla_up_proj", 2 * 16 * (2 * 96 + 64)),
        ("deepseek", 1, "moe_act", 4 * 2 * 512),
        ("deepseek", 1, "shared_experts", 6 * 1024),
        # router in fp32 twice, routed experts' input and three widths, the shared expert's three widths
        ("deepseek", 1, "moe", 8 * 16 + 4 * (2 * 1024 + 6 * 512) + 6 * 1024),
    ],
)
def test_what_a_recomputed_module_drops(family, kind, module, per_token, kernel_of):
    from fivefold.layout import RECOMPUTE_MODULES

    cost = one_rank(kernel_of, family).costs[kind]
    assert cost.dropped_bytes[RECOMPUTE_MODULES.index(module), 0] == SEQ * per_token


def test_full_recompute_keeps_the_input_of_each_block(kernel_of):
    sharded = one_rank(kernel_of, "llama", Layout(tp=4), gpus=4)
    assert one_rank(kernel_of, "llama").costs[0].input_bytes[0] == SEQ * 2 * 1024
    assert sharded.costs[0].input_bytes[0] == SEQ * 2 * 1024 / 4


def test_block_parameters_by_letters(small):
    """12 h^2 + 13 h of a GPT block (four h x h, two h x 4h, their biases and two norms), as the simple view has it."""
    assert block_params(small["gpt2"].runs[0].block, 1024) == 12 * 1024**2 + 13 * 1024
