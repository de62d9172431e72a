"""Rules of nanotron. Releases 0.4 and 0.5 are from memory; the main branch of April 2026 is 2411b022, of which a list
of checks was made (nanotron@2026.4)."""

from __future__ import annotations

from fivefold.layout.rules.common import A2A, kv_divides
from fivefold.layout.rules.rule import Rule

_ONLY = ("nanotron",)
_CP_SINCE = (2026, 4)

NANOTRON: tuple[Rule, ...] = (
    Rule(
        id="nanotron-cp",
        option="--cp",
        field="cp",
        runtimes=_ONLY,
        before=_CP_SINCE,
        holds=lambda c, x: c.cp == 1,
        message="--cp {cp}: nanotron 0.5 has no context parallelism. Shard long sequences with --tp instead.",
        source="nanotron 0.5, ParallelismArgs: dp, pp, tp and expert_parallel_size (from memory)",
    ),
    Rule(
        id="nanotron-cp-kind",
        option="--cp-kind",
        field="cp_kind",
        runtimes=_ONLY,
        since=_CP_SINCE,
        holds=lambda c, x: (c.cp == 1) | (c.cp_kind != A2A),
        message="nanotron's context parallelism is ring attention (p2p), not all-to-all.",
        source="nanotron 2411b022, Qwen2's ring attention",
    ),
    Rule(
        id="nanotron-kv-heads",
        moot_after=("heads-tp",),
        option="--tp",
        field="tp",
        runtimes=_ONLY,
        holds=kv_divides,
        message="--tp {tp} has to divide the {kv_heads} key/value heads, which nanotron does not replicate.",
        source="nanotron 2411b022 config.py and attention: key/value heads >= tp and a multiple of it",
    ),
    Rule(
        id="nanotron-ep",
        option="--ep",
        field="ep",
        runtimes=_ONLY,
        holds=lambda c, x: c.ep == 1,
        message="--ep {ep}: nanotron asks tp · cp · dp · pp to be the world and then lays out ranks with ep beside "
        "them, so ep above 1 does not start.",
        source="nanotron 2411b022 parallel/context.py",
    ),
    Rule(
        id="nanotron-experts",
        option="MODEL",
        field=None,
        runtimes=_ONLY,
        holds=lambda c, x: not x.is_moe,
        message="{model} has experts; nanotron's mixtures of experts are an example and not modelled here.",
        source="nanotron 0.5, examples/moe (from memory)",
    ),
)
