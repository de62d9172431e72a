"""GPUs, nodes and networks as other people write them."""

from __future__ import annotations

import pytest
from foreign import read

from fivefold.cluster import clusters, load_cluster
from fivefold.measure.predict import choose, predict


@pytest.mark.parametrize(
    ("gpu", "system"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g-sxm"),
        ("A100-80GB-PCIe", "a100-80g-pcie"),
        ("H100 80GB PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H800 PCIe", "h100-pcie"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI300A", "mi300a"),
        ("MI350X", "mi350x"),
        ("MI210", "mi210"),
        ("MI250X (per GCD)", "mi250x-gcd"),
        ("HL-225", "gaudi2"),
        ("TPU v3", "tpu-v3"),
        ("TPU7x (Ironwood)", "tpu-v7x"),
        ("TPU v7x-128", "tpu-v7x"),
        ("TPU v5p-1792", "tpu-v5p"),
        ("Ascend 910C", "ascend-910c-die"),
        ("Atlas 900 A3 SuperPoD", "ascend-910c-die"),
        ("v5litepod-256", "tpu-v5e"),
        ("v5p-1024", "tpu-v5p"),
        ("trn1.32xlarge", "trainium"),
        ("AWS Trainium2", "trainium2"),
        ("Intel Data Center GPU Max 1550", "max-1550-tile"),
        ("Ascend 910", "ascend-910a"),
        ("Ascend 910B3", "ascend-910b"),
        ("Atlas 800T A2", "ascend-910b"),
        ("A100 SXM4 40 GB", "a100-40g-sxm"),
        ("V100 16 GB", "v100-sxm-16g"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("p4d.24xlarge", "aws-p4d"),
        ("A100-40", "a100-40g-sxm"),
        ("Grace Hopper", "gh200"),
        ("CloudMatrix 384", "ascend-910c-die"),
        ("Atlas 800 (9000)", "ascend-910a"),
        ("NVIDIA T4 16GB", "t4"),
        ("Tesla T4", "t4"),
        ("g4dn.2xlarge", "t4"),
        ("g4dn.12xlarge", "aws-g4dn-12x"),
        ("ml.g4dn.metal", "aws-g4dn"),
        ("A30-24GB", "a30"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA L40", "l40"),
        ("L40-48GB", "l40"),
        ("NVIDIA L20", "l20"),
        ("RTX 2080 Ti", "rtx-2080-ti"),
        ("GeForce RTX 2080Ti 11GB", "rtx-2080-ti"),
        ("TITAN RTX", "titan-rtx"),
        ("RTX TITAN 24GB", "titan-rtx"),
        ("Quadro RTX 8000", "quadro-rtx-8000"),
        ("RTX 3080 10GB", "rtx-3080"),
        ("RTX 3080 Ti", "rtx-3080-ti"),
        ("RTX 3090 Ti", "rtx-3090-ti"),
        ("RTX 3090", "rtx-3090"),
        ("RTX 4080", "rtx-4080"),
        ("RTX 5080", "rtx-5080"),
        ("NVIDIA RTX A5000", "rtx-a5000"),
        ("RTX A4000", "rtx-a4000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("RTX PRO 6000 Blackwell Max-Q", "rtx-pro-6000-max-q"),
        ("RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("RTX 6000 Blackwell", "rtx-pro-6000"),
        ("g7e.48xlarge", "aws-g7e"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16g"),
        ("V100S-PCIE-32GB", "v100s-pcie"),
        ("p3.16xlarge", "aws-p3"),
        ("p3dn.24xlarge", "aws-p3dn"),
        ("p3.8xlarge", "v100-sxm-16g"),
        ("8x p4de.24xlarge", "aws-p4de"),
        ("P100-PCIE-16GB", "p100-pcie"),
        ("Tesla P100", "p100-sxm"),
        ("A100X", "a100-80g-pcie"),
        ("A800-PCIe-80GB", "a100-80g-pcie"),
        ("A800 40GB", "a100-40g-pcie"),
        ("A100-64GB", "a100-64g-sxm"),
        ("custom A100 (64 GB)", "a100-64g-sxm"),
        ("H100 64GB HBM2", "h100-64g"),
        ("H20 141GB", "h20-141g"),
        ("H20-3e", "h20-141g"),
        ("H20 96GB", "h20-sxm"),
        ("GH200 144GB", "gh200-144g"),
        ("GH200 480GB", "gh200"),
        ("GB200 NVL4", "gb200-nvl4"),
        ("GB200 NVL2", "gb200-nvl2"),
        ("GB200 NVL36", "gb200-nvl36"),
        ("GB200 NVL36x2", "gb200-nvl72"),
        ("GB200 NVL72", "gb200-nvl72"),
        ("B100", "b100"),
        ("NVIDIA B200 (1000W)", "b200"),
        ("MI100", "mi100"),
        ("AMD Instinct MI250", "mi250-gcd"),
        ("MI250X", "mi250x-gcd"),
        ("AMD Instinct MI308X", "mi308x"),
        ("Intel Data Center GPU Max 1100", "max-1100"),
        ("Ascend 910B1", "ascend-910b1"),
        ("Ascend910B2C", "ascend-910b2"),
        ("910B4 32GB", "ascend-910b4"),
        ("TPU v2-512", "tpu-v2"),
        ("AWS Trainium3", "trainium3"),
        ("trn3", "trainium3"),
        ("Standard_ND40rs_v2", "azure-nd-v2"),
        ("g5.12xlarge", "aws-g5-12x"),
        ("AWS g5.2xlarge", "a10g"),
        ("g6e.12xlarge (4x L40S)", "aws-g6e-12x"),
    ],
)
def test_gpus_under_other_spellings(gpu, system):
    name = read(gpu=gpu, interconnect=None, gpus_per_node=None).cluster.name
    assert name == system
    assert name in clusters()


def test_every_system_of_the_catalogue_is_read_by_its_own_name():
    for system in clusters():
        assert read(gpu=system, interconnect=None, gpus_per_node=None, precision_kind="unknown").cluster.gpus == 64


def test_nodes_that_bridges_do_not_divide_are_the_systems_own():
    case = read(gpu="H100 NVL", gpus=12, gpus_per_node=6, gbs=24)
    assert (case.cluster.gpus, case.cluster.gpus_per_node) == (12, 8)
    assert "gpus_per_node" in case.assumed
    part = read(gpu="H100 NVL", gpus=6, gpus_per_node=6, gbs=24)
    assert (part.cluster.gpus, part.cluster.gpus_per_node) == (6, 8)


@pytest.mark.parametrize(
    ("gpu", "guessed"),
    [
        ("L40", False),
        ("NVIDIA L40S", False),
        ("Tesla V100-PCIE-16GB", False),
        ("V100-PCIe", True),
        ("V100-32GB", False),
        ("A800-PCIe", True),
        ("A100X", True),
        ("Ascend 910B2C", True),
        ("T4", False),
    ],
)
def test_cards_that_the_catalogue_lacks_are_marked_where_another_stands_in(gpu, guessed):
    assert ("gpu" in read(gpu=gpu, precision_kind="fp16", interconnect="IB").assumed) == guessed


def test_boards_of_four_have_no_switch():
    board = read(gpu="A100-40GB", gpus=64, gpus_per_node=4).cluster.links[0]
    assert (board.bandwidth_per_s, board.peer_bandwidth_per_s) == (300e9, 100e9)
    assert not read(gpu="H100-80GB-SXM", gpus=64, gpus_per_node=4).cluster.links[0].in_network
    assert read(gpu="A100-40GB", gpus=4, gpus_per_node=4, gbs=8).cluster.links[0].peer_bandwidth_per_s == 0
    assert read(gpu="GB200", gpus=64, gpus_per_node=4).cluster.links[0].in_network


def test_dies_of_one_package_are_nearer_than_others():
    for gpu in ("MI250X", "Max 1550"):
        inside, outside = (
            predict(choose(read(gpu=gpu, gpus=8, tp=tp, gpus_per_node=None, interconnect=None, gbs=8))).seconds.value
            for tp in (2, 4)
        )
        assert 1.1 * inside < outside


def test_gpus_without_a_precision_run_the_next_one():
    assert read(gpu="TPU v5p", precision_kind="fp16").work.precision == "bf16"
    assert read(gpu="V100-32GB", precision_kind="fp8").work.precision == "fp16"


def test_cards_on_pcie_are_not_modules():
    assert read(gpu="A100-80GB", interconnect="PCIe only, 1x HDR").cluster.name == "a100-80g-pcie"
    assert read(gpu="A100-80GB", interconnect="PCIe Gen4").cluster.name == "a100-80g-pcie"
    assert read(gpu="A100-80GB", interconnect="no NVLink").cluster.name == "a100-80g-pcie"
    assert read(gpu="A100-80GB", interconnect="PCIe 4.0, NVLink bridges").cluster.name == "a100-80g-pcie-nvlink"
    assert read(gpu="A100-PCIe-80GB", interconnect="PCIe4 (no NVLink)").cluster.name == "a100-80g-pcie"
    assert read(gpu="RTX A6000 (NVLink)", interconnect=None).cluster.name == "rtx-a6000-nvlink"
    assert read(gpu="A100-80GB", interconnect="NVSwitch, no NVLink between nodes").cluster.name == "a100-80g-sxm"
    assert read(gpu="A100-SXM4-80GB", interconnect="PCIe Gen4").cluster.name == "a100-80g-sxm"
    assert read(gpu="A100-80GB", interconnect="NVLink, PCIe Gen4 to 8x HDR200").cluster.name == "a100-80g-sxm"


@pytest.mark.parametrize(
    ("words", "gigabits"),  # of one GPU of eight
    [
        ("IB HDR", 200), ("InfiniBand EDR 100Gb/s", 100), ("IB NDR", 400), ("NVLink only", 400), ("8xNDR", 400),
        ("2x EDR", 25), ("1x IB HDR 200", 25), ("8x 200Gb/s HDR InfiniBand", 200), ("Slingshot-11", 200),
        ("100GbE", 12.5), ("25 Gbps Ethernet", 3.125), ("Ethernet 100G", 12.5), ("40 Gbps TCP", 5), ("10 Gbps", 1.25),
        ("3.2 Tbps", 400), ("1.6Tb/s RoCE", 200), ("RoCE 4x200G", 100), ("400 Gb/s InfiniBand per node", 50),
        ("InfiniBand 200 Gb/s (1 NIC per node)", 25), ("200Gbps per GPU", 200), ("InfiniBand 1600 Gbps", 200),
        ("Spectrum-X 400GbE", 400), ("dual-rail NDR", 100), ("Dual-rail InfiniBand HDR", 50), ("p5.48xlarge", 400),
        ("NVLink 900 GB/s", 400), ("NVLink 900 GB/s per GPU + IB HDR", 200), ("not stated", 400),
        ("CX-6 200G x 4", 100), ("200 Gbit/s x 8", 200), ("NDR200 x4", 100), ("8*200Gbps", 200), ("2\u00d7HDR", 50),
        ("4 NICs 100 Gb/s each", 50), ("four 100 Gbps cards", 50), ("8 IB cards of 200Gb/s", 200), ("RDMA 100G", 12.5),
        ("single HDR200 NIC", 25), ("internode 800 Gbps", 100), ("25 GB/s per node", 25), ("IB 25 GB/s per GPU", 200),
        ("3x 100GbE per accelerator", 300), ("NVLink 900 GB/s, 3.2Tbps", 400), ("PCIe Gen5 x16", 400),
        ("HPE Slingshot-11 200Gb/s per NIC, 4 NICs per node", 100), ("Slingshot 11, 4x 25 GB/s NIC", 100),
        ("12x 25 GB/s NVLink + HDR", 200),
    ],
)  # fmt: skip
def test_networks_as_written(words, gigabits):
    link = read(interconnect=words).cluster.links[-1]
    assert link.bandwidth_per_s * 8 / 1e9 == pytest.approx(gigabits)


@pytest.mark.parametrize(
    "gpu",
    ["T4", "A30", "L40", "L20", "RTX 2080 Ti", "RTX 4080", "A5000", "P100", "MI100", "MI250", "MI308X", "Max 1100",
     "910B4", "TPU v2", "Trainium3", "B100", "GB200 NVL4", "A100-64GB", "H100-64GB", "Tesla V100-PCIE-32GB"],
)  # fmt: skip
def test_rows_on_cards_that_were_refused_are_priced(gpu):
    """GPT-2 XL on 8 of them: a step takes what its products do at the peak, and no more than some 30 times that."""
    sizes = {"layers": 48, "hidden": 1600, "ffn": 6400, "heads": 25, "kv_heads": 25, "head_dim": 64, "vocab": 50257}
    case = choose(
        read(
            framework="PyTorch FSDP", model="gpt2-xl", gpu=gpu, gpus=8, gpus_per_node=None, interconnect=None,
            precision_kind="fp16", seq=1024, mbs=8, gbs=64, dp=8, gated_mlp=0, **sizes,
        )
    )  # fmt: skip
    peaks = case.cluster.gpu.peak_flops_per_s
    at_peak = 6 * 1.56e9 * 64 * 1024 / (8 * peaks.get("fp16", peaks.get("bf16", 0)))
    assert at_peak < predict(case).seconds.value < 30 * at_peak


def test_cards_on_pcie_3_are_slower_to_reach_than_modules():
    module, card = (read(gpu=gpu, gpus=8, precision_kind="fp16", interconnect=None) for gpu in ("V100", "V100-PCIE"))
    assert card.cluster.links[0].bandwidth_per_s < module.cluster.links[0].bandwidth_per_s / 5
    assert read(gpu="V100-32GB", interconnect="PCIe 3.0").cluster.name == "v100-pcie-32g"
    assert read(gpu="Titan RTX", interconnect="NVLink").cluster.name == "titan-rtx-nvlink"
    assert read(gpu="A30", interconnect="PCIe + NVLink bridge").cluster.name == "a30-nvlink"


def test_a_rate_of_several_cards_is_a_nodes():
    for gpu, words, gigabits in (
        ("A100-80GB", "800 Gb/s IB", 100),
        ("A100-80GB", "400 Gb/s IB", 200),
        ("V100", "800Gbps", 100),
    ):
        link = read(gpu=gpu, interconnect=words).cluster.links[-1]
        assert link.bandwidth_per_s * 8 / 1e9 == pytest.approx(gigabits)


def test_cards_of_a_stated_network_are_counted_where_it_counts_them():
    for words, cards, gigabits in (
        ("100Gbps InfiniBand", 1, 100),
        ("4x HDR200", 4, 200),
        ("dual-rail EDR", 2, 100),
        ("IB HDR", 8, 200),
        ("400 Gb/s per node", 0, 0),
    ):
        link = read(interconnect=words).cluster.links[-1]
        assert (link.cards, link.card_bits_per_s / 1e9) == (cards, pytest.approx(gigabits))


def test_the_torus_of_a_pod_is_no_network_between_nodes():
    for words in ("ICI 1600 Gbps", "ICI 4,800 Gbps per chip; DCN"):
        case = read(framework="MaxText", gpu="TPU v5e", gpus_per_node=4, interconnect=words)
        assert case.cluster.links[-1] == load_cluster("tpu-v5e").links[-1]


def test_dies_are_the_devices_of_cards_that_have_two():
    case = read(gpu="MI250X", gpus=32, gpus_per_node=4, tp=8, dp=8, interconnect=None)
    assert (case.cluster.gpus, case.cluster.gpus_per_node) == (64, 8)
    for gpu, per_node in (("AMD MI250", 4), ("AMD MI250X", 4), ("Intel Max 1550", 6)):  # a node of so many has cards
        cluster = read(gpu=gpu, gpus=4 * per_node, gpus_per_node=per_node, dp=4 * per_node, interconnect=None).cluster
        assert (cluster.gpus, cluster.gpus_per_node) == (8 * per_node, 2 * per_node)


@pytest.mark.parametrize(
    ("gpu", "gpus", "per_node", "degrees", "world"),
    [
        ("trn1.32xlarge", 512, 32, {"tp": 8, "pp": 8, "dp": 8}, (512, 32)),
        ("Trainium", 256, 16, {"tp": 8, "pp": 8, "dp": 8}, (512, 32)),
        ("AWS Trainium2", 64, None, {"tp": 32, "dp": 8}, (256, 64)),
        ("AWS Trainium2", 64, 16, {"tp": 4, "dp": 16}, (64, 16)),
        ("AWS Trainium3", 64, None, {"tp": 32, "dp": 8}, (256, 64)),
    ],
)
def test_ranks_on_cores_have_their_share_of_a_chip(gpu, gpus, per_node, degrees, world):
    cluster = read(framework="NxD", gpu=gpu, gpus=gpus, gpus_per_node=per_node, interconnect=None, **degrees).cluster
    chip = load_cluster(f"trainium{gpu[-1]}" if gpu[-1] in "23" else "trainium")
    share = world[1] // chip.gpus_per_node
    assert (cluster.gpus, cluster.gpus_per_node) == world
    assert cluster.gpu.peak_flops_per_s["bf16"] * share == chip.gpu.peak_flops_per_s["bf16"]
    assert cluster.gpu.memory_bytes == chip.gpu.memory_bytes // share
    for link, of_chip in zip(cluster.links, chip.links, strict=True):
        assert link.bandwidth_per_s * share == of_chip.bandwidth_per_s


@pytest.mark.parametrize(
    ("gpu", "interconnect", "system"),
    [
        ("H100 (a3-megagpu-8g)", None, "gcp-a3-megagpu"),
        ("A3 Mega H100", None, "gcp-a3-megagpu"),
        ("A100 40GB (p4d.24xlarge)", None, "aws-p4d"),
        ("ml.p4d.24xlarge", None, "aws-p4d"),
        ("A100", "p4d", "aws-p4d"),
        ("H100", "p4d", "h100-sxm"),
        ("p5en.48xlarge (8x H200)", None, "aws-p5en"),
        ("A100-40GB", "a2-highgpu-8g", "gcp-a2-highgpu"),
    ],
)
def test_a_clouds_node_beside_its_gpu_brings_its_network(gpu, interconnect, system):
    cluster = read(gpu=gpu, interconnect=interconnect).cluster
    assert (cluster.name, cluster.links[-1]) == (system, load_cluster(system).links[-1])


def test_nodes_of_v100_in_a_cloud_have_its_network():
    link = read(gpu="V100 (p3dn.24xlarge)", interconnect=None).cluster.links[-1]
    assert link.bandwidth_per_s * 8 / 1e9 == pytest.approx(12.5)
    other = read(gpu="V100 (p3dn.24xlarge)", interconnect="8x100G").cluster.links[-1]
    assert other.bandwidth_per_s * 8 / 1e9 == pytest.approx(100)


@pytest.mark.parametrize(
    ("gpu", "gib"),
    [
        ("MI250X (128GB)", 64), ("MI250 128GB", 64), ("T4 16GB", 14.75), ("RTX 2080 Ti 22GB", 22), ("P100 12GB", 12),
        ("RTX 3080 12GB", 12), ("910B4 64GB", 64), ("Max 1100 48GB", 47.4), ("A30 24GB", 23.5),
        ("A100-64GB", 64), ("H20 141GB", 141), ("A100-80GB", 80), ("GH200 480GB", 94.5), ("MI300X-192GB", 192),
        ("GH200 120GB", 94.5), ("GH200 144GB", 142), ("A10G", 22), ("A10G 24GB", 22), ("A100 (200Gb/s IB)", 79.2),
    ],
)  # fmt: skip
def test_memory_in_a_name(gpu, gib):
    assert read(gpu=gpu).cluster.gpu.memory_bytes / 2**30 == pytest.approx(gib, rel=0.02)
