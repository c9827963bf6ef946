"""Sockets between the processes of asynchronous training (ZeroMQ), and where servers listen.

all hosts are this machine   a socket file
hosts have addresses         a TCP port that the server's host picks, told in a file of the job's folder,
                             which all hosts see

    server   one ROUTER that all others connect to; a DEALER to every other server
    others   a DEALER to every server

A DEALER bears its owner's name, so that a server answers by name. Order holds from one peer to another. A
peer that died is forgotten by ZeroMQ: nobody else notices.
"""

import math
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from partc.runtime.asynchronous.processes.job import SessionJob
from partc.runtime.asynchronous.sessions.messages import SessionMessage, decode_message, encode_message
from partc.runtime.asynchronous.sessions.session import server_name, servers_of, worker_name
from partc.runtime.asynchronous.sessions.worker_variables import worker_variables
from partc.runtime.errors import BadPlan, BadUsage, RankFailed
from partc.runtime.plan.program import Plan, Start
from partc.runtime.transports.end_context import end_context
from partc.runtime.transports.locked_sockets import LOCAL, is_one_machine, lock, read_key

_ANY_PORT = ":*"
_LOOK_S = 0.05


def endpoints_of(plan: Plan, addresses: Mapping[str, str], sockets: str) -> dict[str, str]:
    """Return server name -> where it is to listen. `sockets`: a folder for socket files. Raises BadUsage."""
    if is_one_machine(addresses):
        return {server_name(rank.rank): f"ipc://{sockets}/{rank.rank}" for rank in servers_of(plan)}
    for rank in servers_of(plan):
        if addresses.get(rank.host, LOCAL) == LOCAL:
            raise BadUsage(
                f"host {rank.host!r} has the address {LOCAL!r}, where other machines do not find its server",
                at="cluster.json: hosts",
                fix="give every host the address by which the others know it",
            )
    return {server_name(rank.rank): f"tcp://{addresses[rank.host]}{_ANY_PORT}" for rank in servers_of(plan)}


def listen(router: "zmq.Socket[bytes]", name: str, endpoint: str, folder: Path) -> None:
    """Let a server's socket listen, and tell where, if the system was to pick."""
    if not endpoint.endswith(_ANY_PORT):
        router.bind(endpoint)
        return
    host = endpoint.removeprefix("tcp://").removesuffix(_ANY_PORT)
    router.bind(f"tcp://{socket.gethostbyname(host)}{_ANY_PORT}")
    address_file = _told_in(folder, name)
    part = address_file.with_name(address_file.name + ".part")
    part.write_text(router.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    part.replace(address_file)


def find(name: str, endpoint: str, folder: Path, deadline_s: float) -> str:
    """Return where a server listens; wait until it has told. Raises RankFailed."""
    if not endpoint.endswith(_ANY_PORT):
        return endpoint
    since_s = time.monotonic()
    while not _told_in(folder, name).exists():
        if time.monotonic() - since_s > deadline_s:
            raise RankFailed(
                f"{name} did not say where it listens for {deadline_s:.0f} s",
                at=endpoint,
                fix=f"see that its host sees the folder {folder}, and raise the timeout if it starts slowly",
            )
        time.sleep(_LOOK_S)
    return _told_in(folder, name).read_text()


def _told_in(folder: Path, name: str) -> Path:
    return folder / f"endpoint.{name}"


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
        end_context(self._context, linger_ms=0)

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
    local_variables = [np.dtype(v.dtype).itemsize * math.prod(v.shape) for v in worker_variables(plan)]
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
