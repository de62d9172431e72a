"""What a row leaves unstated, by its framework's line, its other columns and its date."""

from __future__ import annotations

import re

import msgspec

from fivefold.layout.workload import QUANTISED
from fivefold.measure.frameworks import OTHER, Framework, line_of
from fivefold.measure.runs import Run
from fivefold.measure.spellings import backend_of, stage_in_notes, usual_name, zero_in_name, zero_in_notes
from fivefold.measure.words import precision_in_words, trains_adapters
from fivefold.runtime import load_runtime

# Transformer Engine's modules came to Megatron-LM at the end of 2022 (from memory).
_TRANSFORMER_ENGINE = "2022-12"
_TPU = re.compile(r"tpu|\bv\d[epx]|\bv\d-\d|trillium|ironwood", re.IGNORECASE)
_OF_NVIDIA = re.compile(r"\bG?[ABHV][1-3]00|\bA100|DGX|HGX|NVIDIA", re.IGNORECASE)
# Devices whose software is one line's, in the order in which they count.
_DEVICES = ((_TPU, "jax"), (re.compile(r"trainium|\btrn\d", re.IGNORECASE), "nxd"))
# Shards of parameters under pipeline parallelism, as another's composition has them, but for keys and values, which
# context-parallel ranks gather as few as they are (Llama 3 report, 3.3.2, from memory).
_COMPOSED = {"stands_in": True, "pipeline_fills": False, "changes": {"repeats_keys_and_values": False}}


def framework_of(run: Run) -> Framework:
    """The line of a row's framework, by its usual name or by another spelling; OTHER where none is known."""
    name = usual_name(run.framework or "", run.notes or "")
    line = line_of(name)
    if line is OTHER:
        line = line_of(_name_of_other(run, name))
    if line.split_as and (run.tp or 1) * (run.pp or 1) > 1:
        line = line_of(line.split_as)
    if line.older_as and dated(run) < _TRANSFORMER_ENGINE:
        line = line_of(line.older_as)
    if line.piped_as and (run.pp or 1) > 1:
        line = msgspec.structs.replace(line_of(line.piped_as), **_COMPOSED)
    kind, _ = precision_of(run, line)
    half = kind == "fp16" and dated(run) < line.since
    changes = line.quantised if kind in QUANTISED else line.half if half else {}
    return msgspec.structs.replace(line, **changes, **(line.on_tpus if _TPU.search(run.gpu or "") else {}))


def _name_of_other(run: Run, name: str) -> str:
    """The name of a line for a framework that none names: what its notes say that it runs on, else what runs on such
    devices; submissions to MLPerf on NVIDIA's run NVIDIA's (from memory)."""
    if "mlperf" in name and _OF_NVIDIA.search(run.gpu or ""):
        return "nemo"
    backend = backend_of(run.notes or "")
    if backend:
        return backend
    return next((line for pattern, line in _DEVICES if pattern.search(run.gpu or "")), name)


def precision_of(run: Run, line: Framework) -> tuple[str, bool]:
    """(kind of precision, whether it is stated); where none is, what the published words name, or the line's."""
    text = run.precision or ""
    if run.precision_kind == "fp32" and precision_in_words(text) == "tf32":  # of whose tensors that is the width
        return "tf32", True
    if run.precision_kind not in (None, "unknown"):
        return str(run.precision_kind), True
    if trains_adapters(run):  # what is in 4 bits is the frozen model
        text = re.sub(r"\b4-?bit\b", " ", text, flags=re.IGNORECASE)
    return precision_in_words(text) or line.precision, False


def is_before_te(run: Run, line: Framework) -> bool:
    """Whether a row is of before Transformer Engine, and predicted with the profile of that time."""
    return bool(line.before_te) and dated(run) < _TRANSFORMER_ENGINE


def _scatters_sums(line: Framework) -> bool:
    """Whether each rank of a distributed optimizer gets the sums of its own shard's gradients alone."""
    profile = load_runtime(line.runtime)
    return profile.sharding == "distributed_optimizer" and not (
        profile.sharded_reduced_at_once or profile.bf16_all_reduces
    )


def zero_of(run: Run, line: Framework) -> tuple[int, bool]:
    """(ZeRO stage, whether it is stated).

    Megatron's distributed optimizer scatters the sums of gradients, which papers call ZeRO-2 (MegaScale); what shards
    gradients between micro-batches has a line of its own, and behind a pipeline no framework does whose default is
    less (DeepSpeed refuses it).
    """
    named = min(run.zero, 3) if run.zero is not None else zero_in_name(run.framework or "")
    if named is None and line.stage_in_notes:
        named = zero_in_notes(run.notes or "")
    if named is None and run.dist_opt is None:
        named = stage_in_notes(f"{run.notes}; {run.overlap}")
    if named is not None:
        whole = line.zero < 2 and (_scatters_sums(line) or (run.pp or 1) > 1)
        return (1 if named == 2 and whole else named), True
    if run.dist_opt is not None and line.zero < 2:
        return run.dist_opt, True
    if is_before_te(run, line):
        return 0, False
    if line.zero_of_mixtures is not None and (run.ep or 1) > 1:
        return line.zero_of_mixtures, False
    if line.zero > 1 and line.shards_without_pipeline and (run.pp or 1) > 1:
        return 1, False
    return line.zero, False


def runtime_of(run: Run, line: Framework) -> tuple[str, bool]:
    """(profile, whether it stands in for another framework)."""
    zero, _ = zero_of(run, line)
    profile = line.sharded if zero >= 2 else line.runtime
    if zero < 2 and is_before_te(run, line):
        return line.before_te, True
    return profile, line.stands_in


def has_sequence_parallelism(run: Run, line: Framework) -> bool:
    """Whether a tensor-parallel row shards sequences too where it does not say so."""
    return line.sequence_parallel and not is_before_te(run, line)


def dated(run: Run) -> str:
    """Year and month of a row, "YYYY-MM"; containers such as 25.09 count as 2025-09, "9998" where nothing is said."""
    text = run.source_date or ""
    found = re.search(r"(20\d\d)(?:[-/.]?(0[1-9]|1[0-2])(?:[0-3]\d)?(?!\d)|[-/.]([1-9])(?!\d))?", text)
    if found:
        return f"{found[1]}-{found[2] or (found[3] or '12').zfill(2)}"
    container = re.search(r"(?<![\d.])v?(2\d)\.(0[1-9]|1[0-2])(?!\d)", f"{text} {run.framework or ''}")
    return f"20{container[1]}-{container[2]}" if container else "9998"
