"""Strangers at the ports of a job over the network: random bytes, false peers, and what real ones have said.

What MPI listens to is not partc's to guard (docs/security.md): its ports are counted, not attacked.
"""

import random
import re
import socket
import struct
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq

from partc.runtime.transports.locked_sockets import Key, lock, read_key
from tests.chaos.slow_network import NETWORK, hosts, session_hosts
from tests.chaos.stage import Stage
from tests.chaos.training import FOREVER, Outcome, Training
from tests.chaos.without_end import held_by

_GROWTH_BYTES = 64 << 20
_HELD_OPEN = 100
_STREAM_BYTES = 1 << 18
_ANSWER_S = 0.5
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"  # ZMTP 3 (rfc.zeromq.org/spec/23)


@dataclass(frozen=True)
class Port:
    """Where a process listens."""

    address: str
    number: int
    process: int


def attack(stage: Stage, draw: random.Random) -> Outcome:
    """Attack the supervisor of a job whose ranks sum gradients; hold it to the bits that it would have."""
    with hosts(stage) as bench, Training(bench.plan, stage.case_folder()) as training:
        with _overheard(NETWORK.bridge) as heard:
            training.begin_saving(FOREVER, 10**6, "--timeout", "300")
            training.until(lambda: training.step)
        failures, figures = _attack(training, heard, stage.minutes * 60, draw)
        assert training.launcher is not None
        training.launcher.terminate()
        failures += training.end(143) + training.left()
        (step,) = re.findall(r"done (\d+) of", training.told)
        failures = failures or training.differences(stage.trained(bench.plan, int(step)))
        return Outcome("the supervisor's port", f"until step {step}", 0.0, tuple(failures), figures)


def attack_servers(stage: Stage, draw: random.Random) -> Outcome:
    """Attack the servers of asynchronous training; it must train on."""
    with session_hosts(stage) as bench, Training(bench.plan, stage.case_folder()) as training:
        with _overheard(NETWORK.bridge) as heard:
            training.begin(FOREVER, "--timeout", "300")
            training.until(lambda: training.step)
        failures, figures = _attack(training, heard, stage.minutes * 60, draw)
        training.until_it_gets_on()
        assert training.launcher is not None
        training.launcher.terminate()
        failures += training.end(143) + training.left()
        return Outcome("servers' ports", "", 0.0, tuple(failures), figures)


def _attack(
    training: Training, heard: dict[int, list[bytes]], seconds: float, draw: random.Random
) -> tuple[list[str], str]:
    """Attack all ports of partc's own; return what did not hold, and what was done."""
    ports = [port for port in _ports(training) if _is_ours(port, training)]
    if not ports:
        return ["no port was found"], ""
    (folder,) = training.plan.glob(".run-*")
    key = read_key(folder)
    assert key is not None
    before = {port.process: held_by(port.process) for port in ports}
    enemy = _Enemy(ports, key, [stream for port in ports for stream in heard[port.number]], draw)
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and not training.is_over:
        enemy.strike()
    enemy.go()
    time.sleep(2.0)
    failures = [f"it ended: {training.told[-800:]}"] if training.is_over else []
    after = {process: held_by(process) for process in before} if not failures else before
    failures += [
        f"process {process}: {before[process]} became {after[process]}"
        for process in before
        if after[process].memory_bytes - before[process].memory_bytes > _GROWTH_BYTES
        or after[process].descriptors > before[process].descriptors
    ]
    grown = max(after[p].memory_bytes - before[p].memory_bytes for p in before) / 2**20
    strangers = len(_ports(training)) - len(ports)
    done = ", ".join(f"{count} x {what}" for what, count in sorted(enemy.done.items()))
    return failures, f"{len(ports)} ports, {strangers} of MPI's; {done}; memory grew by {grown:.1f} MB"


class _Enemy:
    """Somebody who reaches the ports. Some of its connections stay open."""

    def __init__(self, ports: list[Port], key: Key, streams: list[bytes], draw: random.Random) -> None:
        self._ports = ports
        self._key = key
        self._streams = streams
        self._draw = draw
        self._open: list[socket.socket] = []
        self._context = zmq.Context()
        self.done: dict[str, int] = defaultdict(int)
        self._ways = {
            "random bytes": lambda: draw.randbytes(draw.randint(1, 1 << 16)),
            "no mechanism": lambda: _greeting(b"NULL") + draw.randbytes(draw.randint(0, 4096)),
            "a false handshake": lambda: _greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + draw.randbytes(194),
            "a terabyte": lambda: _greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 40) + bytes(1 << 20),
            "a megabyte": lambda: _greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 20) + bytes(1 << 20),
            "a replay": lambda: draw.choice(self._streams) if self._streams else b"",
        }

    def strike(self) -> None:
        """Do one of them, to one of the ports."""
        port = self._draw.choice(self._ports)
        what = self._draw.choice([*self._ways, "another's key", "the job's key"])
        self.done[what] += 1
        if what in self._ways:
            self._send(port, self._ways[what]())
        else:
            self._speak(port, knows_key=what == "the job's key")

    def go(self) -> None:
        """Close all."""
        for opened in self._open:
            opened.close()
        self._context.destroy(linger=0)

    def _send(self, port: Port, said: bytes) -> None:
        with suppress(OSError):
            opened = socket.create_connection((port.address, port.number), _ANSWER_S)
            self._open.append(opened)
            opened.sendall(said)
            opened.recv(4096)
        while len(self._open) > _HELD_OPEN:
            self._open.pop(self._draw.randrange(len(self._open))).close()

    def _speak(self, port: Port, knows_key: bool) -> None:
        """Be a peer, of the job's key or of another, that says nothing sensible under a name of its own."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 50)
            dealer.set(zmq.ROUTING_ID, b"x" + self._draw.randbytes(self._draw.randint(1, 60)))
            public, secret = (half.decode() for half in zmq.curve_keypair())
            lock(dealer, self._key if knows_key else Key(public, secret), is_server=False)
            dealer.connect(f"tcp://{port.address}:{port.number}")
            for _ in range(self._draw.randint(1, 20)):
                frames = [
                    self._draw.randbytes(self._draw.randint(0, 4096)) for _ in range(self._draw.randint(1, 4))
                ]
                with suppress(zmq.Again):
                    dealer.send_multipart(frames, zmq.NOBLOCK)
            time.sleep(0.02)


def _greeting(mechanism: bytes) -> bytes:
    return _GREETING + b"\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def _ports(training: Training) -> list[Port]:
    """Return where processes of the job listen."""
    assert training.launcher is not None
    processes = {training.launcher.pid}
    for role in ("member", "keeper", "mpiexec", "proxy"):
        processes |= {found.process for found in training.processes(role)}
    found = []
    for enter in ([], ["ip", "netns", "exec", NETWORK.host(1)], ["ip", "netns", "exec", NETWORK.host(2)]):
        told = subprocess.run([*enter, "ss", "-4ltnpH"], capture_output=True, text=True, check=True).stdout
        for line in told.splitlines():
            address, _, number = line.split()[3].rpartition(":")
            listeners = {int(process) for process in re.findall(r"pid=(\d+)", line)} & processes
            if listeners:
                found.append(Port(address, int(number), min(listeners)))
    return found


def _is_ours(port: Port, training: Training) -> bool:
    assert training.launcher is not None
    asynchronous = {found.process for found in training.processes("member") if "rank" not in found.name}
    return port.process == training.launcher.pid or port.process in asynchronous


@contextmanager
def _overheard(interface: str) -> Iterator[dict[int, list[bytes]]]:
    """Listen to an interface meanwhile; then there is what each connection said: port -> streams."""
    heard: dict[int, list[bytes]] = defaultdict(list)
    pieces: dict[tuple[bytes, int], dict[int, bytes]] = defaultdict(dict)
    is_over = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as tap:
        tap.bind((interface, 0))
        tap.settimeout(0.1)

        def listen() -> None:
            while not is_over.is_set():
                with suppress(TimeoutError):
                    _take(tap.recv(1 << 16), pieces)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            is_over.set()
            thread.join()
            for (_, port), of_stream in pieces.items():
                heard[port].append(b"".join(said for _, said in sorted(of_stream.items()))[:_STREAM_BYTES])


def _take(frame: bytes, pieces: dict[tuple[bytes, int], dict[int, bytes]]) -> None:
    """Take in an Ethernet frame, if it bears some of a TCP stream."""
    packet = frame[14:]
    if packet[9] != socket.IPPROTO_TCP:
        return
    segment = packet[4 * (packet[0] & 15) : struct.unpack(">H", packet[2:4])[0]]
    source, port, sequence = struct.unpack(">HHI", segment[:8])
    if said := segment[4 * (segment[12] >> 4) :]:
        pieces[packet[12:16] + struct.pack(">H", source), port][sequence] = said
