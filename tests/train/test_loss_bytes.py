"""What each profile says that a loss moves, against the operators that PyTorch runs for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import axes
import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.measure.frameworks import line_of
from fivefold.runtime import load_runtime
from fivefold.train.loss import cross_entropy_sum
from fivefold.train.mesh import Mesh
from fivefold.train.parallel.vocabulary import VocabCrossEntropy

TOKENS, VOCAB = 4, 96
# How often CUDA's kernels for rows that no shared memory holds read their first input: log-softmax for the maximum, the
# sum and the output, its backward for the sum and the output (aten/src/ATen/native/cuda/SoftMax.cu).
SWEEPS = {"_log_softmax": 3, "_log_softmax_backward_data": 2}
# These read one element of a row or none; the second one clears the gradient that it returns.
READ_NOTHING = ("nll_loss_forward", "nll_loss_backward", "gather", "scatter_add_", "index_put_", "zeros_like")


class Moved(TorchDispatchMode):
    """Counts the bytes of tensors as large as the logits that operators read and write."""

    def __init__(self, sweeps: dict[str, int] = SWEEPS) -> None:
        super().__init__()
        self.bytes, self._sweeps = 0, sweeps

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it runs on its own part comes by again
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        aliases = any(ret.alias_info is not None and not ret.alias_info.is_write for ret in func._schema.returns)
        if not aliases and name not in ("detach", "empty_like", "device"):
            read = [] if name in READ_NOTHING else self._large(args)
            sweeps = self._sweeps.get(name, 1) - 1
            self.bytes += sum(read) + sweeps * (read[0] if read else 0)
            self.bytes += 0 if name in ("scatter_add_", "index_put_") else sum(self._large(out))
        return out

    @staticmethod
    def _large(values: Any) -> list[int]:
        leaves = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
        return [each.numel() * each.element_size() for each in leaves if each.numel() == TOKENS * VOCAB]


def moved(loss: Callable[[Tensor, Tensor], Tensor], make: Callable[[Tensor], Tensor] = lambda x: x) -> list[float]:
    """Bytes per logit of each pass."""
    logits = make(torch.randn(1, TOKENS, VOCAB, dtype=torch.bfloat16)).requires_grad_()
    labels = torch.arange(TOKENS)[None]
    found = []
    with Moved() as count:
        value = loss(logits, labels)
        found.append(count.bytes)
        value.backward()
        found.append(count.bytes - found[0])
    return [each / (TOKENS * VOCAB) for each in found]


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@pytest.mark.parametrize("runtime", ["torchtitan", "fsdp", "fsdp1", "deepspeed-zero"])
def test_an_eager_cross_entropy(runtime):
    assert moved(eager) == list(load_runtime(runtime).loss_moved_bytes)


def test_accelerate_casts_the_logits_that_it_returns():
    ahead, back = moved(lambda logits, labels: (logits.float(), eager(logits, labels))[1])
    assert (ahead, back) == load_runtime("accelerate").loss_moved_bytes


def test_a_loss_in_parts_of_pytorchs():
    def on_rank(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        with loss_parallel():
            return moved(eager, lambda part: DTensor.from_local(part, mesh, [Shard(2)], run_check=False))

    wanted = load_runtime("torchtitan").sharded_loss_moved_bytes
    assert run_ranks(2, on_rank) == [list(wanted)] * 2


def test_fivefolds_own():
    profile = load_runtime("fivefold")
    assert moved(cross_entropy_sum) == list(profile.loss_moved_bytes)
    assert moved(VocabCrossEntropy(Mesh(axes.layout()), VOCAB)) == list(profile.sharded_loss_moved_bytes)


def test_autocast_leaves_log_softmax_in_16_bit():
    """What each of Composer's two metrics does after llm-foundry's loss, whose backward moves 4; rows of its vocabulary
    stay in a cache between sweeps."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode(), Moved(sweeps={}) as count:
            logits = torch.empty(TOKENS, VOCAB, dtype=torch.bfloat16, device="cuda")
            count.bytes = 0
            F.cross_entropy(logits, torch.empty(TOKENS, dtype=torch.int64, device="cuda"))
    finally:
        torch.set_autocast_enabled("cuda", False)
    metric = count.bytes / (TOKENS * VOCAB)
    assert line_of("llm-foundry").changes["loss_moved_bytes"][1] == 4 + 2 * metric
