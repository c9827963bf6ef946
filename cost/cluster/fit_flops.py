"""How quickly hosts' CPU devices multiply, from what a product takes alone on one of their threads."""

from collections.abc import Mapping
from statistics import median

import msgspec

from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.fit_cores import Products

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
