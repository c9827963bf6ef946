"""Communication between processes by MPI: non-blocking collectives, buffers only."""

from contextlib import AbstractContextManager, nullcontext

from mpi4py import MPI

from partc.runtime.plan.members import are_spread_alike
from partc.runtime.plan.program import Kind, Plan, Start
from partc.runtime.transports.communication import ROW_KINDS, Part
from partc.runtime.transports.host_levels import levels_among
from partc.runtime.transports.in_memory import Board, InMemoryTransport
from partc.runtime.transports.mover import Mover
from partc.runtime.transports.mpi_dense import DenseHandle
from partc.runtime.transports.mpi_handle import Group, MovedHandle, Requests
from partc.runtime.transports.mpi_levels import LevelGroup, LevelsHandle
from partc.runtime.transports.mpi_rows import RowsHandle
from partc.runtime.transports.sum_levels import levels_in
from partc.runtime.transports.transport import Handle, Traffic

LOOKS = 3  # at a time: what MPI moves in one lets it begin the next (docs/decisions/063)


class MPITransport:
    """One rank's side of MPI."""

    def __init__(self, plan: Plan, world: MPI.Intracomm) -> None:
        self.traffic = Traffic()
        self._alone = InMemoryTransport(Board())
        self._under_way: list[MovedHandle] = []
        self._requests = Requests()
        self._groups: dict[tuple[int, ...], Group] = {}
        self._levels: dict[tuple[Kind, tuple[int, ...]], LevelGroup] = {}
        self._mover = Mover(self._advance)
        hosts = {rank.rank: rank.host for rank in plan.ranks}
        scattering = {
            start.group
            for start in plan.instructions
            if isinstance(start, Start) and start.kind == "reduce_scatter"
        }
        scattered = {
            members
            for group in scattering
            if are_spread_alike([hosts[member] for member in members] for members in plan.groups[group])
            for members in plan.groups[group]
        }
        # Sorted, so that all ranks create their common communicators in one order.
        for members in sorted({members for groups in plan.groups.values() for members in groups}):
            if world.rank in members and len(members) > 1:
                first = world.Create_group(world.group.Incl(members))
                levels = (
                    levels_among(first, [hosts[member] for member in members])
                    if members in scattered
                    else None
                )
                self._groups[members] = Group(first, first.Dup(), self._requests, levels)
        for kind, members in sorted(levels_in(plan)):
            if world.rank in members:
                first = world.Create_group(world.group.Incl(members))
                self._levels[kind, members] = LevelGroup(Group(first, first.Dup(), self._requests))

    def start(self, part: Part) -> Handle:
        """Begin a communication."""
        if len(part.members) == 1:
            self.traffic.count(part)
            return self._alone.start(part)
        with self._mover.lock:
            return self._start(part)

    def progress(self) -> None:
        """Move on every communication under way."""
        with self._mover.lock:
            self._advance()

    def beside(self) -> AbstractContextManager[None]:
        """Return a context in which communications move on while this thread computes."""
        return self._mover.beside() if self._under_way else nullcontext()

    def _start(self, part: Part) -> Handle:
        self.traffic.count(part)
        handle: MovedHandle
        if part.hosts:
            handle = LevelsHandle(part, self._levels, self.progress)
        elif part.start.kind in ROW_KINDS:
            rows = RowsHandle(part, self._groups[part.members], self.progress)
            self.traffic.counts_bytes[part.start.kind] += rows.header_bytes
            handle = rows
        else:
            handle = DenseHandle(part, self._groups[part.members], self.progress)
        self._under_way.append(handle)
        return handle

    def _advance(self) -> None:
        for _ in range(LOOKS):
            if not self._under_way:
                return
            if self._requests.move():
                self._end_complete()

    def _end_complete(self) -> None:
        for handle in [handle for handle in self._under_way if handle.advance()]:
            self._under_way.remove(handle)
            self.traffic.count_complete(handle.part, handle.rows())
