"""Clusters on this machine whose predictions can be held against runs, each measured before it is used.

2-ranks           two workers, a core each
2-hosts           two network namespaces at 1 Gbit/s, a worker and a core each (root, iproute2)
4-ranks, 8-ranks  hosts of one worker with an equal quota of the machine's cores each (root, cgroups); without
                  quotas such workers share a host and its cores, and SHARED is added to the name
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from cpu_quotas import cpu_quotas, quotas_root
from namespaces import Network, namespace_hosts

from partc.compiler.commands.cluster import measure_cluster
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster, encode_cluster, read_cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.cluster.profiles import HOST_MEMORY_BYTES_PER_S

CLUSTERS = ("2-ranks", "2-hosts", "4-ranks", "8-ranks")
SHARED = "-shared"
CORES = len(os.sched_getaffinity(0))
MEMORY_BYTES = 4 * 2**30


def name_of(cluster: str) -> str:
    """Return what a cluster is called here: with SHARED where its ranks can have no core of their own."""
    crowded = cluster.endswith("-ranks") and int(cluster[0]) > CORES
    return cluster + SHARED * (crowded and quotas_root() is None)


@contextmanager
def compared_cluster(name: str, measured: Path) -> Iterator[Cluster]:
    """Set up a cluster of a name as `name_of` returns; its rates are a file's, or measured and written."""
    with _set_up(name) as cluster:
        if not measured.exists():
            found = measure_cluster(cluster, measured.resolve().parent).cluster
            measured.write_bytes(encode_cluster(found))
        yield read_cluster(measured)


@contextmanager
def _set_up(name: str) -> Iterator[Cluster]:
    count = int(name[0])
    if name.endswith("-hosts"):
        with namespace_hosts(count, 1, 1e9, Network("pcmp", "10.213.44")) as cluster:
            yield _shared_out(cluster)
    elif count <= CORES or name.endswith(SHARED):
        devices = tuple(Device(f"cpu{n}", "cpu", "cpu-core") for n in range(count))
        host = Host("h", devices, MEMORY_BYTES, cores=min(count, CORES))
        yield Cluster(CLUSTER_FORMAT, name, (host,))
    else:
        with cpu_quotas(count, CORES / count):
            yield _shared_out(_single_workers(name, count))


def _single_workers(name: str, count: int) -> Cluster:
    hosts = tuple(
        Host(f"h{n}", (Device(f"h{n}/cpu", "cpu", "cpu-core"),), MEMORY_BYTES // count) for n in range(count)
    )
    links = tuple(Link((host.name, "switch"), HOST_MEMORY_BYTES_PER_S / 4) for host in hosts)
    return Cluster(CLUSTER_FORMAT, name, hosts, ("switch",), links)


def _shared_out(cluster: Cluster) -> Cluster:
    """Divide the machine's cores among its hosts, and its memory's rate among those that run at once."""
    count = len(cluster.hosts)
    rate = HOST_MEMORY_BYTES_PER_S / min(count, CORES)
    hosts = tuple(
        msgspec.structs.replace(host, cores=min(1.0, CORES / count), memory_bytes_per_s=rate)
        for host in cluster.hosts
    )
    return msgspec.structs.replace(cluster, hosts=hosts)
