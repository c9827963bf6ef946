"""Count the work of a segment, for the cost model: what its nodes compute, and what they read and write.

    flops, touched_bytes   of all nodes; of a variable's rows that servers own, one server's part
    streamed_bytes         of those nodes that memory holds up on every device
    nodes                  with those in the bodies of functions, for each costs something to start
    sorted_ids             that a Unique or a SumRows puts in order
    packed_bytes           of matrices that a CPU arranges anew for a product of several rows
    kernels                of all that, what could be measured by itself (kernels.py)

What follows the data has no size when it is lowered. It is taken to be as large as what it is made of: the
rows of a table that ids ask for, their update, their sums.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.cpu_kernels.block_updates import BLOCKABLE_OPS
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.kernels import KernelNamer, Shape, absorbed_transposes
from partc.passes.scheduling.prove_in_place import SCATTERS
from partc.runtime.plan.program import KernelWork

# Flops per byte, below those at which any device of profiles.py computes as fast as it reads (4.5, a CPU).
LEAST_RIDGE = 4

PACKING_OPS = {"MatMul", "Gemm"}

SIZED_ALIKE = BLOCKABLE_OPS | {"Identity", "Reshape", "Unsqueeze", "Where"}


Counts = tuple[int, int, int, int, int]  # flops, touched bytes, streamed bytes, sorted ids, packed bytes
NO_TRANSPOSES: Mapping[str, gs.Node] = {}
NO_SHAPES: Mapping[tuple[str, int], Shape] = {}
NOTHING: Counts = (0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Work:
    """What a segment does: see Run, whose fields these are."""

    flops: int
    touched_bytes: int
    streamed_bytes: int
    nodes: int
    sorted_ids: int
    packed_bytes: int = 0
    kernels: tuple[KernelWork, ...] = ()


class WorkCounter:
    """Counts the work of chunks, given in the order of the program.

    `names_kernels`: what could be measured by itself is told apart, which takes as long as the rest.
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        servers: int,
        placed: AbstractSet[str] = frozenset(),
        read_shapes: Mapping[tuple[str, int], Shape] = NO_SHAPES,
        transposes: Mapping[str, gs.Node] = NO_TRANSPOSES,
        names_kernels: bool = True,
    ) -> None:
        self._names_kernels = names_kernels
        self._transposes = dict(transposes)  # that vanish in other chunks
        self._placed = placed  # values that lie in buffers or variables
        self._lowered = lowered
        self._functions = lowered.functions
        self._servers = max(1, servers)
        self._counted: dict[int, tuple[gs.Node, tuple[Counts, int]]] = {}  # by their id
        self._known: dict[str, int] = {}  # value -> bytes
        self._assumed: dict[str, int] = {}  # the same, where they follow the data
        self._bodies: dict[str, tuple[int, bool]] = {}  # function -> its nodes, whether one sorts
        self._namer = KernelNamer(lowered.shapes, lowered.functions, read_shapes)

    def count(self, nodes: Sequence[gs.Node], read_later: AbstractSet[str]) -> Work:
        """Return the work of a chunk, some of whose values others read."""
        cached = cached_values(nodes, read_later)
        transposes = self._transposes
        if self._names_kernels:
            transposes = absorbed_transposes(nodes, read_later) | transposes
        kernels: dict[str | None, tuple[int, Counts]] = {}
        number = 0
        for node in nodes:
            is_alone = not cached or node.op not in BLOCKABLE_OPS
            counts, body_nodes = self._count_alone(node) if is_alone else self._count(node, cached)
            number += body_nodes
            key = self._namer.key(node, cached, transposes) if self._names_kernels else None
            before = kernels.get(key, (0, NOTHING))
            kernels[key] = before[0] + 1, _sum(before[1], counts)
        own_counts = [own for _, own in kernels.values()]
        flops, touched, streamed, sorted_ids, packed = reduce(_sum, own_counts, NOTHING)
        named = tuple(KernelWork(key, n, *own) for key, (n, own) in kernels.items() if key is not None)
        return Work(flops, touched, streamed, number, sorted_ids, packed, named)

    def _count_alone(self, node: gs.Node) -> tuple[Counts, int]:
        """Count a node none of whose values stay in the cache: several chunks may have it."""
        if id(node) not in self._counted:
            self._counted[id(node)] = node, self._count(node, frozenset())
        return self._counted[id(node)][1]

    def _count(self, node: gs.Node, cached: AbstractSet[str]) -> tuple[Counts, int]:
        """Return what a node computes, touches, streams, sorts and packs, and how many nodes it is."""
        flops, touched = self._flops(node), self._touched(node, cached)
        body_nodes, sorts = self._body_of(node.op)
        streamed = touched if flops < LEAST_RIDGE * touched else 0
        sorted_ids = self._elements(node.inputs[0]) if sorts else 0
        return (flops, touched, streamed, sorted_ids, self._packed(node)), body_nodes

    def expected_bytes(self, tensor: gs.Tensor) -> int:
        """Return the size of a value without memory of its own; 0 where it has, or the data decide."""
        is_known = tensor.name in self._lowered.nbytes and tensor.name not in self._placed
        return self._nbytes(tensor) if is_known else 0

    def pass_on(self, nodes: Sequence[gs.Node]) -> None:
        """Take what communications bring for as large as what they are given, where nothing else is known."""
        for node in nodes:
            for source, brought in zip(node.inputs, node.outputs, strict=False):  # counts have no size
                self._assumed.setdefault(brought.name, self._nbytes(source))

    def _touched(self, node: gs.Node, cached: AbstractSet[str]) -> int:
        """Bytes that a node reads and writes; of what it indexes or cuts, only what it visits."""
        self._assume(node)
        reads = [0 if t.name in cached else self._nbytes(t) for t in node.inputs]
        writes = [0 if t.name in cached else self._nbytes(t) for t in node.outputs]
        if node.op == "Gather":
            return reads[1] + 2 * sum(writes)
        if node.op == "Slice":
            return 2 * sum(writes)
        if node.op in SCATTERS:
            return reads[1] + 3 * reads[2]
        return sum(reads) + sum(writes)

    def _packed(self, node: gs.Node) -> int:
        """Bytes of the second factor of a product, unless the first is of single rows."""
        if node.op not in PACKING_OPS:
            return 0
        second = self._nbytes(node.inputs[1])
        *rows, _ = self._lowered.shapes.get(node.outputs[0].name) or (None,)
        is_batch = len(self._lowered.shapes.get(node.inputs[1].name) or ()) > 2
        has_several = any(size != 1 for size in (rows[-1:] if is_batch else rows))
        return second if has_several else 0

    def _nbytes(self, tensor: gs.Tensor) -> int:
        name = tensor.name
        if name not in self._known:
            nbytes = self._lowered.nbytes.get(name, 0)
            self._known[name] = nbytes // self._servers if self._lowered.is_in_rows(name) else nbytes
        return self._known[name] or self._assumed.get(name, 0)

    def _flops(self, node: gs.Node) -> int:
        flops = self._lowered.flops.get(node.name, 0)
        if self._servers == 1 or not flops:
            return flops
        in_rows = any(self._lowered.is_in_rows(tensor.name) for tensor in (*node.inputs, *node.outputs))
        return flops // self._servers if in_rows else flops

    def _assume(self, node: gs.Node) -> None:
        """Give results that have no size one."""
        if all(map(self._nbytes, node.outputs)):
            return
        sizes = [self._nbytes(tensor) for tensor in node.inputs]
        for index, tensor in enumerate(node.outputs):
            if node.op == "Gather":
                assumed = self._elements(node.inputs[1]) * self._row_bytes(node.inputs[0])
            elif node.op == "Unique":
                assumed = sizes[0]
            elif node.op in SIZED_ALIKE:
                assumed = max(sizes, default=0)
            elif node.op in self._functions:
                assumed = sizes[index] if index < len(sizes) else 0
            else:
                continue
            self._assumed.setdefault(tensor.name, assumed)

    def _row_bytes(self, table: gs.Tensor) -> int:
        shape = self._lowered.shapes.get(table.name, ())
        return prod(size or 0 for size in shape[1:]) * np.dtype(table.dtype).itemsize if shape else 0

    def _elements(self, tensor: gs.Tensor) -> int:
        return int(self._nbytes(tensor) // np.dtype(tensor.dtype).itemsize)

    def _body_of(self, op: str) -> tuple[int, bool]:
        """Return the nodes that an op is, functions taken apart, and whether one of them is a Unique."""
        if op not in self._functions:
            return 1, op == "Unique"
        if op not in self._bodies:
            parts = [self._body_of(node.op_type) for node in self._functions[op].node]
            self._bodies[op] = sum(number for number, _ in parts), any(sorts for _, sorts in parts)
        return self._bodies[op]


def _sum(one: Counts, other: Counts) -> Counts:
    flops, touched, streamed, sorted_ids, packed = other
    return (one[0] + flops, one[1] + touched, one[2] + streamed, one[3] + sorted_ids, one[4] + packed)


def cached_values(nodes: Sequence[gs.Node], read_later: AbstractSet[str]) -> set[str]:
    """Return what stays in the cache: what one pointwise op hands to the next."""
    pointwise = [node for node in nodes if node.op in BLOCKABLE_OPS]
    intermediates = {tensor.name for node in pointwise for tensor in node.outputs} - read_later
    outward = {t.name for node in nodes if node.op not in BLOCKABLE_OPS for t in node.inputs}
    return intermediates - outward
