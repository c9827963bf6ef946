"""What sums put on a host's link, and which go by levels: against measured interfaces, and pair by pair."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from partc.cost.cluster.cluster import Cluster
from partc.cost.network import collectives
from partc.cost.network.sums import all_reduce_along, goes_by_levels
from partc.cost.network.topology import Network
from partc.cost.network.traffic import Phases, host_traffic, seconds_of
from partc.runtime.transports.communication import LONG_SUM_BYTES
from tests.builders.plans.compiled_steps import cluster_of

LONG, SHORT = 4_096_000.0, 400_000.0
BEGINNING_S = 70e-6  # of a communication


def workers(cluster: Cluster) -> tuple[str, ...]:
    return tuple(device.name for host in cluster.hosts for device in host.devices)


def sent(network: Network, phases: Phases) -> dict[str, float]:
    return {host: egress for host, (_, egress) in host_traffic(network, phases).items()}


@pytest.mark.parametrize(
    ("shape", "short", "flat", "by_levels", "scattered", "gathered"),
    [
        ("2x2", 1.01, 1.76, 1.01, 0.50, 0.75),
        ("4x2", 1.51, 2.39, 1.51, 0.76, 0.88),
        ("2x4", 1.01, 2.89, 1.01, 0.50, 0.88),
        ("4x1", 1.51, 1.51, 1.51, 0.75, 0.75),
    ],
)
def test_a_link_carries_what_was_measured_at_it(
    shape: str, short: float, flat: float, by_levels: float, scattered: float, gathered: float
) -> None:
    """By byte of the value, of the busiest host: benchmarks/sums.py, headers of a percent included."""
    network, ends = Network(cluster_of(shape)), workers(cluster_of(shape))
    regions = [LONG / len(ends)] * len(ends)

    priced = [
        (SHORT, short, collectives.all_reduce(network, ends, SHORT)),
        (LONG, flat, collectives.all_reduce(network, ends, LONG)),
        (LONG, by_levels, collectives.all_reduce_by_levels(network, ends, LONG)),
        (LONG, scattered, collectives.reduce_scatter(network, ends, regions)),
        (LONG, gathered, collectives.all_gather(network, ends, regions)),
    ]

    for nbytes, measured, phases in priced:
        assert max(sent(network, phases).values()) / nbytes == pytest.approx(measured, rel=0.015)


def drawn(seed: int) -> tuple[Network, tuple[str, ...]]:
    """Draw members of hosts with different numbers of workers, in any order."""
    draw = random.Random(seed)
    cluster = cluster_of("+".join(str(draw.randint(2 - host % 2, 4)) for host in range(draw.randint(2, 5))))
    ends = workers(cluster)
    return Network(cluster), tuple(draw.sample(ends, draw.randint(3, len(ends))))


@pytest.mark.parametrize("seed", range(30))
def test_a_long_sum_crosses_links_pair_by_pair_and_then_around(seed: int) -> None:
    network, members = drawn(seed)
    part = LONG / len(members)
    host = {end: end.partition("/")[0] for end in members}
    expected = Counter[str]()
    for one in members:
        expected[host[one]] += sum(part for other in members if host[other] != host[one])
    for one, following in pairwise((*members, members[0])):
        if host[one] != host[following]:
            expected[host[one]] += LONG - part

    found = sent(network, collectives.all_reduce(network, members, LONG))

    assert {h: n for h, n in found.items() if n} == pytest.approx({h: n for h, n in expected.items() if n})


@pytest.mark.parametrize("seed", range(30))
def test_a_sum_by_levels_crosses_links_as_one_among_the_first_of_each_host(seed: int) -> None:
    network, members = drawn(seed)
    first = {end.partition("/")[0]: end for end in reversed(members)}
    leaders = sorted(first.values(), key=members.index)

    by_levels = collectives.all_reduce_by_levels(network, members, LONG)

    among = sent(network, collectives.all_reduce(network, leaders, LONG))
    assert sent(network, by_levels) == pytest.approx(among)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("nbytes", [1e3, LONG_SUM_BYTES - 4, LONG_SUM_BYTES, 1e6, LONG])
def test_the_way_that_is_chosen_is_the_quicker_one(seed: int, nbytes: float) -> None:
    network, members = drawn(seed)
    flat_s = seconds_of(network, collectives.all_reduce(network, members, nbytes))
    levels_s = seconds_of(network, collectives.all_reduce_by_levels(network, members, nbytes))
    levels_s += 2 * BEGINNING_S

    found_s = seconds_of(network, all_reduce_along(network, (tuple(members),), nbytes))

    assert found_s == pytest.approx(min(flat_s, levels_s))
    assert goes_by_levels(network, (tuple(members),), nbytes) == (levels_s < flat_s)


def test_no_levels_within_a_host_or_with_one_member_of_each() -> None:
    network = Network(cluster_of("2x4"))
    inside = tuple(tuple(f"host{h}/cpu{w}" for w in range(4)) for h in range(2))
    across = tuple(tuple(f"host{h}/cpu{w}" for h in range(2)) for w in range(4))

    assert not goes_by_levels(network, inside, 1e9)
    assert not goes_by_levels(network, across, 1e9)
    assert goes_by_levels(network, ((*inside[0], *inside[1]),), 1e9)


def test_lines_that_lie_otherwise_on_hosts_add_in_one_order() -> None:
    """By levels (a + b) + c along one line would be a + (b + c) along the other, and copies differ."""
    network = Network(cluster_of("2x3"))
    ends = [f"host{h}/cpu{w}" for h in range(2) for w in range(3)]
    alike = tuple(tuple(ends[at] for at in line) for line in ((0, 1, 3), (2, 1, 4)))
    otherwise = tuple(tuple(ends[at] for at in line) for line in ((0, 2, 4), (1, 3, 5)))

    assert goes_by_levels(network, alike, 1e9)
    assert not goes_by_levels(network, otherwise, 1e9)
    assert all(goes_by_levels(network, (line,), 1e9) for line in otherwise)


def test_lines_that_share_links_are_priced_together() -> None:
    """Twice as many lines over a link take it twice as long."""
    network = Network(cluster_of("2x4"))
    one, other = (
        tuple(f"host{host}/cpu{worker + first}" for host in range(2) for worker in range(2))
        for first in (0, 2)
    )

    alone_s, both_s = (
        seconds_of(network, all_reduce_along(network, lines, 1e9)) for lines in ((one,), (one, other))
    )

    assert both_s == pytest.approx(2 * alone_s, rel=1e-3)
