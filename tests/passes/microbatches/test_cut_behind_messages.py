"""What messages wait for comes first: gradients of inputs are sent before those of weights are made."""

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.passes.layouts.layouts import MICROBATCHES
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lowered_graph import COMMUNICATION_DOMAIN, LoweredGraph
from partc.passes.microbatches.cut_behind_messages import cut_behind_messages
from partc.passes.microbatches.find_repeated import Repeated
from partc.passes.microbatches.take_turns import take_turns
from partc.passes.scheduling.schedule import Chunk, Communication, Item


def op(kind: str, reads: Sequence[str], writes: str, **attributes: object) -> gs.Node:
    inputs = [gs.Variable(name, dtype=np.dtype("float32")) for name in reads]
    return gs.Node(kind, writes, attributes, inputs, [gs.Variable(writes, dtype=np.dtype("float32"))])


def message(source: str, target: str) -> Communication:
    return Communication((op("ToStage", [source], target),), None)


def second_each(item: Item) -> float:
    return float(len(item.nodes)) if isinstance(item, Chunk) else 0.0


def names(items: Sequence[Item]) -> list[list[str]]:
    return [[node.name for node in item.nodes] for item in items]


@pytest.fixture
def lowered() -> LoweredGraph:
    return LoweredGraph(Meshes((Mesh("stage1", (("data", 1), (MICROBATCHES, 4))),)))


def back(is_repeated: bool = True) -> Chunk:
    nodes = [op("MatMul", ["dy"], "dw"), op("Mul", ["dy"], "scaled"), op("MatMul", ["scaled"], "dx")]
    return Chunk("stage1", nodes, is_repeated)


def test_what_a_message_comes_of_is_first(lowered: LoweredGraph) -> None:
    items = cut_behind_messages([back(), message("dx", "dx'")], lowered, second_each)

    assert names(items) == [["scaled", "dx"], ["dw"], ["dx'"]]
    assert all(item.is_repeated and item.site == "stage1" for item in items if isinstance(item, Chunk))


def test_what_others_make_of_it_counts_too(lowered: LoweredGraph) -> None:
    later = Chunk("stage1", [op("Relu", ["dx"], "sent")], True)

    assert names(cut_behind_messages([back(), later, message("sent", "there")], lowered, second_each)) == [
        ["scaled", "dx"],
        ["dw"],
        ["sent"],
        ["there"],
    ]


def test_sums_over_micro_batches_are_no_messages(lowered: LoweredGraph) -> None:
    axis = lowered.meshes.microbatch_axis
    node = op("AllReduce", ["dw"], "total", axes=(axis,))
    node.domain = COMMUNICATION_DOMAIN
    total = Communication((node,), None)

    assert names(cut_behind_messages([back(), message("dx", "dx'"), total], lowered, second_each)) == [
        ["scaled", "dx"],
        ["dw"],
        ["dx'"],
        ["total"],
    ]


@pytest.mark.parametrize(
    "items",
    [
        [back(), message("other", "there")],  # nothing to send
        [back(is_repeated=False), message("dx", "dx'")],
        [Chunk("stage1", back().nodes[1:], True), message("dx", "dx'")],  # nothing is left
    ],
)
def test_else_a_segment_stays_whole(items: list[Item], lowered: LoweredGraph) -> None:
    assert cut_behind_messages(items, lowered, second_each) == items


def test_what_is_short_stays(lowered: LoweredGraph) -> None:
    items = [back(), message("dx", "dx'")]

    assert cut_behind_messages(items, lowered, lambda item: 1e-5) == items


def test_two_stages_have_a_third_of_the_bubble(lowered: LoweredGraph) -> None:
    """Forward, both gradients: a second each. Eight take 24 s of each stage, and 3 s of waiting, then 1."""
    forward, last = Chunk("stage0", [op("Relu", ["x"], "h")], True), op("Relu", ["h'"], "dy")
    first = Chunk("stage0", [op("Relu", ["dx'"], "a"), op("Relu", ["dx'"], "b")], True)
    own = Chunk("stage1", [last, op("MatMul", ["dy"], "dw"), op("MatMul", ["dy"], "dx")], True)
    items: list[Item] = [forward, message("h", "h'"), own, message("dx", "dx'"), first]
    of_each = {tensor.name for i in items for node in i.nodes for tensor in (*node.inputs, *node.outputs)}
    repeated = Repeated(8, frozenset(of_each), frozenset(node.name for i in items for node in i.nodes))

    lengths = [
        take_turns(order, repeated, [], ["stage0", "stage1"], second_each)[-1].length_s
        for order in (items, cut_behind_messages(items, lowered, second_each))
    ]
    assert lengths == [27, 25]
