"""Hosts, devices and links, and the ranks that a cluster makes.

    Cluster ─┬─ hosts ── devices        a worker per device; a server per host, on its CPU
             ├─ switches
             └─ links                   between any two of the above, full duplex

A device without a link of its own reaches its host through the host's memory.
"""

import re
from pathlib import Path
from typing import Literal

import msgspec

from partc.cost.cluster_checks import check_machines
from partc.cost.detect_gpus import detect_gpus
from partc.cost.machines import Device, Host, Link
from partc.runtime.errors import BadCluster
from partc.runtime.program import NOT_DECODED, Record, Site

__all__ = [
    "CLUSTER_FORMAT",
    "Cluster",
    "Device",
    "Host",
    "Link",
    "Placement",
    "encode_cluster",
    "groups_of",
    "ranks_of",
    "read_any_cluster",
    "read_cluster",
    "read_resource_file",
]

CLUSTER_FORMAT = "partc-cluster/1"


class Cluster(Record, frozen=True):
    """Everything partc knows about the machines. Checked where it is built: raises BadCluster."""

    format: str
    name: str
    hosts: tuple[Host, ...]
    switches: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if self.format != CLUSTER_FORMAT:
            what, fix = f"a cluster of format {self.format!r}", f"write {CLUSTER_FORMAT!r}"
            raise BadCluster(what, at="format", fix=fix)
        check_machines(self.hosts, self.switches, self.links)


# ---------------------------------------------------------------- files


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file (JSON). Raises BadCluster."""
    text = _read_bytes(path)
    try:
        return msgspec.json.decode(text, type=Cluster)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        raise BadCluster(
            what,
            at=f"{path}: {where.strip('`') or 'the file as a whole'}",
            fix="compare with examples/cluster-2x2.json and with cost/cluster.schema.json",
        ) from error
    except NOT_DECODED as error:
        raise BadCluster(f"not JSON: {error}", at=str(path), fix="mend the file's syntax") from error
    except BadCluster as error:
        raise BadCluster(error.what, at=f"{path}: {error.at}", fix=error.fix) from error


def read_any_cluster(path: Path) -> Cluster:
    """Read a .json cluster, or else a resource file. Raises BadCluster."""
    return read_cluster(path) if path.suffix == ".json" else read_resource_file(path)


def encode_cluster(cluster: Cluster) -> bytes:
    """Return the cluster as JSON: equal clusters give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(cluster, order="deterministic"), indent=1) + b"\n"


def read_resource_file(path: Path) -> Cluster:
    """Read Parallax's resource file: `host: gpu ids` on each line, ids optional (then detected).

    The file says no more, so every GPU is taken for a TITAN Xp, every host for one of 256 GiB (the
    paper's section 7.1), and all are joined by one switch at 10 Gbit/s and 50 microseconds. Write a
    cluster file where that is wrong.
    Raises BadCluster.
    """
    try:
        text = _read_bytes(path).decode()
    except UnicodeDecodeError as error:
        fix = "give a cluster.json, or a text file with a line `host: gpu ids` for each host"
        raise BadCluster(f"neither JSON nor text: {error.reason}", at=str(path), fix=fix) from error
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    hosts = tuple(_resource_host(line, f"{path}: line {i}") for i, line in enumerate(lines, 1) if line)
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


def _resource_host(line: str, at: str) -> Host:
    parsed = re.fullmatch(r"(?P<host>[^\s:,]+)(?:\s*:?\s*(?P<ids>\d+(?:\s*,\s*\d+)*)?)", line)
    if parsed is None:
        raise BadCluster(f"cannot understand {line!r}", at=at, fix="write `host: 0,1,2`, or `host` alone")
    host, ids = parsed["host"], parsed["ids"]
    indices = [int(i) for i in ids.split(",")] if ids else detect_gpus(host, at)
    devices = tuple(Device(f"{host}/gpu{i}", "gpu", profile="titan-xp", index=i) for i in indices)
    return Host(host, devices, memory_bytes=256 * 2**30, address=host)


# ---------------------------------------------------------------- ranks


class Placement(Record, frozen=True):
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
    threads = {host.name: 0 for host in cluster.hosts}
    for rank in ranks_of(cluster):
        threads[rank.host] += rank.threads if rank.kind == "cpu" else 0
    return {
        host.name: 1.0 if host.cores is None else max(1.0, threads[host.name] / host.cores)
        for host in cluster.hosts
    }


def ranks_of(cluster: Cluster) -> tuple[Placement, ...]:
    """Number the ranks: workers over hosts then devices, then the servers that need their own process.

    A host's server shares the process of its first CPU worker where there is one.
    """
    workers = [(host, device) for host in cluster.hosts for device in host.devices]
    hosting = {host.name: _server_device(host) for host in cluster.hosts}
    placements = [
        Placement(
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
            placements.append(_server_alone(len(placements), host))
    return tuple(placements)


def _server_device(host: Host) -> Device | None:
    return next((device for device in host.devices if device.kind == "cpu"), None)


def _server_alone(rank: int, host: Host) -> Placement:
    return Placement(
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
    fed: dict[int, list[int]] = {}
    for name, members in workers.items():
        fed.setdefault((members or every)[0], []).extend(servers[name])
    return {
        "workers": [every],
        "host_workers": list(workers.values()),
        "leaders": [tuple(members[0] for members in workers.values() if members)],
        "servers": [tuple(members[0] for members in servers.values())],
        "host": [tuple(dict.fromkeys(servers[name] + workers[name])) for name in workers],
        "feed": [tuple(dict.fromkeys((leader, *told))) for leader, told in fed.items()],
    }


def _ranks_by_host(cluster: Cluster, site: Site) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, list[int]] = {host.name: [] for host in cluster.hosts}
    for placed in ranks_of(cluster):
        if site in placed.sites:
            ranks[placed.host].append(placed.rank)
    return {host: tuple(members) for host, members in ranks.items()}
