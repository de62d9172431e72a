"""Variants: what one piece costs on a rank, for the distinct combinations of key and recomputation.

Recomputation is arithmetic on a key's cost: dropped bytes leave what is saved, their forward operations come again in
backward. Under a fully sharded runtime a variant also knows its sharding groups, because each piece's parameters are
gathered while another piece computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.estimate.price import Cost
from fivefold.estimate.recomputed import COVERS
from fivefold.layout.layout import RECOMPUTE_KINDS, RECOMPUTE_MODULES

_FULL = RECOMPUTE_KINDS.index("full")
_NONE = RECOMPUTE_KINDS.index("none")
_MOE = RECOMPUTE_MODULES.index("moe")
_INSIDE_MOE = [RECOMPUTE_MODULES.index(name) for name in COVERS["moe"] if name != "moe"]


@dataclass(slots=True)
class Variants:
    """W variants, P pieces, O owners (price.OWNERS).

    forward, backward, again: [W, P, O] seconds; `again` is what recomputation adds to backward.
    gather_forward, gather_backward: [W, P] exposed seconds of parameter gathers and gradient scatters.
    copy_forward, copy_backward: [W, P] exposed seconds of saved tensors that go to host memory and come back.
    offloaded: [W, P] bytes of them per micro-batch.
    adapters, expert_adapters: [W, P] elements of adapters beside dense and expert weights.
    forward_s, backward_s, again_s: [W, P] their sums. weight_grad_s: [W, P] the part of backward_s that can wait when
    the schedule splits the backward; nothing waits in a layout that recomputes, whose activations would be gone.
    saved: [W, P] bytes kept from forward to backward; kept: what recomputation leaves of them.
    working, working_again: [W, P] largest working set of backward without and with recomputation.
    logits, dense, expert, wgrad_*, newton_schulz, matrix, factored: as in Cost, [W, P].
    """

    forward: np.ndarray
    backward: np.ndarray
    again: np.ndarray
    gather_forward: np.ndarray
    gather_backward: np.ndarray
    saved: np.ndarray
    kept: np.ndarray
    working: np.ndarray
    working_again: np.ndarray
    logits: np.ndarray
    dense: np.ndarray
    expert: np.ndarray
    wgrad_mixer: np.ndarray
    wgrad_feed: np.ndarray
    newton_schulz: np.ndarray
    matrix: np.ndarray
    factored: np.ndarray
    weight_grad_s: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    again_s: np.ndarray
    copy_forward: np.ndarray
    copy_backward: np.ndarray
    offloaded: np.ndarray
    adapters: np.ndarray
    expert_adapters: np.ndarray

    def total(self) -> None:
        """Bring the sums up to date with their parts."""
        self.forward_s = self.forward.sum(axis=2) + self.gather_forward + self.copy_forward
        self.backward_s = self.backward.sum(axis=2) + self.gather_backward + self.copy_backward
        self.again_s = self.again.sum(axis=2)


def variants(costs: tuple[Cost, ...], key: np.ndarray, kind: np.ndarray, modules: np.ndarray) -> Variants:
    """The variants of given key indices, recompute kinds (codes) and module masks, each [W]."""
    bits = module_bits(kind, modules)

    def stack(name: str) -> np.ndarray:
        return np.stack([getattr(cost, name)[..., key].T for cost in costs], axis=1)

    forward, saved = stack("forward"), stack("saved_bytes")
    dropped, again = np.zeros_like(saved), np.zeros_like(forward)
    for bit in np.flatnonzero(bits.any(axis=1)):
        dropped += bits[bit][:, None] * np.stack([cost.dropped_bytes[bit][key] for cost in costs], axis=1)
        again += bits[bit][:, None, None] * np.stack([cost.recompute[bit][:, key].T for cost in costs], axis=1)
    full = kind == _FULL
    kept = np.where(full[:, None], stack("input_bytes"), saved - dropped)
    working = stack("working_bytes")
    # What the room's other parts put in their place (gathers, copies, adapters), and the sums.
    later = ("gather_forward", "gather_backward", "copy_forward", "copy_backward", "offloaded", "adapters")
    later += ("expert_adapters", "forward_s", "backward_s", "again_s")
    out = Variants(
        forward=forward,
        backward=stack("backward"),
        again=np.where(full[:, None, None], stack("full"), again),
        saved=saved,
        kept=kept,
        working=working,
        working_again=working + saved - kept,
        logits=stack("logits_bytes"),
        dense=stack("dense"),
        expert=stack("expert"),
        wgrad_mixer=stack("wgrad_mixer"),
        wgrad_feed=stack("wgrad_feed"),
        newton_schulz=stack("newton_schulz"),
        matrix=stack("matrix"),
        factored=stack("factored"),
        weight_grad_s=np.where((kind == _NONE)[:, None], stack("weight_grad"), 0.0),
        **dict.fromkeys(later, np.zeros_like(saved)),
    )
    out.total()
    return out


def module_bits(kind: np.ndarray, modules: np.ndarray) -> np.ndarray:
    """[M, W] 0 or 1: which modules are recomputed selectively. The whole MoE layer includes its activation and
    its shared experts."""
    bits = modules >> np.arange(len(RECOMPUTE_MODULES))[:, None] & 1
    bits = np.where((kind == _NONE) | (kind == _FULL), 0, bits)
    bits[_INSIDE_MOE] &= 1 - bits[_MOE]
    return bits
