"""Models by name. One small file per model under configs/: its config.json's facts and where they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from fivefold.errors import FivefoldError
from fivefold.model.huggingface import CONFIG_NAME, close_matches, first_layers, read_config
from fivefold.model.spec import ModelSpec

CONFIGS = Path(__file__).parent / "configs"
ALIASES = Path(__file__).parent / "aliases.json"


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the catalogue.

    source: where the values of config come from. published_total, published_active: the publisher's own counts of
    parameters in billions, as the publisher rounds them.
    """

    source: str
    config: dict[str, Any]
    published_total: float | None = None
    published_active: float | None = None


def load_model(
    model: str | Path | Mapping[str, Any] | ModelSpec, *, mtp: bool = False, layers: int | None = None
) -> ModelSpec:
    """A model by catalogue name, by path (a config.json or the folder that holds one) or from a config's dict.

    mtp: also the multi-token-prediction modules the configuration states. layers: keep only the first so many blocks.
    Names may be spelled without hyphens or in capitals (llama3-70b). A catalogue name wins over a folder of that
    name in the working directory; write ./name for the folder. A ModelSpec passes through, cut down if asked.

    Raises FivefoldError for an unknown name (with near ones) and all that read_config raises.
    """
    spec = model if isinstance(model, ModelSpec) else _read(model, mtp)
    if isinstance(model, ModelSpec) and mtp and not model.mtp:
        raise FivefoldError(
            f"{model.name} was read without its multi-token-prediction modules; ask for mtp where it is read",
            code="no-mtp",
            option="mtp",
            value=True,
            legal=[False],
        )
    return spec if layers is None else first_layers(spec, layers)


@lru_cache(maxsize=1)
def models() -> tuple[str, ...]:
    """The names of the catalogue, sorted."""
    return tuple(sorted(path.stem for path in CONFIGS.iterdir() if path.suffix == ".json"))


def entry(name: str) -> Entry:
    """The catalogue's file for a name that models() lists."""
    if name not in models():
        raise _unknown(name)
    return msgspec.json.decode((CONFIGS / f"{name}.json").read_bytes(), type=Entry)


def _read(model: str | Path | Mapping[str, Any], mtp: bool) -> ModelSpec:
    if isinstance(model, Mapping):
        return read_config(model, mtp=mtp)
    name = resolve(model) if isinstance(model, str) else None
    if name is not None:
        found = entry(name)
        return read_config(found.config, name=name, source=found.source, mtp=mtp)
    if isinstance(model, Path) or _looks_like_path(model):
        if isinstance(model, str):
            _refuse_hub_name(model)
        return read_config(model, mtp=mtp)
    raise _unknown(model)


def resolve(name: str) -> str | None:
    """The catalogue's own spelling of a name or alias, None where there is none."""
    return _spellings().get(_plain(name))


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    aliases = msgspec.json.decode(ALIASES.read_bytes(), type=dict[str, str])
    return {_plain(name): name for name in models()} | {_plain(alias): name for alias, name in aliases.items()}


def _plain(name: str) -> str:
    """Hyphens, underscores and capitals do not distinguish models, unless they part two numbers (gpt2-2b is not
    gpt-22b); the dot does (qwen2.5-7b is not qwen2-57b)."""
    return re.sub(r"(?<!\d)[-_]+|[-_]+(?!\d)", "", name.strip().lower()).replace("_", "-")


def _refuse_hub_name(model: str) -> None:
    """Raises FivefoldError, with the catalogue's names, for owner/name as a hub has it, where no such folder exists."""
    owner, slash, name = model.partition("/")
    if not slash or not owner.strip(".~") or "/" in name or Path(name).suffix in (".json", ".toml") or _exists(model):
        return
    known = resolve(name)
    near = [known] if known is not None else close_matches(name.lower(), models())
    if near:
        raise FivefoldError(
            f"{model[:80]!r} is no folder here, and nothing is downloaded. The catalogue has {' and '.join(near)}; for "
            f"any other, give its {CONFIG_NAME}.",
            code="no-such-file",
            option="MODEL",
            value=model[:80],
            legal=near,
        )


def _looks_like_path(name: str) -> bool:
    return "/" in name or "\\" in name or name.endswith(".json") or _exists(name)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # longer than a path may be, or holding a null character
        return False


def _unknown(name: str) -> FivefoldError:
    near = close_matches(name.lower(), models())
    hint = f"did you mean {' or '.join(near)}?" if near else "fivefold models lists the catalogue."
    return FivefoldError(
        f"{name[:80]!r} is neither a model of the catalogue nor a {CONFIG_NAME}: {hint}",
        code="unknown-model",
        option="MODEL",
        value=name[:80],
        legal=near or list(models()),
    )
