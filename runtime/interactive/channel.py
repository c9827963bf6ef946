"""The connection between a stepper and the ranks (ZeroMQ): who may speak, transports/locked_sockets.py says.

The stepper listens, one ROUTER for all; every rank connects with a DEALER whose identity is its number. When
the stepper's process ends, however it ends, its connections close, and the ranks end too.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from partc.runtime.errors import RankFailed
from partc.runtime.interactive.messages import LARGEST_FRAME_BYTES, StepperMessage, decode, encode
from partc.runtime.plan.record import Record
from partc.runtime.transports.end_context import end_context
from partc.runtime.transports.locked_sockets import (
    Key,
    is_one_machine,
    lock,
    own_address,
    own_key,
    read_key,
    socket_folder,
)

Array = np.ndarray[Any, np.dtype[Any]]
Received = tuple[StepperMessage, dict[str, Array]]

CHANNEL_FILE = "channel.json"
_HEARTBEAT_MS = 5_000
_SILENCE_MS = 60_000  # a host that is not heard for so long is taken for dead
_MEANWHILE_MS = 5
_LOCK_BYTES = 1_024  # more than what encryption adds to a frame


class Channel(Record, frozen=True):
    """How ranks reach the stepper: host -> endpoint."""

    endpoints: dict[str, str]


class StepperEnd:
    """The stepper's end. `addresses`: host of the plan -> network name. `folder`: the job's.

    `sockets`: a temporary folder, which somebody must remove if this process is killed.
    """

    def __init__(self, addresses: Mapping[str, str], folder: Path) -> None:
        self._at_the_end = ExitStack()
        self.sockets = self._at_the_end.enter_context(socket_folder())
        self._context = zmq.Context()
        self._at_the_end.callback(end_context, self._context, linger_ms=1000)
        here = is_one_machine(addresses)
        key = None if here else own_key(folder)
        self._router = _open(self._context, zmq.ROUTER, key)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.MAXMSGSIZE, LARGEST_FRAME_BYTES + _LOCK_BYTES)
        if here:
            self._router.bind(f"ipc://{self.sockets}/stepper")
            self.channel = Channel(dict.fromkeys(addresses, f"ipc://{self.sockets}/stepper"))
            return
        own = {host: own_address(address) for host, address in addresses.items()}
        ports = {
            address: self._router.bind_to_random_port(f"tcp://{address}") for address in set(own.values())
        }
        self.channel = Channel({host: f"tcp://{address}:{ports[address]}" for host, address in own.items()})

    def send(self, rank: int, message: StepperMessage, arrays: Mapping[str, Array]) -> None:
        """Send to a rank that has said that it is ready. Raises RankFailed if it is gone."""
        try:
            self._router.send_multipart([str(rank).encode(), *encode(message, arrays)])
        except zmq.ZMQError as error:
            raise RankFailed(
                f"it cannot be reached: {error}", at=f"rank {rank}", fix="read run.log in the plan's folder"
            ) from error

    def receive(self, timeout_s: float) -> tuple[int, Received] | None:
        """Return the next message and its rank; None if none comes in time."""
        if not self._router.poll(round(timeout_s * 1e3)):
            return None
        identity, *frames = self._router.recv_multipart()
        return int(identity), decode(frames)

    def close(self) -> None:
        """Close, once what was sent has left."""
        self._at_the_end.close()


class RankEnd:
    """A rank's end. `folder`: the job's."""

    def __init__(self, channel: Channel, host: str, rank: int, folder: Path) -> None:
        self._at = f"rank {rank}"
        self._context = zmq.Context()
        self._dealer = _open(self._context, zmq.DEALER, read_key(folder))
        self._dealer.set(zmq.ROUTING_ID, str(rank).encode())
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer.connect(channel.endpoints[host])

    def send(self, message: StepperMessage, arrays: Mapping[str, Array]) -> None:
        """Send to the stepper."""
        self._dealer.send_multipart(encode(message, arrays))

    def receive(self, meanwhile: Callable[[], object]) -> Received:
        """Wait for the next message, calling `meanwhile` now and then. Raises RankFailed when the stepper
        is gone."""
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not poller.poll(_MEANWHILE_MS):
            meanwhile()
        if self._dealer.poll(0):  # asked again: what came just before the end counts
            return decode(self._dealer.recv_multipart())
        recv_monitor_message(self._monitor)
        raise RankFailed(
            "the process that runs the steps is gone",
            at=self._at,
            fix="close the runner before its process ends",
        )

    def close(self) -> None:
        """Close, once what was sent has left."""
        self._dealer.disable_monitor()
        end_context(self._context, linger_ms=1000)


def _open(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, key: Key | None) -> "zmq.Socket[bytes]":
    opened = context.socket(kind)
    opened.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    opened.set(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    opened.set(zmq.SNDHWM, 0)  # a step's data, never more
    opened.set(zmq.RCVHWM, 0)
    if key is not None:
        lock(opened, key, is_server=kind == zmq.ROUTER)
    return opened
