"""Clusters whose devices have little memory."""

import msgspec

from partc.cost.cluster.cluster import Cluster
from tests.builders.plans.compiled_steps import cluster_of


def small_devices(shape: str, memory_bytes: int) -> Cluster:
    """Return `hosts x workers`, as cluster_of does, of so many bytes a device."""
    cluster = cluster_of(shape)
    hosts = tuple(
        msgspec.structs.replace(
            host,
            devices=tuple(msgspec.structs.replace(d, memory_bytes=memory_bytes) for d in host.devices),
            memory_bytes=memory_bytes * len(host.devices),
        )
        for host in cluster.hosts
    )
    return msgspec.structs.replace(cluster, hosts=hosts)
