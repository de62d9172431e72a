"""Reading a Hugging Face config.json into a ModelSpec, exactly or not at all.

The input may come from anywhere, so it is bounded (size, JSON only, whole numbers in ranges) and nothing in it is
run. Whatever could change the model and is not understood is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fivefold.errors import FivefoldError, UnknownModelTypeError, reason_of
from fivefold.model.families import FAMILIES, NOT_READ, Family, Reader
from fivefold.model.families.nested import IMAGES, NESTED, TEXT, Nested, text_config
from fivefold.model.spec import BlockRun, ModelSpec

# The largest published configuration we know of (with long id2label maps) stays under 100 kB.
MAX_CONFIG_BYTES = 1 << 20
CONFIG_NAME = "config.json"
_GIVE = f"Give a catalogue name, a {CONFIG_NAME} or the folder that holds one; a plan file ends in .toml."


def read_config(
    config: str | Path | Mapping[str, Any], *, name: str | None = None, source: str | None = None, mtp: bool = False
) -> ModelSpec:
    """The ModelSpec of a config.json: a path to it, the folder that holds it, or its content as a dict.

    name: the model's name, by default the file's stem or, for a config.json, its folder's name.
    source: where the facts come from, by default the path.
    mtp: also the multi-token-prediction modules that the file states (DeepSeek-V3); otherwise none, because
        transformers' own class for the model has none.

    Raises FivefoldError naming the key (unknown, missing, out of range) or UnknownModelTypeError.
    """
    if isinstance(config, (str, Path)):
        path = _config_path(Path(config))
        raw, where = _load(path), str(path)
        name = name or (path.parent.resolve().name if path.name == CONFIG_NAME else path.stem)
    else:
        raw, where = dict(config), source or "config"
        if not all(isinstance(key, str) for key in raw):
            raise FivefoldError(f"{where}: every key must be a string", code="bad-config-file", option="MODEL")
    nested, file = _nested(raw), where
    if nested is not None:
        raw, where = text_config(raw, nested, where), f"{where}: {TEXT}"
    family = _family(raw, where)
    _check_architecture(raw, family, where)
    raw, spelled = _plain_keys(raw, family, where)
    _check_keys(raw, family, where)
    spec = family.read(Reader(raw, family, name or family.model_type, source or file, spelled))
    if nested is not None:
        spec = msgspec.structs.replace(spec, peculiar=(*spec.peculiar, IMAGES))
    return _with_mtp(spec, mtp)


def first_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """The model cut down to its first `layers` blocks; embedding, head and everything else stay."""
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= model.layers:
        raise FivefoldError(
            f"--layers {layers!r} is not possible: {model.name} has {model.layers} blocks. Keep 1 to {model.layers}.",
            code="bad-layers",
            option="--layers",
            value=layers,
            legal=f"1..{model.layers}",
        )
    kept: list[BlockRun] = []
    left = layers
    for run in model.runs:
        count = min(run.count, left)
        if count:
            kept.append(BlockRun(count, run.block))
        left -= count
    if model.mtp and kept[-1].block != model.runs[-1].block:
        raise FivefoldError(
            f"--layers {layers} leaves {model.name} without a block of the kind its multi-token-prediction module is "
            "made of. Keep more blocks, or leave --mtp out.",
            code="bad-layers",
            option="--layers",
            value=layers,
            legal=f"{model.layers - model.runs[-1].count + 1}..{model.layers}",
        )
    name = model.name if layers == model.layers else f"{model.name}-{layers}l"
    return msgspec.structs.replace(model, name=name, runs=tuple(kept))


def _config_path(path: Path) -> Path:
    try:
        path = path / CONFIG_NAME if path.is_dir() else path
        there = path.is_file()
    except (OSError, ValueError) as failure:  # a folder that may not be entered, a name too long, a null character
        raise _bad_file(path, f"cannot be read: {reason_of(failure)}") from failure
    if not there:
        raise FivefoldError(
            f"{path}: no such file; give a catalogue name, a {CONFIG_NAME} or the folder that holds one",
            code="no-such-file",
            option="MODEL",
            value=str(path),
        )
    return path


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as failure:
        raise _bad_file(path, f"cannot be read: {reason_of(failure)}") from failure
    if len(data) > MAX_CONFIG_BYTES:
        raise _bad_file(path, f"is larger than {MAX_CONFIG_BYTES} bytes, which no model configuration is")
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise _bad_file(path, f"is not JSON: {failure}. {_GIVE}") from failure
    if not isinstance(raw, dict):
        raise _bad_file(path, "holds no JSON object at its top")
    _check_repeated(data, path)
    return raw


def _check_repeated(data: bytes, path: Path) -> None:
    """Refuse a table that gives one key twice: readers of JSON differ in which of the two they take."""
    import json  # msgspec, which is quicker, keeps the last without a word

    def pairs(items: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                raise _bad_file(path, f"gives the key {key[:80]!r} more than once: leave one")
            seen.add(key)

    try:
        json.loads(data, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as failure:
        if isinstance(failure, FivefoldError):
            raise
        raise _bad_file(path, f"is not JSON: {failure}") from failure


def _bad_file(path: Path, problem: str) -> FivefoldError:
    where = str(path)[:200]
    return FivefoldError(f"{where} {problem}", code="bad-config-file", option="MODEL", value=where)


def _family(raw: Mapping[str, Any], where: str) -> Family:
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    supported = sorted({*FAMILIES, *NESTED})
    if isinstance(model_type, str) and model_type in NOT_READ:
        raise UnknownModelTypeError(
            f"{where}: model_type {model_type!r} is not read: {NOT_READ[model_type]}; "
            f"supported: {', '.join(supported)}",
            code="unknown-model-type",
            option=f"{where}: model_type",
            value=model_type,
            legal=supported,
        )
    given = "is missing" if model_type is None else f"{str(model_type)[:80]!r} is not one that can be read exactly"
    raise UnknownModelTypeError(
        f"{where}: model_type {given}; supported: {', '.join(supported)}",
        code="unknown-model-type",
        option=f"{where}: model_type",
        value=model_type,
        legal=supported,
    )


def _nested(raw: Mapping[str, Any]) -> Nested | None:
    model_type = raw.get("model_type")
    return NESTED.get(model_type) if isinstance(model_type, str) else None


def _check_architecture(raw: Mapping[str, Any], family: Family, where: str) -> None:
    """A classifier or a bare encoder of the same model_type has another head, so other parameters."""
    given = raw.get("architectures")
    if given is None or given in [[name] for name in (family.architecture, *family.other_architectures)]:
        return
    raise FivefoldError(
        f"{where}: architectures = {str(given)[:80]} is not read: only the language model with its head, "
        f"[{family.architecture}], is",
        code="unknown-architecture",
        option=f"{where}: architectures",
        value=given,
        legal=[family.architecture],
    )


def _plain_keys(raw: Mapping[str, Any], family: Family, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration with tables laid flat ("table.key") and aliases under the family's own keys, and for the latter
    the spelling that the file has."""
    plain: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in _flat(raw, family, where):
        own = family.aliases.get(key, key)
        if own in plain and plain[own] != value:
            raise FivefoldError(
                f"{where}: {spelled.get(own, own)} = {str(plain[own])[:60]} and {key} = {str(value)[:60]} are two "
                "spellings of one number: leave one out",
                code="bad-config-value",
                option=f"{where}: {key}",
                value=value,
            )
        plain[own] = value
        if own != key:
            spelled[own] = key
    return family.defaults | plain, spelled


def _flat(raw: Mapping[str, Any], family: Family, where: str) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if key not in family.tables or value is None:
            yield key, value
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            raise FivefoldError(
                f"{where}: {key} = {str(value)[:60]}: must be a table",
                code="bad-config-value",
                option=f"{where}: {key}",
                value=value,
            )


def _check_keys(raw: Mapping[str, Any], family: Family, where: str) -> None:
    missing = sorted(family.required - raw.keys())
    unknown = sorted(raw.keys() - family.known)
    if unknown:
        raise _unknown_keys(unknown, missing, family, where)
    if missing:
        raise FivefoldError(
            f"{where}: {family.model_type} needs {', '.join(missing)}, which the file lacks; no default is assumed "
            "because published models differ in it",
            code="missing-config-key",
            option=f"{where}: {missing[0]}",
            legal=missing,
        )
    for key, values in family.all_fixed.items():
        if key in raw and raw[key] not in values:
            raise FivefoldError(
                f"{where}: {key} = {str(raw[key])[:80]} is not modelled for {family.model_type}: "
                f"only {' or '.join(map(repr, values))} is (or leave the key out)",
                code="unmodelled-config-value",
                option=f"{where}: {key}",
                value=raw[key],
                legal=list(values),
            )


def _unknown_keys(unknown: list[str], missing: list[str], family: Family, where: str) -> FivefoldError:
    shown = unknown[:5]
    sentences = [_unknown_key(key, missing, family) for key in shown]
    if len(unknown) > len(shown):
        sentences.append(f"and {len(unknown) - len(shown)} more")
    if missing:
        sentences.append(f"missing: {', '.join(missing)}")
    first = unknown[0]
    return FivefoldError(
        f"{where}: unknown for {family.model_type}, so the model may be another than it seems: {'; '.join(sentences)}",
        code="unknown-config-key",
        option=f"{where}: {first[:80]}",
        value=first[:80],
        legal=close_matches(first, missing) or close_matches(first, family.known),
    )


def _unknown_key(key: str, missing: list[str], family: Family) -> str:
    near = close_matches(key, missing) or close_matches(key, family.known)
    return f"{key[:80]} (did you mean {' or '.join(near)}?)" if near else key[:80]


def close_matches(word: str, words: Iterable[str]) -> list[str]:
    """Up to three of `words` spelled like `word`, the nearest first."""
    from difflib import get_close_matches  # only an error needs it, and importing it costs time

    return get_close_matches(word[:80], sorted(words), n=3, cutoff=0.6)


def _with_mtp(spec: ModelSpec, mtp: bool) -> ModelSpec:
    if not mtp:
        return msgspec.structs.replace(spec, mtp=0)
    if spec.mtp == 0:
        raise FivefoldError(
            f"mtp was asked for, but the configuration of {spec.name} states no multi-token-prediction module "
            "(num_nextn_predict_layers)",
            code="no-mtp",
            option="mtp",
            value=True,
            legal=[False],
        )
    return spec
