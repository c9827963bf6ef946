"""Give indexed slices rows of their own where another gradient is the same tensor.

    before   d ─┬─ Neg ─┬─ ScatterND (E, ids)        after   d ─┬─ Identity ── Neg ── ScatterND (E, ids)
                │       └─ Sub (P)                               └─ Neg ── Sub (P)

Of x = E[ids] + P both gradients are what came back for x. Replicas lay the one in a row, beside the ids
that each has, and average the other: what stands between a tensor and its readers must then know whose
they are. A reader of E's rows is one that leads to where rows and ids meet.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from partc.passes.graph.reachability import reads_of
from partc.passes.graph.training_graph import Gradient
from partc.passes.indexed_rows.indexed_slices import parts_of
from partc.runtime.errors import UnsupportedModel


@dataclass
class RowSeparation:
    """Separates the gradients of one graph. Needs: sorted nodes. Leaves: the same.

    `main` are the names of the main computation's nodes; copies of rows become part of it.
    """

    graph: gs.Graph
    main: set[str]

    def __post_init__(self) -> None:
        self._names = {node.name for node in self.graph.nodes} | self.graph.tensors().keys()
        self._copies: dict[tuple[str, str], str] = {}  # (ids, rows) -> the rows' copy

    def separate(self, gradient: Gradient, contested: set[str]) -> Gradient:
        """Return the gradient with rows that are none of the tensors `contested`. Raises UnsupportedModel."""
        assert gradient.ids is not None and gradient.rows is not None
        key = (gradient.ids, gradient.rows)
        if key not in self._copies:
            tensors = self.graph.tensors()
            rows = tensors[gradient.rows]
            own = self._copy(rows, contested)
            if not self._reroute(rows, own, gradient.ids):
                raise _inseparable(gradient)
            self._copies[key] = own.name
        return replace(gradient, rows=self._copies[key])

    def _copy(self, rows: gs.Tensor, contested: set[str]) -> gs.Tensor:
        """Return rows of the same values, joined of parts of which none is contested."""
        parts = parts_of(rows)
        if len(parts) == 1:
            return self._identity(rows)
        operands = [self._identity(part) if part.name in contested else part for part in parts]
        return self._clone(rows.inputs[0], operands)[0]

    def _identity(self, source: gs.Tensor) -> gs.Tensor:
        own = gs.Variable(self._fresh(f"{source.name}.own"), dtype=source.dtype, shape=source.shape)
        node = gs.Node("Identity", self._fresh(f"{own.name}.node"), {}, [source], [own])
        at = self.graph.nodes.index(source.inputs[0]) + 1 if source.inputs else 0
        self.graph.nodes.insert(at, node)
        self.main.add(node.name)
        return own

    def _clone(self, node: gs.Node, operands: list[gs.Tensor]) -> list[gs.Tensor]:
        """Insert a copy of a node behind it, and return what it makes."""
        results = [
            gs.Variable(self._fresh(f"{output.name}.own"), output.dtype, output.shape)
            for output in node.outputs
        ]
        name = self._fresh(f"{node.name}.own")
        copy = gs.Node(node.op, name, dict(node.attrs), operands, results, domain=node.domain)
        self.graph.nodes.insert(self.graph.nodes.index(node) + 1, copy)
        return results

    def _reroute(self, rows: gs.Tensor, own: gs.Tensor, ids: str) -> bool:
        """Let all that leads to where rows and ids meet read `own`. Tell whether they meet."""
        carriers, joins = self._follow(rows.name, ids)
        copied = {rows.name: own}
        for node in _nodes_before(joins, carriers):
            operands = [copied.get(read.name, read) for read in node.inputs]
            results = self._clone(node, operands)
            copied |= {output.name: copy for output, copy in zip(node.outputs, results, strict=True)}
        for node in joins:
            node.inputs = [copied.get(read.name, read) for read in node.inputs]
        return bool(joins)

    def _follow(self, rows: str, ids: str) -> tuple[list[gs.Node], list[gs.Node]]:
        """Return the nodes that read what rows make but no ids, and those that read both."""
        of_rows, of_ids = {rows}, {ids}
        carriers: list[gs.Node] = []
        joins: list[gs.Node] = []
        for node in self.graph.nodes:
            if node.name in self.main:
                continue
            reads = {read.name for read in reads_of(node)}
            if reads & of_rows and reads & of_ids:
                joins.append(node)
            elif reads & of_rows:
                carriers.append(node)
                of_rows.update(output.name for output in node.outputs)
            elif reads & of_ids:
                of_ids.update(output.name for output in node.outputs)
        return carriers, joins

    def _fresh(self, hint: str) -> str:
        name, number = hint, 1
        while name in self._names:
            name, number = f"{hint}_{number}", number + 1
        self._names.add(name)
        return name


def _nodes_before(joins: Iterable[gs.Node], carriers: list[gs.Node]) -> list[gs.Node]:
    """Return the carriers that the meetings are computed from, in order."""
    leading = {read.name for node in joins for read in node.inputs}
    nodes: list[gs.Node] = []
    for node in reversed(carriers):
        if any(output.name in leading for output in node.outputs):
            nodes.append(node)
            leading.update(read.name for read in reads_of(node))
    return nodes[::-1]


def _inseparable(gradient: Gradient) -> UnsupportedModel:
    return UnsupportedModel(
        f"the gradient of {gradient.parameter!r} shares its rows with another gradient, "
        "and nothing tells which of their readers belong to it",
        at=f"rows {gradient.rows!r}, ids {gradient.ids!r}",
        fix="compile with --batch global, or make its rows with a node of their own, such as Identity",
    )
