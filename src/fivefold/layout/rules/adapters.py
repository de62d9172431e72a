"""Rules of training adapters beside a frozen model (LoRA), and of holding that in 4 bits (QLoRA)."""

from __future__ import annotations

from fivefold.layout.columns import Columns
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Rule
from fivefold.model.spec import Attention

_LORA = ("megatron", "fsdp", "accelerate", "fsdp1", "deepspeed-zero")
_NF4 = ("fsdp", "accelerate", "fsdp1", "deepspeed-zero")
_OPTIMIZERS = ("adamw", "sgd", "adamw8bit")


def _beside_attention(c: Columns, x: Context) -> bool:
    """q, k and v are those of softmax attention; other mixers have projections of other shapes."""
    lora = x.work.lora
    if lora is None or {"q", "k", "v", "o"}.isdisjoint(lora.targets):
        return True
    return all(isinstance(block.mixer, Attention) for block in x.model.kinds)


ADAPTERS: tuple[Rule, ...] = (
    Rule(
        id="lora-runtime",
        option="--lora-rank",
        field=None,
        values=lambda c, x: [],
        holds=lambda c, x: x.work.lora is None or x.profile.name in _LORA,
        message="{runtime} as modelled trains no adapters (--lora-rank {lora_rank}): megatron (as Megatron-Bridge), "
        "fsdp, accelerate, fsdp1 and deepspeed-zero (as PEFT) do.",
        source="Megatron-Bridge peft/lora; Hugging Face PEFT with FSDP and with DeepSpeed ZeRO-3 (from memory)",
    ),
    Rule(
        id="lora-targets-attention",
        option="--lora-targets",
        field=None,
        values=lambda c, x: [],
        holds=_beside_attention,
        message="Adapters on q, k, v and o are modelled beside softmax attention, and {model} has blocks with another "
        "mixer. Choose from gate, up, down.",
        source="how projections are named: PEFT target_modules for Llama's kind of model",
    ),
    Rule(
        id="base-precision-runtime",
        option="--base-precision",
        field=None,
        values=lambda c, x: ["compute"],
        holds=lambda c, x: x.work.base_precision == "compute" or x.profile.name in _NF4,
        message="{runtime} as modelled holds no weights in 4 bits: fsdp, accelerate, fsdp1 and deepspeed-zero (with "
        "bitsandbytes) do.",
        source="Hugging Face PEFT documentation: QLoRA with FSDP and with DeepSpeed ZeRO-3 (from memory)",
    ),
    Rule(
        id="lora-optimizer",
        option="--optimizer",
        field=None,
        values=lambda c, x: [name for name in _OPTIMIZERS if name in x.profile.optimizers],
        holds=lambda c, x: x.work.lora is None or x.work.optimizer in _OPTIMIZERS,
        message="Adapters are modelled with adamw, sgd and adamw8bit, not with {optimizer}.",
        source="the states of the others depend on the shapes of matrices, which adapters do not share",
    ),
)
