"""A launch as (model, workload, layout, runtime): read from a script or a YAML file, with what is missing asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.errors import FivefoldError
from fivefold.interop.foreign import refuse_foreign_text
from fivefold.interop.megatron.commands import Launch, ScriptInputs, find_launch
from fivefold.interop.megatron.given import Given, Setting
from fivefold.interop.megatron.layout_options import SHARDING, LayoutParts, is_fsdp, read_layout
from fivefold.interop.megatron.model import ModelParts, build_model, padded_vocab
from fivefold.interop.megatron.notes import Assumed, assumed_values, left_out, odd_vocabulary
from fivefold.interop.megatron.options import OPTIONS
from fivefold.interop.megatron.recipes import assume_recipe, recipe_model
from fivefold.interop.megatron.refusals import broken_options, mistakes
from fivefold.interop.megatron.rules import Facts
from fivefold.interop.megatron.settings import add_words, script_settings, yaml_settings
from fivefold.interop.megatron.workload import WorkParts, read_workload
from fivefold.interop.source import plain, read_text, unreadable
from fivefold.layout import Layout, Workload
from fivefold.layout.rules import Violation
from fivefold.model import load_model
from fivefold.model.spec import ModelSpec

_YAML = (".yaml", ".yml")
_BLACKWELL = ("b200", "gb200", "b300", "gb300")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user says beside the file; it wins over the file. extra: options or overrides, as for a command."""

    script: ScriptInputs = field(default_factory=ScriptInputs)
    extra: str = ""
    model: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None


@dataclass(slots=True, kw_only=True)
class Reading:
    """A file understood.

    style: "megatron-lm", "bridge" (overrides of Megatron-Bridge or NeMo) or "yaml". violations: rules on options that a
    layout does not hold. notes: what the figures leave out or simplify. gpu: a name that the file gives, None else.
    """

    source: str
    style: str
    model: ModelSpec
    work: Workload
    layout: Layout
    gpus: int
    gpus_per_node: int | None
    gpu: str | None
    given: Given
    launch: Launch
    padded_vocab: int
    violations: list[Violation] = field(default_factory=list)
    assumed: list[Assumed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def runtime(self) -> str:
        """The profile of the launch's data parallelism."""
        return "megatron-fsdp" if is_fsdp(self.given) else "megatron"

    @property
    def unknown(self) -> list[Setting]:
        return self.given.unknown


def read_file(path: str | Path, asked: Asked | None = None) -> Reading:
    """The launch of a shell script (any name) or of a YAML file (.yaml, .yml).

    The file is never run. Raises FivefoldError naming file and line for what cannot be read, and one that lists by
    option what the file does not say and Megatron-LM has no default for.
    """
    path = Path(path)
    return read_source(read_text(path), path.name, path.parent, asked)


def read_source(text: str, name: str, root: Path | None, asked: Asked | None = None) -> Reading:
    """The same for a text. root: the folder whose other scripts it may read, None for none."""
    try:
        return _read_source(text, name, root, asked or Asked())
    except RecursionError as error:
        raise unreadable(name, "it nests too deeply to be followed", "make it flatter") from error


def _read_source(text: str, name: str, root: Path | None, asked: Asked) -> Reading:
    refuse_foreign_text(text, name)
    if name.lower().endswith(_YAML):
        launch, given, style = yaml_settings(text, name)
    else:
        launch = find_launch(text, name, root, asked.script)
        given, style = script_settings(launch, root)
    add_words(given, asked.extra, style)
    return _assembled(launch, given, style, name, asked)


# ---------------------------------------------------------------- assembly


@dataclass(frozen=True, slots=True, kw_only=True)
class _Complete:
    """A launch that misses nothing. recipe: (option, value, where it comes from) of what the recipe's name stands for;
    shape, batch: layout and workload with what was noticed of them."""

    facts: Facts
    gpus: int
    gpus_per_node: int | None
    recipe: list[tuple[str, object, str]]
    shape: LayoutParts
    batch: WorkParts


def _assembled(launch: Launch, given: Given, style: str, name: str, asked: Asked) -> Reading:
    read = _complete(launch, given, style, name, asked)
    facts = read.facts
    model, layout = facts.model, facts.layout
    violations = broken_options(facts, command_line=style != "bridge")
    not_modelled = [*_not_modelled(given)]
    if not_modelled and not violations:
        raise not_modelled[0].error()
    multiple = given.integer("--make-vocab-size-divisible-by") or 128
    assumed = assumed_values(launch, given, [*facts.parts.assumed, *read.recipe], read.batch.assumed, facts)
    return Reading(
        source=name,
        style=style,
        model=model,
        work=facts.work,
        layout=layout,
        gpus=read.gpus,
        gpus_per_node=read.gpus_per_node,
        gpu=_gpu(launch),
        given=given,
        launch=launch,
        padded_vocab=padded_vocab(model.vocab, multiple, layout.tp),
        violations=violations,
        assumed=[*assumed],
        notes=[
            *(each.note() for each in not_modelled),
            *odd_vocabulary(model, multiple, layout.tp),
            *launch.notes,
            *facts.parts.notes,
            *read.shape.notes,
            *read.batch.notes,
            *left_out(given, launch),
        ],
    )


def _complete(launch: Launch, given: Given, style: str, name: str, asked: Asked) -> _Complete:
    """Raises what lists everything that is missing."""
    parts = _model(launch, given, style, name, asked)
    model = parts.spec
    recipe = assume_recipe(given, _words(launch)) if style == "bridge" else []
    shape = read_layout(given, model.layers if model else 1, model.is_moe if model else False)
    layout = shape.layout
    gpus, per_node = _gpus(launch, given, asked)
    replica = layout.tp * layout.pp * layout.cp
    dp = gpus // replica if gpus and gpus % replica == 0 else 0
    batch = read_workload(given, layout.micro_batch, dp, style)
    if style == "bridge":
        _ask_recipe(given)
    if given.missing or model is None or batch.work is None or gpus is None:
        raise _missing(given, name)
    facts = Facts(
        given=given,
        model=model,
        layout=layout,
        work=batch.work,
        parts=parts,
        dp=dp,
        connections=launch.environment.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        blackwell=(asked.gpu or _gpu(launch) or "").lower().startswith(_BLACKWELL),
        allocator=launch.environment.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    )
    return _Complete(facts=facts, gpus=gpus, gpus_per_node=per_node, recipe=recipe, shape=shape, batch=batch)


def _gpu(launch: Launch) -> str | None:
    return launch.world.gpu[0] if launch.world.gpu else None


def _model(launch: Launch, given: Given, style: str, name: str, asked: Asked) -> ModelParts:
    if asked.model is not None:
        return ModelParts(spec=load_model(asked.model))
    found = recipe_model(_words(launch))
    if style == "bridge" and found is not None and "--hidden-size" not in given:
        layers = given.integer("--num-layers")
        spec = load_model(found, layers=min(layers, load_model(found).layers) if layers else None)
        return ModelParts(spec=spec, assumed=[("model", spec.name, "the name of the recipe")])
    parts = build_model(given, Path(name).stem[:60])
    if style == "bridge" and parts.spec is None and "--num-layers" in given.missing:
        given.missing["--model"] = "the recipe's model is not in the file; name it with --model"
    return parts


def _words(launch: Launch) -> list[str]:
    return [launch.program, *(str(plain(each.text)) for each in launch.arguments)]


def _gpus(launch: Launch, given: Given, asked: Asked) -> tuple[int | None, int | None]:
    world = launch.world
    per_node = asked.gpus_per_node or world.get("per_node")
    nodes = world.get("nodes")
    gpus = asked.gpus or world.get("gpus") or (nodes * per_node if nodes and per_node else None)
    if gpus is None:
        asks = f" ({'; '.join(world.asked[:3])})" if world.asked else ""
        given.missing["--gpus"] = f"the number of GPUs is not in the file{asks}; give it with --gpus"
    if per_node and gpus and per_node > gpus:
        per_node = gpus
    return gpus, per_node


_RECIPE_OPTIONS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--micro-batch-size",
    "--global-batch-size",
    "--seq-length",
)


def _ask_recipe(given: Given) -> None:
    from fivefold.interop.megatron.keys import bridge_key

    for option in _RECIPE_OPTIONS:
        if option not in given:
            given.missing[option] = f"{bridge_key(option)} is the recipe's own, which is not in the file"


def _missing(given: Given, name: str) -> FivefoldError:
    broken = [each.message for each in mistakes(given)]
    asks = [*given.missing.values(), *broken]
    listed = "; ".join(f"{at}. {ask}" for at, ask in enumerate(asks[:8], start=1))
    more = f"; and {len(asks) - 8} more" if len(asks) > 8 else ""
    open_ = "; ".join(f"words at {place} are not known: {unknown.sentence()}" for place, unknown in given.dropped[:3])
    held = f". What is missing may be there: {open_}" if open_ and given.missing else ""
    return FivefoldError(
        f"{name} does not say everything that is needed: {listed}{more}{held}. Options can be added as in "
        "--with '--vocab-size 128256', variables as in --set NODES=4.",
        code="incomplete-launch",
        option=next(iter(given.missing), None),
        value=name,
        legal=list(given.missing) or None,
    )


@dataclass(frozen=True, slots=True)
class _NotModelled:
    """An option with which the run is another one than can be priced. sentence: which, where and why."""

    option: str
    value: Any
    sentence: str
    remedy: str
    legal: list[str] | None = None

    def error(self) -> FivefoldError:
        return FivefoldError(
            f"{self.sentence}, so this launch cannot be checked. {self.remedy}",
            code="not-modelled",
            option=self.option,
            value=self.value,
            legal=self.legal,
        )

    def note(self) -> str:
        return f"{self.sentence}; memory and time are those of the launch without it."


def _not_modelled(given: Given) -> Iterator[_NotModelled]:
    for option, setting in given.settings.items():
        found = OPTIONS[option]
        off = found.kind == "flag" and not given.flag(option)
        if found.effect == "refused" and not off and setting.text not in ("local", "0", "0.0"):
            sentence = f"{' '.join(filter(None, (option, setting.text)))} at {setting.at}: {found.why}"
            yield _NotModelled(option, setting.text or True, sentence, "Take the option out to check the rest.")
    option = "--data-parallel-sharding-strategy"
    sharding, fsdp = given.word(option), is_fsdp(given)
    modelled = SHARDING[2:] if fsdp else SHARDING[:1]
    if sharding not in modelled:
        why = (
            "Megatron-FSDP is modelled where it shards gradients at least"
            if fsdp
            else "without --use-megatron-fsdp it shards nothing"
        )
        place = next(at for at in map(given.place, (option, "--use-megatron-fsdp", "--use-custom-fsdp")) if at)
        sentence, remedy = f"{option} {sharding} at {place}: {why}", f"Give {' or '.join(modelled)}."
        yield _NotModelled(option, sharding, sentence, remedy, list(modelled))
