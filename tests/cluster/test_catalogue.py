"""The catalogue, and cluster files: what they may replace and how mistakes in them are refused."""

from __future__ import annotations

import math

import pytest

from fivefold.cluster import aliases, clusters, gpus, load_cluster, load_curve_of, load_gpu, place
from fivefold.errors import FivefoldError

GIB = 1 << 30


@pytest.fixture
def write(tmp_path):
    def write_file(text: str | bytes, name: str = "mine.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


@pytest.mark.parametrize("name", [*clusters(), *aliases()])
def test_every_entry_loads_and_names_its_sources(name):
    cluster = load_cluster(name)
    gpu = cluster.gpu
    assert set(gpu.sources) == {"memory_bytes", "memory_bandwidth_per_s", "peak_flops_per_s", "sms"}
    assert all(gpu.sources.values()) and all(link.source for link in cluster.links) and cluster.source
    assert cluster.links[-1].span == 0
    assert cluster.nodes * cluster.gpus_per_node >= cluster.gpus
    place(cluster, cluster.gpus, 1)


@pytest.mark.parametrize("name", gpus())
def test_numbers_are_dense_peaks_of_plausible_size(name):
    gpu = load_gpu(name)
    peaks = gpu.peak_flops_per_s
    assert 10e12 < peaks["fp32"] < peaks["fp16"] < 3e15
    assert peaks.get("fp8", 2 * peaks["fp16"]) == pytest.approx(2 * peaks["fp16"], rel=0.01)
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert 15 * GIB < gpu.memory_bytes < 290 * GIB
    assert load_curve_of(load_cluster(name))


def test_reported_capacity_is_below_the_marketing_one():
    assert load_gpu("h100").memory_bytes / GIB == pytest.approx(79.11, abs=0.01)
    assert load_gpu("a100-40gb").memory_bytes / GIB == pytest.approx(39.49, abs=0.01)
    assert load_gpu("b200").memory_bytes / GIB == pytest.approx(178.35, abs=0.01)
    assert load_gpu("v100").memory_bytes / GIB == pytest.approx(31.74, abs=0.01)


def test_counts():
    assert load_cluster("h100").gpus == 8
    assert load_cluster("gb200").gpus == 72
    assert load_cluster("gb200").gpus_per_node == 4
    four = load_cluster("h100", gpus=64, gpus_per_node=4)
    assert four.links[0].span == 4 and four.nodes == 16
    assert [link.name for link in load_cluster("h100", gpus=4, gpus_per_node=1).links] == ["infiniband"]
    assert load_cluster("a100-pcie", gpus_per_node=2).links[0].name == "socket"


@pytest.mark.parametrize("bad", [0, -1, True, 2.5, 1 << 40])
def test_impossible_counts_are_refused(bad):
    with pytest.raises(FivefoldError, match="whole number"):
        load_cluster("h100", gpus=bad)


def test_unknown_names_suggest_known_ones():
    with pytest.raises(FivefoldError, match=r"Did you mean .*h100") as caught:
        load_cluster("h100-sx")
    assert caught.value.option == "--gpu" and "h100-sxm" in (caught.value.legal or ())
    with pytest.raises(FivefoldError, match="no such file"):
        load_cluster("absent.toml")


def test_a_file_replaces_any_number(write):
    path = write(
        """
        base = "h100-sxm"
        name = "ours"
        gpus = 64
        launch_s = 1e-5
        algorithms = ["ring"]
        [gpu]
        memory_bytes = 100_000_000_000
        peak_flops_per_s = { bf16 = 8e14 }
        [[links]]
        name = "infiniband"
        bandwidth_per_s = 25e9
        [[links]]
        name = "leaf"
        span = 32
        bandwidth_per_s = 50e9
        latency_s = 1e-5
        """
    )
    ours, base = load_cluster(path), load_cluster("h100-sxm")
    assert (ours.name, ours.gpus, ours.launch_s, ours.algorithms) == ("ours", 64, 1e-5, ("ring",))
    assert ours.gpu.memory_bytes == 100_000_000_000
    assert ours.gpu.peak_flops_per_s == {**base.gpu.peak_flops_per_s, "bf16": 8e14}
    assert ours.gpu.memory_bandwidth_per_s == base.gpu.memory_bandwidth_per_s
    assert "mine.toml" in ours.gpu.sources["memory_bytes"] and "mine.toml" not in ours.gpu.sources["sms"]
    assert [link.name for link in ours.links] == ["nvlink", "leaf", "infiniband"]
    assert ours.links[2].bandwidth_per_s == 25e9 and ours.links[2].efficiency == base.links[1].efficiency
    assert ours.links[0] == base.links[0]
    assert load_cluster(path, gpus=16).gpus == 16


def test_a_file_without_base(write):
    path = write(
        """
        gpus_per_node = 4
        [gpu]
        memory_bytes = 24_000_000_000
        memory_bandwidth_per_s = 1e12
        peak_flops_per_s = { bf16 = 1e14 }
        sms = 100
        [[links]]
        name = "wire"
        span = "node"
        bandwidth_per_s = 1e10
        latency_s = 1e-5
        [[links]]
        name = "net"
        span = 0
        bandwidth_per_s = 1e9
        latency_s = 1e-5
        """
    )
    assert load_cluster(path).spans == (4, 4)
    assert load_cluster(path, gpus=8).spans == (4, 8)


BASE = 'base = "h100-sxm"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE + "gpuz = 8", "unknown field `gpuz`"),
        (BASE + "[gpu]\nmemory = 8", "unknown field `memory`.*gpu"),
        (BASE + "[gpu]\nsms = -1", r"gpu\.sms"),
        (BASE + "[gpu]\npeak_flops_per_s = { fp4 = 1e15 }", "fp4"),
        (BASE + "[gpu]\nmemory_bandwidth_per_s = nan", r"gpu\.memory_bandwidth_per_s"),
        (BASE + "[gpu]\nmemory_bandwidth_per_s = inf", "memory_bandwidth_per_s"),
        (BASE + '[[links]]\nname = "nvlink"\nefficiency = 1.2', r"links\.nvlink\.efficiency"),
        (BASE + '[[links]]\nname = "nvlink"\nspeed = 1', "unknown field `speed`.*links.nvlink"),
        (BASE + '[[links]]\nname = "new"\nspan = 16', "missing required field `bandwidth_per_s`"),
        (BASE + "[[links]]\nefficiency = 1.0", r"links\[0\] has no name"),
        (BASE + '[[links]]\nname = "nvlink"\nspan = 0', "exactly one, the outermost"),
        (BASE + '[[links]]\nname = "x"\nspan = 12\nbandwidth_per_s = 1e9\nlatency_s = 1e-5', "not a multiple of the 8"),
        (BASE + "keep_links = false", "no link is left"),
        (BASE + 'algorithms = ["tree"]', 'lacks "ring"'),
        (BASE + 'algorithms = ["magic"]', "magic"),
        (BASE + "gpus = 0", "gpus"),
        (BASE + "gpus = true", "gpus"),
        (BASE + "launch_s = 60", "launch_s"),
        (BASE + "launch_s = nan", "launch_s"),
        (BASE + "[compute]\nlaunch_s = nan", "launch_s"),
        (BASE + "[compute]\nspeed = 2", "speed"),
        ('base = "h9000"', "no GPU or cluster 'h9000'"),
        ("gpus = 8", "without base it has to give gpus_per_node, "),
        ("gpus = ", "Invalid value"),
        ("a = " + "[" * 5000, "TOML|nested"),
        ("a = " + "9" * 5000, "TOML|digits"),
        (b"\xff\xfe", "TOML"),
        (b"a = 1\n" * 300_000, "larger than"),
    ],
)
def test_mistakes_in_files_are_refused_with_their_place(write, text, message):
    with pytest.raises(FivefoldError, match=f"(?s){message}"):
        load_cluster(write(text))


def test_a_folder_is_no_cluster_file(tmp_path):
    with pytest.raises(FivefoldError, match="no such file"):
        load_cluster(tmp_path)


def test_loading_is_quick_and_changes_nothing():
    before = load_cluster("h100")
    load_cluster("h100", gpus=64, gpus_per_node=2)
    assert load_cluster("h100") == before
    assert math.isfinite(before.links[0].achieved_per_s)
