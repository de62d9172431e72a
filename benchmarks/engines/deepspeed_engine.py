"""DeepSpeed: ZeRO 0 to 3 on transformers' Llama, and its pipeline."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import llama
import torch
import torch.distributed as dist
from worker import CLIP, GLOBAL_BATCH, Engine, Task

VERSION = f"deepspeed {deepspeed.__version__}, {llama.NAME}"


def start(task: Task) -> Engine:
    deepspeed.init_distributed("gloo")
    return {"zero": _zero, "pipeline": _pipeline}[task.kind](task)


def _config(task: Task, **more: object) -> dict[str, object]:
    return {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **more,
    }


def _zero(task: Task) -> Engine:
    module = llama.model(task)
    config = _config(task, zero_optimization={"stage": task.degrees.get("zero", 0)})
    engine, *_ = deepspeed.initialize(model=module, optimizer=llama.adamw(module.parameters()), config=config)

    def step(number: int) -> float:
        losses = []
        for tokens, labels in task.micro_batches(number):
            loss = llama.forward(engine, tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        if task.ranks > 1:
            dist.all_reduce(mean)
        return (mean / task.ranks).item()

    return Engine(step, version=VERSION)


def _pipeline(task: Task) -> Engine:
    from llama_stages import layers

    module = deepspeed.pipe.PipelineModule(
        layers=layers(task), num_stages=task.degrees["pp"], loss_fn=llama.loss_of, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=llama.adamw(module.parameters()), config=_config(task))

    def step(number: int) -> float:
        return engine.train_batch(data_iter=iter(task.micro_batches(number))).item()

    return Engine(step, version=VERSION)
