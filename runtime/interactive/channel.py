"""The connection between a stepper and the ranks (ZeroMQ over TCP, on one machine and across many).

The stepper listens, one ROUTER for all; every rank connects with a DEALER whose identity is the job's secret
and its rank, so that nobody else is heard. When the stepper's process ends, however it ends, its
connections close, and the ranks end too.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from partc.runtime.errors import RankFailed
from partc.runtime.interactive.messages import StepperMessage, decode, encode
from partc.runtime.plan.record import Record
from partc.runtime.transports.locked_sockets import own_address

Array = np.ndarray[Any, np.dtype[Any]]
Received = tuple[StepperMessage, dict[str, Array]]

CHANNEL_FILE = "channel.json"
_HEARTBEAT_MS = 5_000
_SILENCE_MS = 60_000  # a host that is not heard for so long is taken for dead
_MEANWHILE_MS = 5


class Channel(Record, frozen=True):
    """How ranks reach the stepper: host -> endpoint. The file lies in the job's folder, closed to others."""

    secret: str
    endpoints: dict[str, str]


class StepperEnd:
    """The stepper's end. `addresses`: host of the plan -> network name."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._context = zmq.Context()
        self._router = _open(self._context, zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        own = {host: own_address(address) for host, address in addresses.items()}
        ports = {
            address: self._router.bind_to_random_port(f"tcp://{address}") for address in set(own.values())
        }
        endpoints = {host: f"tcp://{address}:{ports[address]}" for host, address in own.items()}
        self.channel = Channel(secrets.token_hex(16), endpoints)

    def send(self, rank: int, message: StepperMessage, arrays: Mapping[str, Array]) -> None:
        """Send to a rank that has said that it is ready. Raises RankFailed if it is gone."""
        try:
            self._router.send_multipart([_identity(self.channel, rank), *encode(message, arrays)])
        except zmq.ZMQError as error:
            raise RankFailed(
                f"it cannot be reached: {error}", at=f"rank {rank}", fix="read run.log in the plan's folder"
            ) from error

    def receive(self, timeout_s: float) -> tuple[int, Received] | None:
        """Return the next message and its rank; None if none comes in time. Strangers are not heard."""
        while self._router.poll(round(timeout_s * 1e3)):
            identity, *frames = self._router.recv_multipart()
            secret, _, rank = identity.decode(errors="replace").partition("/")
            if secrets.compare_digest(secret.encode(), self.channel.secret.encode()) and rank.isdigit():
                return int(rank), decode(frames)
        return None

    def close(self) -> None:
        """Close, once what was sent has left."""
        self._context.destroy(linger=1000)


class RankEnd:
    """A rank's end."""

    def __init__(self, channel: Channel, host: str, rank: int) -> None:
        self._at = f"rank {rank}"
        self._context = zmq.Context()
        self._dealer = _open(self._context, zmq.DEALER)
        self._dealer.set(zmq.ROUTING_ID, _identity(channel, rank))
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
        self._context.destroy(linger=1000)


def _open(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    opened = context.socket(kind)
    opened.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    opened.set(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    opened.set(zmq.SNDHWM, 0)  # a step's data, never more
    opened.set(zmq.RCVHWM, 0)
    return opened


def _identity(channel: Channel, rank: int) -> bytes:
    return f"{channel.secret}/{rank}".encode()
