"""transformers' Llama as a list of modules, for engines that cut pipelines by themselves."""

from __future__ import annotations

import llama
import torch
from torch import Tensor, nn
from worker import Task


class _Embedding(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class _Block(nn.Module):
    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        return self.block(x, position_embeddings=self.rotary(x, position_ids=positions))


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def layers(task: Task) -> list[nn.Module]:
    """Embedding, blocks, norm and head; SDPA is causal where no mask is given."""
    whole = llama.model(task)
    body = whole.model
    return [
        _Embedding(body.embed_tokens),
        *(_Block(block, body.rotary_emb) for block in body.layers),
        _Head(body.norm, whole.lm_head),
    ]
