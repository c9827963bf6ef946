"""What times of messages say of a cluster's links."""

import numpy as np
import pytest

from partc.compiler.commands.cluster import MESSAGE_BYTES
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.cluster.profiles import MEMORY_LATENCY_S
from partc.cost.network.fit_links import Line, fit_cluster, fit_line
from partc.cost.network.topology import Network
from tests.builders.plans.compiled_steps import cluster_of

SIZES = (8, 4096, 65_536, 1 << 20, 1 << 23)


def test_exact_times_give_their_line() -> None:
    line = fit_line([(size, 20e-6 + size / 125e6) for size in SIZES])

    assert line.latency_s == pytest.approx(20e-6)
    assert line.bytes_per_s == pytest.approx(125e6)
    assert line.error < 1e-9


def test_noise_of_some_percent_moves_the_line_by_no_more() -> None:
    rng = np.random.default_rng(0)
    line = fit_line([(size, (20e-6 + size / 125e6) * rng.uniform(0.97, 1.03)) for size in SIZES])

    assert line.latency_s == pytest.approx(20e-6, rel=0.04)
    assert line.bytes_per_s == pytest.approx(125e6, rel=0.04)
    assert 0 < line.error < 0.07


def test_links_get_the_rate_of_their_fastest_route_and_share_the_latency() -> None:
    """Host 2's link is slow: routes to it say nothing of the others' rates."""
    cluster = cluster_of("3x1")
    lines = {
        ("host0", "host1"): Line(40e-6 + MEMORY_LATENCY_S, 1e9, 0.0),
        ("host0", "host2"): Line(70e-6 + MEMORY_LATENCY_S, 1e8, 0.0),
        ("host1", "host2"): Line(70e-6 + MEMORY_LATENCY_S, 1e8, 0.0),
    }

    found = fit_cluster(cluster, lines)

    assert [link.bytes_per_s for link in found.links] == [1e9, 1e9, 1e8]
    assert [link.latency_s for link in found.links] == pytest.approx([20e-6, 20e-6, 50e-6])


def test_the_cost_model_gives_back_what_was_measured() -> None:
    lines = {("host0", "host0"): Line(1e-6, 4e9, 0.0), ("host0", "host1"): Line(50e-6, 1.2e8, 0.0)}

    network = Network(fit_cluster(cluster_of("2x2"), lines))

    within = network.route("host0/cpu0", "host0/cpu1")
    assert [within.lanes.count(lane) * 4e9 / within.bytes_per_s for lane in set(within.lanes)] == [
        pytest.approx(1)
    ]
    across = network.route("host0/cpu0", "host1/cpu0")
    assert across.bytes_per_s == pytest.approx(1.2e8)
    assert across.latency_s == pytest.approx(50e-6)


def test_what_no_route_crosses_stays() -> None:
    host = Host("a", (Device("a/gpu0", "gpu", "titan-xp"),), 2**30)
    other = Host("b", (Device("b/cpu0", "cpu", "cpu-core"),), 2**30)
    bus, wire = Link(("a/gpu0", "a"), 12e9, 1e-6), Link(("a", "b"), 1e9, 1e-6)
    cluster = Cluster(CLUSTER_FORMAT, "mixed", (host, other), links=(bus, wire))

    found = fit_cluster(cluster, {("a", "b"): Line(5e-5, 2e8, 0.0)})

    assert found.links[0] == bus
    assert found.links[1].bytes_per_s == 2e8
    assert found.hosts == cluster.hosts


def test_a_burst_that_is_seen_leaves_the_rate_as_it_is() -> None:
    burst, rate = 256_000, 12.5e6
    samples = [(n, 5e-6 + max(n / 8e9, (n - burst) / rate)) for n in MESSAGE_BYTES]

    assert fit_line(samples).bytes_per_s == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_the_burst_of_a_traffic_shaper_is_no_rate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    burst, rate, at_once = 10 ** rng.uniform(3, 6), 10 ** rng.uniform(7, 9.5), 10 ** rng.uniform(9.7, 10.3)
    samples = [(n, 5e-6 + max(n / at_once, (n - burst) / rate)) for n in MESSAGE_BYTES]

    assert fit_line(samples).bytes_per_s == pytest.approx(rate, rel=0.06)
