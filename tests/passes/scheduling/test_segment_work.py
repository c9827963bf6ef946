"""The work of a chunk of nodes, counted by hand."""

from math import prod

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS, sum_rows_function
from partc.passes.layouts.configuration import data_parallel
from partc.passes.layouts.layouts import served_rows
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.segment_work import WorkCounter

WORKERS = data_parallel(1).meshes
FLOAT, INT64 = np.dtype(np.float32), np.dtype(np.int64)


def value(name: str, dtype: np.dtype = FLOAT) -> gs.Variable:
    return gs.Variable(name, dtype=dtype)


def node(op: str, inputs: list[gs.Variable], *outputs: gs.Variable, domain: str | None = None) -> gs.Node:
    return gs.Node(op, f"{outputs[0].name}.node", {}, inputs, list(outputs), domain=domain)


def counter(lowered: LoweredGraph, servers: int = 1) -> WorkCounter:
    lowered.functions[SUM_ROWS] = sum_rows_function(17)
    return WorkCounter(lowered, servers)


def test_a_product_of_many_flops_a_byte_is_not_streamed() -> None:
    lowered = LoweredGraph(WORKERS, nbytes={"x": 400, "w": 400, "h": 400, "y": 400})
    product = node("MatMul", [value("x"), value("w")], value("h"))
    added = node("Add", [value("h"), value("x")], value("y"))
    lowered.flops = {product.name: 4 * 1200, added.name: 100}

    work = counter(lowered).count([product, added], {"y"})

    assert (work.nodes, work.flops, work.touched_bytes, work.streamed_bytes) == (2, 4900, 2400, 1200)
    lowered.flops[product.name] -= 1
    assert counter(lowered).count([product, added], {"y"}).streamed_bytes == 2400


@pytest.mark.parametrize(
    ("op", "first", "second", "made", "packed_bytes"),
    [
        ("MatMul", (4, 8), (8, 16), (4, 16), 512),
        ("MatMul", (1, 8), (8, 16), (1, 16), 0),
        ("MatMul", (8,), (8, 16), (16,), 0),
        ("MatMul", (3, 1, 8), (8, 16), (3, 1, 16), 512),
        ("MatMul", (3, 1, 8), (3, 8, 16), (3, 1, 16), 0),
        ("MatMul", (3, 2, 8), (3, 8, 16), (3, 2, 16), 1536),
        ("MatMul", (None, 8), (8, 16), (None, 16), 512),
        ("Gemm", (8, 4), (8, 16), (4, 16), 512),
        ("Mul", (4, 16), (4, 16), (4, 16), 0),
    ],
)
def test_products_of_several_rows_pack_their_second_factor(
    op: str, first: tuple[int, ...], second: tuple[int, ...], made: tuple[int, ...], packed_bytes: int
) -> None:
    shapes = {"x": first, "w": second, "y": made}
    lowered = LoweredGraph(WORKERS, nbytes={"w": 4 * prod(second), "y": 4}, shapes=shapes)
    work = counter(lowered).count([node(op, [value("x"), value("w")], value("y"))], {"y"})

    assert work.packed_bytes == packed_bytes


def test_functions_count_as_their_bodies_and_the_ids_that_they_sort() -> None:
    lowered = LoweredGraph(WORKERS, nbytes={"ids": 100 * 8, "rows": 100 * 32})
    summed = node(
        SUM_ROWS,
        [value("ids", INT64), value("rows")],
        value("unique", INT64),
        value("sums"),
        domain=FUNCTION_DOMAIN,
    )
    once = node("Unique", [value("ids", INT64)], value("own", INT64))

    work = counter(lowered).count([summed, once], set())

    assert work.nodes == len(sum_rows_function(17).node) + 1
    assert work.sorted_ids == 200


def test_rows_that_follow_the_data_are_as_large_as_what_they_are_made_of() -> None:
    lowered = LoweredGraph(WORKERS, nbytes={"ids": 100 * 8}, shapes={"table": (None, 8)})
    found = node("Gather", [value("table"), value("ids", INT64)], value("rows"))
    count = counter(lowered)

    asked = count.count([found], {"rows"})
    sent = node("AllGatherRows", [value("rows")], value("all"))
    count.pass_on([sent])
    scaled = count.count([node("Neg", [value("all")], value("scaled"))], {"scaled"})

    assert asked.touched_bytes == 800 + 2 * 100 * 32
    assert scaled.touched_bytes == 2 * 100 * 32


def test_each_server_touches_its_part_of_what_servers_own() -> None:
    lowered = LoweredGraph(WORKERS, nbytes={"w": 900, "g": 900, "w_next": 900})
    lowered.meanings = {name: (name, served_rows("w")) for name in lowered.nbytes}
    update = [node("Sub", [value("w"), value("g")], value("w_next"))]

    assert counter(lowered).count(update, {"w_next"}).touched_bytes == 2700
    assert counter(lowered, servers=3).count(update, {"w_next"}).touched_bytes == 900
