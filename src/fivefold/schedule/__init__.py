"""Pipeline schedules as data: the actions of every rank, an event simulator over them, and a fast exact cost.

`actions` gives one list per rank, which `simulate` runs and a trainer can execute; `pipeline_seconds` gives the same
makespan for many rows of stage times at once; `in_flight*` say how many activations a rank holds. `placement` says
which rank holds which virtual stage. Parameter gathers, gradient reduction and the optimizer step have their action
kinds, but no schedule here emits them, and the simulator and the trainer refuse them.
"""

from fivefold.schedule.actions import Action, ActionKind, Direction, Placement, RankActions, Tensor, Transfer
from fivefold.schedule.cost import pipeline_seconds
from fivefold.schedule.registry import (
    SCHEDULES,
    actions,
    illegal_reason,
    in_flight,
    in_flight_by_chunk,
    in_flight_moments,
    legal,
    placement,
    split_moments,
)
from fivefold.schedule.simulator import Timeline, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Direction",
    "Placement",
    "RankActions",
    "Tensor",
    "Timeline",
    "Transfer",
    "actions",
    "illegal_reason",
    "in_flight",
    "in_flight_by_chunk",
    "in_flight_moments",
    "legal",
    "pipeline_seconds",
    "placement",
    "simulate",
    "split_moments",
]
