"""Workers change places where, and only where, no step then takes longer or shorter."""

from itertools import permutations

import msgspec
import numpy as np
import pytest

from partc.compiler.search.symmetries import symmetries_of
from partc.compiler.search.walk_tasks import random_state
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.cost.cluster.cluster import Cluster, Link
from tests.builders.plans.compiled_steps import cluster_of
from tests.compiler.task_graphs.test_step_tasks import priced


def uneven() -> Cluster:
    """Return two hosts, the second of which has a slower link."""
    cluster = cluster_of("2x2")
    slower = msgspec.structs.replace(cluster.links[1], bytes_per_s=cluster.links[1].bytes_per_s / 2)
    return msgspec.structs.replace(cluster, links=(cluster.links[0], slower))


def ring() -> Cluster:
    """Return four hosts, each linked to the next: a route to the one opposite goes one way about."""
    cluster = cluster_of("4x1")
    names = [host.name for host in cluster.hosts]
    ends = zip(names, (*names[1:], names[0]), strict=True)
    links = tuple(Link(pair, bytes_per_s=125e6, latency_s=25e-6) for pair in ends)
    return msgspec.structs.replace(cluster, links=links, switches=())


@pytest.mark.parametrize(
    ("cluster", "count"),
    [
        (cluster_of("1x4"), 23),
        (cluster_of("4x1"), 23),
        (cluster_of("2x2"), 7),
        (uneven(), 3),
        (ring(), 1),
        (cluster_of("1x1"), 0),
        (cluster_of("2x4"), 2 * 6 + 1),  # exchanges of two workers of a host, and of the hosts
    ],
    ids=["one host", "four hosts", "two hosts", "uneven hosts", "ring", "one worker", "eight workers"],
)
def test_what_may_change_places(cluster: Cluster, count: int) -> None:
    found = symmetries_of(TaskPrices(cluster))

    assert len(found) == len(set(found)) == count


def test_steps_take_as_long_with_workers_in_other_places_and_only_then() -> None:
    of, rng = priced("words"), np.random.default_rng(0)
    found = symmetries_of(of.tasks.prices)
    others = 0
    for _ in range(4):
        state = random_state(of.tasks, of.space, of.start, rng, moves=6)
        step_s = of.tasks.begin(state)
        for places in permutations(range(4)):
            moved_s = of.tasks.begin(tuple(config.moved(places) for config in state))
            if places in found:
                assert moved_s == pytest.approx(step_s, rel=1e-12)
            others += moved_s != pytest.approx(step_s, rel=1e-6)
    assert others > 20
