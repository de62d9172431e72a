"""Selective checkpointing that chooses single operations, as torchtitan's does: of a block, attention's output and
every second matrix product's are kept, everything else is computed again. What was scattered is kept, what was gathered
for a linear layer is gathered again (torchtitan llama3/infra/parallelize.py, read at 018740b7aa).

Products count in the order in which a Llama block runs them: query, key, value, output, gate, up, down; the first is
kept, the second is not (torchtitan distributed/activation_checkpoint.py, from memory). The down projection's output is
as wide as the residual after the mixer, which stands for it here.
"""

from __future__ import annotations

import numpy as np

from fivefold.estimate.ledger import Exchange, Ledger

_KEPT_WHOLE = ("input_norm.input", "feed_norm.input", "attention_output", "log_sum_exp")


def kept(ledger: Ledger) -> list[np.ndarray]:
    """Of every saved tensor the bytes that stay, [K] each."""
    shares = dict.fromkeys(_KEPT_WHOLE, 1.0) | {"mlp.fc1 output": _first_half(ledger)} | _query_and_value(ledger)
    return [np.asarray(row.bytes) * shares.get(row.name, 0.0) for row in ledger.saved]


def redone(ledger: Ledger) -> list[np.ndarray | float]:
    """Of every matrix product the share that runs again: none of what ends the block, as under a whole checkpoint."""
    shares = {name: 1 - share for name, share in _query_and_value(ledger).items()}
    again = {"qkv_proj": shares.get("query_key_value", 1.0), "mlp.fc1": 1 - _first_half(ledger)}
    return [0.0 if row.ends_block else again.get(row.name, 1.0) for row in ledger.gemms]


def gathers_again(row: Exchange) -> bool:
    """Whether a collective of the forward pass runs again."""
    return row.when == "forward" and row.axis == "tp" and row.op == "all_gather"


def _first_half(ledger: Ledger) -> float:
    """Of gate and up projections the first is kept; a single input projection is the fifth product, and kept."""
    saved = {row.name: row.bytes for row in ledger.saved}
    width = {row.name: row.k for row in ledger.gemms}.get("mlp.fc2")
    return 0.5 if "mlp.activated gate" in saved or _is_gated(ledger, width) else 1.0


def _is_gated(ledger: Ledger, width: object) -> bool:
    out = next((row.n for row in ledger.gemms if row.name == "mlp.fc1"), None)
    return out is not None and width is not None and bool(np.all(np.asarray(out) > 1.5 * np.asarray(width)))


def _query_and_value(ledger: Ledger) -> dict[str, np.ndarray]:
    """Query and value of a projection that the ledger writes as one."""
    sizes = {row.name: row for row in ledger.gemms}
    if "qkv_proj" not in sizes or "out_proj" not in sizes:
        return {}
    whole, query = np.asarray(sizes["qkv_proj"].n, float), np.asarray(sizes["out_proj"].k, float)
    return {"query_key_value": (query + (whole - query) / 2) / whole}
