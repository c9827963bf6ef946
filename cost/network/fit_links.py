"""Latency and rate of a cluster's links, from times of messages between its hosts.

A message of m bytes takes t = a + m / b (Hockney, Parallel Computing 20 (1994) 389-398). a and b are fitted
with relative errors squared, so that short messages count as much as long ones. Where a traffic shaper's
burst or a socket's buffer gives a head start, the longest message is later than that line: then b is the
slope between the two longest, and a what the shortest takes.

    link's rate       the highest of the routes across it: a route is as fast as its narrowest link
    link's latency    what the links of every route must add up to, least squares, none below 0
    host's memory     what makes a message between two of its processes, which crosses it twice, take so long
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Link
from partc.cost.cluster.profiles import MEMORY_LATENCY_S
from partc.cost.network.topology import Network

LATE = 1.05  # times as long as the line says takes the longest message, where short ones had a head start
CROSSINGS = 2  # of a host's memory, by a message between two of its processes


@dataclass(frozen=True, slots=True)
class Line:
    """t = latency_s + m / bytes_per_s, and the largest relative error of a sample that counted."""

    latency_s: float
    bytes_per_s: float
    error: float


def fit_line(samples: Sequence[tuple[int, float]]) -> Line:
    """Fit (bytes, seconds) pairs of at least two sizes."""
    ordered = sorted(samples)
    shortest, long, longest = ordered[0], *ordered[-2:]
    slope_s = (longest[1] - long[1]) / (longest[0] - long[0])
    sizes, times_s = (np.array(column, np.float64) for column in zip(*ordered, strict=True))
    rows = np.stack([1 / times_s, sizes / times_s], axis=1)
    latency_s, per_byte_s = np.linalg.lstsq(rows, np.ones(len(times_s)), rcond=None)[0]
    if longest[1] > LATE * (latency_s + longest[0] * per_byte_s):
        latency_s, per_byte_s = shortest[1] - shortest[0] * slope_s, slope_s
        sizes, times_s = sizes[[0, -1]], times_s[[0, -1]]
    latency_s, per_byte_s = max(float(latency_s), 0.0), max(float(per_byte_s), 1e-15)
    fitted_s = latency_s + sizes * per_byte_s
    return Line(latency_s, 1 / per_byte_s, float(np.max(np.abs(fitted_s / times_s - 1))))


def fit_cluster(cluster: Cluster, lines: Mapping[tuple[str, str], Line]) -> Cluster:
    """Return the cluster with what the lines say of its links and memories.

    `lines`: (host, host) -> what a message between processes of the two takes; of one host, of the same.
    """
    network = Network(cluster)
    crossed = {pair: _links_between(network, cluster, *pair) for pair in lines if pair[0] != pair[1]}
    latencies = _latencies(cluster, lines, crossed)
    links: list[Link] = []
    for index, link in enumerate(cluster.links):
        rates = [lines[pair].bytes_per_s for pair, indices in crossed.items() if index in indices]
        if rates:
            link = msgspec.structs.replace(link, bytes_per_s=max(rates), latency_s=latencies[index])
        links.append(link)
    hosts = tuple(
        msgspec.structs.replace(host, memory_bytes_per_s=CROSSINGS * lines[host.name, host.name].bytes_per_s)
        if (host.name, host.name) in lines
        else host
        for host in cluster.hosts
    )
    return msgspec.structs.replace(cluster, hosts=hosts, links=tuple(links))


def _links_between(network: Network, cluster: Cluster, first: str, second: str) -> list[int]:
    lanes = {frozenset(lane) for lane in network.route(first, second).lanes}
    return [index for index, link in enumerate(cluster.links) if frozenset(link.ends) in lanes]


def _latencies(
    cluster: Cluster,
    lines: Mapping[tuple[str, str], Line],
    crossed: Mapping[tuple[str, str], Sequence[int]],
) -> list[float]:
    """Return every link's latency: those of a route and of the memories at its ends make up the message's."""
    rows = np.zeros((len(crossed), len(cluster.links)))
    for row, indices in enumerate(crossed.values()):
        rows[row, indices] = 1
    measured_s = np.array([max(0.0, lines[pair].latency_s - MEMORY_LATENCY_S) for pair in crossed])
    latencies_s = (
        np.linalg.lstsq(rows, measured_s, rcond=None)[0] if len(crossed) else np.zeros(len(cluster.links))
    )
    return [max(0.0, float(latency_s)) for latency_s in latencies_s]
