"""Sum what a tensor's readers contribute to its gradient.

before   A1' B1, A2' B2, .. ── Sum ── dW         after   stack(A)' stack(B) ── dW

A matrix that multiplies few rows many times, as at every step of a recurrent network, gets one product
over all rows rather than a matrix per step: no sum of large matrices is left, nor are they kept. Rows
are stacked along an axis of their own, so that a batch that is split over ranks stays split.

before   Sum (dW, ScatterND <add> (zeros, ids, rows))       after   ScatterND <add> (dW, ids, rows)

A table that is also multiplied, as tied embeddings are, gets its rows added to the product in place:
no table of zeros is made, and none is added.
"""

from collections.abc import Sequence

import numpy as np
from onnx import numpy_helper

from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.rules.product import transposed_product
from partc.compiler.differentiation.tensor_types import Shape, Types


def sum_contributions(build: NodeBuilder, types: Types, tensor: str, parts: Sequence[str]) -> str:
    """Return the sum of several contributions to the gradient of a forward tensor."""
    shape = types[tensor].shape
    if shape is not None and len(shape) == 2:
        parts = _join_products(build, types, shape, parts)
    scatters = [scatter for part in parts if (scatter := _rows_on_zeros(build, part))]
    whole = [part for part in parts if not _rows_on_zeros(build, part)]
    if not whole:
        return build.op("Sum", *parts) if len(parts) > 1 else parts[0]
    total = whole[0] if len(whole) == 1 else build.op("Sum", *whole)
    for indices, rows in scatters:
        total = build.op("ScatterND", total, indices, rows, reduction="add")
    return total


def _rows_on_zeros(build: NodeBuilder, part: str) -> tuple[str, str] | None:
    """Return the indices and rows of a contribution that is ScatterND <add> (zeros, indices, rows)."""
    scatter = build.producer(part)
    if scatter is None or scatter.op_type != "ScatterND":
        return None
    zeros = build.producer(scatter.input[0])
    if zeros is None or zeros.op_type != "ConstantOfShape":
        return None
    if any(np.any(numpy_helper.to_array(attribute.t)) for attribute in zeros.attribute):
        return None
    return scatter.input[1], scatter.input[2]


def _join_products(build: NodeBuilder, types: Types, shape: Shape, parts: Sequence[str]) -> list[str]:
    """Replace the contributions A' B whose A have one shape by a product for all of them."""
    joined: list[str] = []
    groups: dict[Shape, list[tuple[str, str]]] = {}
    for part in parts:
        factors = transposed_product(build, part)
        rows = types[factors[0]].shape if factors and factors[0] in types else None
        if factors is None or rows is None or not _moves_less(rows, shape):
            joined.append(part)
        else:
            groups.setdefault(rows, []).append(factors)
    for rows, products in groups.items():
        left, right = zip(*products, strict=True)
        a, b = (_stack(build, factors, width) for factors, width in ((left, rows[1]), (right, shape[1])))
        joined.append(build.op("MatMul", build.op("Transpose", a, perm=[1, 0]), b))
    return joined


def _moves_less(rows: Shape, shape: Shape) -> bool:
    """Tell whether stacking the factors moves fewer entries than summing the products does.

    A symbolic number of rows, a batch, is taken for small.
    """
    count, (k, n) = rows[0], shape
    if not isinstance(k, int) or not isinstance(n, int) or rows[1] != k:
        return False
    if count is None:  # two unknown sizes are not known to be equal
        return False
    return isinstance(count, str) or count * (k + n) <= k * n


def _stack(build: NodeBuilder, factors: Sequence[str], width: object) -> str:
    """Return [steps * rows, width] of matrices [rows, width]."""
    if len(factors) == 1:
        return factors[0]
    assert isinstance(width, int)
    layers = [build.op("Unsqueeze", factor, build.ints(0)) for factor in factors]
    return build.op("Reshape", build.op("Concat", *layers, axis=0), build.ints(-1, width))
