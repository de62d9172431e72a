"""Rules of every runtime on the other choices: schedule, ZeRO, optimizer, precision, recompute, overlap."""

from __future__ import annotations

import numpy as np

from fivefold.layout.columns import ALL_LAYERS, Columns
from fivefold.layout.rules.common import (
    DUALPIPEV,
    FEWEST_CHUNKS,
    FULL,
    INTERLEAVED,
    IS_V,
    MOST_CHUNKS,
    SELECTIVE,
    largest_stage,
    modules_possible,
)
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Holds, Rule


def _recompute_layers(c: Columns, x: Context) -> Holds:
    every = c.recompute_layers == ALL_LAYERS
    if every.all():
        return True
    return every | ((c.recompute_layers >= 1) & (c.recompute_layers <= largest_stage(c, x)))


CHOICES: tuple[Rule, ...] = (
    Rule(
        id="vpp-needs-pp",
        option="--vpp",
        field="vpp",
        holds=lambda c, x: (c.vpp == 1) | (c.pp > 1),
        message="--vpp {vpp} interleaves the chunks of a pipeline, and --pp is 1.",
        source="Megatron-LM arguments.py, read at 000c4ac24f",
    ),
    Rule(
        id="schedule-vpp",
        option="--schedule",
        field="schedule",
        others=("vpp",),
        holds=lambda c, x: (c.vpp >= FEWEST_CHUNKS[c.schedule]) & (c.vpp <= MOST_CHUNKS[c.schedule]),
        message="--schedule {schedule} does not go with --vpp {vpp}: interleaved runs 2 or more chunks per rank, zbv "
        "and dualpipev exactly 2, the others 1.",
        source="definition of the schedules; torchtitan pipeline_parallel, read at 02ef790c79; Qi et al. 2023, "
        "section 6 (zbv); PyTorch 2.13 ScheduleDualPipeV",
    ),
    Rule(
        id="dualpipev-micro-batches",
        moot_after=("world-divides", "global-batch-divides", "schedule-vpp"),
        option="--schedule",
        field="schedule",
        others=("pp", "micro_batch"),
        holds=lambda c, x: (c.schedule != DUALPIPEV) | (c.num_micro_batches >= 2 * c.pp),
        message="DualPipeV runs a forward beside every backward, for which it needs at least as many micro-batches as "
        "stages, 2 · pp = 2 · {pp}; there are {m}.",
        source="PyTorch 2.13, torch/distributed/pipelining/schedules.py, ScheduleDualPipeV",
    ),
    Rule(
        id="v-shape-uneven",
        option="--first-stage-layers",
        field="first_stage_layers",
        others=("last_stage_layers",),
        holds=lambda c, x: ~IS_V[c.schedule] | ((c.first_stage_layers == 0) & (c.last_stage_layers == 0)),
        message="In the V of --schedule {schedule} one rank holds the first and the last stage, so that counts for a "
        "first and a last rank mean nothing. Leave them out, or use --account-for-embedding and --account-for-loss.",
        source="definition of the V: Qi et al. 2023 (arXiv 2401.10241), section 6",
    ),
    Rule(
        id="interleaved-micro-batches",
        moot_after=("world-divides", "global-batch-divides"),
        option="--vpp",
        field="vpp",
        others=("micro_batch",),
        holds=lambda c, x: (
            (c.schedule != INTERLEAVED)
            | ((c.num_micro_batches >= c.pp) & (c.num_micro_batches % np.maximum(c.pp, 1) == 0))
        ),
        message="Interleaving runs micro-batches in groups of pp {pp}: their number, {m}, has to be a multiple of it "
        "(a global batch that is a multiple of {interleaved_unit} is). Groups of another size are not modelled.",
        # Megatron's rule with its default group size; torch's Interleaved1F1B asks m % max(1, m // pp) == 0, which
        # this implies. Groups of another size are not modelled.
        source="Megatron-Core schedules, d98e8a64dd: PP <= group <= M and (M % group == 0 or >= PP), group = PP",
    ),
    Rule(
        id="zero-runtime",
        option="--zero",
        field="zero",
        holds=lambda c, x: np.logical_or.reduce([c.zero == stage for stage in x.profile.zero_stages]),
        message="{runtime} as modelled has ZeRO stages {zero_stages}, not {zero}. (Megatron's distributed "
        "optimizer keeps "
        "whole weights and gradients, which is stage 1; fully_shard always shards both gradients and states.)"
        "{zero_elsewhere}",
        source="Megatron-Core documentation of the distributed optimizer; PyTorch documentation of fully_shard",
    ),
    Rule(
        id="dp-replicate-divides",
        moot_after=("world-divides",),
        option="--dp-replicate",
        field="dp_replicate",
        holds=lambda c, x: (c.dp == 0) | (c.dp_shard * c.dp_replicate == c.dp * c.cp),
        message="--dp-replicate {dp_replicate} has to divide the dp·cp = {sharding_ranks} ranks that hold "
        "one replica's "
        "shards (with --zero 0 nothing is sharded and it has to be left at 1).",
        source="PyTorch documentation, HSDP mesh; Megatron-Core parallel_state, num_distributed_optimizer_instances",
    ),
    Rule(
        id="dp-replicate-experts",
        moot_after=("world-divides", "expert-world-divides"),
        option="--dp-replicate",
        field="dp_replicate",
        holds=lambda c, x: (c.zero == 0) | (c.edp % np.maximum(c.dp_replicate, 1) == 0) if x.is_moe else True,
        message="--dp-replicate {dp_replicate} does not divide the {edp} expert-data-parallel ranks.",
        source="Megatron-Core parallel_state, from memory: expert data-parallel size over optimizer instances",
    ),
    Rule(
        id="optimizer-runtime",
        option="--optimizer",
        field=None,
        values=lambda c, x: list(x.profile.optimizers),
        holds=lambda c, x: x.work.optimizer in x.profile.optimizers,
        message="{runtime} as modelled has no optimizer {optimizer}.",
        source="the runtime's profile",
    ),
    Rule(
        id="precision-runtime",
        option="--precision",
        field=None,
        values=lambda c, x: list(x.profile.precisions),
        holds=lambda c, x: x.work.precision in x.profile.precisions,
        message="{runtime} as modelled does not train in {precision}.",
        source="the runtime's profile",
    ),
    Rule(
        id="moe-imbalance",
        option="--moe-imbalance",
        field=None,
        values=lambda c, x: [max(1.0, x.work.moe_imbalance)] if x.is_moe else [1.0],
        holds=lambda c, x: x.work.moe_imbalance >= 1.0 if x.is_moe else x.work.moe_imbalance == 1.0,
        message="The imbalance of {imbalance} is the most loaded rank's tokens over the mean: 1 or more, and "
        "exactly 1 for a "
        "model without experts.",
        source="definition",
    ),
    Rule(
        id="recompute-layers-kind",
        option="--recompute-layers",
        field="recompute_layers",
        holds=lambda c, x: (c.recompute_layers == ALL_LAYERS) | (c.recompute_kind == FULL),
        message="A number of recomputed layers goes with --recompute full only, not with {recompute_kind}.",
        source="Megatron-Core transformer_config: recompute_num_layers must be None with selective",
    ),
    Rule(
        id="recompute-layers-range",
        option="--recompute-layers",
        field="recompute_layers",
        holds=_recompute_layers,
        message="--recompute-layers {value} is outside the 1 to {largest_stage} blocks of a pipeline rank.",
        source="Megatron-Core transformer_config: between 1 and the layers of a pipeline rank",
    ),
    Rule(
        id="recompute-layers-chunks",
        option="--recompute-layers",
        field="recompute_layers",
        holds=lambda c, x: (c.recompute_layers == ALL_LAYERS) | (c.recompute_layers % np.maximum(c.vpp, 1) == 0),
        message="--recompute-layers {value} counts a whole rank and is shared by its {vpp} chunks, so {vpp} "
        "has to divide it.",
        source="Megatron-Core transformer_block: recompute_num_layers is per model chunk",
    ),
    Rule(
        id="recompute-modules-kind",
        option="--recompute-modules",
        field="recompute_modules",
        holds=lambda c, x: (c.recompute_modules == 0) | (c.recompute_kind == SELECTIVE),
        message="Named modules go with --recompute selective only, not with {recompute_kind}.",
        source="Megatron-Core transformer_config: recompute_modules is read under selective",
    ),
    Rule(
        id="recompute-modules-model",
        option="--recompute-modules",
        field="recompute_modules",
        holds=lambda c, x: (c.recompute_modules & ~modules_possible(x)) == 0,
        message="{value} cannot be recomputed here: {model} has no such module.",
        source="Megatron-Core transformer_config (mla_up_proj, moe_act); the others would be accepted and do nothing",
    ),
    Rule(
        id="overlap-param-needs-zero",
        option="--overlap-param",
        field="overlap_param",
        holds=lambda c, x: ~c.overlap_param | ((c.zero >= 1) & c.overlap_grad),
        message="Overlapping the parameter gather needs sharded states (--zero 1 or more, now {zero}) and overlapped "
        "gradient reduction.",
        source="Megatron-LM arguments.py, read at 000c4ac24f",
    ),
    Rule(
        id="overlap-tp-needs-sp",
        option="--overlap-tp",
        field="overlap_tp",
        holds=lambda c, x: ~c.overlap_tp | (c.sp & (c.tp > 1)),
        message="Overlapping TP communication needs --tp above 1 and sequence parallelism: it hides the "
        "all-gathers and "
        "reduce-scatters that only exist then.",
        source="Megatron-LM d98e8a64dd: tp-comm-overlap needs sequence parallelism",
    ),
    Rule(
        id="overlap-ep-needs-ep",
        option="--overlap-ep",
        field="overlap_ep",
        holds=lambda c, x: ~c.overlap_ep | (c.ep > 1),
        message="Overlapping the expert exchange needs --ep above 1.",
        source="Megatron-Core transformer_config: only with expert model parallelism",
    ),
)
