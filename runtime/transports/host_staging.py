"""Communications of a GPU through host memory, for engines that reach no other.

start   what the member supplies  ── copied to the host ──>  the engine
done    where results land        <── copied back ──         the engine
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from partc.runtime.execution.arrays import Array, DeviceArrays
from partc.runtime.execution.device import ExecutionDevice
from partc.runtime.transports.communication import Dense, Part
from partc.runtime.transports.in_memory import Board, InMemoryTransport
from partc.runtime.transports.transport import Handle, Transport


def transport_from(device: ExecutionDevice, transport: Transport) -> Transport:
    """Return a transport that takes arrays of a device, by way of one that takes those in host memory."""
    return transport if device.kind == "cpu" else HostStaging(transport, device.arrays)


class HostStaging:
    """A transport for arrays of a GPU."""

    def __init__(self, transport: Transport, arrays: DeviceArrays) -> None:
        self._transport = transport
        self._arrays = arrays
        self._alone = InMemoryTransport(Board())

    def start(self, part: Part) -> Handle:
        """Begin a communication, once what it sends is in host memory; a member alone needs no engine."""
        if len(part.members) == 1:
            return self._alone.start(part)
        on_host = [self._on_host(dense) for dense in part.dense]
        under_way = self._transport.start(replace(part, dense=tuple(on_host)))
        landings = [
            _Landing(dense.target, host.target) for dense, host in zip(part.dense, on_host, strict=True)
        ]
        return _StagedHandle(under_way, self._arrays, landings if part.lands else ())

    def progress(self) -> None:
        """Move on every communication under way."""
        self._transport.progress()

    def beside(self) -> AbstractContextManager[None]:
        """Return a context in which communications move on while the caller computes."""
        return self._transport.beside()

    def _on_host(self, dense: Dense) -> Dense:
        source = self._arrays.in_host_memory(dense.source)
        if dense.target is dense.source:
            return replace(dense, source=source, target=source)
        target = np.empty(dense.target.shape, dense.target.dtype)
        return replace(dense, source=source, target=target)


@dataclass(frozen=True, slots=True)
class _Landing:
    """Where a result belongs, and where the engine leaves it."""

    target: Array
    arrived: Array


class _StagedHandle:
    """A communication under way whose results are still to be copied to the device."""

    def __init__(self, handle: Handle, arrays: DeviceArrays, landings: Sequence[_Landing]) -> None:
        self._handle = handle
        self._arrays = arrays
        self._landings = landings

    def done(self) -> bool:
        """Tell whether it is complete, its results where they belong."""
        if not self._handle.done():
            return False
        for landing in self._landings:
            self._arrays.copy(landing.target, landing.arrived)
        self._landings = ()
        return True

    def rows(self) -> tuple[Array, ...]:
        """Return one array per write of a row kind, in host memory."""
        return self._handle.rows()
