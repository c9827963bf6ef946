"""A rank's variables at the end of training: written by their owners, merged by the first rank."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from partc.runtime.checkpoint import TensorFile, read_array, write_arrays, write_tensors
from partc.runtime.environment import Environment
from partc.runtime.program import Plan, PlanVariable, Rank
from partc.runtime.results import owners_of, pieces_of

Array = np.ndarray[Any, np.dtype[Any]]

_POLL_S = 1e-3


class VariablesOfRank:
    """What one rank holds, and its share in writing the whole."""

    def __init__(self, plan: Plan, rank: Rank, environment: Environment, world: MPI.Intracomm) -> None:
        self._plan = plan
        self._rank = rank
        self._environment = environment
        self._world = world

    def barrier(self) -> None:
        """Wait for all ranks, asleep."""
        _complete(self._world.Ibarrier())

    def write(self, path: Path) -> None:
        """Write all variables to `path`: every owner its pieces to a file of its own, then rank 0 merges."""
        write_arrays(_part_file(path, self._rank.rank), self._own_pieces())
        self.barrier()
        if self._rank.rank == 0:
            write_tensors(path, [self._merged(path, variable) for variable in self._held_variables()])
            for rank in self._plan.ranks:
                _part_file(path, rank.rank).unlink()

    def disagreeing(self) -> tuple[str, ...]:
        """Return the replicated variables whose copies are not bitwise equal. All ranks must call it."""
        names = [variable.name for variable in self._plan.variables]
        limits = np.iinfo(np.int64)
        lowest = np.full(len(names), limits.max, np.int64)
        highest = np.full(len(names), limits.min, np.int64)
        for held in self._rank.held:
            if held.start is None:
                digest = _digest(self._environment.array(held.value))
                lowest[names.index(held.variable)] = highest[names.index(held.variable)] = digest
        _complete(self._world.Iallreduce(MPI.IN_PLACE, lowest, MPI.MIN))
        _complete(self._world.Iallreduce(MPI.IN_PLACE, highest, MPI.MAX))
        return tuple(name for name, low, high in zip(names, lowest, highest, strict=True) if low < high)

    def _held_variables(self) -> list[PlanVariable]:
        return [variable for variable in self._plan.variables if owners_of(self._plan, variable)]

    def _own_pieces(self) -> dict[str, Array]:
        return {
            variable.name: self._environment.array(owner.held.value)
            for variable in self._plan.variables
            for owner in pieces_of(self._plan, variable)
            if owner.rank == self._rank.rank
        }

    def _merged(self, path: Path, variable: PlanVariable) -> TensorFile:
        def pieces() -> Iterator[Array]:
            for owner in pieces_of(self._plan, variable):
                yield read_array(_part_file(path, owner.rank), variable.name)

        return TensorFile(variable.name, variable.dtype, variable.shape, pieces())


def _part_file(path: Path, rank: int) -> Path:
    return path.with_suffix(f".rank-{rank}.part")


def _complete(request: MPI.Request) -> None:
    while not request.Test():
        time.sleep(_POLL_S)


def _digest(array: Array) -> int:
    digest = hashlib.sha256(np.asarray(array, order="C").reshape(-1).view(np.uint8).data).digest()
    return int.from_bytes(digest[:8], "little") >> 1
