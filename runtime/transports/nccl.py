"""Dense communications among GPUs by NCCL: from device memory to device memory, no host in between.

Every group has a communicator and a stream of its own. Messages from one of its ranks to another have those
of this pair in this direction: a stream carries out one after the other, and the two directions of a
pipeline's stages are not begun in the same order at both ends. All are connected before the first step, in
one order.

Rows, whose sizes nobody knows beforehand, sums that are rounded, and groups with a CPU among their members go
through host memory.
"""

import hashlib
import os
import platform
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from partc.runtime.execution.arrays import Array, DeviceArrays
from partc.runtime.execution.device import ExecutionDevice
from partc.runtime.execution.gpus import has_nccl
from partc.runtime.log import log
from partc.runtime.plan.moves import Index
from partc.runtime.plan.program import Plan, Start
from partc.runtime.transports.communication import ROW_KINDS, SHIFTS, Dense, Part
from partc.runtime.transports.host_staging import HostStaging
from partc.runtime.transports.mpi import MPITransport
from partc.runtime.transports.rounded_sums import is_rounded
from partc.runtime.transports.transport import Handle, Traffic, Transport

SUMMED = frozenset({"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"})
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_ID_BYTES = 128  # of NCCL's unique ids
_NAME_BYTES = hashlib.sha256().digest_size
_NOBODY = bytes(_NAME_BYTES)

Members = tuple[int, ...]  # world ranks
ChannelKey = tuple[Members, Members]  # a group; sender and receiver, nobody where all take part


def transport_among(
    plan: Plan, device: ExecutionDevice, world: MPI.Intracomm, mpi: MPITransport
) -> Transport:
    """Return what moves a rank's arrays: NCCL among GPUs that have it, else MPI. Every rank must call it."""
    if all(rank.kind == "cpu" for rank in plan.ranks):
        return mpi
    gpus = _gpus_of(device, world)
    if device.kind == "cpu":
        return mpi
    staging = HostStaging(mpi, device.arrays)
    reachable = {members for groups in plan.groups.values() for members in groups if _can_join(members, gpus)}
    channels = {
        (group, pair): _connect(pair or group, world, number)
        for number, (group, pair) in enumerate(channel_keys(plan, reachable))
        if world.rank in (pair or group)
    }
    log.debug("NCCL connects rank %d in %s", world.rank, sorted(channels) or "no group")
    return NCCLTransport(channels, reachable, device.arrays, staging, mpi.traffic)


def _gpus_of(device: ExecutionDevice, world: MPI.Intracomm) -> list[bytes]:
    """Return a name of the GPU of each rank that NCCL reaches, NOBODY for the others."""
    names = np.zeros((world.size, _NAME_BYTES), np.uint8)
    own = np.frombuffer(_name_of_gpu(device), np.uint8)
    world.Allgather(own, names)
    return [name.tobytes() for name in names]


def _name_of_gpu(device: ExecutionDevice) -> bytes:
    if device.kind == "cpu" or not has_nccl():
        return _NOBODY
    import cupy

    bus = cupy.cuda.runtime.deviceGetPCIBusId(device.index)
    host = os.environ.get("NCCL_HOSTID") or platform.node()  # as NCCL tells hosts apart
    return hashlib.sha256(f"{host} {bus}".encode()).digest()


# ---------------------------------------------------------------- channels


@dataclass(frozen=True, slots=True)
class NCCLChannel:
    """A communicator and the stream on which its communications follow each other."""

    comm: Any
    stream: Any


def _can_join(members: Members, gpus: Sequence[bytes]) -> bool:
    """Tell whether all members have GPUs, each its own."""
    names = [gpus[member] for member in members]
    return len(members) > 1 and _NOBODY not in names and len(set(names)) == len(names)


def channel_keys(plan: Plan, reachable: Container[Members]) -> list[ChannelKey]:
    """Return the channels that a plan's communications take, in the order in which ranks open them."""
    starts = (each for each in plan.instructions if isinstance(each, Start))
    return sorted({key for start in starts for key in _keys(plan, start) if key[0] in reachable})


def _keys(plan: Plan, start: Start) -> Iterator[ChannelKey]:
    if start.kind in ROW_KINDS:
        return
    for members in plan.groups[start.group]:
        if start.kind == "exchange":
            assert start.exchange is not None, "an exchange tells who has what"
            for move in start.exchange.moves:
                if move.source != move.target:
                    yield members, (members[move.source], members[move.target])
        elif start.kind in SHIFTS:
            for before, after in pairwise(members):
                yield members, (before, after) if start.kind == "shift_ahead" else (after, before)
        else:
            yield members, ()


def _connect(members: Members, world: MPI.Intracomm, tag: int) -> NCCLChannel:
    import cupy
    import nccl.core as nccl

    message = np.zeros(_ID_BYTES, np.uint8)
    if world.rank == members[0]:
        message[:] = np.frombuffer(bytes(nccl.get_unique_id()), np.uint8)
        for member in members[1:]:
            world.Send(message, member, tag)
    else:
        world.Recv(message, members[0], tag)
    comm = nccl.Communicator.init(
        len(members), members.index(world.rank), nccl.UniqueId.from_bytes(message.tobytes())
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    once = cupy.zeros(1, np.float32)
    comm.allreduce(once, once, nccl.SUM, stream=stream)
    stream.synchronize()
    return NCCLChannel(comm, stream)


# ---------------------------------------------------------------- communications


class NCCLTransport:
    """One rank's side of NCCL, and of MPI for what NCCL does not carry."""

    def __init__(
        self,
        channels: Mapping[ChannelKey, NCCLChannel],
        reachable: Container[Members],
        arrays: DeviceArrays,
        staging: HostStaging,
        traffic: Traffic,
    ) -> None:
        self._channels = channels
        self._reachable = reachable
        self._arrays = arrays
        self._staging = staging
        self._traffic = traffic

    def start(self, part: Part) -> Handle:
        """Begin a communication."""
        if not self._reaches(part):
            return self._staging.start(part)
        self._traffic.count(part)
        return NCCLHandle(part, self._channels, self._arrays, self._traffic)

    def progress(self) -> None:
        """Move on what goes through host memory: NCCL needs no help."""
        self._staging.progress()

    def beside(self) -> AbstractContextManager[None]:
        """Return a context in which communications move on while the caller computes."""
        return self._staging.beside()

    def _reaches(self, part: Part) -> bool:
        """Tell whether NCCL carries a communication: all members find the same."""
        kind = part.start.kind
        if kind in ROW_KINDS or is_rounded(part) or part.members not in self._reachable:
            return False
        return kind not in _REDUCING or all(dense.source.dtype.name in SUMMED for dense in part.dense)


class NCCLHandle:
    """A communication that GPUs carry out."""

    def __init__(
        self,
        part: Part,
        channels: Mapping[ChannelKey, NCCLChannel],
        arrays: DeviceArrays,
        traffic: Traffic,
    ) -> None:
        import cupy

        self._event = partial(cupy.cuda.Event, disable_timing=True)
        self._part = part
        self._channels = channels
        self._arrays = arrays
        self._traffic = traffic
        # (target, where in it, what arrived elsewhere)
        self._landings: list[tuple[Array, Index, Array]] = []
        self._used: dict[int, NCCLChannel] = {}
        self._sent: list[Array] = []
        for dense in part.dense:
            self._begin(dense)
        self._events = [self._event() for _ in self._used]
        for event, channel in zip(self._events, self._used.values(), strict=True):
            event.record(channel.stream)

    def done(self) -> bool:
        """Tell whether it is complete, its results where they belong."""
        if not all(event.done for event in self._events):
            return False
        for target, place, arrived in self._landings:
            target[place] = arrived
        if self._events:
            self._traffic.count_complete(self._part, ())
        self._landings, self._events, self._sent = [], [], []
        return True

    def rows(self) -> tuple[Array, ...]:
        """Return nothing: rows go through host memory."""
        return ()

    def _begin(self, dense: Dense) -> None:
        match self._part.start.kind:
            case "exchange":
                self._exchange(dense)
            case "shift_ahead" | "shift_back":
                self._shift(dense)
            case _ if max(dense.source.size, dense.target.size):
                self._begin_collective(dense)

    def _begin_collective(self, dense: Dense) -> None:
        import nccl.core as nccl

        channel = self._channel(())
        comm, stream = channel.comm, channel.stream
        source, target = dense.source.reshape(-1), dense.target.reshape(-1)
        operation = {"sum": nccl.SUM, "max": nccl.MAX, "min": nccl.MIN}[self._part.start.reduction]
        match self._part.start.kind:
            case "all_reduce":
                comm.allreduce(target, target, operation, stream=stream)
            case "reduce":
                comm.reduce(source, target, operation, 0, stream=stream)
            case "broadcast":
                whole = target.view(np.uint8)
                comm.broadcast(whole, whole, 0, stream=stream)
            case "reduce_scatter":
                with nccl.group():
                    for member, region in self._regions(source):
                        comm.reduce(region, target, operation, member, stream=stream)
            case "all_gather":
                own = source.view(np.uint8)
                with nccl.group():
                    for member, region in self._regions(target):
                        here = region.view(np.uint8)
                        is_own = member == self._part.position
                        comm.broadcast(own if is_own else here, here, member, stream=stream)

    def _regions(self, whole: Array) -> Iterator[tuple[int, Array]]:
        """Yield the members that have a region of a whole, and it."""
        first = 0
        for member, count in enumerate(self._part.start.counts):
            if count:
                yield member, whole[first : first + count]
            first += count

    def _shift(self, dense: Dense) -> None:
        own, members = self._part.members[self._part.position], self._part.members
        if (to := self._part.shifts_to) is not None:
            self._send(dense.source, (own, members[to]))
        if (came := self._part.shifts_from) is not None:
            self._receive(dense.target, (members[came], own))
        else:
            dense.target.fill(0)

    def _exchange(self, dense: Dense) -> None:
        members = self._part.members
        for source, target, out, into in self._part.moves():
            if source == target:
                dense.target[into] = dense.source[out]
            elif out is not None:
                self._send(self._arrays.contiguous(dense.source[out]), (members[source], members[target]))
            elif into is not None:
                arrived = self._arrays.empty(dense.target[into].shape, dense.target.dtype)
                self._receive(arrived, (members[source], members[target]))
                self._landings.append((dense.target, into, arrived))

    def _send(self, array: Array, pair: Members) -> None:
        self._sent.append(array)
        if array.size:
            channel = self._channel(pair)
            channel.comm.send(array.reshape(-1).view(np.uint8), 1, stream=channel.stream)

    def _receive(self, array: Array, pair: Members) -> None:
        if array.size:
            channel = self._channel(pair)
            channel.comm.recv(array.reshape(-1).view(np.uint8), 0, stream=channel.stream)

    def _channel(self, pair: Members) -> NCCLChannel:
        channel = self._channels[self._part.members, pair]
        ready = self._event()  # what has been asked of the device until now: what this member supplies
        ready.record()
        channel.stream.wait_event(ready)
        self._used[id(channel)] = channel
        return channel
