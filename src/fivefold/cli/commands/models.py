"""`fivefold models`."""

from __future__ import annotations

from fivefold.cli.flags import OutputFlags
from fivefold.cli.output import console, write_json

_NO_OUTPUT = OutputFlags()


def models(*, output: OutputFlags = _NO_OUTPUT) -> int:
    """The models of the catalogue, with their exact parameter counts.

    Any Hugging Face config.json is taken in their place: fivefold plan ./my-model/config.json --gpus 8

    For example: fivefold models --json
    """
    from fivefold.estimate.result import envelope
    from fivefold.model import count_params, load_model
    from fivefold.model import models as names

    rows = [(spec, count_params(spec)) for spec in map(load_model, names())]
    if output.json:
        listed = [
            {
                "name": spec.name,
                "family": spec.family,
                "layers": spec.layers,
                "hidden": spec.hidden,
                "vocab": spec.vocab,
                "max_position": spec.max_position,
                "params": {"total": counts.total, "active": counts.active},
                "source": spec.source,
            }
            for spec, counts in rows
        ]
        write_json({**envelope("models", {}), "models": listed})
    else:
        from fivefold.cli.render.catalogues import models_table

        console(output).print(models_table(rows))
    return 0
