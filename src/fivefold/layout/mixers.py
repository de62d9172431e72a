"""What a layout has to know of a model's token mixers, whichever kinds they are: their attention heads, and what tensor
parallelism divides."""

from __future__ import annotations

from fivefold.model.spec import Attention, Block, GatedDeltaNet, LatentAttention, Mamba, Mamba2, Mixer, SideBySide

SoftmaxAttention = Attention | LatentAttention


def softmax_attention(mixer: Mixer | None) -> SoftmaxAttention | None:
    """The attention over the whole sequence that a mixer is or contains, None for the others."""
    if isinstance(mixer, SideBySide):
        return mixer.attention
    return mixer if isinstance(mixer, SoftmaxAttention) else None


def state_space(mixer: Mixer | None) -> GatedDeltaNet | Mamba | Mamba2 | None:
    """The linear attention or state space that a mixer is or contains, None for the others."""
    if isinstance(mixer, SideBySide):
        return mixer.state_space
    return mixer if isinstance(mixer, GatedDeltaNet | Mamba | Mamba2) else None


def state_heads(mixer: Mixer | None) -> tuple[int, ...]:
    """Counts of which every rank of tp takes an equal share: heads of a gated delta net's keys and values, heads of
    Mamba 2, channels of Mamba 1; nothing for attention."""
    space = state_space(mixer)
    if isinstance(space, GatedDeltaNet):
        return (space.key_heads, space.value_heads)
    if isinstance(space, Mamba2):
        return (space.heads,)
    return (space.inner,) if isinstance(space, Mamba) else ()


def state_groups(mixer: Mixer | None) -> int | None:
    """Groups of heads of Mamba 2 that share B and C, None without them."""
    space = state_space(mixer)
    return space.groups if isinstance(space, Mamba2) else None


def state_widths(mixer: Mixer | None) -> tuple[int, ...]:
    """Widths of the input projection and of what the output projection reads, both divided by tp."""
    space = state_space(mixer)
    if isinstance(space, GatedDeltaNet):
        return (2 * (space.key_width + space.value_width + space.value_heads), space.value_width)
    if isinstance(space, Mamba2):
        return (space.inner + space.conv_width + space.heads, space.inner)
    return (2 * space.inner, space.inner) if isinstance(space, Mamba) else ()


def largest_tp(blocks: tuple[Block, ...], hidden: int) -> int:
    """The degree of tensor parallelism beyond which some mixer has nothing to give to a rank; hidden without mixers."""
    counts: list[int] = []
    for block in blocks:
        attention = softmax_attention(block.mixer)
        counts += state_heads(block.mixer)
        counts += [attention.heads] if attention is not None else []
    return min(counts, default=hidden)
