"""The catalogue of accelerators and nodes as one page: every number with its source, and what a model costs on each.

    python benchmarks/hardware.py                         the page as Markdown
    python benchmarks/hardware.py --write docs/hardware.md
    python benchmarks/hardware.py --no-plans              tables and sources only, at once

Plans: llama-3-8b and llama-3-70b on 64 of each accelerator, 512 sequences of 8,192 tokens a step, the whole search
under Megatron's profile, in bf16 (fp16 where there is none). The page states predictions, not measurements.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from fivefold.cluster import Cluster, Gpu, aliases, clusters, gpus, load_cluster
from fivefold.errors import FivefoldError
from fivefold.layout import Workload
from fivefold.model import load_model
from fivefold.runtime.accelerators import caveat
from fivefold.search import plan

GPUS = 64
RUNTIME = "megatron"
MODELS = ("llama-3-8b", "llama-3-70b")
SEQ, BATCH = 8192, 512
MEMORY = "from memory"

INTRO = """# Accelerators and nodes

Written by `python benchmarks/hardware.py --write docs/hardware.md` from the catalogue in `src/fivefold/cluster/data/`.

`--gpu NAME` takes an accelerator and means its reference node; it also takes a node, by its name here or by the name
of a vendor's system or a cloud's instance (`--gpu p5.48xlarge`, `--gpu dgx-a100`). `--cluster` takes the same names, or
the path of a TOML file with your own numbers, which can start from one of these (`base = "aws-p5"`). `fivefold gpus`
lists them.

Rates are one direction, per accelerator. Peaks are dense. A number with an asterisk is stated from memory: its document
was not opened when the catalogue was written. [Sources](#sources) has a sentence for each.
"""

ASSUMED = """## What the topologies assume

- **NVLink switches, Infinity Fabric, HCCS, Gaudi's ports.** One level per node. Where accelerators are wired pair by
  pair, a group of n gets n - 1 links: 2 MI300X reach 64 GB/s, 8 reach 448.
- **PCIe boxes.** Two levels: the cards of a socket, each with its own lanes, and the link between the sockets, which
  all rings that cross it share. Cards with peer-to-peer reach 66% of PCIe in a ring, as measured on A100 PCIe. GeForce
  cards have no peer-to-peer: what they send is written to host memory and read from there, at the share of PCIe that
  8 and 4 RTX 5090 were measured at. Switches with an uplink that several cards share are not modelled for collectives;
  state a lower rate in a cluster file.
- **NVLink bridges** join two cards and nothing else: `*-nvlink` nodes have a level of 2 inside the PCIe ones.
- **Network cards.** Each accelerator has its share of the node's cards. Which card is near which accelerator is taken
  to be right (one rail each, or evenly shared), and the fabric between nodes to be full.
- **TPUs.** A slice is one level: a group is taken to lie on one axis of the torus and to use both ports of that axis;
  an all-to-all is held to the bisection. Pods are joined by the data centre's network. What a collective gains over
  several axes at once, and what it loses on an axis without a wrap, is not modelled.
- **Hosts.** Memory is the node's; the link is what one accelerator gets while all of the node copy at once.
- **Frameworks.** No framework of fivefold runs on a TPU, and nanotron and fivefold's trainer on neither Gaudi nor
  Ascend: `--runtime` with such a pair is refused, and the default is priced as if it ran there, which the answer says.
"""


def starred(gpu: Gpu, field: str, text: str) -> str:
    return f"{text}*" if MEMORY in gpu.sources.get(field, "") else text


def tera(gpu: Gpu, kind: str) -> str:
    peak = gpu.peak_flops_per_s.get(kind)  # type: ignore[call-overload]
    if peak is None:
        return "-"
    tflops = peak / 1e12
    return starred(gpu, "peak_flops_per_s", f"{tflops:,.0f}" if tflops >= 1000 else f"{tflops:.4g}")


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accelerators() -> str:
    heads = ["accelerator", "vendor", "memory GB", "HBM TB/s", "bf16", "fp16", "fp8", "fp4", "tf32", "fp32", "SMs"]
    rows = []
    for name in gpus():
        gpu = load_cluster(name).gpu
        rows.append(
            [
                name,
                gpu.vendor,
                starred(gpu, "memory_bytes", f"{gpu.memory_bytes / 1e9:.1f}"),
                starred(gpu, "memory_bandwidth_per_s", f"{gpu.memory_bandwidth_per_s / 1e12:.3g}"),
                *(tera(gpu, kind) for kind in ("bf16", "fp16", "fp8", "nvfp4", "tf32", "fp32")),
                starred(gpu, "sms", str(gpu.sms)),
            ]
        )
    return f"## Accelerators\n\nPeaks in dense TFLOP/s.\n\n{table(heads, rows)}\n"


def link_words(cluster: Cluster) -> str:
    return ", ".join(
        f"{link.name}{f' x{link.span}' if link.span else ''} {link.bandwidth_per_s / 1e9:.4g} ({link.efficiency:.0%})"
        for link in cluster.links
    )


def card_words(cluster: Cluster) -> str:
    last = cluster.links[-1]
    return f"{last.cards} x {last.card_bits_per_s / 1e9:.0f}" if last.cards else "-"


def nodes() -> str:
    heads = ["node", "accelerator", "each", "links: GB/s (reached)", "cards, Gb/s", "host GB", "to host GB/s", "PCIe"]
    heads += ["sockets", "other names"]
    others: dict[str, list[str]] = {}
    for other, name in aliases().items():
        others.setdefault(name, []).append(other)
    rows = []
    for name in clusters():
        cluster = load_cluster(name)
        rows.append(
            [
                name,
                cluster.gpu.name,
                str(cluster.gpus_per_node),
                link_words(cluster),
                card_words(cluster),
                f"{(cluster.host_memory_bytes or 0) / 1e9:,.0f}",
                f"{(cluster.host_link_bandwidth_per_s or 0) / 1e9:.3g}",
                cluster.host_pcie,
                str(cluster.host_sockets or "-"),
                ", ".join(others.get(name, [])),
            ]
        )
    return f"## Nodes\n\nLinks innermost first; x8 joins 8 accelerators.\n\n{table(heads, rows)}\n"


def layout_words(layout: Any) -> str:
    axes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "vpp")}
    degrees = [f"{axis.upper()}{degree}" for axis, degree in axes.items() if degree > 1]
    kind = layout.recompute.kind
    return " ".join([*degrees, f"DP{layout.dp}", f"ZeRO-{layout.zero}", *([] if kind == "none" else [kind])])


def planned(model: str, name: str) -> list[str]:
    """Best layout, seconds, MFU and memory of one model on 64 of one accelerator; or that none fits."""
    cluster = load_cluster(name, gpus=GPUS)
    precision = "bf16" if "bf16" in cluster.gpu.peak_flops_per_s else "fp16"
    work = msgspec.convert({"seq_len": SEQ, "global_batch": BATCH, "precision": precision}, Workload)
    found = plan(load_model(model), cluster, work, runtime=RUNTIME, top=1)
    if not found.plans or not found.plans[0].fits:
        return ["does not fit", "", "", ""]
    best = found.plans[0]
    if best.step is None or best.memory is None:
        raise FivefoldError(f"The best plan of {model} on {name} has no price.")
    seconds = best.step.seconds
    return [
        layout_words(best.layout),
        f"{seconds.value:.3g} ({seconds.low:.3g} to {seconds.high:.3g})",
        f"{best.step.mfu.causal:.1%}",
        f"{best.memory.reserved_bytes / 1e9:.1f} of {cluster.gpu.memory_bytes / 1e9:.1f}",
    ]


def plans() -> str:
    parts = [
        f"## What a model costs on {GPUS} of each\n\n{BATCH} sequences of {SEQ:,} tokens a step, the best layout under "
        f"{RUNTIME}'s profile on the reference node, bf16 (fp16 on Volta). Seconds with their 80% interval; MFU counts "
        "causal model FLOPs. Predictions: the accelerators whose products were not measured say so under `fivefold "
        "explain assumptions`, and their intervals are wide. A dagger: as if the framework ran there.\n"
    ]
    for model in MODELS:
        rows = []
        for name in gpus():
            foreign = caveat(RUNTIME, load_cluster(name).gpu.vendor) is not None
            print(f"{model} on {name} ...", file=sys.stderr, flush=True)
            rows.append([name + ("†" if foreign else ""), *planned(model, name)])
        heads = ["accelerator", "best layout", "s per step", "MFU", "GB"]
        parts.append(f"### {model}\n\n{table(heads, rows)}\n")
    return "\n".join(parts)


def sources() -> str:
    parts = ["## Sources\n\n### Accelerators\n"]
    for name in gpus():
        gpu = load_cluster(name).gpu
        parts.append(f"- **{name}**" + "".join(f"\n  - {field}: {text}" for field, text in gpu.sources.items()))
    parts.append("\n### Nodes\n")
    for name in clusters():
        cluster = load_cluster(name)
        told = [f"{link.name}: {link.source}" for link in cluster.links]
        parts.append(f"- **{name}**" + "".join(f"\n  - {text}" for text in [*told, f"host: {cluster.host_source}"]))
    return "\n".join(parts) + "\n"


def page(with_plans: bool) -> str:
    parts = [INTRO, accelerators(), nodes(), *([plans()] if with_plans else []), ASSUMED, sources()]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the page there instead of printing it")
    parser.add_argument("--no-plans", action="store_true", help="leave out the searches")
    options = parser.parse_args()
    text = page(not options.no_plans)
    if options.write is None:
        print(text)
    else:
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
