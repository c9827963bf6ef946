"""Sockets between the processes of asynchronous training (ZeroMQ).

    server   one ROUTER that all others connect to; a DEALER to every other server
    others   a DEALER to every server

A DEALER bears its owner's name, so that a server answers by name. Order holds from one peer to another. A
peer that died is forgotten by ZeroMQ: nobody else notices.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from partc.runtime.asynchronous.endpoints import find, listen
from partc.runtime.asynchronous.job import SessionJob
from partc.runtime.asynchronous.kept_variables import kept_variables
from partc.runtime.asynchronous.messages import SessionMessage, decode_message, encode_message
from partc.runtime.asynchronous.session import worker_name
from partc.runtime.errors import BadPlan
from partc.runtime.plan.program import Plan, Start
from partc.runtime.transports.locked_sockets import lock, read_key

Array = np.ndarray[Any, np.dtype[Any]]
Received = tuple[SessionMessage, list[memoryview]]

# Rows vary from step to step: they may be this many times what was expected, and never less than the room.
_ROWS_AT_MOST = 16
_ROOM_BYTES = 64 * 2**20


LAUNCHER = "launcher"


class PeerSockets:
    """One process's sockets.

    `job`: which servers listen where, and how long one value may be. `folder`: the job's, where servers tell
    of their ports, and whose key locks their doors. Raises RankFailed where one never tells.
    """

    def __init__(self, name: str, job: SessionJob, folder: Path, deadline_s: float) -> None:
        self._context = zmq.Context()
        self._limit_bytes = job.limit_bytes
        self._key = read_key(folder)
        workers = map(worker_name, range(len(job.steps)))
        self._peers = {peer.encode() for peer in (*job.endpoints, *workers, LAUNCHER)}
        self._poller = zmq.Poller()
        self._router = self._open(zmq.ROUTER, "") if name in job.endpoints else None
        if self._router is not None:
            listen(self._router, name, job.endpoints[name], folder)
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        for server, endpoint in job.endpoints.items():
            if server != name:
                self._dealers[server] = self._open(zmq.DEALER, name)
                self._dealers[server].connect(find(server, endpoint, folder, deadline_s))

    def post(self, target: str, message: SessionMessage, arrays: Sequence[Array] = ()) -> None:
        """Send to a peer; what it sends is copied. To a peer that is gone: nothing. Raises BadPlan."""
        frames = [encode_message(message), *(array.tobytes() for array in arrays)]
        longest = max((len(frame) for frame in frames[1:]), default=0)
        if longest > self._limit_bytes:
            raise BadPlan(
                f"a value of {longest} bytes is to travel, {self._limit_bytes} are the most",
                at=f"a message to {target}",
                fix="compile the model again with the sizes that the data has (--size)",
            )
        if target in self._dealers:
            self._dealers[target].send_multipart(frames, copy=False)
        elif self._router is not None:
            self._router.send_multipart([target.encode(), *frames], copy=False)

    def receive(self, timeout_s: float) -> Iterator[Received]:
        """Yield all messages that have come; wait for the first for `timeout_s`. Raises RankFailed."""
        for ready, _ in self._poller.poll(int(timeout_s * 1e3)):
            yield from _read_all(ready, self._peers if ready is self._router else None)

    def close(self) -> None:
        """Close. What has not left yet is for somebody who has ended."""
        self._context.destroy(linger=0)

    def _open(self, kind: int, name: str) -> "zmq.Socket[bytes]":
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.set(zmq.MAXMSGSIZE, self._limit_bytes)
        # How much may be under way is bounded by the sessions, which are never two steps apart.
        opened.set(zmq.SNDHWM, 0)
        opened.set(zmq.RCVHWM, 0)
        if name:
            opened.set(zmq.ROUTING_ID, name.encode())
        if self._key is not None:
            lock(opened, self._key, is_server=kind == zmq.ROUTER)
        self._poller.register(opened, zmq.POLLIN)
        return opened


def limit_of_messages(plan: Plan) -> int:
    """Return the most bytes that one value of a plan may take on its way."""
    buffers = [buffer.elements * np.dtype(buffer.dtype).itemsize for buffer in plan.buffers]
    local_variables = [np.dtype(v.dtype).itemsize * math.prod(v.shape) for v in kept_variables(plan)]
    rows = [_ROWS_AT_MOST * start.payload_bytes for start in plan.instructions if isinstance(start, Start)]
    return max([_ROOM_BYTES, *buffers, *local_variables, *rows])


def _read_all(ready: "zmq.Socket[bytes]", peers: Collection[bytes] | None) -> Iterator[Received]:
    """Yield what has come. `peers`: who may speak, of a socket that says who did; others are not heard."""
    while True:
        try:
            parts = ready.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        if peers is not None and parts.pop(0).bytes.partition(b".")[0] not in peers:  # in any of its lives
            continue
        if parts:
            yield decode_message(parts[0].bytes), [part.buffer for part in parts[1:]]
