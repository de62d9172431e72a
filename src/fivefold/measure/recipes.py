"""Numbers of a profile that a published run sets otherwise: by its framework's line, its date and its options."""

from __future__ import annotations

import re
from typing import Any

from fivefold.layout.workload import QUANTISED
from fivefold.measure.frameworks import Framework
from fivefold.measure.policies import stated_policy
from fivefold.measure.runs import Run
from fivefold.measure.unstated import dated, is_before_te, precision_of, zero_of
from fivefold.measure.words import said
from fivefold.runtime import load_runtime

# Shares of a block's launches that a CUDA graph of a module replays (from the ledger's operations of a Llama block and
# of one with experts); a graph of the whole iteration, or one without a scope, replays all.
_GRAPHED = (("attn", 0.3), ("mlp", 0.35), ("moe_router", 0.1), ("moe_preprocess", 0.1), ("moe", 0.5))
# torchtitan compiles the loss too since (its pull request 1033).
_LOSS_COMPILED = "2025-03"
# Recipes of mixtures of experts with 8-bit block scales on GB200 and GB300 replay whole iterations since
# Megatron-Bridge 0.5 (perf_recipes/gpt_oss, _apply_full_iter_fp8mx_overrides, and deepseek's, read; qwen3's the same in
# the rows that list their options). Those that drop tokens replayed whole blocks on Blackwell (25.09's qwen3 recipes,
# cuda_graphs on, read).
_WHOLE_STEPS = "cuda_graph_impl=full_iteration; moe_a2a_overlap=True; moe_flex_dispatcher_backend=hybridep"
_WHOLE_STEPS_SINCE = "2026-06"
# Its recipes for hybrids with experts replay these modules and send tokens by Hybrid-EP (nemotron_3_super.py, read).
_HYBRIDS = (
    "cuda_graph_impl=transformer_engine; cuda_graph_scope=['attn', 'mamba', 'moe_router', 'moe_preprocess']; "
    "moe_flex_dispatcher_backend=hybridep"
)
# Its first recipes for DeepSeek-V3 on H100: DeepEP, and exchanges of experts beside the other half's compute (scripts/
# performance/configs/deepseek/deepseek_llm_pretrain.py at 013284246b, read; the month of the next ones from memory).
_FIRST_DEEPSEEK = "moe_a2a_overlap=True; moe_flex_dispatcher_backend=deepep"
_SECOND_RECIPES = "2026-01"
# (pattern in the model's name, in the GPU's, rows dated before this, their options) where a row lists none.
_UNLISTED = (
    (r"nemotron[-_ ]?3(?!\d|[-_ ]8b)", "", "9999", _HYBRIDS),
    (r"deepseek[-_ ]?v3", "H100", _SECOND_RECIPES, _FIRST_DEEPSEEK),
)
_WHOLE_BLOCKS = "cuda_graph_impl=local"
# A compiler makes one kernel of a chain of operations that go element by element; the sum of an input's gradients is
# part of the norm's or the copy's that reads it.
_COMPILED_CHAINS = {"unfused_norms": False, "fused_glu": True, "input_gradient_bytes": 2.0}
# Traced on a CPU with PyTorch 2.13: F.cross_entropy on 16-bit logits keeps them and two numbers a row, and is one sweep
# for the maximum, one for the sum, and a kernel that writes their gradient. In parts over tensor-parallel ranks the
# gradient without the loss's own is made in forward: zeros (4) beside the logits, and fp32 values of both (2 + 4 + 4);
# backward scales these (4 + 2).
_COMPILED_LOSS = {
    "loss_bytes_per_logit": 4,
    "sharded_loss_bytes_per_logit": 10,
    "loss_moved_bytes": (4.0, 4.0),
    "sharded_loss_moved_bytes": (18.0, 6.0),
}
# Megatron-Core's own fused cross-entropy under torch.compile: what is written in place and reduced over in one graph
# becomes an fp32 tensor of its own and is copied back (a note in core/fusions/fused_cross_entropy.py, 0cb4a9c817, which
# takes the graph apart and is newer than the published runs). Cast and maximum are one kernel (6), subtraction,
# exponential and sum another (8) with its copy (8), and the division a third (8).
_NATIVE_FUSED_LOSS = {"loss_bytes_per_logit": 10, "loss_moved_bytes": (30.0, 14.0)}


def changes_of(run: Run, line: Framework) -> dict[str, Any]:
    """Of the profile: what the framework's recipes set otherwise, and launches that CUDA graphs replay."""
    parts = (_by_era, _by_release, _by_scaling, _by_policy)
    return {name: value for part in parts for name, value in part(run, line).items()}


def _by_policy(run: Run, line: Framework) -> dict[str, Any]:
    kept = stated_policy(run) if line.policies else None
    return {} if kept is None else {"checkpoint_keeps": kept}


def _by_era(run: Run, line: Framework) -> dict[str, Any]:
    month = dated(run)
    return {name: value for era in line.eras if era.since <= month < era.until for name, value in era.changes.items()}


def _is_compiled(run: Run, line: Framework) -> bool:
    """Whether a row's blocks are compiled. torchtitan refuses asynchronous tensor parallelism without (llama3/infra/
    parallelize.py), and torchao's 8-bit layers are made for it ("requires torch.compile to be fast", from memory)."""
    if not line.pytorch:
        return False
    words = f"{run.notes or ''}; {run.overlap or ''}"
    if said(r"(?:torch\.)?compile|thunder", f"{run.framework}; {words}"):
        return True
    asynchronous = said(r"async\w{0,20}[- ]{0,3}tp", words)
    return asynchronous or (line.compiles_quantised and precision_of(run, line)[0] in QUANTISED)


def _by_scaling(run: Run, line: Framework) -> dict[str, Any]:
    """torchao's row-wise recipes: whoever asks for them gets PyTorch's plain tensor parallelism (torchtitan
    llama3/infra/parallelize.py, read at 018740b7aa)."""
    if line.pytorch and re.search(r"row-?wise", run.precision or "", re.IGNORECASE):
        return {"scaled_by_row": True, "quantised_gathers": False, "quantised_parameters": False}
    return {}


def _by_release(run: Run, line: Framework) -> dict[str, Any]:
    if _is_compiled(run, line):
        loss = _COMPILED_LOSS if dated(run) >= _LOSS_COMPILED else {}
        # Traced, a collective is waited for where it starts, and Inductor does not move it (PyTorch 2.13,
        # _functional_collectives.py _maybe_wrap_tensor and _inductor/config.py reorder_for_compute_comm_overlap).
        return {**_by_recipe(run, line), **loss, **_COMPILED_CHAINS, "ring_waits": True}
    options = options_of(run, line)
    return {**_by_recipe(run, line), **_by_options(run, line, options), **_by_graphs(run, line, options)}


def _by_recipe(run: Run, line: Framework) -> dict[str, Any]:
    old = is_before_te(run, line)
    newer = dated(run) >= line.since and (old or not line.before_te)
    changes = {**line.changes, **(line.before if old else {}), **(line.newer if newer else {})}
    return changes | line.changes_sharded if zero_of(run, line)[0] >= 2 else changes


def _by_options(run: Run, line: Framework, options: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if re.search(r"moe_flex_dispatcher_backend=(deepep|hybridep)", options):
        changes["tokens_sent_once"] = True
    if drops_tokens(run):
        changes |= {"dispatch_host_s": 0.0, "experts_padded": False}
    if "cross-entropy-loss-fusion" in options:
        own = _by_recipe(run, line)  # whose kernels are others
        changes |= {name: value for name, value in _NATIVE_FUSED_LOSS.items() if name not in own}
    return changes


def _by_graphs(run: Run, line: Framework, options: str) -> dict[str, Any]:
    graph = re.search(r"cuda_graph_impl=(\w+)(?:.*cuda_graph_scope=([^;]+))?", options)
    if graph is None or graph[1] == "none":
        return {}
    scope = graph[2] or graph[1]
    whole = "full_iteration" in scope
    graphed = sum(share for module, share in _GRAPHED if re.search(rf"\b{module}\b", scope))
    share = 0.0 if whole or not graph[2] else max(1 - graphed, 0.0)
    profile = load_runtime(line.runtime)
    # With graphs of whole steps came grouped layers that are fused with what lies between
    # (use_transformer_engine_op_fuser).
    fused = {"expert_extras_apart": False, "fused_experts": True} if whole else {}
    return {
        **fused,
        "launch_host_s": share * profile.launch_host_s,
        "op_host_s": share * profile.op_host_s,
        "group_launch_host_s": share * profile.group_launch_host_s,
        "dispatch_host_s": 0.0 if drops_tokens(run) else share * profile.dispatch_host_s,
    }


def drops_tokens(run: Run) -> bool:
    """Whether experts take a fixed number of tokens, so that no count is read back to the host."""
    return "tokendrop" in (run.notes or "").lower()


def _unlisted(run: Run) -> str:
    """Options of Megatron-Bridge's recipe for a row's model and GPU, "" where none is known here."""
    for model, gpu, until, options in _UNLISTED:
        named = re.search(model, run.model or "", re.IGNORECASE) and re.search(gpu, run.gpu or "", re.IGNORECASE)
        if named and dated(run) < until:
            return options
    return ""


def options_of(run: Run, line: Framework) -> str:
    """A row's options as listed, or those of its framework's recipes for mixtures of experts where none is."""
    stated = run.overlap or ""
    if not stated and line.options_unlisted:
        stated = _unlisted(run)
    if not line.has_recipes or not run.experts or "cuda_graph" in stated:
        return stated
    blackwell = re.search(r"G?B[23]00", run.gpu or "", re.IGNORECASE) is not None
    racks = re.search(r"GB[23]00", run.gpu or "", re.IGNORECASE) is not None
    if blackwell and drops_tokens(run):
        return f"{_WHOLE_BLOCKS}; {stated}"
    if racks and run.precision_kind == "mxfp8" and dated(run) >= _WHOLE_STEPS_SINCE:
        return f"{_WHOLE_STEPS}; {stated}"
    return stated
