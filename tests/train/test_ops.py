"""Each operation against PyTorch's own and against finite differences; what it saves; shapes without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from fivefold.train.ops import ACTIVATIONS, RMSNorm, rotate

THEIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def norm(width: int, dtype: torch.dtype = torch.float64) -> RMSNorm:
    made = RMSNorm(width, 1e-5).to(dtype)
    made.weight.data.copy_(1 + 0.3 * random(width, seed=5).detach())
    return made


def table(seq: int, head_dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angles = torch.arange(3, 3 + seq)[None, :, None, None] * 100.0 ** -torch.linspace(0, 1, head_dim // 2).double()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated_by_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)


def same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor, bound: float = 1e-13) -> None:
    """Values and gradients for the same inputs."""
    got, expected = ours(*inputs), theirs(*inputs)
    assert got.shape == expected.shape
    assert got.dtype == inputs[0].dtype
    grad = random(*got.shape, dtype=got.dtype, seed=9).detach()
    pairs = zip(
        (got, *torch.autograd.grad(got, inputs, grad)),
        (expected, *torch.autograd.grad(expected, inputs, grad)),
        strict=True,
    )
    for mine, other in pairs:
        assert mine.dtype == inputs[0].dtype
        assert (mine - other).norm() <= bound * other.norm()


def test_rms_norm_is_pytorchs() -> None:
    ours = norm(24)
    same(
        lambda x, w: torch.func.functional_call(ours, {"weight": w}, (x,)),
        lambda x, w: F.rms_norm(x, (24,), w, 1e-5),
        random(2, 5, 24),
        random(24, seed=1),
    )


def test_rms_norm_of_heads_and_of_a_view() -> None:
    ours = norm(8)
    wide = random(2, 8, 5, 3)
    same(lambda x: ours(x.transpose(1, 3)), lambda x: F.rms_norm(x.transpose(1, 3), (8,), ours.weight, 1e-5), wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_once(dtype: torch.dtype) -> None:
    """Against fp64 of the same rounded inputs: no worse than one rounding of the result."""
    ours = norm(64, dtype)
    exact = ours.weight.detach().double()
    same(
        ours,
        lambda x: F.rms_norm(x.double(), (64,), exact, 1e-5),
        random(3, 7, 64, dtype=dtype),
        bound=2 * torch.finfo(dtype).eps,
    )


def test_rotation_is_complex_multiplication() -> None:
    cos, sin = table(7, 12)
    same(lambda x: rotate(x, cos, sin), lambda x: rotated_by_complex_numbers(x, cos, sin), random(2, 7, 3, 12))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_pytorchs(name: str) -> None:
    act, theirs = ACTIVATIONS[name], THEIRS[name]
    gate, up = random(2, 5, 11), random(2, 5, 11, seed=1)
    same(act, theirs, gate)
    same(act, lambda g, u: theirs(g) * u, gate, up)
    same(act, lambda g, u: theirs(g) * u, *(random(2, 5, 64, dtype=torch.bfloat16, seed=s) for s in (2, 3)), bound=1e-2)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: (norm(6), random(2, 3, 6)),
        lambda: (lambda x, w: torch.func.functional_call(norm(6), {"weight": w}, (x,)), random(2, 3, 6), random(6)),
        lambda: (lambda x: rotate(x, *table(4, 6)), random(1, 4, 2, 6)),
        *[lambda name=name: (ACTIVATIONS[name], random(2, 7), random(2, 7, seed=1)) for name in ACTIVATIONS],
    ],
    ids=["norm", "norm-weight", "rotate", *ACTIVATIONS],
)
def test_gradients_are_finite_differences(operation: Callable[[], tuple[Any, ...]]) -> None:
    function, *inputs = operation()
    assert torch.autograd.gradcheck(function, inputs)


def saved_by(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        function(*inputs)
    return saved


def test_what_is_saved() -> None:
    """By storage: the inputs themselves, and for a norm one fp32 number per row."""
    x = random(2, 5, 24, dtype=torch.bfloat16)
    ours = norm(24, torch.bfloat16)
    rest = [s for s in saved_by(ours, x) if s.data_ptr() not in (x.data_ptr(), ours.weight.data_ptr())]
    assert [(tuple(s.shape), s.dtype) for s in rest] == [((2, 5, 1), torch.float32)]
    cos, sin = table(5, 24, torch.bfloat16)
    heads = random(2, 5, 1, 24, dtype=torch.bfloat16)
    assert {s.data_ptr() for s in saved_by(lambda x: rotate(x, cos, sin), heads)} == {cos.data_ptr(), sin.data_ptr()}
    up = random(2, 5, 24, dtype=torch.bfloat16)
    for act in ACTIVATIONS.values():
        assert {s.data_ptr() for s in saved_by(act, x, up)} == {x.data_ptr(), up.data_ptr()}


def test_shapes_without_values() -> None:
    with FakeTensorMode() as fake:
        x = fake.from_tensor(torch.zeros(2, 5, 24)).requires_grad_()
        weighted = RMSNorm(24, 1e-5)
        heads = weighted(x).unflatten(-1, (3, 8))
        turned = rotate(heads, torch.zeros(1, 5, 1, 4), torch.zeros(1, 5, 1, 4)).flatten(-2)
        ACTIVATIONS["silu"](turned, x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_a_second_derivative_is_refused() -> None:
    x = random(2, 6)
    (grad,) = torch.autograd.grad(norm(6)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
