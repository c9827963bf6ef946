"""What training returns: variables put together from their owners, outputs from the replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partc.runtime.checkpoints.not_saved import Unsaved
from partc.runtime.execution.recorder import RankTimes
from partc.runtime.plan.boxes import Shape, first_index, is_empty, normalised
from partc.runtime.plan.members import leaders_of
from partc.runtime.plan.program import Output, Plan
from partc.runtime.plan.variables import Box, VariablePiece
from partc.runtime.transports.exchanged import Exchanged

TRAINED_FILE = "trained.safetensors"
LOG_FILE = "run.log"  # of what was printed while training
DISAGREEING_FILE = "disagreeing.safetensors"  # the variables of a training whose copies differ

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a training leaves behind.

    `outputs` has one entry per step: output name -> value of the total batch; per-replica outputs are
    stacked along a new leading axis. `variables_after` holds the variables after the steps asked for.
    `first_step`: steps that were trained before this run; `last_step`: of this run, fewer than asked for if
    it was asked to stop; `stopped_by`: the signal by which the launcher was asked, 0 if none. `waiting_s`:
    rank that has something to do -> how long it waited for communications; `data_s`, `saving_s`: how long the
    rank that waited longest waited for data, and for checkpoints; `trained_s`: how long steps took the rank
    that they took longest, by the clock by which it waited (`steps_per_s` is by the first one's).
    `disagreeing` names replicated variables whose copies are not bitwise equal: always a mistake. `unsaved`:
    of the last checkpoint, where it could not be written.
    """

    variables: dict[str, Array]
    outputs: tuple[dict[str, Array], ...] = ()
    variables_after: dict[int, dict[str, Array]] = field(default_factory=dict)
    first_step: int = 0
    last_step: int = 0
    stopped_by: int = 0
    waiting_s: dict[int, float] = field(default_factory=dict)
    data_s: float = 0.0
    saving_s: float = 0.0
    disagreeing: tuple[str, ...] = ()
    payload_bytes: dict[int, dict[str, int]] = field(default_factory=dict)  # rank -> kind -> supplied in all
    exchanged: dict[int, Exchanged] = field(default_factory=dict)  # rank -> sent and received in all
    steps_per_s: float = 0.0
    trained_s: float = 0.0
    samples: int | None = None  # that all replicas used in this run; None: nobody has counted them
    times: dict[int, RankTimes] = field(default_factory=dict)  # rank -> the traced steps
    unsaved: Unsaved | None = None
    lost_workers: tuple[str, ...] = ()  # of asynchronous training: who died, and how
    missed_pushes: dict[int, int] = field(
        default_factory=dict
    )  # pushes of others since a step began -> steps

    @property
    def waited(self) -> dict[int, float]:
        """Return by rank the share of the time that it waited for communications."""
        return {rank: s / self.trained_s for rank, s in self.waiting_s.items() if self.trained_s}

    @property
    def data_waited(self) -> float:
        """Return the share of the time that the rank waited for data that waited longest for it."""
        return self.data_s / self.trained_s if self.trained_s else 0.0


@dataclass(frozen=True, slots=True)
class Owner:
    """A rank and the part of a variable that it holds."""

    rank: int
    piece: VariablePiece


def owners_of(plan: Plan) -> dict[str, tuple[Owner, ...]]:
    """Return who holds each variable: in the order of their first elements, then of ranks; no empty parts."""
    alike: dict[str, dict[Box | None, list[Owner]]] = {}  # thousands of ranks have few boxes of a variable
    for rank in plan.ranks:
        for piece in rank.pieces:
            alike.setdefault(piece.variable, {}).setdefault(piece.box, []).append(Owner(rank.rank, piece))
    owners: dict[str, tuple[Owner, ...]] = {}
    for variable in plan.variables:
        places: list[tuple[Shape, int, Owner]] = []
        for box, same in alike.get(variable.name, {}).items():
            if not is_empty(box):
                begin = first_index(box)
                places += [(begin, owner.rank, owner) for owner in same]
        if places:
            places.sort(key=lambda place: place[:2])
            owners[variable.name] = tuple(owner for _, _, owner in places)
    return owners


def copies_of(owners: Sequence[Owner]) -> list[tuple[Owner, ...]]:
    """Return the owners of each part: those who hold the same one must hold the same bits."""
    copies: dict[Box | None, list[Owner]] = {}
    normal: dict[Box | None, Box | None] = {None: None}
    for owner in owners:
        box = owner.piece.box
        if box not in normal:
            normal[box] = normalised(box)
        copies.setdefault(normal[box], []).append(owner)
    return [tuple(same) for same in copies.values()]


def pieces_among(owners: Sequence[Owner]) -> tuple[Owner, ...]:
    """Return one owner of each part; together they hold the variable once."""
    return tuple(same[0] for same in copies_of(owners))


def assemble_outputs(plan: Plan, by_rank: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
    """Put the outputs of one step together, each replica's from its first rank: name -> the total batch's."""
    leaders = leaders_of(plan)
    return {
        output.name: assemble_output(output, [by_rank[rank.rank][output.name] for rank in leaders])
        for output in plan.outputs
        if all(output.name in by_rank[rank.rank] for rank in leaders)
    }


def assemble_output(output: Output, values: Sequence[Array]) -> Array:
    """Put one output's values of all replicas, in their order, together."""
    match output.layout:
        case "whole":
            return values[0]
        case "split":
            return np.concatenate(values, axis=output.axis or 0)
        case _:
            return np.stack(values)
