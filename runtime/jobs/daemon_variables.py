"""A rank's variables at the end of training: written by their owners, merged by the first rank."""

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from partc.runtime.data.checkpoint import TensorFile, map_array, write_arrays, write_tensors
from partc.runtime.execution.environment import Environment
from partc.runtime.jobs.results import copies_of, owners_of, pieces_among
from partc.runtime.plan.program import Plan, Rank

Array = np.ndarray[Any, np.dtype[Any]]

_POLL_S = 1e-3


class VariablesOfRank:
    """What one rank holds, and its share in writing the whole."""

    def __init__(self, plan: Plan, rank: Rank, environment: Environment, world: MPI.Intracomm) -> None:
        self._plan = plan
        self._rank = rank
        self._environment = environment
        self._world = world
        self._variables = {variable.name: variable for variable in plan.variables}
        owners = owners_of(plan)
        self._pieces = {name: pieces_among(owners[name]) for name in owners}
        self._copies = [(name, same) for name in owners for same in copies_of(owners[name]) if len(same) > 1]

    def barrier(self) -> None:
        """Wait for all ranks, asleep."""
        complete(self._world.Ibarrier())

    def write(self, path: Path) -> None:
        """Write all variables to `path`: every owner its pieces to a file of its own, then rank 0 merges."""
        write_arrays(_part_file(path, self._rank.rank), self._own_pieces())
        self.barrier()
        if self._rank.rank == 0:
            write_tensors(path, [self._merged(path, name) for name in self._pieces])
            for rank in self._plan.ranks:
                _part_file(path, rank.rank).unlink()

    def disagreeing(self) -> tuple[str, ...]:
        """Return the variables of which copies are not bitwise equal. All ranks must call it."""
        limits = np.iinfo(np.int64)
        lowest = np.full(len(self._copies), limits.max, np.int64)
        highest = np.full(len(self._copies), limits.min, np.int64)
        for number, (_, copies) in enumerate(self._copies):
            for owner in copies:
                if owner.rank == self._rank.rank:
                    digest = _digest(self._environment.array(owner.piece.value))
                    lowest[number] = highest[number] = digest
        complete(self._world.Iallreduce(MPI.IN_PLACE, lowest, MPI.MIN))
        complete(self._world.Iallreduce(MPI.IN_PLACE, highest, MPI.MAX))
        differing = zip(self._copies, lowest, highest, strict=True)
        return tuple(dict.fromkeys(name for (name, _), low, high in differing if low < high))

    def _own_pieces(self) -> dict[str, Array]:
        return {
            name: self._environment.array(owner.piece.value)
            for name, pieces in self._pieces.items()
            for owner in pieces
            if owner.rank == self._rank.rank
        }

    def _merged(self, path: Path, name: str) -> TensorFile:
        variable = self._variables[name]
        pieces = (map_array(_part_file(path, owner.rank), name) for owner in self._pieces[name])
        boxes = [owner.piece.box for owner in self._pieces[name]]
        return TensorFile(name, variable.dtype, variable.shape, pieces, boxes)


def _part_file(path: Path, rank: int) -> Path:
    return path.with_suffix(f".rank-{rank}.part")


def complete(request: MPI.Request) -> None:
    """Wait for a request, asleep."""
    while not request.Test():
        time.sleep(_POLL_S)


def _digest(array: Array) -> int:
    digest = hashlib.sha256(np.asarray(array, order="C").reshape(-1).view(np.uint8).data).digest()
    return int.from_bytes(digest[:8], "little") >> 1
