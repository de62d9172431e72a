"""Which blocks each pipeline stage holds, and every default of a layout written out.

Virtual stage = chunk · pp + rank: with interleaving, a rank holds every pp-th of the pp · vpp stages. In a V (zbv,
dualpipev) the odd chunks lie the other way round: with two chunks rank r holds stages r and 2 · pp - 1 - r.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from fivefold.errors import FivefoldError, option_of
from fivefold.layout.columns import DEGREES, Columns
from fivefold.layout.layout import SCHEDULES, V_SHAPED, Layout, ResolvedLayout
from fivefold.layout.workload import Workload
from fivefold.model import block_params
from fivefold.model.spec import Attention, FeedForward, ModelSpec
from fivefold.runtime import load_runtime

Policy = Literal["even", "weighted", "by_parameters"]
Weights = tuple[int, int]  # parameters of a block and of the head, where they decide what a stage holds
StageRanges = tuple[tuple[tuple[int, int], ...], ...]

MAX_CHUNKS = 1024  # chunks per rank: beyond any model's depth, so a mistyped number fails at once
MAX_STAGES = 4096  # listed of a pipeline that is longer than the GPUs are many

# How a runtime splits blocks when nobody says otherwise.
SPLIT_POLICY: dict[str, Policy] = {
    "megatron": "even",  # Megatron-Core transformer_config: equal stages beside an asked-for first and last count
    "fivefold": "even",  # fivefold.train.build takes the resolved layout's stages
    "megatron-fsdp": "even",
    "nanotron": "by_parameters",  # nanotron models/base.py, build_model
    "deepspeed": "even",  # Megatron-DeepSpeed: uniform partitions of the transformer blocks
    "deepspeed-zero": "even",
    "fsdp": "weighted",  # as torchtitan, whose pipeline is PyTorch's own with weights beside it
    "fsdp1": "even",  # no pipeline
    "accelerate": "even",  # no pipeline
    "torchtitan": "weighted",  # torchtitan distributed/pipeline_parallel: embedding and head weigh one block each
}


def split_policy(runtime: str) -> Policy:
    """The split policy of a runtime's name or alias. Raises FivefoldError for an unknown runtime."""
    return SPLIT_POLICY[load_runtime(runtime).name]


def blocks_per_stage(
    layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    policy: Policy = "even",
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    weights: Weights = (1, 0),
) -> tuple[int, ...]:
    """Blocks of each virtual stage, a tuple of pp · vpp counts that sums to `layers`.

    first, last: blocks on the whole first and last pipeline rank (all its chunks together), None for equal shares.
    account_for_*: embedding, head take the place of one block in an equal split; not together with first and last.
    policy "even": equal stages (Megatron). policy "weighted": embedding and head always count as one block each and
    the first stages take the remainder (torchtitan); it has no first and last counts. policy "by_parameters": a stage
    ends with the first block that takes all parameters so far, by `weights`, beyond its share (nanotron); nor has it.
    Where the counts do not divide, the remainder goes to the earlier stages, so that every block is somewhere:
    a runtime would lose or refuse those blocks, which is for the rules to say.
    """
    if policy == "weighted":
        return _weighted(layers, pp * vpp, True, True)
    if policy == "by_parameters":
        return _by_parameters(layers, pp * vpp, weights)
    if first or last or pp == 1:
        return _with_ends(layers, pp, vpp, first or 0, last or 0)
    return _weighted(layers, pp * vpp, account_for_embedding, account_for_loss)


def blocks_of(layout: Layout, model: ModelSpec, runtime: str = "megatron") -> tuple[int, ...]:
    """Blocks of each virtual stage of a layout under a runtime's split policy."""
    return blocks_per_stage(
        model.layers,
        layout.pp,
        layout.vpp,
        layout.first_stage_layers,
        layout.last_stage_layers,
        split_policy(runtime),
        layout.account_for_embedding,
        layout.account_for_loss,
        stage_weights(model),
    )


def _weighted(layers: int, stages: int, embedding: bool, head: bool) -> tuple[int, ...]:
    """Equal shares, the larger ones first, of the blocks and of the items that count as one."""
    if stages == 1:
        return (layers,)
    counts = _shares(layers + embedding + head, stages)
    counts[0] -= embedding
    counts[-1] -= head
    return tuple(_without_negatives(counts))


def _by_parameters(layers: int, stages: int, weights: Weights) -> tuple[int, ...]:
    """Stages that end where the parameters of all blocks so far exceed their share of the total, the head's in it."""
    block, head = weights
    total = layers * block + head
    ends = [0]
    for stage in range(1, stages):
        beyond = total * stage // (stages * block) + 1
        ends.append(min(max(beyond, ends[-1] + 1), layers))
    return tuple(end - start for start, end in pairwise((*ends, layers)))


def stage_weights(model: ModelSpec) -> Weights:
    """What a block and the head weigh where parameters decide what a stage holds: those of matrices, by the formula of
    nanotron's get_block_compute_costs."""
    block = model.runs[0].block
    mixer, feed = block.mixer, block.feed
    head = model.vocab * model.hidden
    if isinstance(mixer, Attention) and isinstance(feed, FeedForward):
        return model.hidden * (4 * mixer.heads * mixer.head_dim + 3 * feed.ffn), head
    return block_params(block, model.hidden), head


def _with_ends(layers: int, pp: int, vpp: int, first: int, last: int) -> tuple[int, ...]:
    """Asked-for first and last ranks, equal shares between them; each rank's blocks in equal chunks."""
    if pp == 1:
        return tuple(_shares(layers, vpp))
    ends = {rank: count for rank, count in ((0, first), (pp - 1, last)) if count > 0}
    middle = [rank for rank in range(pp) if rank not in ends]
    counts = [0] * (pp * vpp)
    for rank, count in ends.items():
        counts[rank::pp] = _shares(count, vpp)
    rest = layers - sum(ends.values())
    where = [chunk * pp + rank for chunk in range(vpp) for rank in middle] or [pp * vpp - 1]
    for stage, share in zip(where, _shares(rest, len(where)), strict=True):
        counts[stage] += share
    return tuple(_without_negatives(counts))


def _shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` near-equal shares, the larger ones first."""
    share, extra = divmod(total, parts)
    return [share + (part < extra) for part in range(parts)]


def _without_negatives(counts: list[int]) -> list[int]:
    """The same sum without negative counts; the debt of a stage is paid by the later, then by the earlier ones."""
    debt = 0
    for order in (range(len(counts)), reversed(range(len(counts)))):
        for stage in order:
            counts[stage] -= debt
            debt = max(-counts[stage], 0)
            counts[stage] = max(counts[stage], 0)
    return counts


def homes(pp: int, vpp: int, schedule: str = "1f1b") -> tuple[tuple[int, ...], ...]:
    """The virtual stage of each chunk of each pipeline rank, as [rank][chunk]."""
    turned = schedule in V_SHAPED
    return tuple(
        tuple(chunk * pp + (pp - 1 - rank if turned and chunk % 2 else rank) for chunk in range(vpp))
        for rank in range(pp)
    )


@lru_cache(maxsize=4096)
def stage_ranges(
    layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    policy: Policy = "even",
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    schedule: str = "1f1b",
    weights: Weights = (1, 0),
) -> StageRanges:
    """Block ranges [first, last) as [pipeline rank][chunk]; arguments as for blocks_per_stage, and the schedule, which
    says where the stages lie."""
    counts = blocks_per_stage(layers, pp, vpp, first, last, policy, account_for_embedding, account_for_loss, weights)
    bounds = list(pairwise(accumulate(counts, initial=0)))
    return tuple(tuple(bounds[stage] for stage in chunks) for chunks in homes(pp, vpp, schedule))


def row_stages(columns: Columns, i: int, model: ModelSpec, runtime: str = "megatron") -> StageRanges:
    """The stages of row i of Columns under a runtime's split policy."""
    return stage_ranges(
        model.layers,
        int(columns.pp[i]),
        int(columns.vpp[i]),
        int(columns.first_stage_layers[i]),
        int(columns.last_stage_layers[i]),
        split_policy(runtime),
        bool(columns.account_for_embedding[i]),
        bool(columns.account_for_loss[i]),
        SCHEDULES[int(columns.schedule[i])],
        stage_weights(model),
    )


def resolve(layout: Layout, model: ModelSpec, world: int, work: Workload, runtime: str = "megatron") -> ResolvedLayout:
    """Every degree and default of `layout` on `world` GPUs, with the blocks of each stage.

    Resolves what breaks a rule too (quotients floored, spare blocks given to early stages), so that it can be shown
    next to its violations. Raises FivefoldError for degrees below one, unknown words and unknown runtimes.
    """
    check_degrees(layout, world)
    return resolve_row(Columns.from_layouts([layout], world, work), model, runtime)


def resolve_row(columns: Columns, model: ModelSpec, runtime: str = "megatron") -> ResolvedLayout:
    """The same for the only row of `columns`, whose degrees are known to be possible."""
    full = columns.row(0)
    return ResolvedLayout(
        tp=full.tp,
        cp=full.cp,
        cp_kind=full.cp_kind,
        pp=full.pp,
        vpp=full.vpp,
        ep=full.ep,
        etp=full.etp,
        dp=int(columns.dp[0]),
        edp=int(columns.edp[0]),
        dp_shard=int(columns.dp_shard[0]),
        dp_replicate=int(columns.dp_replicate[0]),
        zero=full.zero,
        sequence_parallel=bool(columns.sp[0]),
        micro_batch=full.micro_batch,
        num_micro_batches=int(columns.num_micro_batches[0]),
        schedule=full.schedule or "1f1b",
        stages=row_stages(columns, 0, model, runtime),
        recompute=full.recompute,
        overlap=full.overlap,
    )


def check_degrees(layout: Layout, world: int) -> None:
    """Refuse what has no arithmetic at all: degrees below one, and more stages than could ever be listed.

    Degrees beyond the GPUs break a rule, as those that do not divide them."""
    listed = {"vpp": (MAX_CHUNKS, MAX_CHUNKS), "pp": (max(world, MAX_STAGES // max(layout.vpp, 1)), world)}
    for name in DEGREES:
        value = getattr(layout, name)
        most, said = listed.get(name, (value, None if name == "micro_batch" else world))
        if not 1 <= value <= most:
            option = option_of(name)
            legal = "1 or more" if said is None else f"1 to {said}"
            raise FivefoldError(
                f"{option} {value} is not possible here: it has to be {legal}, where 1 means that the axis is unused.",
                code="bad-degree",
                option=option,
                value=value,
                legal=legal,
            )
