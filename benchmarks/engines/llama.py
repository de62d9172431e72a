"""transformers' Llama as the other engines train it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses
from worker import BETAS, DECAY, EPS, LLAMA, RATE, Task

NAME = f"transformers {transformers.__version__}"


def model(task: Task) -> nn.Module:
    config = transformers.LlamaConfig(**LLAMA, use_cache=False, attn_implementation="sdpa")
    made = transformers.LlamaForCausalLM(config)
    made.load_state_dict(task.weights())
    return made.train()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def forward(module: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss_of(module(input_ids=tokens).logits, labels)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """PyTorch's fused AdamW, which decays matrices only."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if (p.dim() >= 2) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, DECAY), (False, 0.0))
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE, betas=BETAS, eps=EPS, fused=True)
