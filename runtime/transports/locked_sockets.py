"""Sockets (ZeroMQ) that hear those alone who may speak.

    all hosts are this machine   a socket file in a folder that only this user may enter
    hosts have addresses         a TCP port, encrypted, for those who know the job's key

CurveZMQ (RFC 26 of zeromq.org) takes no connection from who does not know the server's public key. It is
the job's: drawn for it, and written where only this user may read.
"""

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import zmq

from partc.runtime.errors import BadUsage, RankFailed
from partc.runtime.jobs.job_folder import held_folder
from partc.runtime.plan.record import Record

LOCAL = "localhost"
KEY_FILE = "job.key"
FOLDERS = "partc-"  # what folders of socket files are called
_SHORT_FOLDERS = ("/tmp", "/dev/shm")
_NAME_BYTES = 32  # of a folder of socket files, and of a file in it
_ANSWER_S = 0.5
_HERE = (LOCAL, "127.0.0.1")


class Key(Record, frozen=True):
    """A CURVE key pair, in ZeroMQ's printable form (Z85)."""

    public: str
    secret: str


def is_one_machine(addresses: Mapping[str, str]) -> bool:
    """Tell whether all hosts are the machine that this runs on."""
    return all(address == LOCAL for address in addresses.values())


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a folder of socket files that this user alone may enter, and remove it in the end.

    It lies in the temporary folder; where that has a longer path than the system lets sockets have, in one
    that has not. Raises BadUsage where there is none.
    """
    longest = zmq.IPC_PATH_MAX_LEN - _NAME_BYTES
    given = tempfile.gettempdir()
    for parent in (given, *_SHORT_FOLDERS):
        if len(os.fsencode(parent)) <= longest and os.access(parent, os.W_OK | os.X_OK):
            with held_folder(Path(parent), FOLDERS) as folder:
                yield folder
            return
    raise BadUsage(
        f"its path is too long for sockets, and {' and '.join(_SHORT_FOLDERS)} are closed",
        at=f"temporary folder {given}",
        fix=f"set TMPDIR to a folder whose path has at most {longest} characters",
    )


def own_key(folder: Path) -> Key:
    """Return the job's key; draw it, if it has none yet."""
    if (key := read_key(folder)) is not None:
        return key
    public, secret = (half.decode() for half in zmq.curve_keypair())
    descriptor = os.open(folder / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{public}\n{secret}\n")
    return Key(public, secret)


def read_key(folder: Path) -> Key | None:
    """Return the job's key, if it has one."""
    if not (folder / KEY_FILE).exists():
        return None
    public, secret = (folder / KEY_FILE).read_text().split()
    return Key(public, secret)


def lock(opened: "zmq.Socket[bytes]", key: Key, is_server: bool) -> None:
    """Let a socket that is not connected yet speak with those alone who know the key."""
    opened.set(zmq.CURVE_PUBLICKEY, key.public.encode())
    opened.set(zmq.CURVE_SECRETKEY, key.secret.encode())
    if is_server:
        opened.set(zmq.CURVE_SERVER, 1)
    else:
        opened.set(zmq.CURVE_SERVERKEY, key.public.encode())


def is_refused(endpoint: str) -> bool:
    """Tell whether nobody listens at a socket file, or at a TCP port whose machine is there."""
    try:
        with _connect(endpoint):
            return False
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False


def _connect(endpoint: str) -> socket.socket:
    kind, _, place = endpoint.partition("://")
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        return socket.create_connection((host, int(port)), _ANSWER_S)
    opened = socket.socket(socket.AF_UNIX)
    opened.settimeout(_ANSWER_S)
    try:
        opened.connect(place)
    except OSError:
        opened.close()
        raise
    return opened


def own_address(address: str) -> str:
    """Return the address under which this machine is seen from another. Raises RankFailed and BadUsage."""
    if address.startswith("-"):
        fix = "write a network name: what begins with a dash, ssh takes for an option"
        raise BadUsage(f"no address: {address!r}", at="cluster.json: hosts", fix=fix)
    if address in _HERE:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it asks which way a packet would leave
        except OSError as error:
            raise RankFailed(
                f"the host cannot be reached: {error}",
                at=f"address {address!r}",
                fix="write the host's network name as its address in the cluster file",
            ) from error
        own: str = probe.getsockname()[0]
    return own
