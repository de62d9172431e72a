"""The table of options goes both ways, and a layout comes back from its own options."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from fivefold.interop.megatron.given import Given, parse_arguments
from fivefold.interop.megatron.keys import bridge_key, read_key
from fivefold.interop.megatron.layout_options import changed_options, layout_options, read_layout
from fivefold.interop.megatron.model import layer_pattern
from fivefold.interop.megatron.option_names import LESS_MEMORY
from fivefold.interop.megatron.options import BY_KEY, DEFINING, OPTION_OF, OPTIONS, PRICED, near_options
from fivefold.interop.megatron.stage_text import counts_of, spread
from fivefold.interop.megatron.words import FLAGS, in_their_words
from fivefold.interop.shell.state import State
from fivefold.interop.source import Field, Place
from fivefold.layout import Layout, Overlap, Recompute
from fivefold.layout.rules import OPTIONS as COLUMN_FLAGS

HERE = Place("x.sh", 1)
changed = msgspec.structs.replace


def given_of(*words: str) -> Given:
    given = Given(State("x.sh"))
    parse_arguments(given, [Field(word, HERE) for word in words])
    return given


def test_options_that_need_less_memory_are_those_that_say_so() -> None:
    unmodelled = {option.name: option.why for option in OPTIONS.values() if option.effect == "unmodelled"}
    assert {name for name, why in unmodelled.items() if "overestimated" in why} == LESS_MEMORY


def test_every_field_has_one_option_and_back() -> None:
    assert len(OPTION_OF) == len(PRICED) == len({option.name for option in PRICED})
    assert all(OPTIONS[option.name] is option for option in PRICED)
    assert all(BY_KEY[option.key] is option for option in PRICED)
    assert set(OPTIONS) >= DEFINING
    assert all(option.why for option in OPTIONS.values() if option.effect in ("unmodelled", "refused"))
    assert set(FLAGS) >= {flag for flag in COLUMN_FLAGS.values() if flag not in ("--schedule", "--sequence-parallel",
                                                                               "--recompute-modules")}  # fmt: skip


def test_what_the_profile_prices_one_way_is_not_said_to_be_neutral() -> None:
    """Kernels that put tokens in order and copies that pad them are priced (runtime/profile.py), so these move time."""
    for name in ("--moe-permute-fusion", "--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"):
        assert OPTIONS[name].effect == "unmodelled"


def test_known_defaults() -> None:
    """Megatron-LM arguments.py, 000c4ac24f."""
    known = {"--make-vocab-size-divisible-by": 128, "--moe-router-topk": 2, "--num-query-groups": 1,
             "--kv-lora-rank": 32, "--qk-head-dim": 128, "--normalization": "LayerNorm",
             "--position-embedding-type": "learned_absolute",
             "--optimizer": "adam", "--tensor-model-parallel-size": 1, "--cp-comm-type": ("p2p",)}  # fmt: skip
    assert {name: OPTIONS[name].default for name in known} == known


def test_arguments_are_taken_as_argparse_takes_them() -> None:
    given = given_of("--num-layers=4", "--hidden-size", "8", "--bf16", "--recompute-modules", "mlp", "layernorm",
                     "--lr", "-1e-4", "--num-layers", "6", "--no-such", "a", "b",
                     "--data-path", "0.5", "/x", "stray")  # fmt: skip
    assert given.integer("--num-layers") == 6
    assert given.texts("--recompute-modules") == ("mlp", "layernorm")
    assert given.number("--lr") == -1e-4
    assert given.flag("--bf16") and not given.flag("--fp16")
    assert [(each.option, each.text) for each in given.unknown] == [("--no-such", "a b")]
    assert [each.text for each in given.repeated] == ["4"]
    assert given.settings["--data-path"].text == "0.5 /x stray"


def test_wrong_values_are_mistakes_of_the_parser() -> None:
    given = given_of("--num-layers", "four", "--normalization", "BatchNorm", "--hidden-size", "--micro-batch-size", "0")
    assert given.integer("--num-layers") is None
    assert given.word("--normalization") == "LayerNorm"
    given.integer("--hidden-size")
    given.integer("--micro-batch-size")
    assert {(each.id, each.option) for each in given.mistakes} == {
        ("option-type", "--num-layers"),
        ("option-choice", "--normalization"),
        ("option-value", "--hidden-size"),
        ("option-type", "--micro-batch-size"),
    }


def test_unknown_options_get_their_neighbours() -> None:
    assert near_options("--tensor_model_parallel_size") == ["--tensor-model-parallel-size"]
    assert "--overlap-grad-reduce" in near_options("--overlap-grads-reduce")
    assert near_options("--zzz") == []


layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    cp_kind=st.sampled_from(["p2p", "a2a"]),
    pp=st.sampled_from([1, 2, 4]),
    vpp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 8]),
    etp=st.sampled_from([1, 2]),
    micro_batch=st.integers(1, 16),
    zero=st.sampled_from([0, 1]),
    sequence_parallel=st.booleans(),
    recompute=st.one_of(
        st.just(Recompute()),
        st.just(Recompute(kind="full")),
        st.just(Recompute(kind="full", layers=4)),
        st.just(Recompute(kind="selective")),
        st.just(Recompute(kind="selective", modules=("moe", "layernorm"))),
    ),
    overlap=st.builds(Overlap, grad=st.booleans(), param=st.booleans(), tp=st.booleans(), ep=st.booleans()),
    account_for_embedding=st.booleans(),
    account_for_loss=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@for_all(layouts)
def test_a_layout_comes_back_from_its_options(layout: Layout) -> None:
    layers = 32 * layout.pp * layout.vpp - layout.account_for_embedding - layout.account_for_loss
    options = layout_options(layout, layers, moe=True)
    words = [word for name, value in options.items() for word in ([name] if value is True else [name, *value.split()])]
    back = read_layout(given_of(*words), layers, moe=True)
    want = layout if layout.tp > 1 else changed(layout, sequence_parallel=False)
    want = want if layout.cp > 1 else changed(want, cp_kind="p2p")
    modules = want.recompute.modules
    if modules:
        # A layout holds them in its own order.
        want = changed(want, recompute=Recompute(kind="selective", modules=back.layout.recompute.modules))
        assert set(back.layout.recompute.modules) == set(modules)
    if want.recompute.layers:
        # Counted per chunk in Megatron, so four of a rank are what its chunks divide.
        assert (back.layout.recompute.layers or 4) // layout.vpp == max(4 // layout.vpp, 1)
        want = changed(want, recompute=back.layout.recompute)
    assert back.layout == want


def test_changes_name_only_what_differs() -> None:
    old, new = Layout(tp=2, micro_batch=1), Layout(tp=4, micro_batch=1)
    given = given_of("--micro-batch-size", "1")
    before, after = changed_options(layout_options(old, 8, False), layout_options(new, 8, False), given)
    assert before == {"--tensor-model-parallel-size": None}
    assert after == {"--tensor-model-parallel-size": "4"}
    kept = given_of("--recompute-activations", "--num-virtual-stages-per-pipeline-rank", "2")
    options = layout_options(Layout(pp=2, vpp=4, recompute=Recompute(kind="selective")), 32, False, kept)
    assert options["--num-virtual-stages-per-pipeline-rank"] == "4"
    assert options["--recompute-activations"] is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("([0]*3+[1]*5)", [0, 0, 0, 1, 1, 1, 1, 1]),
        ("([1]*3+[0]*1)*2", [1, 1, 1, 0, 1, 1, 1, 0]),
        ("[0,1,0,1]*2", [0, 1, 0, 1, 0, 1, 0, 1]),
        ("[1]", [1]),
        ("([1]", None),
        ("[1]*9999", None),
        ("__import__('os')", None),
        ("", None),
    ],
)
def test_layer_patterns(text: str, expected: list[int] | None) -> None:
    assert layer_pattern(text, 100) == expected
    if expected is not None:
        assert eval(text) == expected  # what Megatron-LM does with it


def test_stage_texts() -> None:
    assert spread("Et|(tt|)*3L") == "Et|tt|tt|tt|L"
    assert spread("E(t|)*2,tL") == "Et|t|tL"
    assert spread("t*3|L") == "ttt|L"
    assert spread("Et||(x)") is None
    assert counts_of("Ett|tt|tt|ttL", 8, 4).fields == {"vpp": 1}
    found = counts_of("Et|tt|tt|tL", 6, 4)
    assert found.fields == {"vpp": 1, "first_stage_layers": 1, "last_stage_layers": 1}
    assert counts_of("Ett|(tt|)*6mL", 14, 4).fields == {"vpp": 2, "first_stage_layers": 4, "last_stage_layers": 2}
    assert "holds 8 layers" in counts_of("Ett|tt|tt|ttL", 9, 4).problem
    assert "stages" in counts_of("Ett|ttL", 4, 4).problem


def test_keys_of_bridge() -> None:
    given = Given(State("x"))
    for key, value in (("model.num_moe_experts", "8"), ("model.share_embeddings_and_output_weights", "false"),
                       ("model.add_bias_linear", "false"), ("ddp.grad_reduce_in_fp32", "false"), ("model.fp8", "null"),
                       ("model.moe_layer_freq", "[0,1,1]"), ("mixed_precision", "bf16_mixed"), ("x.y", "1"),
                       ("model.init_method_std", "0.1")):  # fmt: skip
        read_key(given, key, value, HERE)
    assert given.integer("--num-experts") == 8
    assert given.flag("--untie-embeddings-and-output-weights") and given.flag("--disable-bias-linear")
    assert given.flag("--grad-reduce-in-bf16") and given.flag("--bf16")
    assert "--fp8-format" not in given
    assert given.text("--moe-layer-freq") == "[0,1,1]"
    assert [each.option for each in given.unknown] == ["x.y"]
    assert bridge_key("--num-virtual-stages-per-pipeline-rank") == "model.virtual_pipeline_model_parallel_size"
    assert bridge_key("--micro-batch-size") == "train.micro_batch_size"


def test_messages_in_the_users_words() -> None:
    text = in_their_words("--tp 3 does not divide the 32 attention heads. Legal for --tp here: 1, 2.")
    assert text.startswith("--tensor-model-parallel-size 3 does") and "--tp" not in text
    assert in_their_words("--tp 3 and --micro-batch 2", "bridge") == (
        "model.tensor_model_parallel_size 3 and train.micro_batch_size 2"
    )
    assert in_their_words("--tp 3", "yaml") == "tensor_model_parallel_size 3"
