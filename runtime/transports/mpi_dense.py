"""Dense values between processes: one collective each, or two for long sums; shifts go point to point.

A long sum is an Ireduce_scatter, and then an Iallgatherv, or an Igatherv where only the root wants it: each
moves every byte once. MPICH's Iallreduce of 4 MB took 129 ms among three hosts at 1 Gbit/s, the two take
68 ms; its Ireduce of 7 MB within a machine 6.9 ms, the two 3.7 ms. Of four chunks, the second collective
of one fills the pauses in the first collective of the next: 6.6 MB among the same hosts, 117 ms whole, 79 ms.
A long sum that is scattered among as many members on each host is scattered within hosts first: 8 MB among
2 x 4, 170 ms at once, 69 ms.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from partc.runtime.plan.moves import Index
from partc.runtime.transports.communication import LONG_SUM_BYTES, Dense, Part
from partc.runtime.transports.mpi_handle import Array, Group, MPIHandle, PendingCollectives
from partc.runtime.transports.rounded_sums import is_rounded, regions_of, rounded, sum_of

MOST_CHUNKS = 4  # each a long sum itself; eight took as long, or longer

_OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class DenseHandle(MPIHandle):
    """A dense communication under way."""

    def __init__(self, part: Part, group: Group, progress: Callable[[], None]) -> None:
        # (target, where in it, what arrived elsewhere)
        self._landings: list[tuple[Array, Index, Array]] = []
        self._sums: list[tuple[Array, Array]] = []  # (target, what members sent of it, rounded)
        self._summed: list[Array] = []  # which mpi4py 4.1 does not keep while sums of them are under way
        super().__init__(part, group, progress)

    def _begin(self, comm: MPI.Intracomm) -> list[PendingCollectives]:
        return [chunk for dense in self.part.dense for chunk in self._chunks_of(dense, comm)]

    def _land(self) -> None:
        for target, place, arrived in self._landings:
            target[place] = arrived.reshape(target[place].shape)
        for target, arrived in self._sums:
            target[...] = sum_of([*arrived.reshape(len(self.part.members), -1)]).reshape(target.shape)

    def _chunks_of(self, dense: Dense, comm: MPI.Intracomm) -> list[PendingCollectives]:
        start = self.part.start
        if is_rounded(self.part):
            return [self._begin_rounded_sum(dense, comm)]
        match start.kind:
            case "broadcast":
                return [PendingCollectives([comm.Ibcast(_bytes_of(dense.target), root=0)])]
            case "shift_ahead" | "shift_back":
                return [PendingCollectives(self._begin_shift(dense, comm))]
            case "exchange":
                return [PendingCollectives(self._begin_exchange(dense, comm))]
            case "all_gather":
                begin = _begin_all_gather if all(start.counts) else _begin_direct_gather
                whole, counts = dense.target.reshape(-1), list(start.counts)
                return [PendingCollectives(begin(whole, dense.source, counts, comm))]
            case "reduce_scatter":
                return [self._begin_scattered_sum(dense, comm)]
        lands = start.kind == "all_reduce" or self.part.is_root
        whole = self._widened(dense.target) if lands else _widen(dense.source.reshape(-1))
        if self._in_two_phases(whole):
            return self._begin_long_sum(whole, comm)
        return [PendingCollectives([self._begin_short_sum(whole, comm)])]

    def _begin_rounded_sum(self, dense: Dense, comm: MPI.Intracomm) -> PendingCollectives:
        """Send each member the region that it sums; sums that all want follow in a second phase."""
        part = self.part
        sent = rounded(part, dense.source)
        counts = regions_of(part, sent.size)
        own = counts[part.position]
        arrived = np.empty(own * len(part.members), sent.dtype)
        sizes, own_sizes = [count * sent.itemsize for count in counts], [own * sent.itemsize] * len(counts)
        request = comm.Ialltoallv(
            [_bytes_of(sent), sizes, MPI.BYTE], [_bytes_of(arrived), own_sizes, MPI.BYTE]
        )
        if part.start.kind == "reduce_scatter":
            self._sums.append((dense.target, arrived))
            return PendingCollectives([request])
        whole = np.empty(sent.size, sent.dtype)
        self._landings.append((dense.target, (), whole))

        def gather(second: MPI.Intracomm) -> list[MPI.Request]:
            total = sum_of([*arrived.reshape(len(counts), own)])
            return _begin_all_gather(whole, rounded(part, total), counts, second)

        return PendingCollectives([request], gather)

    def _begin_scattered_sum(self, dense: Dense, comm: MPI.Intracomm) -> PendingCollectives:
        """Sum each member's region there; of long values within hosts first.

        There each sums the regions of those at its place on all hosts.
        """
        whole, counts = _widen(dense.source.reshape(-1)), np.array(self.part.start.counts)
        region = np.empty(dense.target.size, whole.dtype)
        self._landings.append((dense.target, (), region))
        levels = self._group.levels
        if levels is None or whole.nbytes < LONG_SUM_BYTES:
            return PendingCollectives([self._begin_reduce_scatter(whole, region, counts.tolist(), comm)])
        regions, sizes = np.split(whole, np.cumsum(counts)[:-1]), counts[levels.order]
        by_place = np.concatenate([regions[member] for member in levels.order.ravel()])
        of_place = np.empty(sizes[levels.place].sum(), whole.dtype)
        request = self._begin_reduce_scatter(by_place, of_place, sizes.sum(axis=1).tolist(), levels.here)

        def scatter(_: MPI.Intracomm) -> list[MPI.Request]:
            return [self._begin_reduce_scatter(of_place, region, sizes[levels.place].tolist(), levels.across)]

        return PendingCollectives([request], scatter)

    def _begin_shift(self, dense: Dense, comm: MPI.Intracomm) -> list[MPI.Request]:
        """Send to one neighbour, receive of the other. Two ranks' messages arrive in the order they begin."""
        requests: list[MPI.Request] = []
        if (to := self.part.shifts_to) is not None:
            requests.append(comm.Isend(_bytes_of(dense.source), to))
        if (came := self.part.shifts_from) is not None:
            requests.append(comm.Irecv(_bytes_of(dense.target), came))
        else:
            dense.target[...] = 0
        return requests

    def _begin_exchange(self, dense: Dense, comm: MPI.Intracomm) -> list[MPI.Request]:
        """Send what others want, receive what they have; what is here already is copied."""
        requests: list[MPI.Request] = []
        for source, target, out, into in self.part.moves():
            if source == target:
                dense.target[into] = dense.source[out]
            elif out is not None:
                piece = np.ascontiguousarray(dense.source[out])
                requests.append(comm.Isend(_bytes_of(piece), target))
            elif into is not None:
                arrived = np.empty(dense.target[into].shape, dense.target.dtype)
                requests.append(comm.Irecv(_bytes_of(arrived), source))
                self._landings.append((dense.target, into, arrived))
        return requests

    def _begin_short_sum(self, whole: Array, comm: MPI.Intracomm) -> MPI.Request:
        operation = _OPERATIONS[self.part.start.reduction]
        self._summed.append(whole)
        if self.part.start.kind == "all_reduce":
            return comm.Iallreduce(MPI.IN_PLACE, whole, operation)
        if self.part.is_root:
            return comm.Ireduce(MPI.IN_PLACE, whole, operation, root=0)
        return comm.Ireduce(whole, None, operation, root=0)

    def _in_two_phases(self, whole: Array) -> bool:
        least_members = 3 if self.part.start.kind == "all_reduce" else 2
        return len(self.part.members) >= least_members and whole.nbytes >= LONG_SUM_BYTES

    def _begin_long_sum(self, whole: Array, comm: MPI.Intracomm) -> list[PendingCollectives]:
        members = len(self.part.members)
        gather = _begin_all_gather if self.part.start.kind == "all_reduce" else _begin_gather
        chunks = []
        for summed in np.array_split(whole, min(MOST_CHUNKS, whole.nbytes // LONG_SUM_BYTES)):
            counts = [b - a for a, b in pairwise(summed.size * i // members for i in range(members + 1))]
            region = np.empty(counts[self.part.position], whole.dtype)
            request = self._begin_reduce_scatter(summed, region, counts, comm)
            chunks.append(PendingCollectives([request], partial(gather, summed, region, counts)))
        return chunks

    def _begin_reduce_scatter(
        self, source: Array, region: Array, counts: list[int], comm: MPI.Intracomm
    ) -> MPI.Request:
        operation = _OPERATIONS[self.part.start.reduction]
        self._summed.append(source)
        return comm.Ireduce_scatter(source, region, counts, operation)

    def _widened(self, target: Array) -> Array:
        """Return the memory to reduce in place: the target's own where MPI can sum its type."""
        flat = target.reshape(-1)
        wide = _widen(flat)
        if wide is not flat:
            self._landings.append((target, (), wide))
        return wide


def _begin_all_gather(whole: Array, own: Array, counts: list[int], comm: MPI.Intracomm) -> list[MPI.Request]:
    """Gather regions of so many elements; a member's own may already be where it belongs."""
    _placed_regions(whole, own, counts, comm.rank)
    sizes = [count * whole.itemsize for count in counts]
    return [comm.Iallgatherv(MPI.IN_PLACE, [_bytes_of(whole), sizes, MPI.BYTE])]


def _begin_direct_gather(
    whole: Array, own: Array, counts: list[int], comm: MPI.Intracomm
) -> list[MPI.Request]:
    """Gather regions as above, each sent straight to all: who has none does not pass on those of others."""
    regions = _placed_regions(whole, own, counts, comm.rank)
    others = [member for member in range(comm.size) if member != comm.rank]
    sent = [comm.Isend(_bytes_of(regions[comm.rank]), other) for other in others if counts[comm.rank]]
    return sent + [comm.Irecv(_bytes_of(regions[other]), other) for other in others if counts[other]]


def _placed_regions(whole: Array, own: Array, counts: list[int], rank: int) -> list[Array]:
    """Return the members' regions of a whole, a rank's own with its content."""
    regions = np.split(whole, np.cumsum(counts)[:-1])
    if regions[rank].ctypes.data != own.ctypes.data:
        regions[rank][:] = own.reshape(-1)
    return regions


def _begin_gather(whole: Array, own: Array, counts: list[int], comm: MPI.Intracomm) -> list[MPI.Request]:
    """Gather regions of so many elements at the first member, into `whole`; its own is the first."""
    if comm.rank:
        return [comm.Igatherv(_bytes_of(own), None, root=0)]
    whole[: own.size] = own
    sizes = [count * whole.itemsize for count in counts]
    return [comm.Igatherv(MPI.IN_PLACE, [_bytes_of(whole), sizes, MPI.BYTE], root=0)]


def _widen(flat: Array) -> Array:
    """Return float16 as float32: MPI sums 16 bits slowly or not at all."""
    return flat.astype(np.float32) if flat.dtype == np.float16 else flat


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
