"""Rates of hosts' CPU devices, from what a product takes."""

import pytest

from partc.cost.cluster.fit_flops import fit_flops
from tests.builders.plans.compiled_steps import cluster_of

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
