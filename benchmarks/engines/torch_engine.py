"""PyTorch's own parallelism on transformers' Llama: DDP, fully_shard, DTensor plans, torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import llama
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from worker import CLIP, GLOBAL_BATCH, Engine, Task

VERSION = f"PyTorch, {llama.NAME}"


def start(task: Task) -> Engine:
    if task.ranks > 1:
        dist.init_process_group("gloo")
    return {"loop": _loop, "ddp": _ddp, "fsdp": _fsdp, "tp": _tp, "pipeline": _pipeline}[task.kind](task)


def _mean(losses: list[Tensor], ranks: int) -> float:
    mean = torch.stack(losses).mean()
    if ranks > 1:
        dist.all_reduce(mean)
    return (mean / ranks).item()


def _clip(parameters: Iterable[nn.Parameter], split: bool = False) -> None:
    """By the norm of the whole model. split: ranks hold different parameters, or parts of them where they are DTensors;
    then one all-reduce for all."""
    every = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in every if p.grad is not None]
    if not split:
        nn.utils.clip_grad_norm_(every, CLIP)
        return
    whole = [g for g in grads if not isinstance(g, DTensor)] if any(isinstance(g, DTensor) for g in grads) else []
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in grads if not any(g is w for w in whole)]
    squares = get_total_norm(parts).square()
    dist.all_reduce(squares)
    norm = (squares + get_total_norm(whole).square()).sqrt()
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    torch._foreach_mul_(local, torch.clamp(CLIP / (norm + 1e-6), max=1.0).item())


def _accumulating(task: Task, module: Any, quiet: Any, replicas: int, split: bool = False) -> Engine:
    """Accumulation over micro-batches, one optimizer step. quiet: (module, last) -> context of a backward."""
    optimizer = llama.adamw(module.parameters())

    def step(number: int) -> float:
        batches, losses = task.micro_batches(number), []
        for i, (tokens, labels) in enumerate(batches):
            with quiet(module, i == len(batches) - 1):
                loss = llama.forward(module, tokens, labels)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        _clip(module.parameters(), split)
        optimizer.step()
        optimizer.zero_grad()
        return _mean(losses, replicas)

    return Engine(step, version=VERSION)


def _loop(task: Task) -> Engine:
    return _accumulating(task, llama.model(task), lambda module, last: nullcontext(), 1)


def _ddp(task: Task) -> Engine:
    module = nn.parallel.DistributedDataParallel(llama.model(task), gradient_as_bucket_view=True)
    return _accumulating(task, module, lambda m, last: nullcontext() if last else m.no_sync(), task.ranks)


def _fsdp(task: Task) -> Engine:
    from torch.distributed.fsdp import fully_shard

    module: Any = llama.model(task)
    mesh = init_device_mesh("cpu", (task.ranks,))
    again = task.degrees["zero"] == 3
    for block in module.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    fully_shard(module, mesh=mesh, reshard_after_forward=again)
    for part in (*module.model.layers, module):
        part.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    return _accumulating(task, module, lambda m, last: nullcontext(), task.ranks)


def _tp(task: Task) -> Engine:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import Replicate

    module: Any = llama.model(task)
    mesh = init_device_mesh("cpu", (task.ranks,))
    for block in module.model.layers:
        plan = dict.fromkeys(
            [*(f"self_attn.{p}_proj" for p in "qkv"), "mlp.gate_proj", "mlp.up_proj"], ColwiseParallel()
        )
        parallelize_module(
            block, mesh, {**plan, "self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        )
    parallelize_module(
        module,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    return _accumulating(task, module, lambda m, last: nullcontext(), 1, split=True)


def _pipeline(task: Task) -> Engine:
    from llama_stages import layers
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    every, rank, ranks = layers(task), task.rank, task.ranks
    chunks = task.degrees.get("vpp", 1)
    cuts = _cuts(len(every), ranks * chunks)
    mine = [nn.Sequential(*every[cuts[i] : cuts[i + 1]]) for i in range(rank, ranks * chunks, ranks)]
    stages = [PipelineStage(part, rank + i * ranks, ranks * chunks, torch.device("cpu")) for i, part in enumerate(mine)]
    count = GLOBAL_BATCH // task.micro_batch
    if chunks == 1:
        schedule: Any = Schedule1F1B(stages[0], count, loss_fn=llama.loss_of)
    else:
        schedule = ScheduleInterleaved1F1B(stages, count, loss_fn=llama.loss_of)
    parameters = [p for part in mine for p in part.parameters()]
    optimizer = llama.adamw(parameters)
    last = rank == ranks - 1

    def step(number: int) -> float | None:
        batches = task.micro_batches(number)
        losses: list[Tensor] = []
        inputs = (torch.cat([tokens for tokens, _ in batches]),) if rank == 0 else ()
        outputs = {"target": torch.cat([labels for _, labels in batches]), "losses": losses} if last else {}
        schedule.step(*inputs, **outputs)
        _clip(parameters, split=True)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if last else None

    return Engine(step, version=VERSION)


def _cuts(modules: int, stages: int) -> list[int]:
    """Where stages begin: blocks spread evenly, the embedding with the first and the head with the last."""
    blocks = modules - 2
    return [0, *(1 + blocks * i // stages for i in range(1, stages)), modules]
