"""Backward through a stage in two steps: the gradient of its input first, those of its parameters later.

The autograd graph is cut where parameters enter it. Call *path* the nodes between the output and the root (the
stage's input): the first step runs them all, which needs no parameter's gradient, and keeps the gradient that arrives
at each node where a parameter joins the path. The second step starts from each such node, once, toward its own
parameters alone, so nothing on the path is computed twice. What forward saved stays until the second step is done.
A Python autograd.Function computes all its gradients in one go (fused products and collectives), so those of its
parameters are taken in the first step and only added in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from fivefold.errors import FivefoldError

_Gradients = tuple[torch.Tensor | None, ...]  # None where the output does not depend on what was asked for


@dataclass(frozen=True, slots=True)
class _Part:
    """One call of backward: from these edges or tensors, with these gradients, into these parameters only."""

    starts: Sequence[Any]
    gradients: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor] | None  # None: into all that is reached


@dataclass(slots=True)
class Owed:
    """The gradients of a stage's parameters that one micro-batch still owes."""

    _parts: list[_Part] = field(default_factory=list)

    def pay(self) -> None:
        """Add them to the parameters' .grad, with the hooks that run on that, and let go of the graph."""
        while self._parts:
            part = self._parts.pop()
            torch.autograd.backward(part.starts, part.gradients, inputs=part.parameters)


def input_gradient(
    output: GradientEdge, gradient: torch.Tensor, root: GradientEdge | None
) -> tuple[torch.Tensor | None, Owed]:
    """The gradient of `root` and what is owed to the parameters.

    output: of the stage, or its loss; gradient: what arrives there. root: what the stage computes from; what lies
    behind it (an embedding) is owed too. None: nothing but parameters, so that all of the backward is owed.
    Raises FivefoldError when a parameter joins the path at two places, which two separate calls would count wrongly.
    """
    path = {} if root is None else _path(output, root.node)
    if root is None or (not path and output.node is not root.node):
        return None, Owed([_Part([output], [gradient], None)])
    joints = _joints(path, root.node)
    behind = [] if _is_leaf(root.node) else _leaves(root.node)
    _refuse_shared([*(joint.parameters for joint in joints), behind])
    of_root, found = _first_step(output, gradient, root, joints)
    parts = [part for joint, arrived in zip(joints, found, strict=True) for part in _parts_of(joint, arrived)]
    if of_root is not None and behind:
        parts.append(_Part([root], [of_root], None))
    # pay() takes from the end: the parameters nearest the output first, as an ordinary backward does.
    return of_root, Owed(parts[::-1])


def _first_step(
    output: GradientEdge, gradient: torch.Tensor, root: GradientEdge, joints: Sequence[_Joint]
) -> tuple[torch.Tensor | None, list[_Gradients]]:
    """One call of autograd along the path: the gradient of the root, and for each joint those that arrive at its
    outputs, or where it is fused those of its parameters."""
    asked: list[list[Any]] = [joint.parameters if joint.fused else joint.edges for joint in joints]
    wanted: Any = [root, *(each for some in asked for each in some)]
    kept = any(not joint.fused for joint in joints)  # the second step goes through the same graph
    of_root, *rest = torch.autograd.grad([output], wanted, [gradient], retain_graph=kept, allow_unused=True)
    left = iter(rest)
    return of_root, [tuple(next(left) for _ in some) for some in asked]


def _parts_of(joint: _Joint, arrived: _Gradients) -> list[_Part]:
    """What is left to do for a joint's parameters. None arrives where the output does not depend on it."""
    if joint.fused:
        pairs = zip(joint.parameters, arrived, strict=True)
        return [_Part([parameter], [grad], [parameter]) for parameter, grad in pairs if grad is not None]
    some = [(edge, grad) for edge, grad in zip(joint.edges, arrived, strict=True) if grad is not None]
    return [_Part([edge for edge, _ in some], [grad for _, grad in some], joint.parameters)] if some else []


@dataclass(frozen=True, slots=True)
class _Joint:
    """A node of the path that parameters enter by a way of their own. outputs: the numbers of its outputs in use."""

    node: Node
    outputs: list[int]
    parameters: list[torch.Tensor]

    @property
    def fused(self) -> bool:
        """Whether the parameters' gradients are taken in the first step."""
        return isinstance(self.node, BackwardCFunction)

    @property
    def edges(self) -> list[GradientEdge]:
        return [GradientEdge(self.node, number) for number in self.outputs]


def _path(output: GradientEdge, root: Node) -> dict[Node, set[int]]:
    """The nodes from which `root` is reached, `root` left out, each with its outputs in use; from the output down."""
    users: dict[Node, list[Node]] = {}
    outputs: dict[Node, set[int]] = {output.node: {output.output_nr}}
    stack = [output.node]
    while stack:
        node = stack.pop()
        if node is root:
            continue
        for child, number in node.next_functions:
            if child is None:
                continue
            if child not in outputs:
                stack.append(child)
            outputs.setdefault(child, set()).add(number)
            users.setdefault(child, []).append(node)
    reaching, stack = {root}, [root]
    while stack:
        for user in users.get(stack.pop(), ()):
            if user not in reaching:
                reaching.add(user)
                stack.append(user)
    # `outputs` keeps the order of discovery, the same on ranks with the same graph: collectives stay in step.
    return {node: numbers for node, numbers in outputs.items() if node in reaching and node is not root}


def _joints(path: dict[Node, set[int]], root: Node) -> list[_Joint]:
    """The nodes of the path where parameters join it. What a node has aside of the path cannot reach the root."""
    joints = []
    for node, outputs in path.items():
        aside = [child for child, _ in node.next_functions if child is not None and child not in path and child != root]
        parameters = [leaf for child in dict.fromkeys(aside) for leaf in _leaves(child)]
        if parameters:
            joints.append(_Joint(node, sorted(outputs), parameters))
    return joints


def _leaves(start: Node) -> list[torch.Tensor]:
    """The tensors whose .grad lies behind `start`, in a fixed order."""
    leaves, seen, stack = [], {start}, [start]
    while stack:
        node = stack.pop()
        if _is_leaf(node):
            leaves.append(node.variable)  # type: ignore[attr-defined]
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return leaves


def _is_leaf(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def _refuse_shared(uses: Sequence[Sequence[torch.Tensor]]) -> None:
    seen: set[int] = set()
    for use in uses:
        shared = next((parameter for parameter in use if id(parameter) in seen), None)
        if shared is not None:
            raise FivefoldError(
                f"A parameter of shape {tuple(shared.shape)} is used at two places of one pipeline stage, and this "
                "schedule splits the backward, which would count its gradient wrongly. Put the two uses on different "
                "stages, or choose afab, 1f1b or interleaved.",
                code="shared-parameter",
                option="schedule",
            )
        seen |= {id(parameter) for parameter in use}
