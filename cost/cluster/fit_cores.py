"""How many cores a host's ranks have together, from what their threads take alone and all at once.

    cores = sum t a / c        of a host's ranks: t threads, a product takes a alone, c while all compute

Fewer than threads where ranks share cores, where cores share their units (simultaneous multithreading) or a
clock that falls, where hosts share a machine, and where a quota of CPU holds a rank back.
"""

from collections.abc import Mapping, Sequence

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
