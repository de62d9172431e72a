"""Layouts, bytes and seconds in words, for explanations."""

from __future__ import annotations

from fivefold.layout.layout import Layout, Recompute


def layout_words(layout: Layout) -> str:
    """The degrees of a layout that are not 1, and its micro-batch: 'tp8 pp4 mbs2, full recompute'."""
    named = ("tp", "cp", "pp", "vpp", "ep", "etp")
    words = [f"{name}{getattr(layout, name)}" for name in named if getattr(layout, name) > 1]
    words.append(f"zero{layout.zero}")
    if layout.dp_replicate > 1:
        words.append(f"{layout.dp_replicate} replicas")
    words.append(f"mbs{layout.micro_batch}")
    recompute = recompute_words(layout.recompute)
    return " ".join(words) + (f", {recompute}" if recompute else "")


def recompute_words(recompute: Recompute) -> str:
    """'' without recomputation."""
    if recompute.kind == "none":
        return ""
    if recompute.kind == "full":
        return "full recompute" if recompute.layers is None else f"full recompute of {recompute.layers} blocks"
    return "recompute of " + "+".join(recompute.modules or ("core_attn",))


def gigabytes(size: float) -> str:
    """Bytes as GB with sensible digits."""
    value = size / 1e9
    return f"{value:.1f} GB" if abs(value) >= 1 else f"{value:.2f} GB"


def duration(seconds: float) -> str:
    """Seconds in the unit a person would use."""
    size = abs(seconds)
    if size >= 86400:
        return f"{seconds / 86400:.1f} days"
    if size >= 3600:
        return f"{seconds / 3600:.1f} h"
    if size >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms"


def percent(part: float, whole: float) -> str:
    """Signed share of a whole."""
    return f"{part / whole:+.1%}" if whole else "n/a"
