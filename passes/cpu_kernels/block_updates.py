"""Update large variables block by block, so that what lies between two steps of the update stays in cache.

before   m2 = Add (0.9 m, 0.1 g)   v2 = ...   w2 = Sub (w, ...)        fifteen passes over [50257,768]
after    w2, m2, v2 = Scan (w, m, v, g)                                one, over [232,166368]: body as before

Every op of such an update reads and writes whole tensors, which for Adam is 13 times the bytes that the
step needs. Scan hands its body views, and lets it write where the result lies: of 32 million float32
elements, Adam took 157 ms before and 78 ms after (onnxruntime 1.31.1, one thread, AMD EPYC). What is
computed is the same to the last bit.

An output that is written over its variable is declared in blocks, for a Reshape behind Scan would copy it:
the executor binds the variable's memory in that shape (runtime/execution/device.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod

import networkx as nx
import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.passes.cpu_kernels.segment_values import FreshNames, known_shapes

BLOCKABLE_OPS = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Max",
        "Min",
        "Sqrt",
        "Neg",
        "Abs",
        "Reciprocal",
        "Sign",
        "Clip",
        "Cast",
    ]
)
LEAST_ELEMENTS = 1 << 18  # of a tensor; below, its passes hit the cache as it is
LEAST_NODES = 4
# Elements of a block: those of Adam's eight float32 tensors are 2 MB, what a core has for itself.
MOST_IN_BLOCK = 1 << 16
LEAST_IN_BLOCK = 1 << 14


def block_updates(model: onnx.ModelProto, typed: onnx.ModelProto, in_place: AbstractSet[str]) -> int:
    """Block the updates of a segment; `typed` is the same with shapes inferred. Return how many.

    `in_place`: outputs that the executor lets the segment write over a variable. They are declared in
    blocks [n, elements].
    """
    return _Blocking(model.graph, typed.graph, in_place).run()


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Pointwise nodes of one shape, in order, that are one Scan."""

    nodes: tuple[onnx.NodeProto, ...]
    reads: tuple[str, ...]  # whole tensors from outside
    writes: tuple[str, ...]  # what is read outside, or an output
    blocks: tuple[int, int]  # how many, and the elements of each


class _Blocking:
    def __init__(self, graph: onnx.GraphProto, typed: onnx.GraphProto, in_place: AbstractSet[str]) -> None:
        self.graph = graph
        self.in_place = in_place
        self.names = FreshNames(graph)
        self.shapes = known_shapes(typed)
        self.elements = _element_types(typed)
        self.producer = {name: node.name for node in graph.node for name in node.output}
        self.nodes = {node.name: node for node in graph.node}
        self.outputs = {output.name for output in graph.output}
        self.candidates = {node.name for node in graph.node if self._is_candidate(node)}
        self.read_in_bodies = {name for node in graph.node for name in _names_read_in_bodies(node)}

    def run(self) -> int:
        clusters = [cluster for nodes in self._connected() for cluster in self._clusters_of(nodes)]
        inside = {node.name for cluster in clusters for node in cluster.nodes}
        outside = [node for node in self.graph.node if node.name not in inside]
        declared = [name for cluster in clusters for name in self._declared_in_blocks(cluster)]
        whole = {name: self.names.fresh(f"{name}/whole") for name in declared}
        scans = [node for cluster in clusters for node in self._scan(cluster, whole)]
        for node in outside:
            node.input[:] = [whole.get(name, name) for name in node.input]
        ordered = _sorted([*outside, *scans])
        del self.graph.node[:]
        self.graph.node.extend(ordered)
        return len(clusters)

    # ------------------------------------------------------------ what is blocked

    def _connected(self) -> list[list[onnx.NodeProto]]:
        """Return groups of candidates that no path leaves and enters again."""
        depths = self._depths()
        links = nx.Graph()
        links.add_nodes_from(name for name in self.nodes if name in self.candidates)
        for reader in self.candidates:
            producers = {
                self.producer[name] for name in self._wholes(self.nodes[reader]) if name in self.producer
            }
            alike = {p for p in producers & self.candidates if depths[p] == depths[reader]}
            links.add_edges_from((producer, reader) for producer in alike)
        place = {node.name: index for index, node in enumerate(self.graph.node)}
        groups = (sorted(group, key=place.__getitem__) for group in nx.connected_components(links))
        return [[self.nodes[name] for name in group] for group in groups]

    def _depths(self) -> dict[str, int]:
        """Return depths that grow along every path, at least by 1 where it leaves candidates for others.

        Of the depths that a node may have, it gets the last that its readers allow.
        """
        depths: dict[str, int] = {}
        readers: dict[str, list[str]] = {}
        for node in self.graph.node:
            producers = [self.producer[name] for name in _names_read(node) if name in self.producer]
            depths[node.name] = max((depths[p] + self._leaves(p, node.name) for p in producers), default=0)
            for producer in producers:
                readers.setdefault(producer, []).append(node.name)
        for node in reversed(self.graph.node):
            if node.name in readers:
                depths[node.name] = min(depths[r] - self._leaves(node.name, r) for r in readers[node.name])
        return depths

    def _leaves(self, producer: str, reader: str) -> bool:
        return producer in self.candidates and reader not in self.candidates

    def _is_candidate(self, node: onnx.NodeProto) -> bool:
        if node.op_type not in BLOCKABLE_OPS or node.domain or len(node.output) != 1:
            return False
        shape = self.shapes.get(node.output[0])
        if not shape or None in shape or _blocks_of(shape) is None:
            return False
        operands = [self.shapes.get(name) for name in node.input if name]
        return all(operand in (shape, (), (1,)) for operand in operands) and shape in operands

    def _wholes(self, node: onnx.NodeProto) -> list[str]:
        shape = self.shapes[node.output[0]]
        return [name for name in node.input if name and self.shapes[name] == shape]

    def _clusters_of(self, nodes: Sequence[onnx.NodeProto]) -> Iterator[_Cluster]:
        """Yield the group as a cluster if it is an update of some length."""
        names = {node.name for node in nodes}
        results = [node.output[0] for node in nodes]
        own = self.in_place & set(results)
        if len(nodes) < LEAST_NODES or not own or own & self.read_in_bodies:
            return
        read_outside = {
            name for node in self.graph.node if node.name not in names for name in _names_read(node)
        }
        reads = dict.fromkeys(name for node in nodes for name in self._wholes(node) if name not in results)
        writes = tuple(name for name in results if name in self.outputs or name in read_outside)
        blocks = _blocks_of(self.shapes[results[0]])
        assert blocks is not None
        yield _Cluster(tuple(nodes), tuple(reads), writes, blocks)

    # ------------------------------------------------------------ how it is written

    def _declared_in_blocks(self, cluster: _Cluster) -> list[str]:
        return [name for name in cluster.writes if name in self.in_place]

    def _scan(self, cluster: _Cluster, whole: Mapping[str, str]) -> Iterator[onnx.NodeProto]:
        """Yield the cluster as Scan, between the Reshapes of what it reads and writes.

        `whole`: outputs that are declared in blocks -> the same in its own shape.
        """
        label = cluster.nodes[-1].name
        to_blocks = self._constant(f"{label}/shape_in_blocks", cluster.blocks)
        shape = self.shapes[cluster.writes[0]]
        to_whole = self._constant(f"{label}/shape_whole", shape)
        inputs = [self.names.fresh(f"{label}/{index}/blocks") for index in range(len(cluster.reads))]
        for name, blocked in zip(cluster.reads, inputs, strict=True):
            yield helper.make_node("Reshape", [name, to_blocks], [blocked], name=blocked)
        outputs = [name if name in whole else self.names.fresh(f"{name}/blocks") for name in cluster.writes]
        body = self._body(cluster, label)
        yield helper.make_node("Scan", inputs, outputs, name=label, body=body, num_scan_inputs=len(inputs))
        for name, blocked in zip(cluster.writes, outputs, strict=True):
            result = whole.get(name, name)
            node_name = self.names.fresh(f"{label}/{result}")
            yield helper.make_node("Reshape", [blocked, to_whole], [result], name=node_name)
        for output in self.graph.output:
            if output.name in whole and output.name in cluster.writes:
                described = helper.make_tensor_value_info(
                    output.name, self.elements[output.name], cluster.blocks
                )
                output.CopyFrom(described)

    def _body(self, cluster: _Cluster, label: str) -> onnx.GraphProto:
        results = [node.output[0] for node in cluster.nodes]
        block = {name: self.names.fresh(f"{name}/{label}/block") for name in (*cluster.reads, *results)}
        nodes: list[onnx.NodeProto] = []
        for node in cluster.nodes:
            inner = onnx.NodeProto()
            inner.CopyFrom(node)
            inner.input[:] = [block.get(name, name) for name in node.input]
            inner.output[:] = [block[name] for name in node.output]
            nodes.append(inner)
        size = cluster.blocks[1:]

        def described(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(block[name], self.elements[name], size) for name in names]

        return helper.make_graph(nodes, "block", described(cluster.reads), described(cluster.writes))

    def _constant(self, hint: str, sizes: Sequence[int | None]) -> str:
        name = self.names.fresh(hint)
        self.graph.initializer.append(numpy_helper.from_array(np.array(sizes, np.int64), name))
        return name


def _blocks_of(shape: Sequence[int | None]) -> tuple[int, int] | None:
    """Return how many blocks of how many elements make the shape; None if it is small or divides badly."""
    elements = prod(size or 0 for size in shape)
    if elements < LEAST_ELEMENTS:
        return None
    least = -(-elements // MOST_IN_BLOCK)
    count = next((n for n in range(least, elements // LEAST_IN_BLOCK + 1) if elements % n == 0), None)
    return None if count is None else (count, elements // count)


def _element_types(typed: onnx.GraphProto) -> dict[str, int]:
    values = (*typed.input, *typed.value_info, *typed.output)
    return {value.name: value.type.tensor_type.elem_type for value in values}


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield what a node and the bodies in it read."""
    yield from node.input
    yield from _names_read_in_bodies(node)


def _names_read_in_bodies(node: onnx.NodeProto) -> Iterator[str]:
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _names_read(inner)


def _sorted(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes so that each comes after what it reads, in the given order where that is free."""
    producer = {name: index for index, node in enumerate(nodes) for name in node.output}
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(nodes)))
    order.add_edges_from(
        (producer[name], index)
        for index, node in enumerate(nodes)
        for name in _names_read(node)
        if name in producer
    )
    return [nodes[index] for index in nx.lexicographical_topological_sort(order)]
