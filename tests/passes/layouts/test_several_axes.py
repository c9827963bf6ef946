"""Layouts on a mesh of two axes: samples along one, weights' columns and rows along the other."""

from itertools import product

from partc.passes.layouts.aggregate_partials import aggregate_partials
from partc.passes.layouts.boxes import box_of
from partc.passes.layouts.configuration import Configuration, Wish
from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lower import lower
from partc.runtime.plan.variables import Box
from tests.builders.graphs.small_steps import lay_out, lines

MESH = Mesh("worker", (("data", 2), ("tensor", 2)))
WHOLE = Replicate()
SUM = Partial("sum")
STEP = """
step (double[8,4] x, double[4,6] U, double[6,4] V) => (double[4,6] U_next, double[6,4] V_next) {
    h = MatMul (x, U)
    t = Tanh (h)
    y = MatMul (t, V)
    dy = Tanh (y)
    tt = Transpose <perm = [1, 0]> (t)
    dV = MatMul (tt, dy)
    vt = Transpose <perm = [1, 0]> (V)
    dt = MatMul (dy, vt)
    xt = Transpose <perm = [1, 0]> (x)
    dU = MatMul (xt, dt)
    U_next = Sub (U, dU)
    V_next = Sub (V, dV)
}
"""
COLUMNS_THEN_ROWS = {"U": Layout("worker", WHOLE, Split(1)), "V": Layout("worker", WHOLE, Split(0))}


def test_columns_then_rows_leave_one_sum() -> None:
    graph = lay_out(STEP, {"x": 0}, configuration=Configuration(Meshes((MESH,)), COLUMNS_THEN_ROWS))

    aggregate_partials(graph)

    assert graph.layout("h") == graph.layout("t") == Layout("worker", Split(0), Split(1))
    assert graph.layout("y") == Layout("worker", Split(0), SUM)
    assert graph.layout("dV") == Layout("worker", SUM, Split(0))
    assert graph.layout("dU") == Layout("worker", SUM, Split(1))
    assert graph.layout("U_next") == COLUMNS_THEN_ROWS["U"]
    assert graph.made_whole == {("y", 1), ("dV", 0), ("dU", 0)}


def test_replicas_gather_what_they_share_and_scatter_its_gradient() -> None:
    homes = {"U": Layout("worker", Split(0))}
    graph = lay_out(STEP, {"x": 0}, configuration=Configuration(Meshes((MESH,)), homes))
    aggregate_partials(graph)

    lowered = lines(lower(graph))

    assert graph.layout("h") == Layout("worker", Split(0))
    assert "U@worker.whole = AllGather (U)" in lowered
    assert "dU@worker.split0.1 = ReduceScatter (dU)" in lowered
    assert "U_next = Sub (U, dU@worker.split0.1)" in lowered


def test_a_wish_comes_before_what_operands_bring() -> None:
    wishes = {"h": {0: Wish(Split(1)), 1: Wish(None)}}
    names = {node.outputs[0].name: node.name for node in lay_out(STEP, {"x": 0}).training.graph.nodes}
    configuration = Configuration(
        Meshes((MESH,)), wishes={names[tensor]: wish for tensor, wish in wishes.items()}
    )

    graph = lay_out(STEP, {"x": 0}, configuration=configuration)

    assert graph.layout("x") == Layout("worker", Split(0))
    assert graph.layout("h") == Layout("worker", Split(1))


def test_two_axes_cut_one_factor_one_within_the_other() -> None:
    layout = Layout("worker", Split(0), Split(0))

    boxes = [box_of(MESH, layout, (8, 4), MESH.coordinates(position)) for position in range(4)]

    rows = [box.ranges[0] for box in boxes]
    assert rows == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]


def test_a_strided_box_has_the_blocks_as_a_factor() -> None:
    box = box_of(MESH, Layout("worker", WHOLE, Split(1, outer=3)), (4, 12), (0, 1))

    assert box == Box(((4,), (3, 4)), (((0, 4),), ((0, 3), (2, 4))))


def test_parts_of_unequal_size_are_no_layout() -> None:
    assert MESH.divides(Layout("worker", Split(0), Split(0)), (8,))
    assert not MESH.divides(Layout("worker", Split(0), Split(0)), (6,))
    assert not MESH.divides(Layout("worker", Split(0), Split(0, outer=3)), (9,))
    assert MESH.divides(Layout("worker", Split(0), Split(0, outer=2)), (8,))


def test_earlier_parts_of_what_does_not_divide_have_one_entry_more() -> None:
    boxes = [box_of(MESH, Layout("worker", WHOLE, Split(1, 3, 5)), (4, 15), (0, place)) for place in (0, 1)]

    assert [box.factored[1] for box in boxes] == [(3, 5), (3, 5)]
    assert [box.ranges[1] for box in boxes] == [((0, 3), (0, 3)), ((0, 3), (3, 5))]


def test_what_cannot_be_cut_unevenly() -> None:
    assert MESH.divides(Layout("worker", Split(0, 1, 5), Split(0, 5)), (20,))
    assert not MESH.divides(Layout("worker", Split(0, 1, 5), Split(0)), (20,))  # what is left is not told
    assert not MESH.divides(Layout("worker", Split(0, 1, 5), Split(0, 2)), (20,))  # within an entry of it
    assert not MESH.divides(Layout("worker", Split(0, 1, 5), Split(0, 1, 15)), (15,))  # of other factors
    assert not MESH.divides(Layout("worker", Split(0, 1, 1)), (4,))  # more parts than entries
    assert not MESH.divides(Layout("worker", Split(0, 1, 3), Split(0, 1, 3)), (3,))


def test_axes_at_one_place_divide_what_those_before_them_left() -> None:
    layout = MESH.nest_splits(Layout("worker", Split(0), Split(0)), (10,))

    assert layout == Layout("worker", Split(0), Split(0, 1, 10))  # the first alone makes equal parts
    assert MESH.divides(layout, (10,))
    assert rows(layout, (10,)) == [(0, 3), (3, 5), (5, 8), (8, 10)]
    assert MESH.nest_splits(Layout("worker", Split(0), Split(0)), (8,)) == Layout(
        "worker", Split(0), Split(0)
    )


def test_one_axis_of_a_tensor_has_two_factors_of_parts_that_differ() -> None:
    layout = MESH.nest_splits(Layout("worker", Split(0), Split(0, outer=5)), (15,))

    assert layout == Layout("worker", Split(0, 1, 5), Split(0, 5, 3))
    assert MESH.divides(layout, (15,))
    assert rows(layout, (15,)) == [((0, 3), (0, 2)), ((0, 3), (2, 3)), ((3, 5), (0, 2)), ((3, 5), (2, 3))]


def rows(layout: Layout, shape: tuple[int, ...]) -> list[object]:
    boxes = [box_of(MESH, layout, shape, place) for place in product(range(2), range(2))]
    return [box.ranges[0] if len(box.ranges[0]) > 1 else box.ranges[0][0] for box in boxes]
