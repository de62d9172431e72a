"""The vocabulary of a pipeline schedule: what one rank does, as data.

A schedule is one list of actions per pipeline rank. The same list is simulated (simulator.py), drawn, and executed
by a trainer. Virtual stage g of p ranks lives on rank g % p as its chunk g // p; the model runs through g = 0, 1, ...
"""

from __future__ import annotations

from enum import Enum

import msgspec


class ActionKind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    EXCHANGE = "exchange"
    UNSHARD = "unshard"
    RESHARD = "reshard"
    REDUCE_GRAD = "reduce_grad"
    OPTIM = "optim"


class Direction(Enum):
    SEND = "send"
    RECV = "recv"


class Tensor(Enum):
    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Transfer(msgspec.Struct, frozen=True):
    """One boundary tensor between two ranks, seen from one of them.

    virtual_stage is the stage that consumes the tensor: as its forward input (ACTIVATION) or as the gradient of its
    output (GRADIENT). So (tensor, micro_batch, virtual_stage) names a transfer, the same on both of its ranks.
    """

    direction: Direction
    peer: int
    tensor: Tensor
    micro_batch: int
    virtual_stage: int


class Action(msgspec.Struct, frozen=True):
    """One step of one rank.

    micro_batch, chunk: what a compute step works on; None where it has no meaning.
    transfers: of an EXCHANGE, all posted together.
    blocking: whether the rank stops until every transfer of an EXCHANGE is complete. When it does not stop, the
    compute step that needs a received tensor waits for that one.
    """

    kind: ActionKind
    micro_batch: int | None = None
    chunk: int | None = None
    transfers: tuple[Transfer, ...] = ()
    blocking: bool = True


RankActions = list[Action]


def forward(micro_batch: int, chunk: int = 0) -> Action:
    return Action(ActionKind.FORWARD, micro_batch, chunk)


def backward(micro_batch: int, chunk: int = 0) -> Action:
    return Action(ActionKind.BACKWARD, micro_batch, chunk)


def exchange(*transfers: Transfer | None, blocking: bool = True) -> list[Action]:
    """The grouped EXCHANGE of the given transfers, or nothing when none is left.

    None stands for a transfer that the first or last stage does not have; a list makes both cases one `+=`.
    """
    present = tuple(t for t in transfers if t is not None)
    return [Action(ActionKind.EXCHANGE, transfers=present, blocking=blocking)] if present else []


class Boundary:
    """The four transfers at the edges of a virtual stage, None where the model begins or ends.

    p ranks, v chunks per rank; micro_batch and chunk are those of the *local* compute step: `recv_activation` is what
    its forward needs, `send_gradient` what its backward makes.
    """

    def __init__(self, rank: int, p: int, v: int = 1) -> None:
        self._rank, self._p, self._last = rank, p, p * v - 1

    def _stage(self, chunk: int) -> int:
        return chunk * self._p + self._rank

    def recv_activation(self, micro_batch: int, chunk: int = 0) -> Transfer | None:
        stage = self._stage(chunk)
        if stage == 0:
            return None
        return Transfer(Direction.RECV, (stage - 1) % self._p, Tensor.ACTIVATION, micro_batch, stage)

    def send_activation(self, micro_batch: int, chunk: int = 0) -> Transfer | None:
        stage = self._stage(chunk)
        if stage == self._last:
            return None
        return Transfer(Direction.SEND, (stage + 1) % self._p, Tensor.ACTIVATION, micro_batch, stage + 1)

    def recv_gradient(self, micro_batch: int, chunk: int = 0) -> Transfer | None:
        stage = self._stage(chunk)
        if stage == self._last:
            return None
        return Transfer(Direction.RECV, (stage + 1) % self._p, Tensor.GRADIENT, micro_batch, stage)

    def send_gradient(self, micro_batch: int, chunk: int = 0) -> Transfer | None:
        stage = self._stage(chunk)
        if stage == 0:
            return None
        return Transfer(Direction.SEND, (stage - 1) % self._p, Tensor.GRADIENT, micro_batch, stage - 1)
