"""The links of a cluster file: the base's with the file's numbers over them, network cards, and spans that nest."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from fivefold.cluster.mistakes import convert, file_error
from fivefold.cluster.spec import Link
from fivefold.cluster.tables import Table

_CARDS = ("cards", "card_bits_per_s")


def merge_links(
    base: list[Table], given: list[Table], per_node: int, base_gpus: int, card_gpus: int, label: str
) -> tuple[Link, ...]:
    """Links innermost first: the base's with the file's numbers over them, then the file's new ones, sorted by span.

    base_gpus: GPUs of the base's node. card_gpus: GPUs of the node whose network cards a link of the file states.
    """
    merged = {link["name"]: dict(link) for link in _needed(_resized(base, base_gpus, per_node), per_node)}
    stated = {link.get("name") for link in given if any(key in link for key in _CARDS)}
    for at, link in enumerate(given):
        name = link.get("name")
        if not isinstance(name, str):
            raise file_error(label, f"links[{at}] has no name", 'add name = "nvlink", or another text')
        if name not in merged and link.get("span") is None:
            raise file_error(
                label,
                f"links.{name} states no span, and the base has no link of that name",
                f"name one of {', '.join(merged) or 'a base'}, or add span, the GPUs that it joins, 0 for all",
            )
        merged[name] = {**_without_replaced(merged.get(name, {}), link), **link}
    links = [
        convert(
            {**_with_share(link, card_gpus if name in stated else per_node, label), "span": _span(link, per_node)},
            Link,
            label,
            f"links.{name}",
        )
        for name, link in merged.items()
    ]
    return tuple(sorted(links, key=lambda link: link.span or math.inf))


def _resized(base: list[Table], own: int, per_node: int) -> list[Table]:
    """The links of a node of `own` GPUs in one of `per_node`: what joins two sockets is a pipe that their GPUs share,
    and network cards are whole ones, so that no GPU has less of them than in the larger node."""
    if own == per_node:
        return base
    sockets = any(link.get("span") == "node/2" for link in base)
    links: list[Table] = []
    for link in base:
        changes: Table = {}
        if sockets and link.get("span") == "node":
            changes = {"bandwidth_per_s": link["bandwidth_per_s"] * own / per_node}
        elif link.get("cards"):
            cards = math.ceil(link["cards"] * per_node / own)
            changes = {"cards": cards, "bandwidth_per_s": cards * link["card_bits_per_s"] / 8 / per_node}
        links.append({**link, **changes})
    return links


def _needed(base: list[Table], per_node: int) -> list[Table]:
    """The base's links that join something in a node of so many GPUs: in a node of 2 or 4 a bridge between two already
    joins what a larger node's PCIe switch or socket would."""
    first: dict[Any, Table] = {}
    for link in base:
        first.setdefault(_span(link, per_node), link)
    return [link for span, link in first.items() if span != 1]


def _without_replaced(base: Table, link: Table) -> Table:
    """The base's link without its bandwidth if the file states cards, and without its cards if it states bandwidth."""
    stale = ("bandwidth_per_s",) if any(key in link for key in _CARDS) else ()
    stale = _CARDS if "bandwidth_per_s" in link else stale
    return {key: value for key, value in base.items() if key not in stale}


def _with_share(link: Table, gpus: int, label: str) -> Table:
    """The link with bandwidth_per_s, one GPU's share of the node's cards, where cards are what it states."""
    cards, rate = (link.get(key) for key in _CARDS)
    if cards is None and rate is None:
        return link
    if not (isinstance(cards, int | float) and isinstance(rate, int | float) and cards > 0 and rate > 0):
        problem = f"links.{link['name']} states cards = {cards!r} and card_bits_per_s = {rate!r}"
        raise file_error(label, problem, "give both above 0, as 8 and 400e9, or bandwidth_per_s alone")
    share = cards * rate / 8 / gpus
    stated = link.get("bandwidth_per_s", share)
    if isinstance(stated, int | float) and not math.isclose(stated, share, rel_tol=0.01):
        problem = f"links.{link['name']} has bandwidth_per_s {stated:.4g}, but its cards give each GPU {share:.4g}"
        raise file_error(label, problem, "leave one of the two out")
    return {**link, "bandwidth_per_s": stated}


def check_spans(spans: list[int], label: str) -> None:
    if spans[-1] != 0 or len(set(spans)) != len(spans) or spans[0] == 1:
        raise file_error(
            label,
            f"links span {spans} GPUs, but exactly one, the outermost, has to span everything (span = 0), and the "
            "others 2 or more, no two the same",
            "correct span",
        )
    for inner, outer in pairwise(spans[:-1]):
        if outer % inner:
            raise file_error(
                label, f"a link spans {outer} GPUs, not a multiple of the {inner} inside it", "correct span"
            )


def _span(link: Table, per_node: int) -> Any:
    """Domain size of a link's table: a number, "node" or "node/2" (each of two CPU sockets)."""
    span = link.get("span")
    return {"node": per_node, "node/2": max(per_node // 2, 1)}.get(span, span) if isinstance(span, str) else span
