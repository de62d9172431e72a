"""Writes docs/models.md: every config.json of the tests, its parameters as transformers' own class has them and as
fivefold counts them.

    python benchmarks/models.py [--output docs/models.md]

Needs transformers; builds on the meta device, so a model of a trillion parameters takes no memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

from fivefold.errors import FivefoldError
from fivefold.model import ModelSpec, count_params, read_config
from fivefold.model.families import FAMILIES, SAME
from fivefold.model.families.nested import NESTED

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests/model/data/hf_configs"
SOURCES = ROOT / "tests/model/data/SOURCES.md"
sys.path.insert(0, str(ROOT / "tests/model"))

HEAD = """# Models that are read

Written by `benchmarks/models.py`: {read} of {files} published configurations read, {equal} of them with exactly the
parameters of transformers {version}'s own class built on the meta device; {refused} refused by name. The sources of the
files are in `tests/model/data/SOURCES.md`. Totals count tied embeddings once and language models only: the tower of a
model that reads images is not counted. *Active* is per token, embedding table included.

A file whose keys the class cannot take as they are is given to it with the change named in `tests/model/conftest.py`
(falcon-40b's old names, dbrx's `moe_normalize_expert_weights` as a float, falcon-h1's missing `mamba_d_ssm`).

| file | family | transformers' class | its parameters | ours | difference | active |
|---|---|---|---:|---:|---:|---:|
"""
REFUSALS = """
## Refused

| file | why |
|---|---|
"""
FAMILY_TABLE = """
## Families

`model_type` in config.json; every key of each is known, and an unknown one is refused. What a model computes beyond
its sizes is in `ModelSpec.peculiar`, shown here for the files above, or for a small model of the family.

| model_type | what is peculiar |
|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/models.md")
    output: Path = parser.parse_args().output
    rows, refused, peculiar, equal = [], [], {}, 0
    files = sorted(CONFIGS.glob("*.json"))
    for path in files:
        try:
            spec = read_config(path)
        except FivefoldError as refusal:
            refused.append(f"| {path.stem} | {reason(refusal, path)} |")
            continue
        name, theirs = transformers_count(path)
        ours = count_params(spec)
        equal += theirs == ours.total
        active = f"{ours.active:,}" if spec.is_moe else ""
        cells = (path.stem, spec.family, name, f"{theirs:,}", f"{ours.total:,}", f"{ours.total - theirs:,}", active)
        rows.append(f"| {' | '.join(cells)} |")
        peculiar.setdefault(spec.family, []).append(spec)
    head = HEAD.format(
        read=len(rows), files=len(files), equal=equal, refused=len(refused), version=version("transformers")
    )
    text = head + "\n".join(rows) + "\n" + REFUSALS + "\n".join(refused) + "\n" + FAMILY_TABLE + family_rows(peculiar)
    output.write_text(text)
    print(f"{output}: {len(rows)} read, {equal} equal, {len(refused)} refused")


def transformers_count(path: Path) -> tuple[str, int]:
    from conftest import build  # the tests' own way of asking transformers

    model = build(json.loads(path.read_text()))
    return type(model).__name__, sum(parameter.numel() for parameter in model.parameters())


def reason(refusal: FivefoldError, path: Path) -> str:
    """The refusal without the file's name and without the list of all that is supported."""
    return str(refusal.message).replace(f"{path}: ", "").partition("; supported:")[0]


def family_rows(peculiar: dict[str, list[ModelSpec]]) -> str:
    from small import SMALL  # a small configuration of every family without a file

    lines = []
    for model_type in sorted({*FAMILIES, *NESTED}):
        if model_type in SAME or model_type in NESTED:
            own = SAME.get(model_type) or f"its `text_config` is {NESTED[model_type].text}"
            lines.append(f"| {model_type} | {own if model_type in NESTED else f'another name of {own}'} |")
            continue
        specs = peculiar.get(model_type) or [read_config({"model_type": model_type} | SMALL[model_type][0])]
        lines.append(f"| {model_type} | {'; '.join(dict.fromkeys(each for spec in specs for each in spec.peculiar))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
