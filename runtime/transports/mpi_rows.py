"""Rows between processes: headers first, then the rows themselves; never blocking."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from mpi4py import MPI

from partc.runtime.transports.communication import Part
from partc.runtime.transports.mpi_handle import Array, Group, MPIHandle, PendingCollectives
from partc.runtime.transports.row_headers import RowType, header_size, read_headers, write_header


class RowsHandle(MPIHandle):
    """A communication of rows under way: headers, then rows, then done."""

    def __init__(self, part: Part, group: Group, progress: Callable[[], None]) -> None:
        self._results: list[Array] = []
        self._own = _own_headers(part)
        self._headers = np.zeros((len(part.members), self._own.shape[1]), np.int64)
        self.header_bytes = self._own.nbytes
        super().__init__(part, group, progress)

    def rows(self) -> tuple[Array, ...]:
        """Return one array per write."""
        assert self._complete, "asked for before it was done"
        return tuple(self._results)

    def _begin(self, comm: MPI.Intracomm) -> list[PendingCollectives]:
        return [PendingCollectives([self._begin_headers(comm)], self._begin_rows)]

    def _begin_headers(self, comm: MPI.Intracomm) -> MPI.Request:
        match self.part.start.kind:
            case "gather_rows":
                return comm.Igather(self._own, self._headers if self.part.is_root else None, root=0)
            case "all_gather_rows":
                return comm.Iallgather(self._own, self._headers)
            case "scatter_rows":
                return comm.Iscatter(self._own if self.part.is_root else None, self._headers[:1], root=0)
            case _:
                return comm.Ialltoall(self._own, self._headers)

    def _begin_rows(self, comm: MPI.Intracomm) -> list[MPI.Request]:
        part = self.part
        counts, types = read_headers(self._headers, f"communication {part.start.label or part.start.tag_id}")
        begin = {
            "gather_rows": self._begin_gather,
            "all_gather_rows": self._begin_all_gather,
            "scatter_rows": self._begin_scatter,
            "all_to_all_rows": self._begin_all_to_all,
        }[part.start.kind]
        values = (self._own.shape[1] - 1) // (header_size(1) - 1)
        self._results = [np.empty((sum(counts), *row.shape), row.dtype) for row in types]
        results: Sequence[Array | None] = self._results or [None] * values
        sources: Sequence[Array | None] = part.rows or [None] * values
        row_types: Sequence[RowType | None] = types or [None] * values
        requests = [
            begin(
                comm,
                source,
                result,
                [count * row.row_bytes for count in counts] if row else [0] * len(counts),
            )
            for source, result, row in zip(sources, results, row_types, strict=True)
        ]
        if part.start.kind != "scatter_rows":
            self._results.append(np.array(counts, np.int64))
        return requests

    def _begin_gather(
        self, comm: MPI.Intracomm, source: Array | None, result: Array | None, sizes: list[int]
    ) -> MPI.Request:
        received = [_bytes_of(result), sizes, MPI.BYTE] if self.part.is_root else None
        return comm.Igatherv(_bytes_of(source), received, root=0)

    def _begin_all_gather(
        self, comm: MPI.Intracomm, source: Array | None, result: Array | None, sizes: list[int]
    ) -> MPI.Request:
        return comm.Iallgatherv(_bytes_of(source), [_bytes_of(result), sizes, MPI.BYTE])

    def _begin_scatter(
        self, comm: MPI.Intracomm, source: Array | None, result: Array | None, sizes: list[int]
    ) -> MPI.Request:
        sent = [_bytes_of(source), self._sent_sizes(source), MPI.BYTE] if self.part.is_root else None
        return comm.Iscatterv(sent, _bytes_of(result), root=0)

    def _begin_all_to_all(
        self, comm: MPI.Intracomm, source: Array | None, result: Array | None, sizes: list[int]
    ) -> MPI.Request:
        sent_sizes = self._sent_sizes(source)
        sent_from, arrive_at = _offsets(sent_sizes), _offsets(sizes)
        sent, arrived = _bytes_of(source), _bytes_of(result)
        # MPICH sends a member's own rows through the network too: five times slower.
        own = self.part.position
        arrived[arrive_at[own] :][: sizes[own]] = sent[sent_from[own] :][: sent_sizes[own]]
        sent_sizes[own] = sizes[own] = 0
        return comm.Ialltoallv([sent, sent_sizes, sent_from, MPI.BYTE], [arrived, sizes, arrive_at, MPI.BYTE])

    def _sent_sizes(self, source: Array | None) -> list[int]:
        if source is None or not self.part.counts:
            return [0] * len(self.part.members)
        row_bytes = source.dtype.itemsize * int(np.prod(source.shape[1:], dtype=np.int64))
        return [count * row_bytes for count in self.part.counts]


def _own_headers(part: Part) -> Array:
    """Return what this member announces: one header, or one for every member where it cuts its rows."""
    start = part.start
    cuts = start.kind in {"scatter_rows", "all_to_all_rows"}
    values = len(start.reads) - 1 if cuts else len(start.reads)
    headers = np.zeros((len(part.members) if cuts else 1, header_size(values)), np.int64)
    if part.sends:
        counts = part.counts if cuts else (part.rows[0].shape[0],)
        for header, count in zip(headers, counts, strict=True):
            write_header(header, count, part.rows)
    return headers


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes[:-1])]


def _bytes_of(array: Array | None) -> Array:
    return np.empty(0, np.uint8) if array is None else array.reshape(-1).view(np.uint8)
