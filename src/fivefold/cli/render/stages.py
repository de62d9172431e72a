"""The view of balanced stages: the split as given, the best of counts, the best of any."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from fivefold.cli.render.text import gigabytes, heading, plain_table, seconds
from fivefold.search.stages import Balance, Split


def balance_parts(found: Balance) -> list[RenderableType]:
    """A table of three splits, and the options that make the better ones."""
    table = plain_table(("split", "<"), ("blocks per stage", "<"), ("step", ">"), ("gain", ">"), ("GB", ">"))
    for name, split in (("as given", found.given), ("by counts", found.counted), ("any", found.free)):
        gain = found.given.seconds / split.seconds - 1
        table.add_row(
            name, blocks(split), seconds(split.seconds), "-" if split.blocks == found.given.blocks else f"{gain:+.1%}",
            gigabytes(split.reserved_bytes) if split.fits else f"{gigabytes(split.reserved_bytes)}!",
        )  # fmt: skip
    how = "all splits compared" if found.exact else f"{found.compared:,} splits compared, moving one block at a time"
    parts: list[RenderableType] = [heading("Balanced stages", how), table]
    if found.counted.blocks != found.given.blocks:
        parts.append(Text(f"By counts: {options(found.counted)}"))
    if found.free.blocks != found.counted.blocks:
        parts.append(Text(f"Any: --pipeline-model-parallel-layout '{found.free.text}' (Megatron-LM)"))
    return parts


def blocks(split: Split) -> str:
    """19-20x14-17: blocks of each virtual stage."""
    runs: list[list[int]] = []
    for each in split.blocks:
        if runs and runs[-1][0] == each:
            runs[-1][1] += 1
        else:
            runs.append([each, 1])
    return "-".join(f"{each}x{times}" if times > 1 else str(each) for each, times in runs)


def options(split: Split) -> str:
    """fivefold's flags of a split that counts express."""
    layout = split.layout
    if layout is None:
        return "-"
    words = []
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(layout, name) is not None:
            words.append(f"--{name.replace('_', '-')} {getattr(layout, name)}")
    words += [
        f"--{name.replace('_', '-')}" for name in ("account_for_embedding", "account_for_loss") if getattr(layout, name)
    ]
    return " ".join(words) or "equal stages"
