"""Sums along two axes of a mesh: one message where nothing reads what lies between, and it takes less."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lowered_graph import COMMUNICATION_DOMAIN, LoweredGraph, RankConstant, State
from partc.passes.scheduling.join_sums import join_sums
from partc.passes.scheduling.schedule import Chunk, Item
from partc.runtime.plan.program import Start
from tests.builders.graphs.soap_models import soap_model
from tests.builders.plans.compiled_steps import compile_step
from tests.checks.float64_windows import open_in_float64

MESH = Mesh("worker", (("data", 2), ("rows", 2), ("microbatch", 2)))
ROWS, DATA, MOMENTS = (1,), (0,), (2,)


def node(op: str, output: str, *inputs: str, axes: tuple[int, ...] = (), **attributes: object) -> gs.Node:
    given = {"site": "worker", "axes": axes, "reduction": "sum", "values": 1, **attributes} if axes else {}
    ends = ([gs.Variable(n, np.float32) for n in names] for names in (inputs, (output,)))
    return gs.Node(op, output, given, *ends, domain=COMMUNICATION_DOMAIN if axes else None)


def graph(*nodes: gs.Node) -> LoweredGraph:
    sites = {n.name: "worker" for n in nodes if not n.domain}
    states = [State("W", "worker", "W", "W_next")]
    outputs = [("loss", "loss", Layout("worker"))]
    return LoweredGraph(Meshes((MESH,)), list(nodes), sites, states=states, outputs=outputs)


def sums(lowered: LoweredGraph, seconds: Callable[[Item], float]) -> list[tuple[str, tuple[int, ...]]]:
    join_sums(lowered, lambda way: {}, {}, seconds)
    return [(n.inputs[0].name, n.attrs["axes"]) for n in lowered.nodes if n.op == "AllReduce"]


def each(item: Item) -> float:
    return 1.0


def far_apart(item: Item) -> float:
    """Along rows there is nothing between the ranks; along both as much as along data alone, twice."""
    return 0.0 if isinstance(item, Chunk) else {ROWS: 0.0, DATA: 1.0}.get(item.nodes[0].attrs["axes"], 2.0)


def dear(name: str, item: Item) -> float:
    """Every message takes 1 s, but one that is joint 3.5 s."""
    if isinstance(item, Chunk):
        return 0.0
    return 3.5 if (item.nodes[0].name, item.nodes[0].attrs["axes"]) == (name, (0, 1)) else 1.0


BEFORE = node("ReduceSum", "m", "x")
FIRST = node("AllReduce", "m1", "m", axes=ROWS)
COPY = node("Identity", "m1.sent", "m1")
LAST = node("AllReduce", "m2", "m1.sent", axes=DATA)
READER = node("Sub", "W_next", "W", "m2")
CHAIN = (BEFORE, FIRST, COPY, LAST, READER)


def test_two_sums_of_one_value_are_one_message() -> None:
    lowered = graph(*CHAIN)

    assert sums(lowered, each) == [("m", (0, 1))]
    assert [n.op for n in lowered.nodes] == ["ReduceSum", "AllReduce", "Sub"]
    assert lowered.nodes[1].outputs[0].name == "m2"


def test_one_after_the_other_where_that_takes_less() -> None:
    assert sums(graph(*CHAIN), far_apart) == [("m", ROWS), ("m1.sent", DATA)]


@pytest.mark.parametrize(
    "nodes",
    [
        (*CHAIN, node("Neg", "other", "m1")),
        (*CHAIN, node("Neg", "other", "m1.sent")),
        (BEFORE, FIRST, COPY, node("AllReduce", "m2", "m1.sent", axes=DATA, reduction="max"), READER),
        (BEFORE, FIRST, node("Neg", "m1.sent", "m1"), LAST, READER),
        (BEFORE, node("AllReduce", "m1", "m", axes=MOMENTS), COPY, LAST, READER),
        (BEFORE, node("AllReduce", "W_next", "m", axes=ROWS), node("AllReduce", "m2", "W_next", axes=DATA)),
        (BEFORE, node("AllReduce", "loss", "m", axes=ROWS), node("AllReduce", "m2", "loss", axes=DATA)),
        (BEFORE, FIRST, COPY, node("AllReduce", "m2", "m1.sent", axes=DATA, rounds_to="bfloat16"), READER),
        (BEFORE, FIRST, COPY, node("AllReduce", "m2", "m1.sent", axes=DATA, site="server"), READER),
    ],
    ids=[
        "reads",
        "reads the copy",
        "largest",
        "computes",
        "micro-batches",
        "is kept",
        "is an output",
        "rounds",
        "elsewhere",
    ],
)
def test_what_lies_between_is_needed(nodes: tuple[gs.Node, ...]) -> None:
    lowered = graph(*nodes)
    before = list(lowered.nodes)

    assert len(sums(lowered, each)) == 2
    assert lowered.nodes == before


def test_what_is_summed_last_may_stay_while_what_others_wait_for_is_joined() -> None:
    """Such as gradients, whose last sum goes along with others."""
    last = (node("AllReduce", "g1", "h", axes=ROWS), node("AllReduce", "g2", "g1", axes=DATA))
    lowered = graph(*CHAIN[:-1], node("Mul", "h", "m2", "x"), *last, node("Sub", "W_next", "W", "g2"))

    assert sums(lowered, partial(dear, "g2")) == [("m", (0, 1)), ("h", ROWS), ("g1", DATA)]


def test_a_message_of_every_micro_batch_counts_as_often() -> None:
    """Joint, one of each of two micro-batches takes 1 s less, and one of the whole batch 1.5 s more."""
    each_time = (node("ReduceSum", "m", "x", "i"), *CHAIN[1:-1], node("AllReduce", "g", "m2", axes=MOMENTS))
    once = (node("AllReduce", "c1", "c", axes=ROWS), node("AllReduce", "c2", "c1", axes=DATA))
    behind = (node("Mul", "h", "g", "c2"), node("AllReduce", "z", "h", axes=ROWS))
    lowered = graph(*each_time, *once, *behind, node("Sub", "W_next", "W", "z"))
    lowered.constants["i"] = RankConstant("coordinate", axis=2)

    assert sums(lowered, partial(dear, "c2"))[0] == ("m", (0, 1))


def test_three_sums_of_one_value_are_one_message() -> None:
    mesh = Mesh("worker", (("data", 2), ("rows", 2), ("columns", 2)))
    lowered = graph(*CHAIN[:-1], node("AllReduce", "m3", "m2", axes=(2,)), node("Sub", "W_next", "W", "m3"))
    lowered.meshes = Meshes((mesh,))

    assert sums(lowered, each) == [("m", (0, 1, 2))]


def test_statistics_of_images_cut_in_both_ways_are_summed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean and variance on the way ahead, both sums on the way back; gradients of weights at the end."""
    open_in_float64(monkeypatch)
    training = import_training_graph(onnx.ModelProto.FromString(soap_model("convolutions")))

    plan = compile_step(training, tmp_path / "out", "1x4", "data=2,spatial=2", "global").plan

    starts = [i for i in plan.instructions if isinstance(i, Start) and i.kind == "all_reduce"]
    joint = [start for start in starts if start.group == "worker.data*spatial"]
    assert plan.groups["worker.data*spatial"] == ((0, 1, 2, 3),)
    assert [start.payload_bytes for start in joint[:3]] == [4 * 8, 4 * 8, 2 * 4 * 8]
    assert len(joint) == 4
    assert len(starts) == 6  # nine, one axis after the other
