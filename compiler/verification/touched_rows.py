"""Large tables of which a step reads and writes some rows only: the reference is given these alone.

before   e = Gather (E, ids)                     after   near = Gather (places of E, ids)
         E_next = ScatterND (E, ids, rows)               e = Gather (E', near)
                                                         E'_next = ScatterND (E', near, rows)

E' holds the rows that any index of the step names, in ascending order; `places of E` int64[rows] says where
each of them is. It is the same computation, row by row. A table that is read in any other way stays whole.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, shape_inference

from partc.compiler.model_files.cut_model import leaves_of
from partc.passes.graph.bodies import subgraphs_of

Array = np.ndarray[Any, np.dtype[Any]]
Uses = dict[str, tuple[str, ...]]  # table -> the tensors of indices by which its rows are read and written

PLACES = "verify.places_of."


def find_tables(model: onnx.ModelProto, state: Mapping[str, str], candidates: Iterable[str]) -> Uses:
    """Return the candidates that are read and written by rows alone, and by which indices.

    `state`: variable -> its next value.
    """
    candidates = tuple(candidates)
    graph = model.graph
    one_index = _tensors_of_one_index(model) if candidates else set()
    uses: Uses = {}
    for table in candidates:
        indices = _indices_of(graph, table, state[table], one_index)
        if indices is not None:
            uses[table] = indices
    while stray := [table for table in uses if _depends_on_tables(graph, uses[table], uses)]:
        for table in stray:
            del uses[table]
    return uses


def read_by_places(model: onnx.ModelProto, tables: Uses, state: Mapping[str, str]) -> onnx.ModelProto:
    """Return the model with tables of touched rows, and an input `PLACES + table` more for each."""
    if not tables:
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    del graph.node[:], graph.value_info[:]
    table_of = {
        table: table for table in tables
    }  # tensor that is a table, before or behind an update -> which
    finished: set[str] = set()
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if node.input and (table := table_of.get(node.input[0])) is not None:
            if node.op_type != "Gather":
                table_of[node.output[0]] = table
            if len(node.input) > 1:
                copy.input[1] = f"{node.input[1]}/places.{table}"
                if copy.input[1] not in finished:
                    finished.add(copy.input[1])
                    operands = [PLACES + table, node.input[1]]
                    graph.node.append(helper.make_node("Gather", operands, [copy.input[1]], copy.input[1]))
        graph.node.append(copy)
    for info in (*graph.input, *graph.output):
        if info.name in tables or info.name in {state[table] for table in tables}:
            info.type.tensor_type.ClearField("shape")
    graph.input.extend(
        helper.make_tensor_value_info(PLACES + table, TensorProto.INT64, [None]) for table in tables
    )
    return changed


def places(rows: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Return the further inputs. `rows`: of each table those that are given, ascending; `sizes`: of all."""
    arrays = {}
    for table, table_rows in rows.items():
        where = np.full(
            sizes[table], len(table_rows), np.int64
        )  # out of bounds: no other row is to be asked for
        where[table_rows] = np.arange(len(table_rows))
        arrays[PLACES + table] = where
    return arrays


def distinct_rows(indices: Iterable[Array], rows: int) -> Array:
    """Return the rows that indices name, int64[k] ascending; negative ones count from the end."""
    row_lists = [index.reshape(-1) % rows for index in indices]
    return np.unique(np.concatenate(row_lists)).astype(np.int64)


def _indices_of(
    graph: onnx.GraphProto, table: str, following: str, one_index: Collection[str]
) -> tuple[str, ...] | None:
    """Return the indices by which a table is read and written; None if it is read in another way."""
    aliases, indices = {table}, dict[str, None]()
    for node in graph.node:
        if any(aliases & names for names in _inner_reads(node)):
            return None
        if not aliases.intersection(node.input):
            continue
        if node.input[0] not in aliases or aliases.intersection(node.input[1:]):
            return None
        if not _is_by_rows(node, one_index):
            return None
        if node.op_type != "Gather":
            aliases.add(node.output[0])
        indices |= dict.fromkeys(node.input[1:2])
    aliases_in_outputs = {info.name for info in graph.output} & aliases
    return tuple(indices) if aliases_in_outputs == {following} and indices else None


def _is_by_rows(node: onnx.NodeProto, one_index: Collection[str]) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    match node.op_type:
        case "Identity":
            return True
        case "Gather" | "ScatterElements":
            return axis == 0
        case "ScatterND":
            return node.input[1] in one_index
    return False


def _tensors_of_one_index(model: onnx.ModelProto) -> set[str]:
    """Return the tensors whose last axis has one entry: they name rows, and nothing within them."""
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    return {
        info.name
        for info in (*inferred.value_info, *inferred.input)
        if (dims := info.type.tensor_type.shape.dim) and dims[-1].dim_value == 1
    }


def _inner_reads(node: onnx.NodeProto) -> Iterator[set[str]]:
    for body in subgraphs_of(node):
        yield {info.name for info in body.output}
        for inner in body.node:
            yield set(inner.input)
            yield from _inner_reads(inner)


def _depends_on_tables(graph: onnx.GraphProto, indices: Iterable[str], tables: Uses) -> bool:
    return bool(leaves_of(graph, indices, ()) & tables.keys())
