"""Hosts as network namespaces of one machine, joined by a bridge at a rate that `tc tbf` holds them to.

    namespace partc-1 ── veth, tbf ──┐
    namespace partc-2 ── veth, tbf ──┼── bridge ── mpiexec
    ...                              ┘

Needs root and iproute2. Ranks of different hosts then talk over TCP at that rate, as between machines.
Networks of different names live side by side:

    with namespace_hosts(4, workers=1, bits_per_s=1e9, network=Network("pb", "10.213.8")) as cluster:
        compile_step(train, cluster, folder)
        Runner(folder).train(data, steps)
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.runtime.engines.engine import find_mpiexec

# What passes at once before the rate holds: one segment as the system hands it over, of 64 KB and headers. Of
# less the shaper would cut segments, which a network card does, on a core that ranks need.
BURST_BYTES = 72 * 1024
LATENCY_S = 50e-6  # one way, through two veths and the bridge: measured with ping, rounded up
MEMORY_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Network:
    """What the hosts, their interfaces and their bridge are called. Hosts count from 1."""

    name: str = "partc"  # short: Linux allows an interface 15 letters
    subnet: str = "10.213.7"

    @property
    def bridge(self) -> str:
        return f"{self.name}br"

    def host(self, number: int) -> str:
        return f"{self.name}-{number}"

    def outside(self, number: int) -> str:
        """Return the bridge's end of a host's link."""
        return f"{self.name}v{number}"

    def address(self, number: int) -> str:
        return f"{self.subnet}.{number}"


@dataclass(frozen=True)
class Counted:
    """What a host's interface sent and received so far, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


@contextmanager
def namespace_hosts(
    hosts: int, workers: int, bits_per_s: float, network: Network = Network()
) -> Iterator[Cluster]:
    """Make the hosts, let mpiexec find them, and remove them in the end."""
    with ExitStack() as stack:
        stack.callback(_remove, hosts, network)
        _remove(hosts, network)
        _make_bridge(network)
        for number in range(1, hosts + 1):
            _make_host(number, bits_per_s, network)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        enter = _write_enter(folder, network)
        starters = {"PARTC_MPIEXEC": str(_write_mpiexec(folder, enter, network)), "PARTC_SSH": str(enter)}
        stack.enter_context(environment(starters))
        yield _cluster(hosts, workers, bits_per_s, network)


def interface_counters(hosts: int, network: Network = Network()) -> list[Counted]:
    """Return each host's counters. What it sends, its end on the bridge receives."""
    folders = [Path(f"/sys/class/net/{network.outside(n)}/statistics") for n in range(1, hosts + 1)]
    names = ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets")
    return [Counted(*(int((folder / name).read_text()) for name in names)) for folder in folders]


def interface_bytes(hosts: int) -> int:
    """Return the bytes that have left the hosts so far, headers included."""
    return sum(counted.sent_bytes for counted in interface_counters(hosts))


def _cluster(hosts: int, workers: int, bits_per_s: float, network: Network) -> Cluster:
    made = tuple(
        Host(
            f"h{number}",
            tuple(Device(f"h{number}/cpu{worker}", "cpu", "cpu-core") for worker in range(workers)),
            memory_bytes=MEMORY_BYTES,
            address=network.address(number),
        )
        for number in range(1, hosts + 1)
    )
    links = tuple(Link((host.name, "switch"), bits_per_s / 8, LATENCY_S / 2) for host in made)
    return Cluster(CLUSTER_FORMAT, f"{hosts} namespaces", made, switches=("switch",), links=links)


def _make_bridge(network: Network) -> None:
    _ip("link", "add", network.bridge, "type", "bridge")
    _ip("address", "add", f"{network.address(254)}/24", "dev", network.bridge)
    _ip("link", "set", network.bridge, "up")


def _make_host(number: int, bits_per_s: float, network: Network) -> None:
    name, outside, inside = network.host(number), network.outside(number), network.bridge
    _ip("netns", "add", name)
    # The inner end is named like the bridge: mpiexec's -iface then holds on both sides.
    _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
    _ip("link", "set", outside, "master", network.bridge)
    _ip("link", "set", outside, "up")
    _ip("-n", name, "address", "add", f"{network.address(number)}/24", "dev", inside)
    _ip("-n", name, "link", "set", inside, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    shaped = ("root", *shaper(bits_per_s))
    _run("tc", "qdisc", "add", "dev", outside, *shaped)
    _run("tc", "-n", name, "qdisc", "add", "dev", inside, *shaped)


def shaper(bits_per_s: float) -> tuple[str, ...]:
    """Return what tc calls a link of that rate."""
    return ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(BURST_BYTES), "latency", "100ms")


def _remove(hosts: int, network: Network) -> None:
    for number in range(1, hosts + 1):
        _run("ip", "netns", "delete", network.host(number), check=False)
        _run("ip", "link", "delete", network.outside(number), check=False)
    _run("ip", "link", "delete", network.bridge, check=False)


def _write_enter(folder: Path, network: Network) -> Path:
    """Write a program that is called as ssh is, and enters an address's namespace, named as it."""
    return _script(
        folder / "enter",
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        f"host={network.name}-${{1##*.}}; shift\n"
        'exec ip netns exec $host unshare --uts sh -c \'hostname "$0" && exec sh -c "$1"\' $host "$*"\n',
    )


def _write_mpiexec(folder: Path, enter: Path, network: Network) -> Path:
    """Write an mpiexec that starts each host's ranks in its namespace, and speaks TCP alone."""
    own = f"{find_mpiexec()} -launcher ssh -launcher-exec {enter} -iface {network.bridge}"
    return _script(folder / "mpiexec", f'export UCX_TLS=tcp\nexec {own} "$@"\n')


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str, check: bool = True) -> None:
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]} is not installed: hosts as namespaces need iproute2")
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()} (hosts as namespaces need root)")
