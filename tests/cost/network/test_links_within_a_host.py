"""FlexFlow's two clusters (arXiv:1807.05358, figure 6): devices of a host are not equally near each other."""

from pathlib import Path

import pytest

from partc.cost.cluster.cluster import read_cluster
from partc.cost.network.topology import Network

EXAMPLES = Path(__file__).parents[3] / "examples"


def network(name: str) -> Network:
    return Network(read_cluster(EXAMPLES / f"cluster-{name}.json"))


def passed(network: Network, source: str, target: str) -> list[str]:
    """Return the ends and switches that a message passes, links being all it needs."""
    route = network.route(source, target)
    return [source, *(lane[1] for lane in route.lanes)]


def test_gpus_of_a_p100_node_are_joined_directly() -> None:
    cluster = network("4x4-p100")

    for other in (1, 2, 3):
        route = cluster.route("node0/gpu0", f"node0/gpu{other}")
        assert route.lanes == (("node0/gpu0", f"node0/gpu{other}"),)
        assert route.bytes_per_s == 18e9
    assert passed(cluster, "node0/gpu0", "node2/gpu3") == [
        "node0/gpu0", "node0", "infiniband", "node2", "node2/gpu3",
    ]  # fmt: skip
    assert cluster.route("node0/gpu0", "node2/gpu3").bytes_per_s == 11.25e9


def test_adjacent_gpus_of_a_k80_node_pass_a_switch_of_their_own() -> None:
    cluster = network("16x4-k80")

    assert passed(cluster, "node0/gpu0", "node0/gpu1") == ["node0/gpu0", "node0/pcie0", "node0/gpu1"]
    assert passed(cluster, "node0/gpu1", "node0/gpu2") == [
        "node0/gpu1", "node0/pcie0", "node0/pcie", "node0/pcie1", "node0/gpu2",
    ]  # fmt: skip
    assert cluster.route("node3/gpu0", "node12/gpu0").bytes_per_s == 6.3e9


@pytest.mark.parametrize(
    ("pairs", "twice"),
    [
        ((("gpu0", "gpu1"), ("gpu2", "gpu3")), False),  # each pair within its own switch
        ((("gpu0", "gpu2"), ("gpu1", "gpu3")), True),  # both across the shared one
        ((("gpu0", "gpu2"), ("gpu3", "gpu1")), False),  # links are full duplex
    ],
)
def test_messages_queue_where_they_share_a_switchs_link(
    pairs: tuple[tuple[str, str], ...], twice: bool
) -> None:
    cluster = network("16x4-k80")

    routes = [cluster.route(f"node0/{source}", f"node0/{target}") for source, target in pairs]

    assert bool(set(routes[0].lanes) & set(routes[1].lanes)) == twice
