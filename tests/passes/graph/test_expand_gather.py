"""A table in parts, read and written by ids of the whole: the parts together are the whole."""

import re

import numpy as np
import pytest

from partc.passes.graph.expand_gather import can_expand_scatter, expand_gather, expand_scatter
from partc.passes.graph.facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.indexed_slices import sum_rows_function
from tests.builders.graphs.run_graphs import graph_of, run_graph

ROWS = 11
BOUNDS = [(0, 11)], [(0, 5), (5, 11)], [(0, 1), (1, 7), (7, 11)]  # uneven parts, of one to three ranks
GATHERS = [
    ("[R,3]", "[4]", "[4,3]", 0),
    ("[R,3]", "[2,5]", "[2,5,3]", 0),
    ("[R,2,3]", "[6]", "[6,2,3]", 0),
    ("[R,3]", "", "[3]", 0),
    ("[R]", "[4]", "[4]", 0),
    ("[4,R,2]", "[3,2]", "[4,3,2,2]", 1),
]
SCATTERS = [
    ("ScatterND", "[R,3]", "[9,1]", "[9,3]"),
    ("ScatterND", "[R,2,3]", "[3,4,1]", "[3,4,2,3]"),
    ("ScatterND", "[R]", "[9,1]", "[9]"),
    ("ScatterElements", "[R,3]", "[9,3]", "[9,3]"),
]


def graph_of_node(inputs: str, outputs: str, node: str, rows: int) -> TrainingGraph:
    training = graph_of(re.sub(r"\bR\b", str(rows), f"step ({inputs}) => ({outputs}) {{ {node} }}"))
    training.graph.nodes[0].name = "node"
    return training


def bound_feeds(start: int, stop: int) -> dict[str, np.ndarray]:
    return {"first": np.array([start]), "count": np.array([stop - start])}


def sizes(shape: str) -> list[int]:
    return [ROWS if size == "R" else int(size) for size in shape.strip("[]").split(",") if size]


@pytest.mark.parametrize("element", ["double", "float"])
@pytest.mark.parametrize("kind", ["int64", "int32"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(("table", "ids", "result", "axis"), GATHERS)
def test_what_parts_read_adds_up_to_what_the_table_reads(
    table: str, ids: str, result: str, axis: int, bounds: list[tuple[int, int]], kind: str, element: str
) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=sizes(table)).astype("float64" if element == "double" else "float32")
    chosen = np.asarray(rng.integers(-ROWS, ROWS, sizes(ids)), kind)
    inputs = f"{element}{table} t, {kind}{ids} i"
    node = f"y = Gather <axis = {axis}> (t, i)"
    whole = graph_of_node(inputs, f"{element}{result} y", node, ROWS)
    expected = run_graph(whole, {"t": values, "i": chosen})["y"]

    parts = []
    for start, stop in bounds:
        step = graph_of_node(inputs, f"{element}{result} y", node, stop - start)
        facts = infer_facts(step, {})
        names = expand_gather(
            step.graph, step.graph.nodes[0], facts, rows=ROWS, first_row="first", row_count="count"
        )
        assert [n.name for n in step.graph.nodes] == names
        part = np.take(values, range(start, stop), axis)
        parts.append(run_graph(step, {"t": part, "i": chosen, **bound_feeds(start, stop)})["y"])

    np.testing.assert_array_equal(np.sum(parts, axis=0, dtype=values.dtype), expected)


@pytest.mark.parametrize("stray", [ROWS, -ROWS - 1])
def test_an_id_of_no_row_gives_nan_on_every_rank(stray: int) -> None:
    for start, stop in ((0, 5), (5, 11)):
        step = graph_of_node("double[R,3] t, int64[2] i", "double[2,3] y", "y = Gather (t, i)", stop - start)
        facts = infer_facts(step, {})
        expand_gather(step.graph, step.graph.nodes[0], facts, rows=ROWS, first_row="first", row_count="count")
        feeds = {"t": np.ones((stop - start, 3)), "i": np.array([stray, 3]), **bound_feeds(start, stop)}
        y = run_graph(step, feeds)["y"]

        assert np.isnan(y[0]).all()
        assert not np.isnan(y[1]).any()


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(("op", "table", "ids", "updates"), SCATTERS)
def test_what_parts_add_is_what_the_table_adds(
    op: str, table: str, ids: str, updates: str, bounds: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(0)
    feeds = {"t": rng.normal(size=sizes(table)), "u": rng.normal(size=sizes(updates))}
    feeds["i"] = rng.integers(-ROWS, ROWS, sizes(ids))
    inputs, outputs = f"double{table} t, int64{ids} i, double{updates} u", f"double{table} y"
    node = f'y = {op} <reduction = "add"> (t, i, u)'
    expected = run_graph(graph_of_node(inputs, outputs, node, ROWS), feeds)["y"]

    parts = []
    for start, stop in bounds:
        step = graph_of_node(inputs, outputs, node, stop - start)
        facts = infer_facts(step, {})
        assert can_expand_scatter(step.graph.nodes[0], facts)
        expand_scatter(
            step.graph, step.graph.nodes[0], facts, rows=ROWS, first_row="first", row_count="count"
        )
        own = feeds | {"t": feeds["t"][start:stop], **bound_feeds(start, stop)}
        parts.append(run_graph(step, own)["y"])

    np.testing.assert_allclose(np.concatenate(parts), expected, 1e-12, 1e-12)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_summed_rows_go_to_the_parts_that_have_them(bounds: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(0)
    ids, rows = rng.integers(0, ROWS, 9), rng.normal(size=(9, 3))
    expected = np.zeros((ROWS, 3))
    np.add.at(expected, ids, rows)

    for start, stop in bounds:
        step = graph_of_node(
            "int64[9] i, double[9,3] r", "int64[n] u, double[n,3] s", "u, s = SumRows (i, r)", 1
        )
        step.graph.nodes[0].domain = "partc"
        step.functions.append(sum_rows_function(21))
        facts = infer_facts(step, {})
        expand_scatter(
            step.graph, step.graph.nodes[0], facts, rows=ROWS, first_row="first", row_count="count"
        )
        found = run_graph(step, {"i": ids, "r": rows, **bound_feeds(start, stop)})
        part = np.zeros((stop - start, 3))
        part[found["u"]] = found["s"]

        np.testing.assert_allclose(part, expected[start:stop], 1e-12, 1e-12)


def test_what_overwrites_rows_is_not_expanded() -> None:
    step = graph_of_node(
        "double[R,3] t, int64[2,1] i, double[2,3] u", "double[R,3] y", "y = ScatterND (t, i, u)", 4
    )

    assert not can_expand_scatter(step.graph.nodes[0], infer_facts(step, {}))
