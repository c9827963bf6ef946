"""A table in parts, read and written by ids of the whole: the parts together are the whole."""

import re
from collections.abc import Callable, Mapping

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.passes.graph.expand_gather import TableShard, write_gather, write_scatter
from partc.passes.graph.node_writer import NodeWriter
from partc.passes.graph.training_graph import TrainingGraph
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
    ("[R,3]", "[9,1]", "[9,3]"),
    ("[R,2,3]", "[3,4,1]", "[3,4,2,3]"),
    ("[R]", "[9,1]", "[9]"),
]

Feeds = Mapping[str, np.ndarray]
Writer = Callable[[NodeWriter, Mapping[str, gs.Tensor], TableShard], gs.Tensor]


def run_whole(inputs: str, outputs: str, node: str, feeds: Feeds) -> np.ndarray:
    step = f"step ({inputs}) => ({outputs} y) {{ y = {node} }}"
    return run_graph(graph_of(re.sub(r"\bR\b", str(ROWS), step)), feeds)["y"]


def run_part(start: int, stop: int, feeds: Feeds, write_nodes: Writer) -> np.ndarray:
    """Run what is written for a rank that has the rows from start to stop."""
    fed = {**feeds, "first": np.array([start]), "count": np.array([stop - start])}
    inputs = {name: gs.Variable(name, value.dtype, value.shape) for name, value in fed.items()}
    write = NodeWriter(set(), "part")
    y = write_nodes(write, inputs, TableShard(inputs["first"], inputs["count"], ROWS))
    graph = gs.Graph(write.nodes, list(inputs.values()), [y], opset=21)
    return run_graph(TrainingGraph(graph, {}, {}, (), None, {}), fed)[y.name]


def read_rows(axis: int = 0) -> Writer:
    def write_nodes(write: NodeWriter, inputs: Mapping[str, gs.Tensor], part: TableShard) -> gs.Tensor:
        table, ids = inputs["t"], inputs["i"]
        return write_gather(write, table, ids, part, axis=axis, ranks=(len(table.shape), len(ids.shape)))

    return write_nodes


def add_rows(write: NodeWriter, inputs: Mapping[str, gs.Tensor], part: TableShard) -> gs.Tensor:
    ids_rank = len(inputs["i"].shape) - 1  # the last axis is of size 1
    ids = write.op("Squeeze", inputs["i"], write.ints(-1))
    row_axes = len(inputs["t"].shape) - 1
    positions, updates = write_scatter(write, ids, inputs["u"], part, ids_rank=ids_rank, row_axes=row_axes)
    positions = write.op("Unsqueeze", positions, write.ints(-1))
    return write.op("ScatterND", inputs["t"], positions, updates, reduction="add")


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
    feeds = {"t": values, "i": np.asarray(rng.integers(-ROWS, ROWS, sizes(ids)), kind)}
    inputs, node = f"{element}{table} t, {kind}{ids} i", f"Gather <axis = {axis}> (t, i)"
    expected = run_whole(inputs, f"{element}{result}", node, feeds)

    parts = [
        run_part(start, stop, feeds | {"t": np.take(values, range(start, stop), axis)}, read_rows(axis))
        for start, stop in bounds
    ]

    np.testing.assert_array_equal(np.sum(parts, axis=0, dtype=values.dtype), expected)


@pytest.mark.parametrize("stray", [ROWS, -ROWS - 1])
def test_an_id_of_no_row_gives_nan_on_every_rank(stray: int) -> None:
    for start, stop in ((0, 5), (5, 11)):
        feeds = {"t": np.ones((stop - start, 3)), "i": np.array([stray, 3])}
        y = run_part(start, stop, feeds, read_rows())

        assert np.isnan(y[0]).all()
        assert not np.isnan(y[1]).any()


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(("table", "ids", "updates"), SCATTERS)
def test_what_parts_add_is_what_the_table_adds(
    table: str, ids: str, updates: str, bounds: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(0)
    feeds = {"t": rng.normal(size=sizes(table)), "u": rng.normal(size=sizes(updates))}
    feeds["i"] = rng.integers(-ROWS, ROWS, sizes(ids))
    inputs = f"double{table} t, int64{ids} i, double{updates} u"
    expected = run_whole(inputs, f"double{table}", 'ScatterND <reduction = "add"> (t, i, u)', feeds)

    parts = [run_part(start, stop, feeds | {"t": feeds["t"][start:stop]}, add_rows) for start, stop in bounds]

    np.testing.assert_allclose(np.concatenate(parts), expected, 1e-12, 1e-12)
