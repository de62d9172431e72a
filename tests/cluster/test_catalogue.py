"""The catalogue, and cluster files: what they may replace and how mistakes in them are refused."""

from __future__ import annotations

import math
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from fivefold.cluster import aliases, clusters, gpus, load_cluster, load_curve_of, load_gpu, place
from fivefold.cluster.tables import gpu_table, system_table
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


@pytest.mark.parametrize("name", clusters())
def test_every_system_has_a_host_with_a_source(name):
    cluster = load_cluster(name)
    assert cluster.host_source and cluster.host_pcie
    memory, link, bandwidth = (
        cluster.host_memory_bytes,
        cluster.host_link_bandwidth_per_s,
        cluster.host_memory_bandwidth_per_s,
    )
    assert memory and link and bandwidth
    assert 150e9 < memory < 5e12
    # All GPUs of a node read at once what its memory gives; PCIe 3.0 x16 over 4 at least, NVLink-C2C at most.
    assert 2e9 < link < 450e9 and link * cluster.gpus_per_node <= bandwidth * 1.01
    for network in cluster.links:
        assert 0.3e9 < network.bandwidth_per_s <= 1024e9 and 1e-6 < network.latency_s <= 1e-4
        assert 0.1 < network.efficiency <= 1
        share = network.cards * network.card_bits_per_s / 8 / cluster.gpus_per_node
        assert network.cards == 0 or network.bandwidth_per_s == pytest.approx(share, rel=0.01)
    if cluster.gpu.vendor != "google":  # a TPU host's network is stated per pod
        assert cluster.links[-1].cards > 0


# Dense TFLOP/s of bf16 (fp16 on Volta), written down from datasheets and vendors' pages apart from the catalogue.
DENSE_TFLOPS = {
    "v100-sxm-16g": 125, "v100-sxm-32g": 125, "a100-40g-sxm": 312, "a100-80g-sxm": 312, "a100-40g-pcie": 312,
    "a100-80g-pcie": 312, "a800-80g-sxm": 312, "h100-sxm": 989.5, "h100-pcie": 756.5, "h100-nvl": 835.5,
    "h100-96g": 989.5, "h100-96g-500w": 989.5, "h800-sxm": 989.5, "h20-sxm": 148, "h200-sxm": 989.5,
    "h200-nvl": 835.5, "gh200": 989.5, "b200": 2250, "gb200-nvl72": 2500, "b300": 2250, "gb300-nvl72": 2500,
    "l4": 121, "l40s": 362.05, "a10": 125, "a10g": 70, "a40": 149.7, "rtx-a6000": 154.8, "rtx-6000-ada": 364.2,
    "rtx-pro-6000": 503.8, "rtx-3090": 71, "rtx-4090": 165.2, "rtx-5090": 209.5, "mi250x-gcd": 383 / 2,
    "mi300x": 1307.4, "mi325x": 1307.4, "mi355x": 2516.6, "gaudi2": 432, "gaudi3": 1677, "ascend-910b": 313,
    "tpu-v4": 275, "tpu-v5e": 197, "tpu-v5p": 459, "tpu-v6e": 918, "tpu-v3": 123, "mi210": 181, "mi300a": 980.6,
    "mi350x": 2306.9, "max-1550-tile": 838.9 / 2, "ascend-910a": 256, "trainium": 190, "trainium2": 667,
    "tpu-v7x": 2307, "ascend-910c-die": 376, "v100-pcie-16g": 112, "v100-pcie-32g": 112, "v100s-pcie": 130,
    "p100-sxm": 21.2, "p100-pcie": 18.7, "t4": 65, "rtx-2080-ti": 107.6 / 2, "titan-rtx": 130.5,
    "quadro-rtx-6000": 130.5, "quadro-rtx-8000": 130.5, "a100-64g-sxm": 22.4 * 16, "h100-64g": 989.5, "h20-141g": 148,
    "gh200-144g": 989.5, "b100": 1750, "l40": 181.05, "l20": 119.5, "a30": 330 / 2, "rtx-a5000": 222.2 / 2,
    "rtx-a4000": 153.4 / 2, "rtx-pro-6000-server": 480, "rtx-pro-6000-max-q": 440.4, "rtx-3080": 119 / 2,
    "rtx-3080-ti": 136 / 2, "rtx-3090-ti": 160 / 2, "rtx-4080": 195 / 2, "rtx-5080": 450.2 / 4, "mi100": 92.3,
    "mi250-gcd": 362.1 / 2, "mi308x": 344, "max-1100": 355.5, "ascend-910b1": 363.7, "ascend-910b2": 353.9,
    "ascend-910b4": 245.76, "tpu-v2": 45, "trainium3": 671,
}  # fmt: skip
# FLOP a clock and multiprocessor, with fp32 accumulation, and boost clock: what the peak of NVIDIA's chips is made of.
CHIPS = {
    "a100-80g-sxm": (2048, 1.410e9), "h100-sxm": (4096, 1.830e9), "rtx-3090": (512, 1.695e9), "rtx-4090": (512, 2.52e9),
    "rtx-5090": (512, 2.407e9), "rtx-a6000": (1024, 1.80e9), "rtx-6000-ada": (1024, 2.505e9), "a40": (1024, 1.74e9),
    "rtx-pro-6000": (1024, 2.617e9), "l40s": (1024, 2.49e9), "l4": (1024, 2.04e9), "v100-sxm-32g": (1024, 1.53e9),
    "a10": (1024, 1.695e9), "mi300x": (2048, 2.1e9), "mi355x": (4096, 2.4e9), "tpu-v5e": (4 * 128 * 128 * 2 / 4, 1.5e9),
    "mi210": (1024, 1.7e9), "mi300a": (2048, 2.1e9), "mi350x": (4096, 2.2e9), "v100s-pcie": (1024, 1.597e9),
    "p100-sxm": (256, 1.48e9), "t4": (1024, 1.59e9), "rtx-2080-ti": (512, 1.545e9), "titan-rtx": (1024, 1.77e9),
    "quadro-rtx-8000": (1024, 1.77e9), "a100-64g-sxm": (2048, 1.41e9), "l40": (512, 2.49e9), "l20": (512, 2.52e9),
    "a30": (2048, 1.44e9), "rtx-a5000": (1024, 1.695e9), "rtx-a4000": (1024, 1.56e9), "rtx-3080": (512, 1.71e9),
    "rtx-3080-ti": (512, 1.665e9), "rtx-3090-ti": (512, 1.86e9), "rtx-4080": (512, 2.505e9), "rtx-5080": (512, 2.617e9),
    "rtx-pro-6000-max-q": (1024, 2.288e9), "mi100": (512, 1.502e9), "mi250-gcd": (1024, 1.7e9),
    "mi308x": (2048, 2.1e9), "max-1100": (4096, 1.55e9), "ascend-910b1": (8192, 1.85e9), "ascend-910b2": (8192, 1.8e9),
    "ascend-910b4": (8192, 1.5e9), "tpu-v2": (2 * 128 * 128, 0.7e9),
}  # fmt: skip


def test_peaks_are_the_published_dense_ones():
    assert set(DENSE_TFLOPS) == set(gpus()) and len(gpus()) >= 40
    for name, tflops in DENSE_TFLOPS.items():
        peaks = load_gpu(name).peak_flops_per_s
        assert peaks.get("bf16", peaks.get("fp16", 0)) / 1e12 == pytest.approx(tflops, rel=0.003), name


@pytest.mark.parametrize("name", CHIPS)
def test_peaks_are_multiprocessors_times_clock(name):
    gpu = load_gpu(name)
    flop, clock = CHIPS[name]
    peaks = gpu.peak_flops_per_s
    assert gpu.sms * flop * clock == pytest.approx(peaks.get("bf16", peaks.get("fp16")), rel=0.02)


@pytest.mark.parametrize("name", gpus())
def test_numbers_are_dense_peaks_of_plausible_size(name):
    gpu = load_gpu(name)
    peaks = gpu.peak_flops_per_s
    half = peaks.get("bf16") or peaks["fp16"]
    assert 2.5e12 < peaks["fp32"] < half < 3e15
    narrower = [peaks[kind] for kind in ("fp8", "nvfp4") if kind in peaks]
    assert narrower == sorted(narrower) and all(half <= peak <= 8 * half for peak in narrower)
    if name not in ("gaudi3", "mi100"):  # one's fp8 is no faster than bf16 and its fp16 slower, the other's bf16 is
        assert peaks.get("fp8", 2 * half) == pytest.approx(2 * half, rel=0.015)
        assert peaks.get("fp16", half) == half
    assert peaks.get("mxfp8", peaks.get("fp8")) == peaks.get("fp8") or name == "trainium3"  # whose fp8 is left out
    assert 9 * GIB < gpu.memory_bytes < 290 * GIB
    assert 0.25e12 < gpu.memory_bandwidth_per_s <= 8e12
    assert load_curve_of(load_cluster(name))


def test_tf32_is_half_of_bf16_where_matrix_units_have_it():
    for name, tflops in {"a100-80g-sxm": 156, "h100-sxm": 494.7, "a10": 62.5, "l4": 60, "rtx-3090": 35.6}.items():
        assert load_gpu(name).peak_flops_per_s["tf32"] / 1e12 == pytest.approx(tflops, rel=0.01), name
    for name in gpus():
        gpu = load_gpu(name)
        peaks = gpu.peak_flops_per_s
        has = gpu.vendor == "nvidia" and "bf16" in peaks  # Ampere and later
        assert ("tf32" in peaks) == has, name
        if has:
            assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.001), name
            assert peaks["tf32"] > 0.97 * peaks["fp32"], name  # GeForce's and the L40's vector units are as fast
            assert "tf32" in load_curve_of(load_cluster(name)).precision


def test_cards_without_bf16_are_those_before_ampere():
    without = {name for name in gpus() if "bf16" not in load_gpu(name).peak_flops_per_s}
    assert without == {
        "v100-sxm-16g", "v100-sxm-32g", "v100-pcie-16g", "v100-pcie-32g", "v100s-pcie", "p100-sxm", "p100-pcie", "t4",
        "rtx-2080-ti", "titan-rtx", "quadro-rtx-6000", "quadro-rtx-8000", "ascend-910a",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["gpu", "system"])
def test_entries_cut_out_of_their_file_are_what_the_whole_file_says(kind):
    text = resources.files("fivefold.cluster").joinpath(f"data/{kind}s.toml").read_text(encoding="utf-8")
    whole = tomllib.loads(text)[kind]
    assert list(whole) == (gpus() if kind == "gpu" else clusters())
    for name, table in whole.items():
        if kind == "gpu":
            assert gpu_table(name) == {"name": name, **table}
        else:
            cut = system_table(name)
            assert all(cut[key] == table[key] for key in table if key not in ("like", "network", "bridge"))
            assert "network" not in table or cut["links"][-1] == {"span": 0, **table["network"]}
            assert "bridge" not in table or cut["links"][0] == table["bridge"]


@pytest.mark.parametrize(
    ("asked", "gpu", "network", "gigabits"),
    [
        ("p4d.24xlarge", "a100-40g-sxm", "efa", 400),
        ("p4de.24xlarge", "a100-80g-sxm", "efa", 400),
        ("p5.48xlarge", "h100-sxm", "efa", 3200),
        ("p5e.48xlarge", "h200-sxm", "efa", 3200),
        ("p5en.48xlarge", "h200-sxm", "efa", 3200),
        ("P6-B200.48xlarge", "b200", "efa", 3200),
        ("g6e.48xlarge", "l40s", "efa", 400),
        ("a3-highgpu-8g", "h100-sxm", "tcpx", 800),
        ("a3-megagpu-8g", "h100-sxm", "tcpxo", 1600),
        ("a3-ultragpu-8g", "h200-sxm", "roce", 3200),
        ("Standard_ND96asr_v4", "a100-40g-sxm", "infiniband", 1600),
        ("Standard_ND96isr_H100_v5", "h100-sxm", "infiniband", 3200),
        ("dgx-h200", "h200-sxm", "infiniband", 3200),
        ("dgx-1", "v100-sxm-32g", "infiniband", 400),
        ("p3dn.24xlarge", "v100-sxm-32g", "efa", 100),
        ("p3.16xlarge", "v100-sxm-16g", "ethernet", 25),
        ("g4dn.metal", "t4", "ethernet", 100),
        ("g4dn.12xlarge", "t4", "ethernet", 50),
        ("g5.12xlarge", "a10g", "ethernet", 40),
        ("g6e.12xlarge", "l40s", "efa", 100),
        ("g7e.48xlarge", "rtx-pro-6000-server", "efa", 1600),
        ("Standard_ND40rs_v2", "v100-sxm-32g", "infiniband", 100),
        ("Standard_NC96ads_A100_v4", "a100-80g-pcie", "ethernet", 80),
        ("leonardo", "a100-64g-sxm", "infiniband", 400),
    ],
)
def test_instances_go_by_their_own_names(asked, gpu, network, gigabits):
    cluster = load_cluster(asked)
    link = cluster.links[-1]
    assert (cluster.gpu.name, link.name) == (gpu, network)
    assert link.cards * link.card_bits_per_s == gigabits * 1e9
    assert link.bandwidth_per_s * cluster.gpus_per_node * 8 == pytest.approx(gigabits * 1e9)


def test_reported_capacity_is_below_the_marketing_one():
    assert load_gpu("h100").memory_bytes / GIB == pytest.approx(79.11, abs=0.01)
    assert load_gpu("a100-40gb").memory_bytes / GIB == pytest.approx(39.49, abs=0.01)
    assert load_gpu("b200").memory_bytes / GIB == pytest.approx(178.35, abs=0.01)
    assert load_gpu("v100").memory_bytes / GIB == pytest.approx(31.74, abs=0.01)


def test_a_part_of_a_node_has_its_part_of_the_host():
    whole, half = load_cluster("h100"), load_cluster("h100", gpus_per_node=4)
    assert whole.host_memory_bytes and half.host_memory_bytes == whole.host_memory_bytes // 2
    assert half.host_link_bandwidth_per_s == whole.host_link_bandwidth_per_s
    assert [link.bandwidth_per_s for link in half.links] == [link.bandwidth_per_s for link in whole.links]


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


def test_a_number_of_gpus_that_nobody_said_is_asked_for_where_it_counts(write):
    assert load_cluster(write(BASE + "gpus = 16"), counted=True).gpus == 16
    assert load_cluster("h100", gpus=8, counted=True).gpus == 8
    with pytest.raises(FivefoldError, match=r"for example --gpus 8\.$") as caught:
        load_cluster("h100", counted=True)
    assert caught.value.option == "--gpus"
    with pytest.raises(FivefoldError, match=r"--gpus 8, or gpus = 8 to .+"):
        load_cluster(write(BASE), counted=True)


@pytest.mark.parametrize(("name", "count", "legal"), [("l40s", 5, [1, 2, 3, 4, 8]), ("h100-nvl", 7, [1, 2, 4, 8])])
def test_counts_that_a_nodes_links_do_not_divide_are_refused_by_the_option(name, count, legal):
    """Not as a mistake in a cluster file, which nobody gave."""
    with pytest.raises(FivefoldError, match=f"--gpus-per-node {count} does not go with {name}") as caught:
        load_cluster(name, gpus_per_node=count)
    assert caught.value.option == "--gpus-per-node"
    assert set(legal) <= set(caught.value.legal) and count not in caught.value.legal
    for each in caught.value.legal:
        assert load_cluster(name, gpus_per_node=each).gpus_per_node == each


def test_a_job_on_a_part_of_one_node_may_say_how_large_it_is():
    """Its launch does: 7 processes on 1 node, of 8 GPUs that bridges of 2 and 4 join."""
    assert load_cluster("rtx-4090", gpus=7, gpus_per_node=7) == load_cluster("rtx-4090", gpus=7)
    with pytest.raises(FivefoldError, match="does not go with"):
        load_cluster("rtx-4090", gpus=14, gpus_per_node=7)


@pytest.mark.parametrize("name", ["h100-nvl", "h200-nvl", "a100-80g-pcie-nvlink", "rtx-3090-nvlink"])
def test_bridged_pairs_in_smaller_nodes(name):
    """Servers of 4 and workstations of 2 bridged cards are as common as the catalogue's 8."""
    bridge = load_cluster(name).links[0]
    two, four = (load_cluster(name, gpus_per_node=count) for count in (2, 4))
    assert [(link.name, link.span) for link in two.links[:-1]] == [(bridge.name, 2)]
    assert [(link.name, link.span) for link in four.links[:-1]] == [(bridge.name, 2), ("socket", 4)]
    assert two.links[0] == four.links[0] == bridge


@pytest.mark.parametrize("count", [2, 4, 10, 16])
def test_sockets_of_any_number_of_cards_share_one_pipe(count):
    """A ring crosses it once each way, whatever lies behind it: it is no faster with more cards."""
    whole, other = load_cluster("a100-80g-pcie"), load_cluster("a100-80g-pcie", gpus_per_node=count)
    pipes = [cluster.links[-2].bandwidth_per_s * cluster.gpus_per_node for cluster in (whole, other)]
    assert whole.links[-2].name == other.links[-2].name == "socket"
    assert pipes[1] == pytest.approx(pipes[0])


def test_a_node_has_whole_network_cards():
    """Two cards of eight that share one have it to themselves, and four of eight with eight have four."""
    two, four = load_cluster("a100-80g-pcie", gpus_per_node=2), load_cluster("h100", gpus_per_node=4)
    assert (two.links[-1].cards, two.links[-1].bandwidth_per_s) == (1, 12.5e9)
    assert (four.links[-1].cards, four.links[-1].bandwidth_per_s) == (4, 50e9)


def test_unknown_names_suggest_known_ones():
    with pytest.raises(FivefoldError, match=r"Did you mean .*h100") as caught:
        load_cluster("h100-sx")
    assert caught.value.option == "--gpu" and "h100-sxm" in (caught.value.legal or ())
    with pytest.raises(FivefoldError, match=r"Did you mean .*p5\.48xlarge"):
        load_cluster("p5.48xlarg")
    with pytest.raises(FivefoldError, match=r"rtx-5090.*fivefold gpus"):
        load_cluster("potato")
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


def test_a_file_states_cards_or_bandwidth(write):
    cards = '[[links]]\nname = "infiniband"\ncards = 4\ncard_bits_per_s = 200e9'
    ours = load_cluster(write(BASE + cards)).links[-1]
    assert ours.bandwidth_per_s == 4 * 200e9 / 8 / 8 and (ours.cards, ours.card_bits_per_s) == (4, 200e9)
    # On nodes of four GPUs each has a fourth of the cards.
    assert load_cluster(write(BASE + "gpus_per_node = 4\n" + cards)).links[-1].bandwidth_per_s == 25e9
    plain = load_cluster(write(BASE + '[[links]]\nname = "infiniband"\nbandwidth_per_s = 1e9')).links[-1]
    assert (plain.bandwidth_per_s, plain.cards) == (1e9, 0)


def test_a_file_replaces_the_host(write):
    ours = load_cluster(write(BASE + "host_memory_bytes = 512_000_000_000\nhost_link_bandwidth_per_s = 50e9"))
    base = load_cluster("h100-sxm")
    assert (ours.host_memory_bytes, ours.host_link_bandwidth_per_s) == (512_000_000_000, 50e9)
    assert ours.host_memory_bandwidth_per_s == base.host_memory_bandwidth_per_s
    assert "host_memory_bytes, host_link_bandwidth_per_s: given in" in ours.host_source


def test_hosts_differ_in_what_their_work_takes(write):
    """Relative to the Xeon of a DGX H100; clouds' nodes take it from the system they are like, a file from its base."""
    ratios = {name: load_cluster(name).host_work_ratio for name in ("h100-sxm", "a100-80g-sxm", "gb300-nvl72")}
    assert ratios == {"h100-sxm": 1.0, "a100-80g-sxm": 1.4, "gb300-nvl72": 1.4}
    assert load_cluster("azure-nd-gb200-v6").host_work_ratio == 1.4
    assert load_cluster(write('base = "a100-80g-sxm"')).host_work_ratio == 1.4
    ours = load_cluster(write(BASE + "host_work_ratio = 2.5"))
    assert ours.host_work_ratio == 2.5 and "host_work_ratio: given in" in ours.host_source


BASE = 'base = "h100-sxm"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE + "gpuz = 8", r"unknown field `gpuz`.*Did you mean gpu\? Legal: .*gpus_per_node"),
        (BASE + "[gpu]\nmemory = 8", "unknown field `memory`.*gpu.*Legal: .*memory_bytes"),
        (BASE + "[compute]\ntiles = [8, 8]", r"unknown field `tiles`.*Did you mean tile\? Legal: .*wave_share"),
        (BASE + '[[links]]\nname = "nvlnk"\nbandwidth_per_s = 1e11', "no link of that name.*name one of nvlink, inf"),
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
        (BASE + '[[links]]\nname = "infiniband"\ncards = 4\ncard_bits_per_s = 0', "give both above 0"),
        (BASE + '[[links]]\nname = "n"\nspan = 32\ncards = 8\nlatency_s = 1e-5', "give both above 0"),
        (
            BASE + '[[links]]\nname = "infiniband"\ncards = 8\ncard_bits_per_s = 4e11\nbandwidth_per_s = 1e9',
            "its cards give each GPU 5e",
        ),
        # Anything this small makes a step longer than a float can say.
        (BASE + '[[links]]\nname = "nvlink"\nbandwidth_per_s = 1e-300', r"links\.nvlink\.bandwidth_per_s"),
        (BASE + '[[links]]\nname = "nvlink"\npeer_bandwidth_per_s = 1e-300', "peer_bandwidth_per_s.*under 1 MB/s"),
        (BASE + '[[links]]\nname = "nvlink"\nefficiency = 1e-300', r"links\.nvlink\.efficiency"),
        (BASE + "[gpu]\nmemory_bandwidth_per_s = 0.5", r"gpu\.memory_bandwidth_per_s"),
        # Gigabytes and teraflops typed as they are on the datasheet, which would be years a step.
        (
            BASE + '[[links]]\nname = "nvlink"\nbandwidth_per_s = 450',
            "links.nvlink.bandwidth_per_s.*bytes per second",
        ),
        (
            BASE + '[[links]]\nname = "infiniband"\ncards = 8\ncard_bits_per_s = 400',
            "bytes per second: 450 GB/s is 450e9",
        ),
        (
            BASE + '[[links]]\nname = "nvlink"\npeer_bandwidth_per_s = 50',
            "peer_bandwidth_per_s = 50 .*bytes per sec",
        ),
        (BASE + "[gpu]\npeak_flops_per_s = { bf16 = 989 }", r"gpu\.peak_flops_per_s.*989 TFLOP/s is 989e12"),
        (BASE + "[gpu]\nmemory_bandwidth_per_s = 3350", r"gpu\.memory_bandwidth_per_s.*bytes per second"),
        (BASE + "host_link_bandwidth_per_s = 27", "host_link_bandwidth_per_s.*bytes per second"),
        (BASE + "host_memory_bytes = -1", "host_memory_bytes"),
        (BASE + "host_link_bandwidth_per_s = nan", "host_link_bandwidth_per_s"),
        (BASE + "host_work_ratio = 0", "host_work_ratio"),
        (BASE + '[gpu]\nvendor = "acme"', "acme"),
        (BASE + "keep_links = false", "no link is left"),
        (BASE + 'algorithms = ["tree"]', 'lacks "ring"'),
        (BASE + 'algorithms = ["magic"]', "magic"),
        (BASE + "gpus = 0", "gpus"),
        (BASE + "gpus = true", "gpus"),
        (BASE + "launch_s = 60", "launch_s"),
        (BASE + "launch_s = nan", "launch_s"),
        (BASE + "[compute]\nlaunch_s = nan", "launch_s"),
        (BASE + "[compute]\nspeed = 2", r"^Cluster file .*\.toml', \[compute\] for h100-sxm: .*speed"),
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


def test_the_page_of_the_catalogue_has_every_entry():
    page = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
    missing = [name for name in [*gpus(), *clusters()] if f"| {name} |" not in page or f"- **{name}**" not in page]
    assert not missing, "python benchmarks/hardware.py --write docs/hardware.md"
