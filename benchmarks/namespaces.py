"""Hosts as network namespaces of one machine, joined by a bridge at a rate that `tc tbf` holds them to.

    namespace partc-1 ── veth, tbf ──┐
    namespace partc-2 ── veth, tbf ──┼── bridge ── mpiexec
    ...                              ┘

Needs root and iproute2. Ranks of different hosts then talk over TCP at that rate, as between machines.
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from partc.cost.cluster import CLUSTER_FORMAT, Cluster, Device, Host, Link
from partc.runtime.launcher import find_mpiexec

BRIDGE = "partcbr"
SUBNET = "10.213.7"
LATENCY_S = 50e-6  # one way, through two veths and the bridge: measured with ping, rounded up
MEMORY_BYTES = 4 * 2**30


@contextmanager
def namespace_hosts(hosts: int, workers: int, bits_per_s: float) -> Iterator[Cluster]:
    """Make the hosts, let mpiexec find them, and remove them in the end."""
    with ExitStack() as stack:
        stack.callback(_remove, hosts)
        _remove(hosts)
        _make_bridge()
        for number in range(1, hosts + 1):
            _make_host(number, bits_per_s)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_environment({"PARTC_MPIEXEC": str(_write_mpiexec(folder))}))
        yield _cluster(hosts, workers, bits_per_s)


def interface_bytes(hosts: int) -> int:
    """Return the bytes that have left the hosts so far, headers included: what their veths received."""
    counters = [Path(f"/sys/class/net/partcv{number}/statistics/rx_bytes") for number in range(1, hosts + 1)]
    return sum(int(counter.read_text()) for counter in counters)


def _cluster(hosts: int, workers: int, bits_per_s: float) -> Cluster:
    made = tuple(
        Host(
            f"h{number}",
            tuple(Device(f"h{number}/cpu{worker}", "cpu", "cpu-core") for worker in range(workers)),
            memory_bytes=MEMORY_BYTES,
            address=f"{SUBNET}.{number}",
        )
        for number in range(1, hosts + 1)
    )
    links = tuple(Link((host.name, "switch"), bits_per_s / 8, LATENCY_S / 2) for host in made)
    return Cluster(CLUSTER_FORMAT, f"{hosts} namespaces", made, switches=("switch",), links=links)


def _make_bridge() -> None:
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")


def _make_host(number: int, bits_per_s: float) -> None:
    name, outside = f"partc-{number}", f"partcv{number}"
    _ip("netns", "add", name)
    # The inner end is named like the bridge: mpiexec's -iface then holds on both sides.
    _ip("link", "add", outside, "type", "veth", "peer", "name", BRIDGE, "netns", name)
    _ip("link", "set", outside, "master", BRIDGE)
    _ip("link", "set", outside, "up")
    _ip("-n", name, "address", "add", f"{SUBNET}.{number}/24", "dev", BRIDGE)
    _ip("-n", name, "link", "set", BRIDGE, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    limit = ["root", "tbf", "rate", f"{bits_per_s:.0f}bit", "burst", "256kb", "latency", "100ms"]
    _run("tc", "qdisc", "add", "dev", outside, *limit)
    _run("tc", "-n", name, "qdisc", "add", "dev", BRIDGE, *limit)


def _remove(hosts: int) -> None:
    for number in range(1, hosts + 1):
        _run("ip", "netns", "delete", f"partc-{number}", check=False)
        _run("ip", "link", "delete", f"partcv{number}", check=False)
    _run("ip", "link", "delete", BRIDGE, check=False)


def _write_mpiexec(folder: Path) -> Path:
    """Write an mpiexec that starts each host's ranks in its namespace, and speaks TCP alone."""
    enter = folder / "enter"
    enter.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        'host=${1##*.}; shift\nexec ip netns exec partc-$host sh -c "$*"\n'
    )
    mpiexec = folder / "mpiexec"
    own = f"{find_mpiexec()} -launcher ssh -launcher-exec {enter} -iface {BRIDGE}"
    mpiexec.write_text(f'#!/bin/sh\nexport MPIR_CVAR_NOLOCAL=1 UCX_TLS=tcp\nexec {own} "$@"\n')
    for script in (enter, mpiexec):
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return mpiexec


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
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
