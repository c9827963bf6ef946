"""Ways and loads that are found piece by piece, held against every pair's own shortest way."""

import random
from collections import Counter

import networkx as nx
import numpy as np
import pytest

from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.network import collectives
from partc.cost.network.families import families_of, in_every
from partc.cost.network.topology import Network
from partc.cost.network.traffic import AllToAllTraffic, Phase, lane_loads, numbers_of, totals_of
from partc.cost.network.ways import Ways


def random_cluster(seed: int) -> Cluster:
    """Draw hosts on a random connected graph of switches; some devices have links of their own."""
    draw = random.Random(seed)
    switches = [f"s{i}" for i in range(draw.randint(1, 4))]
    ends = [(switches[i], draw.choice(switches[:i])) for i in range(1, len(switches))]
    ends += [tuple(draw.sample(switches, 2)) for _ in range(draw.randint(0, 3)) if len(switches) > 1]
    hosts = []
    for i in range(draw.randint(2, 6)):
        kind = draw.choice(["cpu", "gpu"])
        profile = "cpu-core" if kind == "cpu" else "v100"
        names = [f"h{i}/d{k}" for k in range(draw.randint(1, 4))]
        devices = tuple(Device(name, kind, profile, index=k) for k, name in enumerate(names))
        hosts.append(Host(f"h{i}", devices, 2**36, memory_bytes_per_s=draw.uniform(1e9, 9e9)))
        ends.append((f"h{i}", draw.choice(switches)))
        linked = names[: draw.randint(0, len(names))] if kind == "gpu" else []
        ends += [(name, f"h{i}") for name in linked]
        ends += [(a, b) for a in linked for b in linked if a < b and draw.random() < 0.5]
    unique = {tuple(sorted(pair)) for pair in ends}
    links = tuple(Link(pair, draw.uniform(1e8, 9e9), draw.uniform(1e-6, 1e-4)) for pair in sorted(unique))
    return Cluster(CLUSTER_FORMAT, "random", tuple(hosts), switches=tuple(switches), links=links)


@pytest.mark.parametrize("seed", range(30))
def test_a_way_found_piece_by_piece_is_a_shortest_way(seed: int) -> None:
    draw = random.Random(seed)
    graph = nx.gnm_random_graph(14, 17, seed=seed)
    graph.add_edges_from((node, draw.randrange(node)) for node in range(1, 14))
    for edge in graph.edges.values():
        edge["weight"] = draw.uniform(1, 2)
    ways = Ways(graph)

    for source in graph:
        for target in graph:
            path = ways.path(source, target)
            length = nx.path_weight(graph, path, "weight")
            assert path[0] == source and path[-1] == target
            assert length == pytest.approx(nx.shortest_path_length(graph, source, target, "weight"))


@pytest.mark.parametrize("seed", range(30))
def test_everybody_to_everybody_loads_lanes_as_every_pair_does_alone(seed: int) -> None:
    network = Network(random_cluster(seed))
    draw = np.random.default_rng(seed)
    ends = [name for name in network.nodes if network.host_of[network.number_of[name]] >= 0]
    members = [str(name) for name in draw.permutation(ends)[: draw.integers(2, len(ends) + 1)]]
    sent, taken = draw.uniform(0, 9, len(members)), draw.uniform(0, 9, len(members))
    expected: Counter[tuple[str, str]] = Counter()
    for source, amount in zip(members, sent, strict=True):
        for target, share in zip(members, taken, strict=True):
            for lane in network.route(source, target).lanes:
                expected[lane] += amount * share
    every = AllToAllTraffic(numbers_of(network, members), sent, taken)

    loads = lane_loads(network, (Phase((every,), 0.0),))

    np.testing.assert_allclose(loads, [expected[lane] for lane in network.lanes], rtol=1e-9)
    slowest = max(network.route(a, b).latency_s for a in members for b in members)
    assert network.farthest_s(tuple(members)) == pytest.approx(slowest)


@pytest.mark.parametrize("seed", range(30))
def test_what_one_group_of_a_family_does_counts_for_all(seed: int) -> None:
    network = Network(random_cluster(seed))
    groups = [(host.name, *(device.name for device in host.devices)) for host in network.cluster.hosts]

    together = in_every(
        network, families_of(network, groups), lambda group: collectives.reduce(network, group, 1e6)
    )

    alone = [phase for group in groups for phase in collectives.reduce(network, group, 1e6)]
    for found, expected in ((totals_of(network, together), totals_of(network, alone)),):
        for name in ("lanes", "sent", "received", "ingress", "egress"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-6)


def test_equal_hosts_are_one_family_and_another_kind_of_host_is_not() -> None:
    hosts = [Host(f"h{i}", (Device(f"h{i}/gpu", "gpu", "v100"),), 2**36) for i in range(3)]
    slow = Host("slow", (Device("slow/gpu", "gpu", "v100"),), 2**36, memory_bytes_per_s=1e8)
    links = tuple(Link((host.name, "switch"), 1e9, 1e-5) for host in (*hosts, slow))
    network = Network(Cluster(CLUSTER_FORMAT, "c", (*hosts, slow), switches=("switch",), links=links))

    families = families_of(network, [(host.name, host.devices[0].name) for host in (*hosts, slow)])

    assert [family.positions.tolist() for family in families] == [[0, 1, 2], [3]]
