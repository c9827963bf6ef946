"""What another mesh waits for goes ahead of what nobody waits for, and nothing else changes its place."""

import onnx_graphsurgeon as gs

from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lowered_graph import COMMUNICATION_DOMAIN, LoweredGraph, is_communication
from partc.passes.scheduling.lead_first import lead_first


def node(op: str, output: str, *inputs: str) -> gs.Node:
    domain = COMMUNICATION_DOMAIN if op in ("Exchange", "AllReduce") else None
    return gs.Node(op, output, {}, [gs.Variable(n) for n in inputs], [gs.Variable(output)], domain=domain)


def graph(*nodes: gs.Node) -> tuple[LoweredGraph, dict[str, int]]:
    lowered = LoweredGraph(Meshes((Mesh("a", (("data", 2),)),)), list(nodes))
    return lowered, {n.name: place for place, n in enumerate(nodes) if not is_communication(n)}


BACK = (
    node("Transpose", "turned", "W"),
    node("MatMul", "dW", "x", "dy"),
    node("ReduceSum", "db", "dy"),
    node("MatMul", "dx", "dy", "turned"),
    node("Where", "masked", "mask", "dx"),
)
SUMS = (node("AllReduce", "dW.whole", "dW"), node("AllReduce", "db.whole", "db"))
UPDATES = (node("Sub", "W_next", "W", "dW.whole"), node("Sub", "b_next", "b", "db.whole"))
BELOW = (
    node("Exchange", "sent", "masked"),
    node("MatMul", "dV", "sent", "h"),
    node("AllReduce", "dV.whole", "dV"),
)


def in_order(places: dict[str, int]) -> list[str]:
    return sorted(places, key=lambda name: places[name])


def test_gradients_of_weights_go_behind_what_is_sent_to_the_mesh_before() -> None:
    lowered, position_of = graph(*BACK, *SUMS, *BELOW, *UPDATES)

    assert in_order(lead_first(lowered, position_of))[:5] == ["turned", "dx", "masked", "dW", "db"]


def test_nothing_changes_where_nobody_waits_for_the_message() -> None:
    lowered, position_of = graph(*BACK, *SUMS, node("Exchange", "sent", "masked"), *UPDATES)

    assert in_order(lead_first(lowered, position_of)) == list(position_of)


def test_nothing_changes_where_all_that_is_read_leads_further() -> None:
    """As where gradients are clipped by their norm: each sum is waited for."""
    norm = (node("Add", "norm", "dW.whole", "db.whole"), node("AllReduce", "norm.whole", "norm"))
    lowered, position_of = graph(*BACK, *SUMS, *norm, *BELOW)

    assert in_order(lead_first(lowered, position_of)) == list(position_of)
