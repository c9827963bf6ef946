"""How many cores a host's ranks were measured to have together."""

import pytest

from partc.cost.cluster.cluster import shares_places, threads_per_core
from partc.cost.cluster.fit_rates import Products, fit_cores, fit_flops
from tests.builders.plans.compiled_steps import cluster_of

ALONE_S = 1e-3


@pytest.mark.parametrize(
    ("products", "cores"),
    [
        ([(1, ALONE_S, ALONE_S)] * 2, 2.0),  # a core each
        ([(1, ALONE_S, 2 * ALONE_S)] * 2, 1.0),  # one core for both
        ([(1, ALONE_S, 1.6 * ALONE_S)] * 2, 1.25),  # two cores that share their units
        ([(1, ALONE_S, 1.03 * ALONE_S)] * 2, 2.0),  # noise
        ([(2, ALONE_S, 4 * ALONE_S), (1, ALONE_S, 2 * ALONE_S)], 1.0),  # by threads
    ],
)
def test_cores_are_what_threads_get_together(products: Products, cores: float) -> None:
    given = cluster_of("2x2")

    found = fit_cores(given, {"host0": products})

    assert found.hosts[0].cores == pytest.approx(cores)
    assert found.hosts[1] == given.hosts[1]


@pytest.mark.parametrize(("slower", "waits"), [(1.0, False), (1.7, False), (2.2, True), (4.0, True)])
def test_a_slow_core_is_a_place_to_run_and_half_the_time_of_one_is_none(slower: float, waits: bool) -> None:
    products = [(1, ALONE_S, slower * ALONE_S)] * 2
    cluster = fit_cores(cluster_of("1x2"), {"host0": products})

    assert threads_per_core(cluster)["host0"] == pytest.approx(slower)
    assert shares_places(cluster) is waits


FLOPS = 10**9


def test_a_devices_rate_is_that_of_the_median_product() -> None:
    given = cluster_of("2x2")

    found = fit_flops(given, {"host0": [(1, 0.01, 0.01), (1, 0.01, 0.02), (1, 0.04, 0.04)]}, FLOPS)

    assert [device.flops_per_s for device in found.hosts[0].devices] == [pytest.approx(1e11)] * 2
    assert found.hosts[1] == given.hosts[1]


@pytest.mark.parametrize(("slower", "alike"), [(1.1, True), (2.0, False)])
def test_hosts_that_are_nearly_as_quick_are_alike(slower: float, alike: bool) -> None:
    products = {"host0": [(1, 0.01, 0.01)], "host1": [(1, 0.01 * slower, 0.01)]}

    found = fit_flops(cluster_of("2x2"), products, FLOPS)

    rates = {device.flops_per_s for host in found.hosts for device in host.devices}
    assert len(rates) == (1 if alike else 2)
