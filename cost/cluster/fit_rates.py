"""Fit what hosts' CPUs do to what was measured: cores of a host's ranks together, flops of a thread.

    cores = sum t a / c        of a host's ranks: t threads, a product takes a alone, c while all compute

Fewer than threads where ranks share cores, where cores share their units (simultaneous multithreading) or a
clock that falls, where hosts share a machine, and where a quota of CPU holds a rank back.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from partc.cost.cluster.cluster import Cluster

NOISE = 0.05  # a loss of less is none

Products = Sequence[tuple[int, float, float]]  # of a host's ranks: threads, seconds alone, seconds crowded


def fit_cores(cluster: Cluster, products: Mapping[str, Products]) -> Cluster:
    """Return the cluster with the cores that its hosts' CPU ranks were measured to have.

    `products`: host -> what its ranks took; other hosts stay as they are.
    """
    hosts = []
    for host in cluster.hosts:
        if measured := products.get(host.name):
            threads = sum(count for count, _, _ in measured)
            cores = sum(count * alone_s / crowded_s for count, alone_s, crowded_s in measured)
            quiet = cores > (1 - NOISE) * threads
            host = msgspec.structs.replace(host, cores=float(threads) if quiet else cores)
        hosts.append(host)
    return msgspec.structs.replace(cluster, hosts=tuple(hosts))


ALIKE = 0.15  # a host's rate that is no farther from that of most is the same: what is alike stays alike


def fit_flops(cluster: Cluster, products: Mapping[str, Products], flops: int) -> Cluster:
    """Return the cluster with the rates that its hosts' CPU devices were measured at.

    `products`: host -> what its ranks took for a product of `flops` operations; other hosts stay as they are.
    """
    measured = {
        host: median(flops / alone_s for _, alone_s, _ in own) for host, own in products.items() if own
    }
    most = median(measured.values()) if measured else 0.0
    hosts = []
    for host in cluster.hosts:
        if rate := measured.get(host.name):
            rate = most if abs(rate / most - 1) <= ALIKE else rate
            devices = tuple(
                msgspec.structs.replace(device, flops_per_s=rate) if device.kind == "cpu" else device
                for device in host.devices
            )
            host = msgspec.structs.replace(host, devices=devices)
        hosts.append(host)
    return msgspec.structs.replace(cluster, hosts=tuple(hosts))
