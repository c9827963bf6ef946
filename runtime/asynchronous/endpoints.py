"""Where servers listen (transports/locked_sockets.py).

all hosts are this machine   a socket file
hosts have addresses         a TCP port that the server's host picks, told in a file of the job's folder,
                             which all hosts see
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path

import zmq

from partc.runtime.asynchronous.session import server_name, servers_of
from partc.runtime.errors import BadUsage, RankFailed
from partc.runtime.plan.program import Plan
from partc.runtime.transports.locked_sockets import LOCAL, is_one_machine

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
