"""What programs compiled by XLA keep of a checkpointed block, by the names that frameworks give such policies.

JAX checkpoints a block under a policy that names operations whose outputs are kept; whatever else backward needs is
computed again from them and from the block's input. Praxis's checkpoint_policy.py (read at 1e634344f9) and MaxText's
decoders.py and base.yml (read) list the names. Attention's core is kept where a policy has "context", which Transformer
Engine gives its fused kernel's output and statistics (transformer_engine/jax/attention.py, read).
"""

from __future__ import annotations

import re

from fivefold.measure.runs import Run

# Operations as a ledger names them.
_QKV, _CORE, _OUT = "qkv_proj", "core_attention", "out_proj"
_MLP = ("mlp.fc1", "mlp.fc2")
_PRODUCTS = (_QKV, _OUT, *_MLP)

# "dots without batch dimensions" are the weights' products; attention's own, which a flash kernel hides, are not.
KEPT: dict[str, tuple[str, ...]] = {
    "full": (),
    "save_nothing": (),
    "nothing_saveable": (),
    "save_out_proj": (_OUT,),
    "save_context": (_CORE,),
    "save_encoded_and_out_proj": (_CORE, _OUT),
    "save_qkv_proj": (_QKV,),
    "save_qkv_out_proj": (_QKV, _OUT),
    "save_dot_except_mlp": (_QKV, _OUT),
    "save_dot_except_mlpwi": (_QKV, _OUT, "mlp.fc2"),
    "save_dot_with_context_except_mlp": (_QKV, _CORE, _OUT),
    "save_dot_for_mlperf_200b": (_QKV, _CORE, _OUT),
    "save_dot_only": _PRODUCTS,
    "save_dot_with_no_batch_dims": _PRODUCTS,
    "save_dot_with_no_batch_dim": _PRODUCTS,
    "minimal": _PRODUCTS,
    "minimal_flash": (_CORE, *_PRODUCTS),
    "minimal_with_context": (_CORE, *_PRODUCTS),
}
# "full" says no more than a kind of recomputation does.
_NAMED = re.compile(rf"\b({'|'.join(sorted(KEPT.keys() - {'full'}, key=len, reverse=True))})\b")


def stated_policy(run: Run) -> tuple[str, ...] | None:
    """What a row's own policy keeps, by its name among the words on recomputation or after "policy" or "remat" in
    the notes."""
    words = [run.recompute or "", *re.findall(r"(?:policy|\bremat)\W{1,3}(\w+)", run.notes or "", re.IGNORECASE)]
    found = (_NAMED.search(text.lower()) for text in words)
    return next((KEPT[each[1]] for each in found if each), None)
