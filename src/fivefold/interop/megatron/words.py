"""fivefold's own flags in Megatron-LM's words, so that a message names the option that the user wrote."""

from __future__ import annotations

import re

from fivefold.interop.megatron.keys import bridge_key
from fivefold.interop.megatron.options import OPTION_OF

# fivefold's flag -> Megatron-LM's option. --vpp counts chunks, which is the second of Megatron's two ways to say it.
FLAGS: dict[str, str] = {
    "--tp": OPTION_OF["layout.tp"].name,
    "--pp": OPTION_OF["layout.pp"].name,
    "--cp": OPTION_OF["layout.cp"].name,
    "--cp-kind": OPTION_OF["layout.cp_kind"].name,
    "--vpp": OPTION_OF["layout.vpp"].name,
    "--ep": OPTION_OF["layout.ep"].name,
    "--etp": OPTION_OF["layout.etp"].name,
    "--zero": OPTION_OF["layout.zero"].name,
    "--dp-replicate": OPTION_OF["layout.dp_replicate"].name,
    "--micro-batch": OPTION_OF["layout.micro_batch"].name,
    "--global-batch": OPTION_OF["work.global_batch"].name,
    "--seq-len": OPTION_OF["work.seq_len"].name,
    "--recompute": OPTION_OF["layout.recompute_kind"].name,
    "--recompute-layers": OPTION_OF["layout.recompute_layers"].name,
    "--first-stage-layers": OPTION_OF["layout.first_stage_layers"].name,
    "--last-stage-layers": OPTION_OF["layout.last_stage_layers"].name,
    "--account-for-embedding": OPTION_OF["layout.account_for_embedding"].name,
    "--account-for-loss": OPTION_OF["layout.account_for_loss"].name,
    "--overlap-grad": OPTION_OF["layout.overlap_grad"].name,
    "--overlap-param": OPTION_OF["layout.overlap_param"].name,
    "--overlap-tp": OPTION_OF["layout.overlap_tp"].name,
    "--overlap-ep": OPTION_OF["layout.overlap_ep"].name,
    "--grad-dtype": OPTION_OF["work.bf16_gradients"].name,
    "--precision": OPTION_OF["work.bf16"].name,
    "--mtp": OPTION_OF["model.mtp"].name,
}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?![\w-])")


def spelled(option: str, style: str) -> str:
    """An option of Megatron-LM as the file's own style has it."""
    if not option.startswith("--") or style == "megatron-lm":
        return option
    return bridge_key(option) if style == "bridge" else option.removeprefix("--").replace("-", "_")


def option_of(flag: str, style: str = "megatron-lm") -> str:
    """The user's option behind one of fivefold's flags."""
    return spelled(FLAGS.get(flag, flag), style)


def in_their_words(text: str, style: str = "megatron-lm") -> str:
    """A message with fivefold's flags replaced by the user's options."""
    return _FLAG.sub(lambda found: option_of(found[0], style) if found[0] in FLAGS else found[0], text)
