"""Conversion of published runs, against the published parameter counts and the sources' own statements."""

from __future__ import annotations

import math

import msgspec
import pytest

from fivefold.cluster import load_cluster, load_curve_of
from fivefold.measure import Run, Unconvertible, convert, shipped_runs
from fivefold.model import count_params

RUNS = {run.id: run for run in shipped_runs().runs}


def _change(run_id: str, **fields):
    return msgspec.structs.replace(RUNS[run_id], **fields)


@pytest.mark.parametrize(
    "run", [run for run in RUNS.values() if run.group == "llmfoundry" and run.params_b], ids=lambda run: run.id
)
def test_parameters_are_those_that_the_source_counted(run):
    assert run.params_b is not None
    assert count_params(convert(run).model).total == round(run.params_b * 1e9)


@pytest.mark.parametrize("run", [run for run in RUNS.values() if run.group == "nanotron"], ids=lambda run: run.id)
def test_rounded_parameter_counts_of_nanotron(run):
    assert count_params(convert(run).model).total / 1e9 == pytest.approx(run.params_b, abs=0.011)


def test_every_shipped_run_converts():
    for run in RUNS.values():
        case = convert(run)
        world = case.layout.tp * case.layout.cp * case.layout.pp * (run.dp or 1)
        assert world == case.cluster.gpus == run.gpus
        assert case.model.layers == run.layers


def test_sources_go_to_their_runtimes_and_clusters():
    simumax, mpt, nanotron = (convert(RUNS[f"{name}"]) for name in ("simumax-0001", "llmfoundry-0090", "nanotron-0001"))
    assert (simumax.runtime, simumax.cluster.gpu.name) == ("megatron", "b200")
    assert (mpt.runtime, mpt.cluster.gpu.name, mpt.layout.zero) == ("torchtitan", "a100-80g-sxm", 3)
    assert mpt.layout.recompute.kind == "full"
    assert (nanotron.runtime, nanotron.cluster.name) == ("megatron", "aws-p5")
    assert "runtime" in mpt.assumed
    assert "runtime" in nanotron.assumed
    assert "runtime" not in simumax.assumed


def test_what_is_not_stated_is_named():
    nanotron = convert(RUNS["nanotron-0001"])
    assert {"recompute", "stages", "overlap", "attention_kernel"} <= set(nanotron.assumed)
    assert "tied_embeddings" in convert(RUNS["simumax-0001"]).assumed
    assert "sequence_parallel" in convert(_change("simumax-0002", sp=None)).assumed
    assert "precision" in convert(_change("simumax-0002", precision_kind="unknown")).assumed


def test_overlap_that_megatron_lm_does_not_list_was_off():
    off = convert(RUNS["simumax-0001"]).layout.overlap
    assert (off.grad, off.param, off.tp) == (False, False, False)
    text = "overlap-grad-reduce; overlap-param-gather; --tp-comm-overlap"
    on = convert(_change("simumax-0001", overlap=text)).layout.overlap
    assert (on.grad, on.param, on.tp) == (True, True, True)
    silent = convert(_change("simumax-0001", overlap=None))
    assert silent.layout.overlap.grad
    assert "overlap" in silent.assumed


def test_recipes_overlap_tensor_parallelism():
    assert convert(_change("simumax-0002", framework="NeMo 24.07", overlap=None)).layout.overlap.tp
    assert not convert(_change("simumax-0001", framework="NeMo 24.07", overlap=None)).layout.overlap.tp  # tp 1
    assert not convert(_change("simumax-0002", overlap=None)).layout.overlap.tp  # Megatron-LM's switch is opt-in


def test_context_parallelism_kind_is_read():
    assert convert(RUNS["simumax-0037"]).layout.cp_kind == "a2a"


def _greedy(layers: int, block: int, head: int, pp: int) -> list[int]:
    """nanotron's loop, written out: a stage is closed by the block that reaches its threshold."""
    total = layers * block + head
    per_stage, done = [0], 0
    for _ in range(layers):
        done += block
        per_stage[-1] += 1
        if done >= total * len(per_stage) / pp and len(per_stage) < pp:
            per_stage.append(0)
    return per_stage


@pytest.mark.parametrize("run", [r for r in RUNS.values() if r.group == "nanotron" and r.pp != 1], ids=lambda r: r.id)
def test_nanotron_stages_follow_its_loop(run):
    layout = convert(run).layout
    block = 4 * run.hidden**2 + 3 * run.hidden * run.ffn
    expected = _greedy(run.layers, block, run.vocab * run.hidden, run.pp)
    assert layout.last_stage_layers == expected[-1]
    middle = (run.layers - layout.first_stage_layers - layout.last_stage_layers) // max(run.pp - 2, 1)
    assert max(layout.first_stage_layers, middle if run.pp > 2 else 0) == max(expected[:-1])


def test_126_blocks_run_with_embedding_and_head_counted():
    layout = convert(
        _change("simumax-0001", layers=126, pp=8, tp=1, dp=1, vpp=None, framework="NeMo 24.07", recompute_kind="none")
    ).layout
    assert layout.account_for_embedding
    assert layout.account_for_loss


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"framework": "MaxText"}, "framework MaxText"),
        ({"framework": None}, "not stated: framework"),
        ({"framework": "Megatron-LM pipeline zbv"}, "schedule"),
        ({"gpu": "H800"}, "GPU 'H800'"),
        ({"vocab": None}, "not stated: vocab"),
        ({"layers": None, "hidden": None}, "layers, hidden"),
        ({"mbs": None}, "not stated: mbs"),
        ({"gbs": None}, "not stated: gbs"),
        ({"arch": "hybrid/moe"}, "architecture"),
        ({"arch": "moe"}, "not stated: experts"),
        ({"precision_kind": "nvfp4"}, "nvfp4"),
        ({"attention": "unfused"}, "flash"),
        ({"dp": 3}, "published dp 3"),
        ({"tp": 3}, "do not divide"),
        ({"heads": 7, "head_dim": None}, "head_dim"),
        ({"framework": "torchtitan", "recompute_kind": "selective"}, "single operations"),
    ],
)
def test_what_is_not_modelled_is_refused_with_a_reason(changes, reason):
    with pytest.raises(Unconvertible, match=reason):
        convert(_change("simumax-0001", **changes))


def test_mixture_of_experts_are_built_from_the_row():
    case = convert(
        _change("simumax-0002", arch="moe", experts=8, topk=2, moe_ffn=1024, shared_experts=1, ep=2, gated_mlp=1)
    )
    feed = case.model.runs[0].block.feed
    assert case.model.is_moe
    assert msgspec.to_builtins(feed)["shared_ffn"] == 1024
    assert (case.layout.ep, case.layout.etp) == (2, 1)
    assert "etp" in case.assumed


def test_an_empty_row_is_refused():
    with pytest.raises(Unconvertible):
        convert(Run(id="x-1"))


def test_attention_kernels_of_other_frameworks():
    mpt, nanotron = convert(RUNS["llmfoundry-0090"]).cluster, convert(RUNS["nanotron-0001"]).cluster
    plain, slow = load_curve_of(load_cluster("a100-80g-sxm")), load_curve_of(mpt)
    for kernel in slow.attention.values():  # whichever the runtime picks
        assert math.isclose(plain.attention["fa2"].forward[0] / kernel.forward[0], 1.7)
    h100 = load_curve_of(load_cluster("h100-sxm")).attention["fa2"]
    assert all(kernel.forward == h100.forward for kernel in load_curve_of(nanotron).attention.values())
    assert convert(RUNS["simumax-0001"]).cluster.compute == {}
