"""Turn a product of few rows with a big matrix, so that the matrix is read once instead of packed.

before   MatMul (A [16,512], B [512,8192])          after   Transpose (MatMul (B' [8192,512], A'))

ONNX Runtime's CPU kernel copies its right operand into panels before it multiplies; an initializer's
panels are kept, a variable's are made anew in every product. The left operand is read where it lies. At
16 rows the copy takes as long as the arithmetic: 2.21 ms for the product above, 1.24 ms after
(onnxruntime 1.31.1, one thread, AMD EPYC). Recurrent networks make such a product at every step.

    cost in rows     as it is    m + PACKING_ROWS          transposed  m rounded up to whole vectors
    once per matrix  transposed  TRANSPOSE_ROWS, unless the graph has B' already
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.passes.cpu_kernels.segment_values import FreshNames, Shape, known_shapes, singles_of

# Of float32 matrices from 0.5 to 4 million elements, on the machine above.
PACKING_ROWS = 12
TRANSPOSE_ROWS = 50
LANES = 16
MOST_ROWS = 64  # beyond, the copy is a small part of the product
LEAST_ELEMENTS = 1 << 19  # of the matrix; below, the nodes that are added cost what is gained


@dataclass(frozen=True, slots=True)
class _Product:
    """A product with a matrix [k, n]; its left operand is [.., m, k], the leading axes of size 1."""

    node: onnx.NodeProto
    leading: int
    rows: int
    depth: int
    width: int

    @property
    def matrix(self) -> str:
        return str(self.node.input[1])

    @property
    def gain_rows(self) -> int:
        return PACKING_ROWS + self.rows - LANES * -(-self.rows // LANES)


def transpose_products(model: onnx.ModelProto, typed: onnx.ModelProto) -> int:
    """Turn products of a segment in place; `typed` is the same with shapes inferred. Return how many."""
    return _Transposer(model.graph, typed.graph).run()


class _Transposer:
    def __init__(self, graph: onnx.GraphProto, typed: onnx.GraphProto) -> None:
        self.graph = graph
        self.shapes = known_shapes(typed)
        self.singles = singles_of(typed)
        self.producers = {name: node for node in graph.node for name in node.output}
        self.transposes: dict[str, str] = {}  # matrix -> its transpose
        self.names = FreshNames(graph)
        self.sizes: dict[tuple[int, ...], str] = {}  # sizes -> the constant that holds them

    def run(self) -> int:
        cheaper = self._choose()
        nodes: list[onnx.NodeProto] = []
        for node in self.graph.node:
            product = cheaper.get(node.name)
            nodes += [node] if product is None else self._transpose(product)
        del self.graph.node[:]
        self.graph.node.extend(_without_unread_transposes(nodes, {o.name for o in self.graph.output}))
        return len(cheaper)

    def _choose(self) -> Mapping[str, _Product]:
        """Return node name -> product, of those that are cheaper transposed."""
        by_matrix: dict[str, list[_Product]] = {}
        for product in self._products():
            by_matrix.setdefault(product.matrix, []).append(product)
        return {
            product.node.name: product
            for matrix, products in by_matrix.items()
            if sum(p.gain_rows for p in products) > (0 if self._transposed(matrix) else TRANSPOSE_ROWS)
            for product in products
        }

    def _products(self) -> Iterator[_Product]:
        packed_once = {tensor.name for tensor in self.graph.initializer}
        for node in self.graph.node:
            if node.op_type != "MatMul" or node.domain or node.input[1] in packed_once:
                continue
            left, right = (self.shapes.get(name) for name in node.input)
            if node.input[1] in self.singles and (sizes := _few_rows(left, right)) is not None:
                product = _Product(node, *sizes)
                if product.gain_rows > 0:
                    yield product

    def _transposed(self, matrix: str) -> str | None:
        """Return what a matrix is the transpose of."""
        node = self.producers.get(matrix)
        return str(node.input[0]) if node is not None and _is_transpose(node) else None

    def _transpose(self, product: _Product) -> list[onnx.NodeProto]:
        result = product.node.output[0]
        nodes: list[onnx.NodeProto] = []

        def emit(op_type: str, inputs: Sequence[str], suffix: str, **attributes: list[int] | str) -> str:
            name = result if not suffix else self.names.fresh(f"{result}/transposed/{suffix}")
            label = name if suffix else product.node.name
            nodes.append(helper.make_node(op_type, inputs, [name], name=label))
            nodes[-1].attribute.extend(helper.make_attribute(key, attributes[key]) for key in attributes)
            return name

        matrix = self.transposes.get(product.matrix) or self._transposed(product.matrix)
        if matrix is None:
            # Not a Transpose: ONNX Runtime would fuse it back into every product.
            matrix = emit("Einsum", [product.matrix], "matrix", equation="ij->ji")
        self.transposes[product.matrix] = matrix
        rows = str(product.node.input[0])
        if product.leading:
            rows = emit("Reshape", [rows, self._sizes(product.rows, product.depth)], "rows")
        columns = emit("Transpose", [rows], "columns", perm=[1, 0])
        columns = emit("MatMul", [matrix, columns], "product")
        if not product.leading:
            emit("Transpose", [columns], "", perm=[1, 0])
            return nodes
        rows = emit("Transpose", [columns], "flat", perm=[1, 0])
        emit("Reshape", [rows, self._sizes(*(1,) * product.leading, product.rows, product.width)], "")
        return nodes

    def _sizes(self, *sizes: int) -> str:
        if sizes not in self.sizes:
            self.sizes[sizes] = name = self.names.fresh("transposed/" + "x".join(map(str, sizes)))
            self.graph.initializer.append(numpy_helper.from_array(np.array(sizes, np.int64), name))
        return self.sizes[sizes]


def _few_rows(left: Shape | None, right: Shape | None) -> tuple[int, int, int, int] | None:
    """Return the leading axes, m, k and n where few rows meet a big matrix."""
    if left is None or right is None or len(right) != 2 or len(left) < 2:
        return None
    (*leading, m, _), (k, n) = left, right
    if m is None or k is None or n is None or any(size != 1 for size in leading):
        return None
    return (len(leading), m, k, n) if m <= MOST_ROWS and k * n >= LEAST_ELEMENTS else None


def _is_transpose(node: onnx.NodeProto) -> bool:
    return node.op_type == "Transpose" and [list(a.ints) for a in node.attribute] == [[1, 0]]


def _without_unread_transposes(nodes: list[onnx.NodeProto], results: set[str]) -> list[onnx.NodeProto]:
    read = results.union(*(node.input for node in nodes))
    return [node for node in nodes if not _is_transpose(node) or node.output[0] in read]
