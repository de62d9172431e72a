"""The line of data of a published framework, and what several lines have in common."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Era(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the profile that rows dated from one year and month on and before another have otherwise."""

    since: str = ""
    until: str = "9999"
    changes: dict[str, Any]


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """One published framework.

    starts: how its name starts, in lower case.
    split_as, older_as: the name whose line rows with tensor or pipeline parallelism have, and rows older than
        Transformer Engine; "": this one. piped_as: the name of the framework that composes its shards of parameters
        with a pipeline, which it has none of itself.
    pytorch: whether its blocks are PyTorch's own, which compile and quantise as a row asks, and whose attention has a
        kernel for every GPU.
    runtime, sharded: the profiles that predict it with ZeRO 0 and 1, and with fully sharded parameters; before_te: with
        rows older than Transformer Engine. stands_in: those profiles describe another framework.
    zero: ZeRO stage where none is stated; zero_of_mixtures: with experts over several ranks, where the framework
        refuses `zero` for them; None: no other. stage_in_notes: whether the stage is an option of its configuration,
        which rows' notes may quote. shards_to_fit: of 0, whether replicas that do not fit shard their optimizer.
    unfused_until: rows dated before this year and month ran attention without a flash kernel; "9999" for all rows.
    drops_out: whether models without a gated feed-forward, as GPT-3, are trained with dropout where nothing says so;
        those of the years before flash kernels were.
    kernel: the flash-attention kernel where it is not the profile's, as named in the GPU's curve.
    vocab: where it is not stated and does not follow from the model's shape.
    lists_ties: rows that untie embedding and head list the option, and others have them tied.
    sequence_parallel: whether tensor parallelism brings it where that is not stated.
    pipeline_fills: a pipeline cuts the local batch into as many micro-batches as stages where none is stated and that
        fits.
    recomputes_in_part: whether some of a rank's blocks are recomputed without others where a row does not say which.
    policies: of frameworks that checkpoint every block under a policy, those of its recipes by their names in
        policies.py, the one that keeps most first; a row that states none has the first that fits, the last where none
        does.
    shard_nodes: nodes that its recipes shard parameters over where replicas lie beside them, the fewest first; a row
        that does not say has the first that hold it, the last where none do.
    interleaves: chunks per pipeline rank at most where they are not stated. states_chunks: its tables have a column for
        them, so that a blank is none.
    experts_share_tp: where a row does not say over how many ranks an expert is split, it is the tensor-parallel ones.
    changes: numbers of the profile that its recipes set otherwise. eras: those of some of its releases. since, newer:
        from that year and month on these too. before: numbers of the profile of before_te; `newer` are of that one too
        where there is one. changes_sharded: with fully sharded parameters.
    compiles_quantised: of PyTorch's own blocks, whether 8-bit recipes bring torch.compile (torchao's are made for it).
    quantised, half: fields of this line that rows with 8-bit or narrower recipes have otherwise, and that rows in fp16
        dated before `since` have. on_tpus: those that rows on TPUs have otherwise.
    precision: where not stated. grad_dtype: gradients as they are accumulated and reduced ("bf16": in 16 bit);
        sharded_grad_dtype: the same of fully sharded parameters.
    overlap: "listed" where what a row that lists its overlap does not list was off, "on" for recipes that switch
        everything on, "grad" for gradients and parameters, "reduce" for gradients only, "hooks" for these only and not
        behind a pipeline, "off" for none. mixtures_overlap_tp: whether "on" has tensor parallelism beside compute for
        mixtures of experts too. overlaps_since: rows dated before this year and month reduced gradients after backward.
    tuned: how a published number was come by where the framework's vendor publishes it, "" if plainly measured.
    packs_documents: mean tokens of the documents that its fine-tuning recipes pack into a sequence; None: none.
    has_recipes: whether recipes.py knows those for mixtures of experts. options_unlisted: whether rows that list no
        options ran with those of the recipe.
    logs_reserved_gib: whether the memory that it logs is the allocator's reserve in units of 2**30 bytes.
    trains_mtp: whether its recipes train the modules of multi-token prediction that a model has.
    source: where the defaults are from.
    """

    starts: tuple[str, ...]
    split_as: str = ""
    older_as: str = ""
    piped_as: str = ""
    pytorch: bool = False
    runtime: str
    sharded: str = "torchtitan"
    before_te: str = ""
    stands_in: bool = False
    zero: int = 1
    zero_of_mixtures: int | None = None
    stage_in_notes: bool = False
    shards_to_fit: bool = False
    unfused_until: str = ""
    drops_out: bool = False
    kernel: str = ""
    vocab: int | None = None
    lists_ties: bool = False
    sequence_parallel: bool = True
    pipeline_fills: bool = False
    recomputes_in_part: bool = True
    policies: tuple[str, ...] = ()
    shard_nodes: tuple[int, ...] = (1,)
    interleaves: int = 1
    states_chunks: bool = False
    experts_share_tp: bool = False
    changes: dict[str, Any] = {}
    eras: tuple[Era, ...] = ()
    since: str = "9999"
    newer: dict[str, Any] = {}
    before: dict[str, Any] = {}
    changes_sharded: dict[str, Any] = {}
    compiles_quantised: bool = True
    quantised: dict[str, Any] = {}
    half: dict[str, Any] = {}
    on_tpus: dict[str, Any] = {}
    precision: Literal["bf16", "fp16"] = "bf16"
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    sharded_grad_dtype: Literal["fp32", "bf16"] = "fp32"
    overlap: Literal["listed", "on", "grad", "reduce", "hooks", "off"] = "grad"
    overlaps_since: str = ""
    mixtures_overlap_tp: bool = True
    tuned: str = ""
    packs_documents: float | None = None
    has_recipes: bool = False
    options_unlisted: bool = False
    logs_reserved_gib: bool = False
    trains_mtp: bool = False
    source: str = "from memory"

    @property
    def shards_without_pipeline(self) -> bool:
        """Whether gradients and parameters are sharded by another profile than the one with pipelines, which refuses
        them (DeepSpeed's ZeRO 2 and 3, FSDP1)."""
        return self.runtime != self.sharded


# FlashAttention's first release; before it every framework materialised the scores (Dao et al. 2022, May 2022; in
# Megatron-LM behind a switch since 2023, from memory).
FLASH_USUAL = "2023-01"
# Without --accumulate-allreduce-grads-in-fp32, which bf16 alone implies, Megatron-LM accumulates and reduces gradients
# in the parameters' own type (arguments.py and the same file); its fused accumulation of 2022 needed fp32 ones.
HALF_GRADIENTS = {"grad_dtype": "bf16"}
