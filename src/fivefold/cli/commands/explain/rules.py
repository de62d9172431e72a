"""`fivefold explain rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.cli.flags import OutputFlags, RuntimeFlags
from fivefold.cli.output import console, write_json

if TYPE_CHECKING:
    from fivefold.layout.rules import Rule

_RUNTIME, _OUTPUT = RuntimeFlags(), OutputFlags()


def rules(*, runtime: RuntimeFlags = _RUNTIME, output: OutputFlags = _OUTPUT) -> int:
    """The rules that decide whether a layout would start, with their sources.

    Of one runtime and version with --runtime megatron@0.16, else of all. Words in <> stand for a layout's own values.
    """
    from fivefold.cli.values import runtime_name
    from fivefold.estimate.result import envelope
    from fivefold.layout.rules import RULES

    found = RULES if runtime.runtime is None else _rules_of(runtime_name(runtime.runtime))
    if output.json:
        listed = [
            {
                "id": rule.id,
                "option": rule.option,
                "value": None,  # of a layout that breaks it
                "legal": None,
                "message": rule.message,
                "source": rule.source,
                "runtimes": list(rule.runtimes),
                "since": None if rule.since is None else ".".join(map(str, rule.since)),
                "before": None if rule.before is None else ".".join(map(str, rule.before)),
                "silent": rule.silent,
            }
            for rule in found
        ]
        write_json({**envelope("explain", {"runtime": runtime.runtime}), "topic": "rules", "rules": listed})
    else:
        from fivefold.cli.render.explain import rules_view

        console(output).print(rules_view(found))
    return 0


def _rules_of(runtime: str) -> tuple[Rule, ...]:
    """The rules of one runtime and version; the rest of the context, which nothing here looks at, is the smallest."""
    from fivefold.layout import Context, Workload, rules_for
    from fivefold.model import load_model

    work = Workload(seq_len=1, global_batch=1)
    context = Context(
        model=load_model("gpt2"), cluster_gpus=1, gpus_per_node=1, scale_up_size=1, work=work, runtime=runtime
    )
    return rules_for(context)
