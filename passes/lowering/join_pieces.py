"""Let small tensors that are gathered, or summed and scattered, in parts travel as one.

    W1 piece, b1 piece, b2 piece                 W1 piece    b1 piece, b2 piece, one behind the other
        │         │         │          =>            │                      │
    AllGather AllGather AllGather                AllGather              AllGather, [N, elements of all pieces]
                                                                        and a column for each

Large ones stay as they are: their parts lie in one buffer in their order, and nothing is copied. What is
joined is copied before and behind, which for small ones takes less than a message.
"""

import heapq
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph, constant, is_communication
from partc.passes.microbatches.find_repeated import find_repeated
from partc.passes.scheduling.bucket_communications import BUCKET_BYTES, IN_PIECES, depths, whole_value

# Three copies of so many bytes, at 10e9 bytes/s, take what a message costs (profiles.py).
SMALL_BYTES = 200_000


def join_pieces(lowered: LoweredGraph, whole_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Join what is small and waits for equally many messages. `whole_shapes`: of values of known size."""
    groups: dict[tuple[object, ...], list[gs.Node]] = {}
    depth, repeated = depths(lowered), find_repeated(lowered)
    for node in lowered.nodes:
        if _is_small(node, lowered, whole_shapes):
            way = map(node.attrs.get, ("site", "axis", "reduction"))
            dtype = np.dtype(node.inputs[0].dtype).name
            key = (node.op, *way, dtype, depth[node.name], node.name in repeated.nodes)
            groups.setdefault(key, []).append(node)
    joined = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in joined:
        for chunk in _chunks(nodes, whole_shapes):
            _Joined(lowered, chunk, whole_shapes).write()
    if joined:
        _sort(lowered)


def _is_small(node: gs.Node, lowered: LoweredGraph, whole_shapes: Mapping[str, tuple[int, ...]]) -> bool:
    if not is_communication(node) or node.op not in IN_PIECES or node.attrs.get("entries"):
        return False
    shape = whole_shapes.get(whole_value(node))
    is_even = (
        shape is not None and shape[0] % lowered.meshes.size(node.attrs["site"], node.attrs["axis"]) == 0
    )
    return is_even and _nbytes(node, whole_shapes) <= SMALL_BYTES


def _nbytes(node: gs.Node, whole_shapes: Mapping[str, tuple[int, ...]]) -> int:
    return prod(whole_shapes[whole_value(node)]) * np.dtype(node.inputs[0].dtype).itemsize


def _chunks(nodes: Sequence[gs.Node], whole_shapes: Mapping[str, tuple[int, ...]]) -> list[list[gs.Node]]:
    """Return the nodes in runs of at most a bucket's bytes."""
    chunks: list[list[gs.Node]] = [[]]
    filled = 0
    for node in nodes:
        filled += _nbytes(node, whole_shapes)
        if filled > BUCKET_BYTES:
            chunks.append([])
            filled = _nbytes(node, whole_shapes)
        chunks[-1].append(node)
    return chunks


class _Joined:
    """One communication in place of several."""

    def __init__(
        self, lowered: LoweredGraph, nodes: Sequence[gs.Node], whole_shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.lowered = lowered
        self.nodes = nodes
        first = nodes[0]
        self.site, self.op = first.attrs["site"], first.op
        self.attributes = {name: value for name, value in first.attrs.items() if name != "values"}
        self.parts = lowered.meshes.size(self.site, first.attrs["axis"])
        self.name = f"{first.inputs[0].name} and {len(nodes) - 1} more"
        self.dtype = np.dtype(first.inputs[0].dtype)
        self.shapes = [whole_shapes[whole_value(node)] for node in nodes]
        self.elements = [prod(shape) // self.parts for shape in self.shapes]  # of each one's part

    def write(self) -> None:
        """Write the nodes that join, send and take apart where the first that sent stood."""
        gone = {node.name for node in self.nodes}
        place = next(number for number, node in enumerate(self.lowered.nodes) if node.name in gone)
        kept = [node for node in self.lowered.nodes if node.name not in gone]
        self.lowered.nodes = []
        gathers = self.op == "AllGather"
        rows = 1 if gathers else self.parts  # one of each part that is sent
        given = self._flatten([node.inputs[0] for node in self.nodes], rows)
        result = gs.Variable(f"{self.name}.brought", dtype=self.dtype)
        self.lowered.shapes[given.name] = (rows * sum(self.elements),)
        self.lowered.shapes[result.name] = (self.parts // rows * sum(self.elements),)
        nbytes = sum(self.elements) * self.dtype.itemsize
        self.lowered.nbytes |= {given.name: rows * nbytes, result.name: self.parts // rows * nbytes}
        self.lowered.communicate(self.op, [given], [result], **self.attributes)
        self._take_apart(result, self.parts // rows)
        self.lowered.nodes = [*kept[:place], *self.lowered.nodes, *kept[place:]]

    def _flatten(self, tensors: Sequence[gs.Tensor], rows: int) -> gs.Variable:
        """Return the parts of all tensors behind each other, part by part."""
        columns = [
            self._reshape(tensor, [rows, elements], f"{self.name}.{index}.given")
            for index, (tensor, elements) in enumerate(zip(tensors, self.elements, strict=True))
        ]
        together = self.lowered.emit("Concat", columns, f"{self.name}.given", self.dtype, self.site, axis=1)
        return self._reshape(together, [-1], self.name)

    def _take_apart(self, result: gs.Variable, rows: int) -> None:
        together = self._reshape(result, [rows, -1], f"{self.name}.rows")
        axis, end = constant(f"{self.name}.axis", [1], np.int64), 0
        for index, node in enumerate(self.nodes):
            begin, end = end, end + self.elements[index]
            bounds = [
                constant(f"{self.name}.{index}.{what}", [at], np.int64)
                for what, at in (("begin", begin), ("end", end))
            ]
            own = f"{self.name}.{index}.own"
            column = self.lowered.emit("Slice", [together, *bounds, axis], own, self.dtype, self.site)
            first, *rest = self.shapes[index]
            shape = [first * rows // self.parts, *rest]
            (output,) = node.outputs
            sizes = constant(f"{own}.sizes", shape, np.int64)
            output.inputs.clear()
            reshape = gs.Node("Reshape", f"{output.name}.node", {}, [column, sizes], [output])
            self.lowered.append(reshape, self.site)

    def _reshape(self, tensor: gs.Tensor, sizes: list[int], name: str) -> gs.Variable:
        spelled = constant(f"{name}.sizes", sizes, np.int64)
        return self.lowered.emit("Reshape", [tensor, spelled], name, self.dtype, self.site)


def _sort(lowered: LoweredGraph) -> None:
    """Bring the nodes into a topological order again, those that stand first as early as may be."""
    makers = {tensor.name: number for number, n in enumerate(lowered.nodes) for tensor in n.outputs}
    missing: list[int] = []
    after: list[list[int]] = [[] for _ in lowered.nodes]
    for number, node in enumerate(lowered.nodes):
        sources = {makers[tensor.name] for tensor in node.inputs if tensor.name in makers}
        missing.append(len(sources))
        for source in sources:
            after[source].append(number)
    ready = [number for number, count in enumerate(missing) if not count]
    order: list[gs.Node] = []
    while ready:
        number = heapq.heappop(ready)
        order.append(lowered.nodes[number])
        for following in after[number]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, following)
    assert len(order) == len(lowered.nodes), "the joined graph has a cycle"
    lowered.nodes = order
