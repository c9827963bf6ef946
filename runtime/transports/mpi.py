"""Communication between processes by MPI: non-blocking collectives, buffers only.

Every group has two communicators. On the first, dense collectives and row headers begin in program order.
On the second, rows begin in the order of their headers, each when its header has come: so all members
meet the collectives of a communicator in one order though headers return at different times.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from partc.runtime.program import Plan
from partc.runtime.transports.communication import ROW_KINDS, Dense, Part
from partc.runtime.transports.in_memory import Board, InMemoryTransport
from partc.runtime.transports.mpi_rows import RowsHandle
from partc.runtime.transports.transport import Handle, Traffic

Array = np.ndarray[Any, np.dtype[Any]]
Members = tuple[int, ...]

_OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class MPITransport:
    """One rank's side of MPI."""

    def __init__(self, plan: Plan, world: MPI.Intracomm) -> None:
        self.traffic = Traffic()
        self._alone = InMemoryTransport(Board())
        self._under_way: list[DenseHandle | RowsHandle] = []
        self._queues: dict[Members, deque[RowsHandle]] = {}
        self._ordered: dict[Members, MPI.Intracomm] = {}
        self._for_rows: dict[Members, MPI.Intracomm] = {}
        # Sorted, so that all ranks create their common communicators in one order.
        for members in sorted({group for rank in plan.ranks for group in rank.groups.values()}):
            if world.rank in members and len(members) > 1:
                self._ordered[members] = world.Create_group(world.group.Incl(members))
                self._for_rows[members] = self._ordered[members].Dup()
                self._queues[members] = deque()

    def start(self, part: Part) -> Handle:
        """Begin a communication."""
        self.traffic.count(part)
        if len(part.members) == 1:
            return self._alone.start(part)
        ordered = self._ordered[part.members]
        handle: DenseHandle | RowsHandle
        if part.start.kind in ROW_KINDS:
            queue = self._queues[part.members]
            handle = RowsHandle(part, ordered, self._for_rows[part.members], queue, self.progress)
            self.traffic.counts_bytes[part.start.kind] += handle.header_bytes
        else:
            handle = DenseHandle(part, ordered, self.progress)
        self._under_way.append(handle)
        return handle

    def progress(self) -> None:
        """Move on every communication under way."""
        for handle in [handle for handle in self._under_way if handle.advance()]:
            self._under_way.remove(handle)
            self.traffic.count_complete(handle.part, handle.rows())


class DenseHandle:
    """A dense collective under way."""

    def __init__(self, part: Part, comm: MPI.Intracomm, progress: Callable[[], None]) -> None:
        self.part = part
        self._progress = progress
        self._landings: list[tuple[Array, Array]] = []  # (target, what arrived elsewhere)
        self._requests = [self._begin(part, dense, comm) for dense in part.dense]
        self._complete = False

    def done(self) -> bool:
        """Move on everything under way; tell whether this is complete."""
        if not self._complete:
            self._progress()
        return self._complete

    def rows(self) -> tuple[Array, ...]:
        """Return nothing: dense kinds land in their targets."""
        return ()

    def advance(self) -> bool:
        """Tell whether the collective is complete; land what arrived elsewhere."""
        if MPI.Request.Testall(self._requests):
            for target, arrived in self._landings:
                target[...] = arrived.reshape(target.shape)
            self._complete = True
        return self._complete

    def _begin(self, part: Part, dense: Dense, comm: MPI.Intracomm) -> MPI.Request:
        match part.start.kind:
            case "broadcast":
                return comm.Ibcast(_bytes_of(dense.target), root=0)
            case "all_gather":
                return _begin_all_gather(part, dense, comm)
            case "reduce_scatter":
                return self._begin_reduce_scatter(part, dense, comm)
        operation = _OPERATIONS[part.start.reduction]
        if part.start.kind == "all_reduce":
            return comm.Iallreduce(MPI.IN_PLACE, self._widened(dense.target), operation)
        if part.is_root:
            return comm.Ireduce(MPI.IN_PLACE, self._widened(dense.target), operation, root=0)
        return comm.Ireduce(_widen(dense.source.reshape(-1)), None, operation, root=0)

    def _begin_reduce_scatter(self, part: Part, dense: Dense, comm: MPI.Intracomm) -> MPI.Request:
        source = _widen(dense.source.reshape(-1))
        region = np.empty(dense.target.size, source.dtype)
        self._landings.append((dense.target, region))
        operation = _OPERATIONS[part.start.reduction]
        return comm.Ireduce_scatter(source, region, part.start.counts, operation)

    def _widened(self, target: Array) -> Array:
        """Return the memory to reduce in place: the target's own where MPI can sum its type."""
        flat = target.reshape(-1)
        wide = _widen(flat)
        if wide is not flat:
            self._landings.append((target, wide))
        return wide


def _begin_all_gather(part: Part, dense: Dense, comm: MPI.Intracomm) -> MPI.Request:
    first = sum(part.start.counts[: part.position])
    whole = dense.target.reshape(-1)
    region = whole[first : first + dense.source.size]
    if region.ctypes.data != dense.source.ctypes.data:
        region[:] = dense.source.reshape(-1)
    sizes = [count * whole.itemsize for count in part.start.counts]
    return comm.Iallgatherv(MPI.IN_PLACE, [_bytes_of(whole), sizes, MPI.BYTE])


def _widen(flat: Array) -> Array:
    """Return float16 as float32: MPI sums 16 bits slowly or not at all."""
    return flat.astype(np.float32) if flat.dtype == np.float16 else flat


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
