"""The vocabulary of a pipeline schedule: what one rank does, as data.

A schedule is one list of actions per pipeline rank. The same list is simulated (simulator.py), drawn, and executed
by a trainer. The model runs through the virtual stages 0, 1, ..., p*v-1; `Placement` says which rank has which.

A backward step is either one BACKWARD, or INPUT_GRAD (the gradient that the stage before waits for) and later
WEIGHT_GRAD (the gradients of the stage's own parameters, which nobody waits for).
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


class Placement(Enum):
    """Where the virtual stages live on p ranks.

    LOOP: stage g is chunk g // p of rank g % p, so a pass through the model goes round the ranks once per chunk.
    V:    odd chunks run back: with two chunks rank r holds stages r and 2p-1-r, so one rank holds first and last.
    """

    LOOP = "loop"
    V = "v"

    def stage(self, rank: int, chunk: int, p: int) -> int:
        """The virtual stage that is this chunk of this rank."""
        backwards = self is Placement.V and chunk % 2 == 1
        return chunk * p + (p - 1 - rank if backwards else rank)

    def home(self, stage: int, p: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        chunk, place = divmod(stage, p)
        backwards = self is Placement.V and chunk % 2 == 1
        return (p - 1 - place if backwards else place), chunk


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


def input_grad(micro_batch: int, chunk: int = 0) -> Action:
    return Action(ActionKind.INPUT_GRAD, micro_batch, chunk)


def weight_grad(micro_batch: int, chunk: int = 0) -> Action:
    return Action(ActionKind.WEIGHT_GRAD, micro_batch, chunk)


def exchange(*transfers: Transfer | None, blocking: bool = True) -> list[Action]:
    """The grouped EXCHANGE of the given transfers, or nothing when none is left.

    None stands for a transfer that the first or last stage does not have; a list makes both cases one `+=`.
    """
    present = tuple(t for t in transfers if t is not None)
    return [Action(ActionKind.EXCHANGE, transfers=present, blocking=blocking)] if present else []


class Boundary:
    """The four transfers at the edges of a virtual stage, None where there is none.

    There is none where the model begins or ends, and between two stages of the same rank (the bottom of the V).
    p ranks, v chunks per rank; micro_batch and chunk are those of the *local* compute step: `recv_activation` is what
    its forward needs, `send_gradient` what its backward makes.
    """

    def __init__(self, rank: int, p: int, v: int = 1, placement: Placement = Placement.LOOP) -> None:
        self._rank, self._p, self._last, self._placement = rank, p, p * v - 1, placement

    def recv_activation(self, micro_batch: int, chunk: int = 0) -> Transfer | None:
        stage = self._stage(chunk)
        return self._transfer(Direction.RECV, Tensor.ACTIVATION, micro_batch, stage, stage - 1)

    def send_activation(self, micro_batch: int, chunk: int = 0) -> Transfer | None:
        after = self._stage(chunk) + 1
        return self._transfer(Direction.SEND, Tensor.ACTIVATION, micro_batch, after, after)

    def recv_gradient(self, micro_batch: int, chunk: int = 0) -> Transfer | None:
        stage = self._stage(chunk)
        return self._transfer(Direction.RECV, Tensor.GRADIENT, micro_batch, stage, stage + 1)

    def send_gradient(self, micro_batch: int, chunk: int = 0) -> Transfer | None:
        before = self._stage(chunk) - 1
        return self._transfer(Direction.SEND, Tensor.GRADIENT, micro_batch, before, before)

    def _stage(self, chunk: int) -> int:
        return self._placement.stage(self._rank, chunk, self._p)

    def _transfer(
        self, direction: Direction, tensor: Tensor, micro_batch: int, consumer: int, other: int
    ) -> Transfer | None:
        """The transfer with stage `other`, into the step of stage `consumer`."""
        if not 0 <= other <= self._last:
            return None
        peer, _ = self._placement.home(other, self._p)
        return None if peer == self._rank else Transfer(direction, peer, tensor, micro_batch, consumer)
