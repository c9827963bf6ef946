"""Clusters with one thing changed: what changes, and what stays."""

from pathlib import Path

import msgspec
import pytest

from partc.cost.cluster.cluster import Cluster, ranks_of, read_cluster
from partc.cost.cluster.vary_cluster import (
    with_hosts,
    with_latencies,
    with_link_rates,
    with_profile,
    with_threads,
)
from partc.cost.network.topology import Network
from partc.runtime.errors import BadCluster

EXAMPLES = Path(__file__).parents[3] / "examples"
TWO_BY_TWO = read_cluster(EXAMPLES / "cluster-2x2.json")


def seconds(cluster: Cluster, source: str, target: str, nbytes: float) -> float:
    route = Network(cluster).route(source, target)
    return route.latency_s + nbytes / route.bytes_per_s


def test_quicker_links_and_longer_latencies_are_those_of_the_routes() -> None:
    ends = TWO_BY_TWO.hosts[0].name, TWO_BY_TWO.hosts[1].name
    latency_s = seconds(TWO_BY_TWO, *ends, 0)
    on_the_wire_s = seconds(TWO_BY_TWO, *ends, 1e6) - latency_s

    assert seconds(with_link_rates(TWO_BY_TWO, 4), *ends, 1e6) == pytest.approx(latency_s + on_the_wire_s / 4)
    assert seconds(with_latencies(TWO_BY_TWO, 4), *ends, 1e6) == pytest.approx(4 * latency_s + on_the_wire_s)


def test_more_hosts_are_the_last_one_again_at_the_same_distance() -> None:
    four = with_hosts(TWO_BY_TWO, 4)

    names = [host.name for host in four.hosts]
    assert names[:2] == [host.name for host in TWO_BY_TWO.hosts]
    assert len(ranks_of(four)) == 2 * len(ranks_of(TWO_BY_TWO))
    distances = {seconds(four, a, b, 1e6) for a in names for b in names if a != b}
    assert distances == {seconds(TWO_BY_TWO, *names[:2], 1e6)}


def test_fewer_hosts_are_the_first_ones() -> None:
    assert with_hosts(TWO_BY_TWO, 1).hosts == TWO_BY_TWO.hosts[:1]


def test_a_host_that_is_linked_to_nothing_is_not_repeated() -> None:
    alone = with_hosts(TWO_BY_TWO, 1)
    alone = msgspec.structs.replace(alone, switches=(), links=())

    with pytest.raises(BadCluster, match="name a switch, and link the host to it") as refusal:
        with_hosts(alone, 2)

    assert refusal.value.at == "links"


def test_what_joins_a_hosts_devices_is_repeated_with_it() -> None:
    cluster = read_cluster(EXAMPLES / "cluster-4x4-p100.json")

    more = with_hosts(cluster, 5)

    new, old = more.hosts[-1], cluster.hosts[-1]
    pairs = [tuple(device.name for device in host.devices[:2]) for host in (old, new)]
    inner = [Network(more).route(*pair) for pair in pairs]
    assert inner[0].bytes_per_s == inner[1].bytes_per_s
    assert not set(inner[0].lanes) & set(inner[1].lanes)  # two hosts do not disturb each other inside


def test_devices_change_their_profile_or_their_threads() -> None:
    gpus = read_cluster(EXAMPLES / "cluster-4x4-p100.json")

    assert {device.profile for host in with_profile(gpus, "h100").hosts for device in host.devices} == {
        "h100"
    }
    assert {rank.threads for rank in ranks_of(with_threads(TWO_BY_TWO, 2))} == {
        2 * rank.threads for rank in ranks_of(TWO_BY_TWO)
    }
