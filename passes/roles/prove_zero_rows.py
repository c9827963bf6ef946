"""Prove that rows of zero gradient do not count in a sparse update.

A parameter with indexed slices may be all-reduced as a dense gradient: its update is then given every
row, most of them zero, instead of those that were read. That changes nothing for SGD or Adagrad; it does
for a lazy momentum, whose rows decay where they were read and rest elsewhere.

Every tensor behind SumRows is followed with the sums taken as zero:

    ZERO         zero                        Mul (sums, anything), Neg (ZERO), ...
    RowsOf (t)   rows of table t as it was   Gather (t, ids), RowsOf (t) + ZERO
    OTHER        anything else               of rows: it may go into further rows, never back to a table

and the update passes if whatever leaves the rows is as if they had not been there: a ScatterND that adds
ZERO, or writes back RowsOf its own table; a reduction of ZERO.
"""

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.indexed_slices import gradient_read_by
from partc.passes.rules.sharding_rules import is_sum_rows

KEEPS_ZERO_ROWS = frozenset(
    ["Identity", "Neg", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Sqrt", "Abs", "Sign"]
)


@dataclass(frozen=True, slots=True)
class RowPerId:
    """A tensor with one entry per id: of table `table` as it was, or (None) of anything else."""

    table: str | None = None


@dataclass(frozen=True, slots=True)
class Zero:
    """A tensor of zeros, with one entry per id if `is_rows`."""

    is_rows: bool = True


Value = RowPerId | Zero | None  # None: does not depend on the rows


def ignores_zero_rows(training: TrainingGraph, parameter: str) -> bool:
    """Tell whether more ids, of zero gradient, leave the update of a sparse parameter as it is."""
    gradient = training.gradients[parameter]
    every = training.gradients.values()
    sums = [n for n in training.graph.nodes if is_sum_rows(n) and gradient_read_by(n, every) is gradient]
    return all(_Proof().holds(training.graph, node) for node in sums)


class _Proof:
    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.same_as: dict[str, str] = {}  # table -> the table that it equals if the rows are zero

    def holds(self, graph: gs.Graph, sum_rows: gs.Node) -> bool:
        """Follow the sums through the graph; stop at the first op that rows of zero would show in."""
        ids, sums = (tensor.name for tensor in sum_rows.outputs)
        self.values = {ids: RowPerId(), sums: Zero()}
        for node in graph.nodes:
            read = [self.values.get(tensor.name) for tensor in node.inputs]
            if any(value is not None for value in read) and not self._follow(node, read):
                return False
        return True

    def _follow(self, node: gs.Node, read: list[Value]) -> bool:
        """Give the node's outputs values; tell whether rows of zero leave no trace in them."""
        result = node.outputs[0].name
        if node.op == "ScatterND":
            return self._scatter(node, read)
        if node.op == "Gather" and read[0] is None:
            self.values[result] = RowPerId(self._root(node.inputs[0].name))
        elif node.op.startswith("Reduce"):
            self.values[result] = Zero(is_rows=False)
            return isinstance(read[0], Zero)
        elif node.op in ("Shape", "Size", "Concat"):
            return False
        else:
            self.values.update((tensor.name, _combine(node.op, read)) for tensor in node.outputs)
        return True

    def _scatter(self, node: gs.Node, read: list[Value]) -> bool:
        table, _, updates = (tensor.name for tensor in node.inputs)
        adds = node.attrs.get("reduction", "none") == "add"
        value = read[2]
        leaves_no_trace = isinstance(value, Zero) if adds else value == RowPerId(self._root(table))
        self.same_as[node.outputs[0].name] = self._root(table)
        return leaves_no_trace and read[0] is None and updates != table

    def _root(self, table: str) -> str:
        return self.same_as.get(table, table)


def _combine(op: str, read: list[Value]) -> Value:
    """Return the value of a pointwise op's result."""
    is_rows = any(isinstance(v, RowPerId) or (isinstance(v, Zero) and v.is_rows) for v in read)
    zero = Zero(is_rows)
    is_zero = [isinstance(value, Zero) for value in read]
    if op in ("Mul", "And") and any(is_zero):
        return zero
    if op in KEEPS_ZERO_ROWS and is_zero[0]:
        return zero
    if op == "Div" and is_zero[0]:
        return zero
    if op in ("Identity", "Cast") or (op in ("Add", "Sub") and is_zero[1]):
        return read[0] if read[0] is not None or not is_rows else RowPerId()
    if op == "Add" and is_zero[0]:
        return read[1] if read[1] is not None or not is_rows else RowPerId()
    return RowPerId() if is_rows else None
