"""Where servers listen, and who may speak to them.

    all hosts are this machine   a socket file in a folder that only this user may enter
    hosts have addresses         a TCP port that the server's host picks, told in a file of the job's folder,
                                 which all hosts see; encrypted, for those who know the job's key alone

CurveZMQ (RFC 26 of zeromq.org) takes no connection from who does not know the server's public key. It is
the job's: drawn for it, and written where only this user may read.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import zmq

from partc.runtime.asynchronous.session import server_name, servers_of
from partc.runtime.errors import BadUsage, RankFailed
from partc.runtime.plan.program import Plan
from partc.runtime.plan.record import Record

LOCAL = "localhost"
KEY_FILE = "session.key"
_ANY_PORT = ":*"
_LOOK_S = 0.05


class Key(Record, frozen=True):
    """A CURVE key pair, in ZeroMQ's printable form (Z85)."""

    public: str
    secret: str


def is_one_machine(addresses: Mapping[str, str]) -> bool:
    """Tell whether all hosts are the machine that this runs on."""
    return all(address == LOCAL for address in addresses.values())


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


def write_key(folder: Path) -> None:
    """Draw the job's key."""
    public, secret = zmq.curve_keypair()
    descriptor = os.open(folder / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(public + b"\n" + secret + b"\n")


def read_key(folder: Path) -> Key | None:
    """Return the job's key, if it has one."""
    if not (folder / KEY_FILE).exists():
        return None
    public, secret = (folder / KEY_FILE).read_text().split()
    return Key(public, secret)


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
