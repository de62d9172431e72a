"""What rows have under a profile where they do not say, whichever framework it stands for."""

from __future__ import annotations

# DeepSpeed has no context parallelism over a whole block but Ulysses (Jacobs et al. 2023); so say its rules.
EXCHANGES_HEADS = frozenset(("deepspeed", "deepspeed-zero"))
# With a pipeline torchtitan keeps what it has gathered, as ZeRO-2 does (fsdp_reshard_after_forward's default).
KEEPS_GATHERED_IN_PIPELINES = frozenset(("torchtitan",))
