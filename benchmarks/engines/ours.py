"""fivefold's own trainer."""

from __future__ import annotations

import torch.distributed as dist
from worker import BETAS, CLIP, DECAY, EPS, GLOBAL_BATCH, LLAMA, RATE, SEQ, VOCAB, Engine, Task

import fivefold
from fivefold.layout import Layout, Workload, resolve
from fivefold.model import Attention, Block, BlockRun, FeedForward, ModelSpec
from fivefold.train.build import Setup
from fivefold.train.data import Batch
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Recipe
from fivefold.train.trainer import Trainer


def spec() -> ModelSpec:
    heads = LLAMA["num_attention_heads"]
    block = Block(
        mixer=Attention(heads=heads, kv_heads=LLAMA["num_key_value_heads"], head_dim=LLAMA["hidden_size"] // heads),
        feed=FeedForward(ffn=LLAMA["intermediate_size"]),
    )
    return ModelSpec(
        name="throughput", family="llama", hidden=LLAMA["hidden_size"], vocab=VOCAB, max_position=SEQ,
        runs=(BlockRun(LLAMA["num_hidden_layers"], block),),
    )  # fmt: skip


def start(task: Task) -> Engine:
    import torch

    if task.ranks > 1:
        dist.init_process_group("gloo")
    layout = resolve(Layout(**task.degrees), spec(), task.ranks, Workload(seq_len=SEQ, global_batch=GLOBAL_BATCH))
    recipe = Recipe(rate=RATE, betas=BETAS, eps=EPS, decay=DECAY, clip=CLIP)
    trainer = Trainer(spec(), layout, Mesh(layout), Setup(precision="fp32", recipe=recipe))
    positions = torch.arange(SEQ)

    def step(number: int) -> float:
        batches = [Batch(*pair, positions) for pair in task.micro_batches(number)]
        return trainer.step(number, batches).loss

    return Engine(step, trainer.wait, f"fivefold {fivefold.__version__}")
