"""Dense values between processes: one collective each, or two for long sums.

A long sum is an Ireduce_scatter, and then an Iallgatherv, or an Igatherv where only the root wants it: each
moves every byte once. MPICH's Iallreduce of 4 MB took 129 ms among three hosts at 1 Gbit/s, the two take
68 ms; its Ireduce of 7 MB within a machine 6.9 ms, the two 3.7 ms.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from partc.runtime.transports.communication import Dense, Part
from partc.runtime.transports.mpi_handle import Array, Group, MPIHandle

# Measured with 2 to 4 members, in one machine and at 1 Gbit/s (docs/benchmarks.md): shorter sums take the
# same or less in one collective, and so does an all_reduce of two members.
LONG_SUM_BYTES = 1 << 19

_OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class DenseHandle(MPIHandle):
    """A dense communication under way."""

    def __init__(self, part: Part, group: Group, progress: Callable[[], None]) -> None:
        self._landings: list[tuple[Array, Array]] = []  # (target, what arrived elsewhere)
        self._to_gather: list[tuple[Array, Array, list[int]]] = []  # (sum, own region, elements of each)
        super().__init__(part, group, progress)

    def _begin_first(self, comm: MPI.Intracomm) -> list[MPI.Request]:
        return [self._begin(dense, comm) for dense in self.part.dense]

    def _has_second(self) -> bool:
        return bool(self._to_gather)

    def _begin_second(self, comm: MPI.Intracomm) -> list[MPI.Request]:
        begin = _begin_all_gather if self.part.start.kind == "all_reduce" else _begin_gather
        return [begin(comm, *gathered) for gathered in self._to_gather]

    def _land(self) -> None:
        for target, arrived in self._landings:
            target[...] = arrived.reshape(target.shape)

    def _begin(self, dense: Dense, comm: MPI.Intracomm) -> MPI.Request:
        start = self.part.start
        match start.kind:
            case "broadcast":
                return comm.Ibcast(_bytes_of(dense.target), root=0)
            case "all_gather":
                return _begin_all_gather(comm, dense.target.reshape(-1), dense.source, list(start.counts))
            case "reduce_scatter":
                region = np.empty(dense.target.size, _widen(dense.target.reshape(-1)).dtype)
                self._landings.append((dense.target, region))
                return self._begin_reduce_scatter(dense.source, region, list(start.counts), comm)
        lands = start.kind == "all_reduce" or self.part.is_root
        whole = self._widened(dense.target) if lands else _widen(dense.source.reshape(-1))
        if self._in_two_phases(whole):
            return self._begin_long_sum(whole, comm)
        operation = _OPERATIONS[start.reduction]
        if start.kind == "all_reduce":
            return comm.Iallreduce(MPI.IN_PLACE, whole, operation)
        if self.part.is_root:
            return comm.Ireduce(MPI.IN_PLACE, whole, operation, root=0)
        return comm.Ireduce(whole, None, operation, root=0)

    def _in_two_phases(self, whole: Array) -> bool:
        least_members = 3 if self.part.start.kind == "all_reduce" else 2
        return len(self.part.members) >= least_members and whole.nbytes >= LONG_SUM_BYTES

    def _begin_long_sum(self, whole: Array, comm: MPI.Intracomm) -> MPI.Request:
        members = len(self.part.members)
        counts = [b - a for a, b in pairwise(whole.size * i // members for i in range(members + 1))]
        region = np.empty(counts[self.part.position], whole.dtype)
        self._to_gather.append((whole, region, counts))
        return self._begin_reduce_scatter(whole, region, counts, comm)

    def _begin_reduce_scatter(
        self, source: Array, region: Array, counts: list[int], comm: MPI.Intracomm
    ) -> MPI.Request:
        operation = _OPERATIONS[self.part.start.reduction]
        return comm.Ireduce_scatter(_widen(source.reshape(-1)), region, counts, operation)

    def _widened(self, target: Array) -> Array:
        """Return the memory to reduce in place: the target's own where MPI can sum its type."""
        flat = target.reshape(-1)
        wide = _widen(flat)
        if wide is not flat:
            self._landings.append((target, wide))
        return wide


def _begin_all_gather(comm: MPI.Intracomm, whole: Array, own: Array, counts: list[int]) -> MPI.Request:
    """Gather regions of so many elements; a member's own may already be where it belongs."""
    first = sum(counts[: comm.rank])
    region = whole[first : first + own.size]
    if region.ctypes.data != own.ctypes.data:
        region[:] = own.reshape(-1)
    sizes = [count * whole.itemsize for count in counts]
    return comm.Iallgatherv(MPI.IN_PLACE, [_bytes_of(whole), sizes, MPI.BYTE])


def _begin_gather(comm: MPI.Intracomm, whole: Array, own: Array, counts: list[int]) -> MPI.Request:
    """Gather regions of so many elements at the first member, into `whole`; its own is the first."""
    if comm.rank:
        return comm.Igatherv(_bytes_of(own), None, root=0)
    whole[: own.size] = own
    sizes = [count * whole.itemsize for count in counts]
    return comm.Igatherv(MPI.IN_PLACE, [_bytes_of(whole), sizes, MPI.BYTE], root=0)


def _widen(flat: Array) -> Array:
    """Return float16 as float32: MPI sums 16 bits slowly or not at all."""
    return flat.astype(np.float32) if flat.dtype == np.float16 else flat


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
