"""What a rule may look at beside the layouts: the model, the cluster's sizes, the workload, the runtime's version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from fivefold.errors import FivefoldError
from fivefold.layout.features import features
from fivefold.layout.mixers import SoftmaxAttention, softmax_attention, state_groups, state_heads, state_widths
from fivefold.layout.workload import Workload
from fivefold.model.flops import attention_widths
from fivefold.model.spec import Attention, Experts, FeedForward, LatentAttention, ModelSpec
from fivefold.runtime import Profile, load_runtime, parse_runtime

Version = tuple[int, ...]
LARGEST_SIZE = 2**31  # beyond any cluster, batch or sequence; keeps a mistyped number out of int64 overflow


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything outside the layout that decides whether it would start.

    cluster_gpus: world size. gpus_per_node: GPUs of one host. scale_up_size: GPUs of one NVLink-like domain.
    runtime: name or alias, optionally "name@version"; version: the same, apart. No version means the newest covered.
    Raises FivefoldError for an unknown runtime or version and for sizes below one.
    """

    model: ModelSpec
    cluster_gpus: int
    gpus_per_node: int
    scale_up_size: int
    work: Workload
    runtime: str
    version: str | None = None

    def __post_init__(self) -> None:
        for name, option in (
            ("cluster_gpus", "--gpus"),
            ("gpus_per_node", "--gpus-per-node"),
            ("scale_up_size", "cluster file: span of the innermost link"),
        ):
            _require_positive(getattr(self, name), option)
        _require_positive(self.work.seq_len, "--seq-len")
        _require_positive(self.work.global_batch, "--global-batch")
        _require_positive(self.model.layers, "config.json: number of layers")
        load_runtime(self._runtime_with_version)

    @property
    def _runtime_with_version(self) -> str:
        if self.version is None:
            return self.runtime
        asked = parse_runtime(self.runtime)
        return "@".join(part for part in (asked.name, self.version, asked.device) if part)

    @cached_property
    def profile(self) -> Profile:
        """The runtime's profile: its optimizers, precisions and ZeRO stages."""
        return load_runtime(self._runtime_with_version)

    @cached_property
    def alias(self) -> str:
        """The runtime as the user named it, without version and in lower case."""
        return parse_runtime(self.runtime).name

    @cached_property
    def version_parts(self) -> Version | None:
        """The asked-for version as integers, None for the newest covered."""
        text = self.version or parse_runtime(self.runtime).version
        return version_tuple(text) if text else None

    # What rules ask of the model. A divisor of every block's value is a divisor of their greatest common divisor.

    @property
    def world(self) -> int:
        return self.cluster_gpus

    @property
    def layers(self) -> int:
        return self.model.layers

    @cached_property
    def features(self) -> frozenset[str]:
        """Names of what the model has beyond Llama's blocks (fivefold.layout.features)."""
        return features(self.model)

    @cached_property
    def _attentions(self) -> tuple[SoftmaxAttention, ...]:
        found = (softmax_attention(block.mixer) for block in self.model.kinds)
        return tuple(attention for attention in found if attention is not None)

    @cached_property
    def heads(self) -> int:
        """Greatest common divisor of the blocks' attention heads; 0, which every degree divides, without attention."""
        return gcd(*(attention.heads for attention in self._attentions))

    @cached_property
    def kv_heads(self) -> tuple[int, ...]:
        """Distinct numbers of key/value heads; blocks with latent attention have none."""
        return tuple(sorted({each.kv_heads for each in self._attentions if isinstance(each, Attention)}))

    @cached_property
    def head_widths(self) -> tuple[int, ...]:
        """Distinct widths of a mixer's projections to all heads, in elements per token before TP."""
        widths = {width for block in self.model.kinds for width in state_widths(block.mixer)}
        for attention in self._attentions:
            widths |= set(attention_widths(attention))
        return tuple(sorted(widths))

    @cached_property
    def state_heads(self) -> int:
        """Greatest common divisor of what TP divides of linear attention and state spaces: heads, or channels; 0
        without them."""
        return gcd(*(count for block in self.model.kinds for count in state_heads(block.mixer)))

    @cached_property
    def state_groups(self) -> int:
        """Greatest common divisor of the groups that share B and C in Mamba 2; 0 without it."""
        groups = (state_groups(block.mixer) for block in self.model.kinds)
        return gcd(*(count for count in groups if count is not None))

    @cached_property
    def has_mla(self) -> bool:
        return any(isinstance(block.mixer, LatentAttention) for block in self.model.kinds)

    @cached_property
    def has_window(self) -> bool:
        """Whether some attention sees a part of the sequence only: a window, or its own chunk."""
        return any(
            isinstance(each, Attention) and (each.window is not None or each.chunk is not None)
            for each in self._attentions
        )

    @cached_property
    def has_dense_feed(self) -> bool:
        return any(isinstance(block.feed, FeedForward) for block in self.model.kinds)

    @cached_property
    def is_moe(self) -> bool:
        return self.model.is_moe

    @cached_property
    def _experts(self) -> tuple[Experts, ...]:
        return tuple(block.feed for block in self.model.kinds if isinstance(block.feed, Experts))

    @cached_property
    def experts(self) -> int:
        """Greatest common divisor of the blocks' expert counts; 0 for a dense model."""
        return gcd(*(feed.num_experts for feed in self._experts)) if self._experts else 0

    @cached_property
    def dense_ffn(self) -> int:
        """Greatest common divisor of the widths that TP cuts: dense feed-forwards and shared experts; 0 if none."""
        widths = [block.feed.ffn for block in self.model.kinds if isinstance(block.feed, FeedForward)]
        widths += [feed.shared_ffn for feed in self._experts if feed.shared_ffn]
        return gcd(*widths) if widths else 0

    @cached_property
    def expert_ffn(self) -> int:
        """Greatest common divisor of the routed experts' widths, which expert-TP cuts; 0 for a dense model."""
        return gcd(*(feed.ffn for feed in self._experts)) if self._experts else 0


def version_tuple(text: str) -> Version:
    """'0.16.1' or 'core 0.16' as (0, 16, 1) or (0, 16); FivefoldError when it is not a version."""
    try:
        return tuple(int(part) for part in text.lower().replace("core", "").strip().split("."))
    except ValueError:
        raise FivefoldError(
            f"'{text}' is not a version; write numbers with dots between them, as in 0.16.",
            code="bad-version",
            option="--runtime",
            value=text,
        ) from None


def _require_positive(value: int, option: str) -> None:
    if not 1 <= value <= LARGEST_SIZE:
        raise FivefoldError(
            f"{option} is {value}; it has to be 1 or more (and no more than {LARGEST_SIZE}).",
            code="bad-size",
            option=option,
            value=value,
            legal=f"1 to {LARGEST_SIZE}",
        )
