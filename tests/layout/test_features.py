"""Names of what models have, the heads that axes divide, and the trainer's refusal of what it does not run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fivefold.layout import violations
from fivefold.layout.features import FEATURES, PHRASES, features
from fivefold.layout.mixers import largest_tp, softmax_attention
from fivefold.model.spec import (
    Attention,
    Block,
    BlockRun,
    Experts,
    FeedForward,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    Rotary,
    SideBySide,
)

GROUPED = Attention(heads=16, kv_heads=16, head_dim=64)
DENSE = FeedForward(ffn=4096)
ROUTED = Experts(num_experts=8, top_k=2, ffn=512)
LATENT = LatentAttention(heads=16, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
SPACE = Mamba2(heads=16, head_dim=64, groups=8, state=64, conv=4)
PLAIN = Block(mixer=GROUPED, feed=DENSE)


def of(block: Block, **more) -> ModelSpec:
    return ModelSpec(
        name="one", family="one", hidden=1024, vocab=32000, max_position=8192, runs=(BlockRun(8, block),), **more
    )


def attention(**changes) -> ModelSpec:
    return of(replace(PLAIN, mixer=replace(GROUPED, **changes)))


def experts(**changes) -> ModelSpec:
    return of(replace(PLAIN, feed=replace(ROUTED, **changes)))


# What each model has; every feature is in at least one.
HAVE: list[tuple[ModelSpec, set[str]]] = [
    (of(PLAIN), set()),
    (experts(), {"experts"}),
    (experts(shared_ffn=512, shared_gate=True), {"experts", "shared-experts", "shared-expert-gate"}),
    (experts(latent=256), {"experts", "latent-experts"}),
    (experts(bias=True, router_bias=True), {"experts", "expert-bias", "router-bias"}),
    (
        replace(of(PLAIN), runs=(BlockRun(4, PLAIN), BlockRun(4, replace(PLAIN, feed=ROUTED)))),
        {"experts", "mixed-feed"},
    ),
    (of(replace(PLAIN, mixer=LATENT)), {"latent-attention"}),
    (
        of(replace(PLAIN, mixer=replace(LATENT, indexer=Indexer(heads=4, head_dim=64, top_k=512)))),
        {"latent-attention", "sparse-attention"},
    ),
    (
        of(replace(PLAIN, mixer=GatedDeltaNet(key_heads=8, value_heads=8, key_dim=64, value_dim=64, conv=4))),
        {"gated-delta-net"},
    ),
    (of(replace(PLAIN, mixer=Mamba(inner=2048, state=16, conv=4, dt_rank=64))), {"mamba"}),
    (of(replace(PLAIN, mixer=SPACE)), {"mamba2"}),
    (of(replace(PLAIN, mixer=SideBySide(attention=GROUPED, state_space=SPACE))), {"side-by-side"}),
    (
        of(replace(PLAIN, mixer=SideBySide(attention=replace(GROUPED, window=64), state_space=SPACE))),
        {"side-by-side", "window"},
    ),
    (of(replace(PLAIN, mixer=None)), {"one-sublayer-blocks"}),
    (attention(window=512), {"window"}),
    (attention(chunk=512), {"chunked-attention"}),
    (attention(sinks=True), {"attention-sinks"}),
    (attention(gate=True), {"attention-gate"}),
    (attention(alibi=True), {"alibi"}),
    (attention(qk_norm=True), {"qk-norm"}),
    (attention(qk_norm=True, qk_norm_over="all"), {"qk-norm", "qk-norm-all"}),
    (attention(qk_norm=True, qk_norm_over="each"), {"qk-norm", "qk-norm-each"}),
    (attention(qk_norm=True, qk_norm_kind="layernorm"), {"qk-norm", "qk-layernorm"}),
    (of(replace(PLAIN, norms="post")), {"post-norm"}),
    (of(replace(PLAIN, norms="sandwich")), {"sandwich-norm"}),
    (of(replace(PLAIN, parallel=True)), {"parallel-blocks"}),
    (of(replace(PLAIN, norm="layernorm_fixed")), {"fixed-layernorm"}),
    (of(PLAIN, final_norm="layernorm"), {"layernorm-without-bias"}),
    (of(replace(PLAIN, feed=replace(DENSE, activation="relu2"))), {"squared-relu"}),
    (of(PLAIN, learned_positions=8192), {"learned-positions"}),
    (of(PLAIN, rotary=Rotary(share=0.5)), {"partial-rotary"}),
    (of(PLAIN, rotary=Rotary(scaling="llama3")), set()),
    (of(replace(PLAIN, mixer=LATENT), rotary=Rotary(scaling="yarn")), {"latent-attention", "scaled-rotary"}),
    (attention(rope=False), set()),
    (of(PLAIN, embedding_norm=True), {"embedding-norm"}),
    (of(PLAIN, head_bias=True), {"head-bias"}),
    (of(PLAIN, mtp=1), {"mtp"}),
    (of(PLAIN, peculiar=("scores are soft-capped",)), {"peculiar"}),
]
TRAINED = ({"window"}, {"qk-norm"}, {"learned-positions"}, {"layernorm-without-bias"}, set())


@pytest.mark.parametrize(
    ("model", "expected"), HAVE, ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else ""
)
def test_features_are_named(model: ModelSpec, expected: set[str]) -> None:
    assert features(model) == expected


def test_every_feature_is_seen_and_has_a_phrase_of_its_own() -> None:
    assert set().union(*(expected for _, expected in HAVE)) == {feature.name for feature in FEATURES}
    assert len(set(PHRASES.values())) == len(FEATURES)


@pytest.mark.parametrize(
    ("model", "expected"), HAVE, ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else ""
)
def test_the_trainer_refuses_what_it_does_not_run_by_name(make, model: ModelSpec, expected: set[str]) -> None:
    layout, context = make(model=model, runtime="fivefold", world=1, global_batch=1, zero=1)
    broken = violations(layout, context)
    if expected in TRAINED:
        assert broken == []
        return
    text = " ".join(violation.message for violation in broken)
    assert {violation.option for violation in broken} <= {"MODEL", "--mtp"}, text
    said = {
        "experts": "routed experts",
        "mtp": "1 multi-token-prediction modules",
        "peculiar": "scores are soft-capped",
    }
    of_experts = {"latent-experts", "shared-experts", "shared-expert-gate", "expert-bias", "router-bias", "mixed-feed"}
    for name in expected - of_experts - set().union(*TRAINED):
        assert said.get(name, PHRASES[name]) in text, name


def test_what_tensor_parallelism_divides() -> None:
    space = replace(SPACE, heads=8)
    both = Block(mixer=SideBySide(attention=GROUPED, state_space=space), feed=None)
    assert largest_tp((both,), 1024) == 8
    assert largest_tp((Block(mixer=None, feed=DENSE), PLAIN), 1024) == 16
    assert largest_tp((Block(mixer=None, feed=DENSE),), 1024) == 1024
    assert softmax_attention(both.mixer) == GROUPED
    assert softmax_attention(space) is None


def test_axes_see_the_mixers_of_every_block(make) -> None:
    """A hybrid: attention in some blocks, Mamba 2 in others, feed-forwards alone in the rest (nemotron-h)."""
    blocks = (Block(mixer=SPACE, feed=None), Block(mixer=None, feed=DENSE), Block(mixer=GROUPED, feed=None))
    model = replace(of(PLAIN), runs=tuple(BlockRun(4, block) for block in blocks))
    _, context = make(model=model)
    assert (context.heads, context.kv_heads, context.state_heads, context.state_groups) == (16, (16,), 16, 8)
    assert {each.id for each in violations(*make(model=model, tp=16))} == {"state-groups-tp"}
    assert violations(*make(model=model, tp=8, cp=2)) == []
    _, attention_less = make(model=of(Block(mixer=SPACE, feed=None)))
    made = 2 * 1024 + 2 * 8 * 64 + 16
    assert (attention_less.heads, attention_less.kv_heads, attention_less.head_widths) == (0, (), (1024, made))


def test_fp8_products_of_a_state_space_need_whole_sixteens_on_every_rank(make) -> None:
    """Megatron-Core's mamba_mixer: the input projection's width, here 3,088 = 193 x 16."""
    model = of(Block(mixer=SPACE, feed=None))
    assert violations(*make(model=model, precision="fp8")) == []
    assert {each.id for each in violations(*make(model=model, precision="fp8", tp=2))} == {"fp8-dimensions"}
