"""Hosts, devices and links, and the ranks that a cluster makes.

    Cluster ─┬─ hosts ── devices        a worker per device; a server per host, on its CPU
             ├─ switches
             └─ links                   between any two of the above, full duplex

A device without a link of its own reaches its host through the host's memory.

The cluster as one session of asynchronous training sees it: one worker, and every server.

    cluster   hostA: cpu0 cpu1 (server)     view   session: cpu0         one worker, owns nothing
              hostB: cpu2 cpu3 (server)            hostA:   (server)     a server alone
                                                   hostB:   (server)     a server alone

All workers do the same with the servers, so one view serves them all: the first worker's device stands
for every other. Its host is a host of its own, next to the machine it is on: whatever is summed within a
host is then summed in the worker's process, and what crosses hosts goes straight to the owners.
"""

import re
from pathlib import Path
from typing import Literal

import msgspec

from partc.cost.cluster.cluster_checks import check_machines, check_mpiexec_options
from partc.cost.cluster.detect_gpus import gpus_of
from partc.cost.cluster.machines import Device, Host, Link
from partc.runtime.asynchronous.sessions.session import SESSION_HOST
from partc.runtime.errors import BadCluster
from partc.runtime.plan.plan_json import NOT_DECODED, why_not_decoded
from partc.runtime.plan.program import Site
from partc.runtime.plan.record import Record
from partc.runtime.plan.written_json import decode_written

CLUSTER_FORMAT = "partc-cluster/1"


class Cluster(Record, frozen=True):
    """Everything partc knows about the machines. Checked where it is built: raises BadCluster.

    `mpiexec`: what mpiexec, or what else starts ranks, is told besides.
    """

    format: str
    name: str
    hosts: tuple[Host, ...]
    switches: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    mpiexec: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format != CLUSTER_FORMAT:
            what, fix = f"a cluster of format {self.format!r}", f"write {CLUSTER_FORMAT!r}"
            raise BadCluster(what, at="format", fix=fix)
        check_machines(self.hosts, self.switches, self.links)
        check_mpiexec_options(self.mpiexec)


# ---------------------------------------------------------------- files


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file (JSON). Raises BadCluster."""
    text = _read_bytes(path)
    try:
        return decode_written(text, Cluster)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        raise BadCluster(
            what,
            at=f"{path}: {where.strip('`') or 'the file as a whole'}",
            fix="compare with examples/cluster-2x2.json and with cost/cluster.schema.json",
        ) from error
    except NOT_DECODED as error:
        raise BadCluster(why_not_decoded(error, text), at=str(path), fix="mend the file's syntax") from error
    except BadCluster as error:
        raise BadCluster(error.what, at=f"{path}: {error.at}", fix=error.fix) from error


def read_any_cluster(path: Path) -> Cluster:
    """Read a .json cluster, or else a resource file. Raises BadCluster."""
    return read_cluster(path) if path.suffix == ".json" else read_resource_file(path)


def encode_cluster(cluster: Cluster) -> bytes:
    """Return the cluster as JSON: equal clusters give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(cluster, order="deterministic"), indent=1) + b"\n"


def read_resource_file(path: Path, gpu_type: str | None = None) -> Cluster:
    """Read Parallax's resource file: `host: gpu ids` on each line, ids optional (then detected).

    The GPUs' type stands behind the ids (`host: 0,1 a100`), or is `gpu_type`, or what nvidia-smi says there.
    The file says no more, so every host is taken for one of 256 GiB (the paper's section 7.1), and all are
    joined by one switch at 10 Gbit/s and 50 microseconds. Write a cluster file where that is wrong.
    Raises BadCluster.
    """
    try:
        text = _read_bytes(path).decode()
    except UnicodeDecodeError as error:
        fix = "give a cluster.json, or a text file with a line `host: gpu ids` for each host"
        raise BadCluster(f"neither JSON nor text: {error.reason}", at=str(path), fix=fix) from error
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    hosts = tuple(
        _resource_host(line, f"{path}: line {i}", gpu_type) for i, line in enumerate(lines, 1) if line
    )
    links = tuple(Link((host.name, "switch"), bytes_per_s=1.25e9, latency_s=25e-6) for host in hosts)
    try:
        return Cluster(CLUSTER_FORMAT, path.stem, hosts, switches=("switch",), links=links)
    except BadCluster as error:
        raise BadCluster(error.what, at=f"{path}: {error.at}", fix=error.fix) from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadCluster(
            f"cannot be read: {error.strerror}", at=str(path), fix="give the path of a cluster file"
        ) from error


def _resource_host(line: str, at: str, gpu_type: str | None) -> Host:
    parsed = re.fullmatch(
        r"(?P<host>[^\s:,]+)(?:\s*:?\s*(?P<ids>\d+(?:\s*,\s*\d+)*)(?:\s+(?P<type>[^\s,]+))?)?", line
    )
    if parsed is None:
        fix = "write `host: 0,1,2`, `host: 0,1,2 a100`, or `host` alone"
        raise BadCluster(f"cannot understand {line!r}", at=at, fix=fix)
    host, ids = parsed["host"], parsed["ids"]
    indices = [int(i) for i in ids.split(",")] if ids else None
    gpus = gpus_of(host, at, indices, parsed["type"] or gpu_type)
    devices = tuple(
        Device(f"{host}/gpu{gpu.index}", "gpu", profile, index=gpu.index, memory_bytes=gpu.memory_bytes)
        for gpu, profile in gpus
    )
    return Host(host, devices, memory_bytes=256 * 2**30, address=host)


# ---------------------------------------------------------------- ranks


class ClusterRank(Record, frozen=True):
    """Where one rank runs and what it plays. `device` is the host's name for a server of its own."""

    rank: int
    host: str
    device: str
    kind: Literal["cpu", "gpu"]
    sites: tuple[Site, ...]
    replica: int | None  # position among the workers
    threads: int
    device_index: int


def threads_per_core(cluster: Cluster) -> dict[str, float]:
    """Return how many threads of CPU ranks there are per core of each host, at least 1."""
    threads = _cpu_threads(cluster)
    return {
        host.name: 1.0 if host.cores is None else max(1.0, threads[host.name] / host.cores)
        for host in cluster.hosts
    }


def shares_places(cluster: Cluster) -> bool:
    """Tell whether a host's CPU ranks have more threads than can run at once, so that one waits to run."""
    threads = _cpu_threads(cluster)
    return any(threads[host.name] > host.places for host in cluster.hosts)


def _cpu_threads(cluster: Cluster) -> dict[str, int]:
    threads = {host.name: 0 for host in cluster.hosts}
    for rank in ranks_of(cluster):
        threads[rank.host] += rank.threads if rank.kind == "cpu" else 0
    return threads


def ranks_of(cluster: Cluster) -> tuple[ClusterRank, ...]:
    """Number the ranks: workers over hosts then devices, then the servers that need their own process.

    A host's server shares the process of its first CPU worker where there is one.
    """
    workers = [(host, device) for host in cluster.hosts for device in host.devices]
    hosting = {host.name: _server_device(host) for host in cluster.hosts}
    ranks = [
        ClusterRank(
            rank=rank,
            host=host.name,
            device=device.name,
            kind=device.kind,
            sites=("worker", "server") if device is hosting[host.name] else ("worker",),
            replica=rank,
            threads=device.threads,
            device_index=device.index,
        )
        for rank, (host, device) in enumerate(workers)
    ]
    for host in cluster.hosts:
        if hosting[host.name] is None:
            ranks.append(_server_alone(len(ranks), host))
    return tuple(ranks)


def _server_device(host: Host) -> Device | None:
    return next((device for device in host.devices if device.kind == "cpu"), None)


def _server_alone(rank: int, host: Host) -> ClusterRank:
    return ClusterRank(
        rank=rank,
        host=host.name,
        device=host.name,
        kind="cpu",
        sites=("server",),
        replica=None,
        threads=1,
        device_index=0,
    )


def groups_of(cluster: Cluster) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of ranks that meet in communications; a group's first rank is its root.

    workers       all workers
    host_workers  for each host, its workers
    leaders       the first worker of each host
    servers       the server of each host, in host order
    host          for each host, its server, then its workers (a merged server appears once)
    feed          a host's first worker, then the server that it tells what workers know; a server
                  whose host has no workers is told by the first worker of all
    """
    workers, servers = _ranks_by_host(cluster, "worker"), _ranks_by_host(cluster, "server")
    every = tuple(rank for members in workers.values() for rank in members)
    servers_of: dict[int, list[int]] = {}
    for name, members in workers.items():
        servers_of.setdefault((members or every)[0], []).extend(servers[name])
    return {
        "workers": [every],
        "host_workers": list(workers.values()),
        "leaders": [tuple(members[0] for members in workers.values() if members)],
        "servers": [tuple(members[0] for members in servers.values())],
        "host": [tuple(dict.fromkeys(servers[name] + workers[name])) for name in workers],
        "feed": [tuple(dict.fromkeys((leader, *own_servers))) for leader, own_servers in servers_of.items()],
    }


def _ranks_by_host(cluster: Cluster, site: Site) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, list[int]] = {host.name: [] for host in cluster.hosts}
    for rank in ranks_of(cluster):
        if site in rank.sites:
            ranks[rank.host].append(rank.rank)
    return {host: tuple(members) for host, members in ranks.items()}


class SessionView(Cluster, frozen=True):
    """A cluster whose servers' hosts have no devices. Made from a checked cluster."""

    def __post_init__(self) -> None:
        """Let hosts be without devices."""


def view_of_session(cluster: Cluster) -> SessionView:
    """Return one worker and all servers of a cluster."""
    home = cluster.hosts[0]
    device = msgspec.structs.replace(home.devices[0], name=f"{SESSION_HOST}/worker")
    worker = Host(
        SESSION_HOST,
        (device,),
        memory_bytes=home.memory_bytes,
        address=home.address,
        server=False,
        memory_bytes_per_s=home.memory_bytes_per_s,
    )
    servers = tuple(msgspec.structs.replace(host, devices=()) for host in cluster.hosts)
    named = {host.name for host in cluster.hosts} | set(cluster.switches)
    links = tuple(link for link in cluster.links if set(link.ends) <= named)
    beside = Link((SESSION_HOST, home.name), bytes_per_s=home.memory_bytes_per_s)
    return SessionView(cluster.format, cluster.name, (worker, *servers), cluster.switches, (*links, beside))
