"""`fivefold gpus`."""

from __future__ import annotations

from fivefold.cli.flags import OutputFlags
from fivefold.cli.output import console, write_json

_NO_OUTPUT = OutputFlags()


def gpus(*, output: OutputFlags = _NO_OUTPUT) -> int:
    """The GPUs and systems of the catalogue: memory, dense peaks, links and where each number comes from.

    A name from here goes to --gpu; so do the other names below the table, such as those of cloud instances. Your own
    cluster is a TOML file for --cluster, which can start from one of these.

    For example: fivefold gpus --json
    """
    from fivefold.cluster import aliases, clusters, load_cluster, load_curve_of
    from fivefold.estimate.result import envelope

    systems = [load_cluster(name) for name in clusters()]
    if output.json:
        from msgspec import to_builtins

        listed = [
            {**system.to_dict(), "name": name, "compute": to_builtins(load_curve_of(system))}
            for name, system in zip(clusters(), systems, strict=True)
        ]
        write_json({**envelope("gpus", {}), "gpus": listed, "aliases": aliases()})
    else:
        from fivefold.cli.render.catalogues import gpus_table

        page = console(output)
        page.print(gpus_table(systems))
        page.print(f"Other names: {', '.join(aliases())}.", style="dim")
    return 0
