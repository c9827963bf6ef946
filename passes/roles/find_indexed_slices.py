"""Find gradients that are rows scattered into zeros, and give them one form.

    before   ScatterElements <axis = 0, reduction = "add"> (zeros, Expand(Unsqueeze(ids)), rows)
             or ScatterND <reduction = "add"> (zeros, indices, rows), or a sum of such
    after    ids = Reshape ..., rows = Reshape ...
             dense = ScatterND <reduction = "add"> (zeros, Unsqueeze(ids), rows)

A scatter along another axis (the class axis of a loss) is not one of rows, and stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.training_graph import Variable
from partc.passes.roles.find_zeros import KEEPS_ZERO

_SMALL = 1 << 16  # elements of a constant worth reading


@dataclass(frozen=True)
class _Scatter:
    """Rows `rows` [..., d...] added at `ids` (any shape, one id per row)."""

    ids: gs.Tensor
    rows: gs.Tensor


def find_indexed_slices(graph: gs.Graph, dense: gs.Tensor, table: Variable) -> tuple[str, str] | None:
    """Return the names of ids int64[n] and rows [n, ...] if `dense` is their sum, else None."""
    if not table.shape:
        return None
    scatters = _scatters_of(dense, table)
    if not scatters:
        return None
    builder = _Builder(graph, table)
    ids = builder.joined("ids", [builder.flat_ids(scatter.ids) for scatter in scatters])
    rows = builder.joined("rows", [builder.flat_rows(scatter.rows) for scatter in scatters])
    builder.scatter(dense, ids, rows)
    return ids.name, rows.name


# ---------------------------------------------------------------- recognition


def _scatters_of(dense: gs.Tensor, table: Variable) -> list[_Scatter] | None:
    """Return the scatters whose sum `dense` is; None if anything else is in the sum."""
    if _is_zero(dense):
        return []
    if not dense.inputs:
        return None
    node = dense.inputs[0]
    if node.op in ("Add", "Sum", "Identity") or _keeps_axes(node):
        parts = [_scatters_of(read, table) for read in node.inputs]
        known = [part for part in parts if part is not None]
        return [scatter for part in known for scatter in part] if len(known) == len(parts) else None
    scatter = _scatter_nd(node) if node.op == "ScatterND" else _scatter_elements(node, table)
    return None if scatter is None or not _adds_to_zeros(node) else [scatter]


def _keeps_axes(node: gs.Node) -> bool:
    """Tell whether a transpose leaves every axis where it is, as PyTorch's exporter writes them."""
    perm = list(node.attrs.get("perm", ()))
    return node.op == "Transpose" and bool(perm) and perm == sorted(perm)


def _adds_to_zeros(node: gs.Node) -> bool:
    return node.attrs.get("reduction") == "add" and _is_zero(node.inputs[0])


def _is_zero(tensor: gs.Tensor) -> bool:
    if isinstance(tensor, gs.Constant):
        return int(np.prod(tensor.shape)) <= _SMALL and not np.any(tensor.values)
    if not tensor.inputs:
        return False
    node = tensor.inputs[0]
    if node.op == "ConstantOfShape":
        value = node.attrs.get("value")
        return value is None or not np.any(getattr(value, "values", value))
    if node.op == "Constant":
        value = node.attrs.get("value")
        return isinstance(value, gs.Constant) and _is_zero(value)
    return node.op in KEEPS_ZERO and _is_zero(node.inputs[0])


def _scatter_nd(node: gs.Node) -> _Scatter | None:
    indices = node.inputs[1]
    one_id_per_row = indices.shape is not None and len(indices.shape) > 0 and indices.shape[-1] == 1
    return _Scatter(indices, node.inputs[2]) if one_id_per_row else None


def _scatter_elements(node: gs.Node, table: Variable) -> _Scatter | None:
    """Peel the ids' expansion over the row: every column must have the same ids."""
    if node.op != "ScatterElements" or int(node.attrs.get("axis", 0)) not in (0, -len(table.shape)):
        return None
    ids = node.inputs[1]
    row_axes = [1] * (len(table.shape) - 1)
    while ids.inputs and ids.inputs[0].op in ("Expand", "Tile", "Identity", "Cast"):
        ids = ids.inputs[0].inputs[0]
        if ids.shape is not None and list(ids.shape[1:]) == row_axes:
            return _Scatter(ids, node.inputs[2])
    return _Scatter(ids, node.inputs[2]) if table.shape[1:] == (1,) * len(row_axes) else None


# ---------------------------------------------------------------- rewriting


class _Builder:
    def __init__(self, graph: gs.Graph, table: Variable) -> None:
        self._graph = graph
        self._table = table
        self._taken = set(graph.tensors()) | {node.name for node in graph.nodes}

    def flat_ids(self, ids: gs.Tensor) -> gs.Tensor:
        """Return ids as int64[n]."""
        if ids.inputs and ids.inputs[0].op == "Unsqueeze" and len(ids.inputs[0].inputs[0].shape or ()) == 1:
            ids = ids.inputs[0].inputs[0]
        if np.dtype(ids.dtype) != np.int64:
            ids = self._add("Cast", [ids], "ids64", np.int64, ids.shape, to=7)
        if len(ids.shape or ()) == 1:
            return ids
        flat = self._constant("flat", [-1])
        return self._add("Reshape", [ids, flat], "ids", np.int64, [_count(ids.shape)])

    def flat_rows(self, rows: gs.Tensor) -> gs.Tensor:
        """Return rows as [n, ...], shaped like the table but for axis 0."""
        row = self._table.shape[1:]
        if len(rows.shape or ()) == len(row) + 1:
            return rows
        shape = self._constant("row_shape", [-1, *row])
        lead = None if rows.shape is None else rows.shape[: len(rows.shape) - len(row)]
        return self._add("Reshape", [rows, shape], "rows", rows.dtype, [_count(lead), *row])

    def joined(self, what: str, parts: list[gs.Tensor]) -> gs.Tensor:
        """Return all parts one behind the other."""
        if len(parts) == 1:
            return parts[0]
        lead = _count_sum([part.shape[0] if part.shape else None for part in parts])
        shape = [lead, *(self._table.shape[1:] if what == "rows" else ())]
        return self._add("Concat", parts, what, parts[0].dtype, shape, axis=0)

    def scatter(self, dense: gs.Tensor, ids: gs.Tensor, rows: gs.Tensor) -> None:
        """Make `dense` anew, as one ScatterND."""
        last = self._constant("last", [-1])
        # No shape: the slices of several replicas may be laid one behind the other before this.
        positions = self._add("Unsqueeze", [ids, last], "positions", np.int64, None)
        shape = self._constant("shape", list(self._table.shape))
        zero = gs.Constant("value", np.zeros(1, dtype=np.dtype(dense.dtype)))
        zeros = self._add("ConstantOfShape", [shape], "zeros", dense.dtype, self._table.shape, value=zero)
        dense.inputs.clear()
        name = self._name("scatter")
        node = gs.Node("ScatterND", name, {"reduction": "add"}, [zeros, positions, rows], [dense])
        self._graph.nodes.append(node)

    def _add(
        self,
        op: str,
        inputs: list[gs.Tensor],
        what: str,
        dtype: np.dtype | type,
        shape: Sequence[int | str | None] | None,
        **attributes: object,
    ) -> gs.Tensor:
        result = gs.Variable(self._name(what), dtype=np.dtype(dtype), shape=shape)
        self._graph.nodes.append(gs.Node(op, self._name(f"{what}_node"), attributes, inputs, [result]))
        return result

    def _constant(self, what: str, values: list[int]) -> gs.Constant:
        return gs.Constant(self._name(what), np.array(values, dtype=np.int64))

    def _name(self, what: str) -> str:
        name = base = f"{self._table.name}/{what}"
        number = 1
        while name in self._taken:
            name, number = f"{base}_{number}", number + 1
        self._taken.add(name)
        return name


def _count(shape: Sequence[int | str | None] | None) -> int | None:
    sizes = [size for size in shape or () if isinstance(size, int)]
    return prod(sizes) if shape is not None and len(sizes) == len(shape) else None


def _count_sum(sizes: Sequence[int | str | None]) -> int | None:
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) if len(known) == len(sizes) else None
