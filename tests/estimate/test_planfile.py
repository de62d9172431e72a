"""Plan files: what is saved loads back equal, and what is not a plan is refused with the place of the mistake."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fivefold as ff
from fivefold.cluster import clusters
from fivefold.errors import FivefoldError
from fivefold.estimate.planfile import SavedPlan
from fivefold.layout.layout import CP_KINDS, RECOMPUTE_KINDS, RECOMPUTE_MODULES, SCHEDULES

degrees = st.integers(1, 64)
maybe_count = st.none() | st.integers(1, 200)
maybe_switch = st.none() | st.booleans()
layouts = st.builds(
    ff.Layout,
    tp=degrees,
    cp=degrees,
    cp_kind=st.sampled_from(CP_KINDS),
    pp=degrees,
    vpp=degrees,
    ep=degrees,
    etp=degrees,
    dp_replicate=degrees,
    zero=st.integers(0, 3),
    sequence_parallel=maybe_switch,
    micro_batch=degrees,
    schedule=st.none() | st.sampled_from(SCHEDULES),
    recompute=st.builds(
        ff.Recompute,
        kind=st.sampled_from(RECOMPUTE_KINDS),
        layers=maybe_count,
        modules=st.lists(st.sampled_from(RECOMPUTE_MODULES), unique=True).map(tuple),
    ),
    overlap=st.builds(ff.Overlap, grad=st.booleans(), param=maybe_switch, tp=st.booleans(), ep=st.booleans()),
    first_stage_layers=maybe_count,
    last_stage_layers=maybe_count,
    account_for_embedding=st.booleans(),
    account_for_loss=st.booleans(),
)
amounts = st.none() | st.floats(1e-3, 1e16)
works = st.builds(
    ff.Workload,
    seq_len=st.integers(1, 1 << 20),
    global_batch=st.integers(1, 1 << 20),
    precision=st.sampled_from(["bf16", "fp16", "fp8"]),
    optimizer=st.sampled_from(["adamw", "sgd", "adafactor", "muon", "adamw8bit"]),
    grad_dtype=st.sampled_from(["fp32", "bf16"]),
    moe_imbalance=st.floats(1, 8),
    tokens=amounts,
    price=amounts,
)
models = st.sampled_from([ff.load_model(name) for name in ff.models()])
bandwidths = st.floats(1e6, 1e15)


@st.composite
def cluster(draw: st.DrawFn) -> ff.Cluster:
    """One of the catalogue with the user's own numbers in it."""
    known = ff.load_cluster(draw(st.sampled_from(clusters())), gpus=draw(st.integers(1, 1 << 20)))
    links = [msgspec.structs.replace(link, bandwidth_per_s=draw(bandwidths)) for link in known.links]
    name = draw(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20))
    return msgspec.structs.replace(known, name=name, links=tuple(links), launch_s=draw(st.floats(0, 1)))


@settings(max_examples=80, deadline=None)
@given(layout=layouts, work=works, model=models, where=cluster(), runtime=st.sampled_from(["megatron@0.16", "fsdp"]))
def test_saving_and_loading_changes_nothing(layout, work, model, where, runtime) -> None:
    plan = SavedPlan(runtime=runtime, layout=layout, workload=work, cluster=where, model=model)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        plan.save(path)
        assert ff.load_plan(path) == plan


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    found = ff.estimate(
        ff.load_model("deepseek-v2-lite"),
        ff.load_cluster("h100-sxm", gpus=8),
        ff.Workload(seq_len=4096, global_batch=16),
        ff.Layout(ep=8),
    )
    path = tmp_path / "plan.toml"
    found.save(path)
    return path


def test_an_estimate_is_priced_again_to_the_bit(saved: Path) -> None:
    again = ff.load_plan(saved).estimate()
    expected = ff.estimate(
        ff.load_model("deepseek-v2-lite"),
        ff.load_cluster("h100-sxm", gpus=8),
        ff.Workload(seq_len=4096, global_batch=16),
        ff.Layout(ep=8),
    )
    assert again == expected


def test_the_file_says_what_was_predicted(saved: Path) -> None:
    text = saved.read_text()
    assert text.startswith("# ")
    seconds = ff.load_plan(saved).estimate().step.seconds.value
    assert f"{seconds:.4g} s per step" in text


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("tp = 1", 'tp = "one"', "layout.tp"),
        ("tp = 1", "tpp = 1", "layout.tpp"),
        ("seq_len = 4096", "", "seq_len"),
        ("[workload]", "[workloads]", "workload"),
        ("hidden = 2048", "hidden = 0", "model.hidden"),
        ("hidden = 2048", "hidden = 99999999999", "model.hidden"),
        ("norm_eps = 1e-06", "norm_eps = 0.0", "model.norm_eps"),
        ("theta = 10000.0", "theta = -1.0", "model.rotary.theta"),
        ("count = 26", "count = 1000000000", "model.runs"),
        ("moe_imbalance = 1.0", "moe_imbalance = nan", "moe_imbalance"),
        ("span = 0", "span = 4", "span"),
        ('runtime = "megatron"', 'runtime = "megatrom"', "runtime"),
        ("fivefold-plan/1", "fivefold-plan/9", "schema"),
        ("[layout]", "[layout", ""),
        ("bf16", "bf17", "precision"),
    ],
)
def test_a_mistake_is_refused_where_it_is(saved: Path, old: str, new: str, place: str) -> None:
    text = saved.read_text()
    assert old in text
    saved.write_text(text.replace(old, new))
    with pytest.raises(FivefoldError) as caught:
        ff.load_plan(saved)
    assert place in caught.value.message or place in str(caught.value.option)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_bytes(data)
        with pytest.raises(FivefoldError):
            ff.load_plan(path)


def test_what_is_no_file_or_too_large_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    for path in (tmp_path, tmp_path / "none.toml", large, "a\x00b.toml"):
        with pytest.raises(FivefoldError):
            ff.load_plan(path)
