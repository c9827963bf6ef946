"""Whether the host of somebody who says nothing still answers: its system acknowledges what is sent over TCP.

It does so for a process that is stopped, or hangs, and does not where the link is cut, or the host is gone.
Only Linux tells (TCP_INFO, tcp(7)).
"""

import os
import socket
import struct
import sys
from dataclasses import dataclass

import zmq

_LAST_ACK_RECEIVED = struct.Struct("@56xI")  # of struct tcp_info, in milliseconds


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a message came from. `descriptor`: of the connection while it lasts; `address`: of the host."""

    descriptor: int
    address: str

    @classmethod
    def of(cls, message: zmq.Frame) -> "Connection | None":
        """Return what a message came over; None if that was no TCP."""
        address = message.get("Peer-Address")
        return cls(int(message.get(zmq.SRCFD)), str(address)) if address else None

    def acknowledged_s(self) -> float:
        """Return how long ago the other side acknowledged anything; infinity if the connection has ended."""
        if sys.platform != "linux":
            return float("inf")
        try:
            with socket.socket(fileno=os.dup(self.descriptor)) as connection:
                # Of a connection that ended, the number may be another's by now: of the same host it may be.
                if connection.getpeername()[0] != self.address:
                    return float("inf")
                information = connection.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_RECEIVED.size
                )
        except (OSError, IndexError):
            return float("inf")
        return float(_LAST_ACK_RECEIVED.unpack(information)[0]) / 1e3
