"""Gradient rules of matrix products."""

from collections.abc import Mapping

import numpy as np
import onnx

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.rules.along_axis import static_size


def _matmul(at: ForwardNode, dy: str) -> Gradients:
    a, b = at.x(0), at.x(1)
    if at.rank(a) == 1 or at.rank(b) == 1:
        return _vector_product(at, dy)
    if at.rank(b) == 2:
        return _product_with_matrix(at, dy)
    gradients = {}
    if 0 in at.gradient_inputs:
        gradients[0] = _sum_batch(at, at.op("MatMul", dy, _swap(at, b, at.rank(b))), a)
    if 1 in at.gradient_inputs:
        gradients[1] = _sum_batch(at, at.op("MatMul", _swap(at, a, at.rank(a)), dy), b)
    return gradients


def _product_with_matrix(at: ForwardNode, dy: str) -> Gradients:
    """[..., k] x [k, n]: all leading axes are merged for the matrix's gradient, one product sums them."""
    a, b = at.x(0), at.x(1)
    gradients = {}
    if 0 in at.gradient_inputs:
        gradients[0] = at.op("MatMul", dy, transpose_matrix(at.build, b))
    if 1 in at.gradient_inputs:
        rows, row_gradients = a, dy
        if at.rank(a) > 2:
            rows, row_gradients = _as_rows(at, a, a), _as_rows(at, dy, at.y())
        gradients[1] = at.op("MatMul", transpose_matrix(at.build, rows), row_gradients)
    return gradients


def _as_rows(at: ForwardNode, tensor: str, like: str) -> str:
    """Merge all axes but the last; `like` is a forward tensor of this shape."""
    width = at.shape(like)[-1]
    if isinstance(width, int):
        return at.op("Reshape", tensor, at.build.ints(-1, width))
    last = at.op("Shape", tensor, start=-1)
    return at.op("Reshape", tensor, at.op("Concat", at.build.ints(-1), last, axis=0))


def transpose_matrix(build: NodeBuilder, matrix: str) -> str:
    """Return the transpose of a matrix; of a transpose, what was transposed."""
    node = build.producer(matrix)
    if node is not None and is_transpose(node):
        return str(node.input[0])
    return build.op("Transpose", matrix, perm=[1, 0])


def turned_gradient(build: NodeBuilder, gradient: str) -> str:
    """Return the transpose of a gradient that nothing else reads: of A' B it is B' A."""
    if factors := transposed_product(build, gradient):
        return build.op("MatMul", transpose_matrix(build, factors[1]), factors[0])
    return transpose_matrix(build, gradient)


def is_transpose(node: onnx.NodeProto) -> bool:
    """Tell whether a node transposes a matrix."""
    return node.op_type == "Transpose" and [list(a.ints) for a in node.attribute] == [[1, 0]]


def transposed_product(build: NodeBuilder, matrix: str) -> tuple[str, str] | None:
    """Return A and B where a matrix is made as A' B, as the gradients of weights are."""
    product = build.producer(matrix)
    if product is None or product.op_type != "MatMul":
        return None
    producer = build.producer(product.input[0])
    return (producer.input[0], product.input[1]) if producer is not None and is_transpose(producer) else None


def _vector_product(at: ForwardNode, dy: str) -> Gradients:
    """A vector operand is a matrix with one row (left) or one column (right)."""
    a, b = at.x(0), at.x(1)
    left, right = at.rank(a) == 1, at.rank(b) == 1
    if right:
        dy = at.op("Unsqueeze", dy, at.build.ints(-1))
    if left:
        dy = at.op("Unsqueeze", dy, at.build.ints(-2))
    wide_a = at.op("Unsqueeze", a, at.build.ints(0)) if left else a
    wide_b = at.op("Unsqueeze", b, at.build.ints(1)) if right else b
    da = at.op("MatMul", dy, _swap(at, wide_b, max(at.rank(b), 2)))
    db = at.op("MatMul", _swap(at, wide_a, max(at.rank(a), 2)), dy)
    # The other operand's batch axes were broadcast over the vector.
    if left:
        da = at.op("ReduceSum", da, at.build.ints(*range(at.rank(b) - 1 if not right else 1)), keepdims=0)
    if right:
        db = at.op("Squeeze", db, at.build.ints(-1))
        if at.rank(a) > 2:
            db = at.op("ReduceSum", db, at.build.ints(*range(at.rank(a) - 2)), keepdims=0)
    return {0: da, 1: db}


def _swap(at: ForwardNode, tensor: str, rank: int) -> str:
    """Transpose the last two axes."""
    return at.op("Transpose", tensor, perm=[*range(rank - 2), rank - 1, rank - 2])


def _sum_batch(at: ForwardNode, gradient: str, operand: str) -> str:
    """Sum over batch axes that the product broadcast."""
    return at.unbroadcast(gradient, at.y(), operand, slice(-2))


def _gemm(at: ForwardNode, dy: str) -> Gradients:
    a, b = at.x(0), at.x(1)
    flip_a, flip_b = at.integer("transA", 0), at.integer("transB", 0)
    alpha = at.number("alpha", 1.0)
    gradients = {}
    if 0 in at.gradient_inputs and not flip_a:
        gradients[0] = at.op("Gemm", dy, b, transB=1 - flip_b, alpha=alpha)
    elif 0 in at.gradient_inputs:
        gradients[0] = at.op("Gemm", b, dy, transA=flip_b, transB=1, alpha=alpha)
    if 1 in at.gradient_inputs and not flip_b:
        gradients[1] = at.op("Gemm", a, dy, transA=1 - flip_a, alpha=alpha)
    elif 1 in at.gradient_inputs:
        gradients[1] = at.op("Gemm", dy, a, transA=1, transB=flip_a, alpha=alpha)
    if 2 in at.gradient_inputs:
        beta = at.number("beta", 1.0)
        scaled = dy if beta == 1.0 else at.op("Mul", dy, at.scalar(beta, like=at.x(2)))
        gradients[2] = at.unbroadcast(scaled, at.y(), at.x(2))
    return gradients


def _det(at: ForwardNode, dy: str) -> Gradients:
    """d det(A) = adj(A)', the adjugate, which exists for singular matrices too.

        M_1 = 1        M_(k+1) = A M_k - trace(A M_k) / k        adj(A) = (-1)^(n-1) M_n

    Source: the Faddeev-LeVerrier algorithm. Rounding grows with n: it is for small matrices.
    """
    a, rank = at.x(0), at.rank(at.x(0))
    size = static_size(at, a, rank - 1)
    unit = at.build.constant(np.eye(size, dtype=at.types[a].dtype))
    adjugate = unit
    for k in range(1, size):
        product = at.op("MatMul", a, adjugate)
        trace = at.op("ReduceSum", at.op("Mul", product, unit), at.build.ints(-2, -1), keepdims=1)
        share = at.op("Div", trace, at.scalar(k, like=a))
        adjugate = at.op("Sub", product, at.op("Mul", share, unit))
    sign = at.scalar((-1) ** (size - 1), like=a)
    slope = at.op("Unsqueeze", at.op("Mul", dy, sign), at.build.ints(-2, -1))
    cofactors = (
        at.op("Transpose", adjugate, perm=[*range(rank - 2), rank - 1, rank - 2]) if size > 1 else unit
    )
    return {0: at.op("Expand", at.op("Mul", slope, cofactors), at.shape_of(a))}


RULES: Mapping[str, Rule] = {
    "MatMul": of_first_output(_matmul),
    "Det": of_first_output(_det),
    "Gemm": of_first_output(_gemm),
}
