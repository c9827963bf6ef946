"""Find the workers of a cluster that may change places: no strategy's step then takes longer or shorter.

A permutation of workers is a symmetry if devices are alike, hosts go to hosts, and routes over the network go
to routes of equal latency, lane by lane, each lane to one of equal rate.
"""

from collections.abc import Iterator
from itertools import permutations

from partc.compiler.task_graphs.task_prices import TaskPrices

Permutation = tuple[int, ...]  # worker -> the one in its place
ALL_UP_TO = 6  # workers: of more, only exchanges of two, and of two hosts, are tried


def symmetries_of(prices: TaskPrices) -> list[Permutation]:
    """Return permutations that are symmetries, without the one that changes nothing."""
    workers = len(prices.workers)
    identity = tuple(range(workers))
    tried = permutations(identity) if workers <= ALL_UP_TO else _exchanges(prices)
    return [
        permutation for permutation in tried if permutation != identity and _is_symmetry(prices, permutation)
    ]


def _exchanges(prices: TaskPrices) -> Iterator[Permutation]:
    identity = list(range(len(prices.workers)))
    members: dict[str, list[int]] = {}
    for worker, host in enumerate(prices.hosts):
        members.setdefault(host, []).append(worker)
    pairs = [([a], [b]) for a in identity for b in identity[:a]]
    pairs += [(a, b) for a in members.values() for b in members.values() if a < b and len(a) == len(b)]
    for ours, theirs in pairs:
        permutation = identity.copy()
        for a, b in zip(ours, theirs, strict=True):
            permutation[a], permutation[b] = b, a
        yield tuple(permutation)


def _is_symmetry(prices: TaskPrices, places: Permutation) -> bool:
    network, workers = prices.network, prices.workers
    hosts: dict[str, str] = {}
    lanes: dict[object, object] = {}
    computing = {device.name: device.rates for host in prices.cluster.hosts for device in host.devices}
    likeness = [(computing[worker.device], worker.kind, worker.threads) for worker in workers]
    for worker, other in enumerate(places):
        alike = (
            likeness[worker] == likeness[other] and prices.limits_bytes[worker] == prices.limits_bytes[other]
        )
        if not alike or hosts.setdefault(prices.hosts[worker], prices.hosts[other]) != prices.hosts[other]:
            return False
    for a, b in permutations(range(len(workers)), 2):
        here = network.route(workers[a].device, workers[b].device)
        there = network.route(workers[places[a]].device, workers[places[b]].device)
        if here.latency_s != there.latency_s or len(here.lanes) != len(there.lanes):
            return False
        for lane, image in zip(here.lanes, there.lanes, strict=True):
            rates = (network.bytes_per_s[network.lane_number[each]] for each in (lane, image))
            if lanes.setdefault(lane, image) != image or len(set(map(float, rates))) > 1:
                return False
    return len(set(lanes.values())) == len(lanes)
