"""Random small float64 graphs, drawn by hypothesis from the plain ops that have gradient rules.

A graph grows op by op from up to three parameters; each node is executed as it is made, so that shapes and
values are known, and what grows large passes through a Tanh.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.parameters.find_parameters import FORWARD_KEY
from tests.builders.graphs.onnx_cases import Erf, Pad, Problem
from tests.checks.training_steps import Arrays

MOST_ENTRIES = 60
Draw = Callable[[st.SearchStrategy], int]  # of the integers that all makers draw


@dataclass
class Sketch:
    """A graph under construction."""

    draw: Draw
    parameters: Arrays
    values: Arrays = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"t{len(self.nodes)}.{index}" for index in range(outputs)]
        node = helper.make_node(op_type, list(inputs), names, name=f"n{len(self.nodes)}", **attributes)
        feeds = {name: self.values[name] for name in inputs if name}
        results = ReferenceEvaluator(node, new_ops=[Erf, Pad], opsets={"": 21}).run(None, feeds)
        self.nodes.append(node)
        self.values.update(zip(names, results, strict=True))
        return names[-1] if op_type == "Split" else names[0]

    def constant(self, value: object, dtype: type = np.float64) -> str:
        name = f"t{len(self.nodes)}"
        array = np.asarray(value, dtype)
        tensor = numpy_helper.from_array(array)
        self.nodes.append(helper.make_node("Constant", [], [name], name=f"n{name}", value=tensor))
        self.values[name] = array
        return name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def among(self, count: int) -> int:
        return self.draw(st.integers(0, count - 1))

    def axis(self, x: str) -> int:
        return self.among(self.values[x].ndim)

    def shape(self, x: str) -> tuple[int, ...]:
        return self.values[x].shape

    def positive(self, x: str) -> str:
        return self.op("Add", self.op("Mul", x, x), self.constant(1.2))

    def inside(self, x: str) -> str:
        """Keep a tensor within 0.8 of zero."""
        return self.op("Mul", self.op("Tanh", x), self.constant(0.8))

    def partner(self, x: str) -> str:
        """Return a tensor that broadcasts with x."""
        fitting = [
            name
            for name, value in self.values.items()
            if value.dtype == np.float64 and _broadcast(value.shape, self.shape(x)) == self.shape(x)
        ]
        return fitting[self.among(len(fitting))]


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(one, other)
    except ValueError:
        return None


# ---------------------------------------------------------------- what a graph grows by

ANYWHERE = """
    Abs Asinh Atan Celu Cos Cosh Elu Erf Exp HardSigmoid HardSwish Identity LeakyRelu Mish Neg Relu Selu
    Sigmoid Sin Sinh Softplus Softsign Tanh ThresholdedRelu LogSoftmax Softmax
""".split()
POSITIVE = "Acosh Log Reciprocal Sqrt".split()
INSIDE = "Acos Asin Atanh Tan".split()
REDUCTIONS = "L1 L2 LogSumExp Max Mean Min Prod Sum SumSquare".split()


def _point(g: Sketch, x: str) -> str:
    kind = (ANYWHERE + POSITIVE + INSIDE)[g.among(len(ANYWHERE + POSITIVE + INSIDE))]
    x = g.positive(x) if kind in POSITIVE else g.inside(x) if kind in INSIDE else x
    return g.op(kind, x)


def _binary(g: Sketch, x: str) -> str:
    kind = ["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Mod", "Sum", "Mean", "Where"][g.among(11)]
    y = g.partner(x)
    if kind == "Where":
        return g.op(kind, g.op("Greater", x, y), x, g.op("Neg", y))
    if kind == "Pow":
        return g.op(kind, g.positive(x), y)
    if kind in ("Div", "Mod"):
        return g.op(kind, x, g.positive(y), **({"fmod": 1} if kind == "Mod" else {}))
    # ONNX's reference of Mean wants the widest first.
    return g.op(kind, *((y, x) if kind != "Mean" and g.among(2) else (x, y)))


def _reduction(g: Sketch, x: str) -> str:
    kind, axis = f"Reduce{REDUCTIONS[g.among(len(REDUCTIONS))]}", g.axis(x)
    axes = [g.ints(axis), g.ints(axis - g.values[x].ndim), ""][g.among(3)]
    return g.op(kind, x, axes, keepdims=g.among(2))


def _movement(g: Sketch, x: str) -> str:
    rank, axis = g.values[x].ndim, g.axis(x)
    size = g.shape(x)[axis]
    moves: list[Callable[[], str]] = [
        lambda: g.op("Transpose", x, perm=np.roll(np.arange(rank), 1 + g.among(rank)).tolist()),
        lambda: g.op("Reshape", x, g.ints(-1, size)),
        lambda: g.op("Unsqueeze", x, g.ints(axis)),
        lambda: g.op("Expand", x, g.ints(2, *g.shape(x))),
        lambda: g.op("Tile", x, g.ints(*(1 + g.among(2) for _ in range(rank)))),
        lambda: g.op("Concat", x, g.op("Neg", x), axis=axis),
        lambda: g.op("Split", x, g.ints(size - size // 2, size // 2), outputs=2, axis=axis),
        lambda: g.op("Slice", x, g.ints(size - 1), g.ints(-99), g.ints(axis), g.ints(-1 - g.among(2))),
        lambda: g.op("Slice", x, g.ints(0), g.ints(99), g.ints(axis - rank), g.ints(1 + g.among(2))),
        lambda: _pad(g, x),
        lambda: g.op("CumSum", x, g.constant(axis, np.int64), reverse=g.among(2), exclusive=g.among(2)),
        lambda: g.op("Clip", x, g.constant(-0.5), g.constant(0.7)),
        lambda: g.op("TopK", x, g.ints(1 + g.among(size)), outputs=2, axis=axis, largest=g.among(2)),
    ]
    return moves[g.among(len(moves))]()


def _pad(g: Sketch, x: str) -> str:
    mode = ["constant", "edge", "reflect", "wrap"][g.among(4)]
    most = 1 if min(g.shape(x)) > 1 or mode in ("constant", "edge") else 0
    return g.op("Pad", x, g.ints(*(g.among(most + 1) for _ in range(2 * g.values[x].ndim))), mode=mode)


def _index(g: Sketch, x: str) -> str:
    axis, shape = g.axis(x), g.shape(x)
    size = shape[axis]
    chosen = [g.among(2 * size) - size for _ in range(3)]
    rows = g.constant([[index] for index in chosen], np.int64)
    wide = np.broadcast_to(np.array(chosen).reshape([3 if a == axis else 1 for a in range(len(shape))]), 
                           [3 if a == axis else s for a, s in enumerate(shape)])  # fmt: skip
    reduction = ["add", "mul", "max", "min"][g.among(4)]
    taken = g.op("Gather", x, g.ints(*chosen), axis=axis)
    ways: list[Callable[[], str]] = [
        lambda: taken,
        lambda: g.op("GatherElements", x, g.constant(wide, np.int64), axis=axis),
        lambda: g.op("GatherND", x, g.constant([[i % shape[0]] for i in chosen], np.int64)),
        lambda: g.op(
            "ScatterElements", x, g.constant(wide % size, np.int64), g.op("Sin", taken), axis=axis,
            reduction=reduction,
        ),
        lambda: g.op("Gather", x, rows, axis=axis),
    ]  # fmt: skip
    return ways[g.among(len(ways))]()


def _product(g: Sketch, x: str) -> str:
    rank = g.values[x].ndim
    if rank < 2:
        return g.op("MatMul", x, x) if g.among(2) else g.op("Einsum", x, x, equation="i,j->ij")
    turned = g.op("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])
    last = g.op("Gather", x, g.constant(0, np.int64), axis=rank - 2)
    ways: list[Callable[[], str]] = [
        lambda: g.op("MatMul", x, turned),
        lambda: g.op("Einsum", x, x, equation="...ij,...kj->...ki"),
        lambda: g.op("Einsum", g.op("MatMul", x, turned), equation="...ii->...i"),
        lambda: g.op("Einsum", x, last, equation="...ij,...j"),
        lambda: g.op("Einsum", x, equation="...ij->...j"),
    ]
    return ways[g.among(len(ways))]()


MAKERS = (_point, _point, _binary, _binary, _reduction, _movement, _movement, _index, _product)


@st.composite
def problems(draw: Draw) -> Problem:
    """Draw a graph, whose `total` is a weighted sum of its last tensor."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shapes = [(2, 3), (3,), (3, 1, 2), (1, 3), (3, 3)]
    count = draw(st.integers(1, 3))
    chosen = [shapes[draw(st.integers(0, len(shapes) - 1))] for _ in range(count)]
    parameters = {f"p{index}": rng.normal(size=shape) for index, shape in enumerate(chosen)}
    g = Sketch(draw, parameters)
    for name in parameters:
        g.values[f"{name}.read"] = parameters[name]
        g.nodes.append(helper.make_node("Identity", [name], [f"{name}.read"], name=f"{name}.read"))
    x = "p0.read"
    for _ in range(draw(st.integers(1, 7))):
        x = MAKERS[g.among(len(MAKERS))](g, x)
        if np.abs(g.values[x]).max(initial=0) > 10:
            x = g.op("Tanh", x)
        if g.values[x].ndim == 0 or not 0 < g.values[x].size <= MOST_ENTRIES:
            x = g.op("Reshape", g.op("ReduceSum", x, keepdims=0), g.ints(1, 1))
    return _finish(g, x, rng)


def _finish(g: Sketch, x: str, rng: np.random.Generator) -> Problem:
    weighted = g.op("Mul", x, g.constant(rng.normal(size=g.shape(x))))
    total = g.op("ReduceSum", weighted, keepdims=0)
    g.nodes.append(helper.make_node("Identity", [total], ["total"], name="total"))
    output = helper.make_tensor_value_info("total", TensorProto.DOUBLE, [])
    stored = [numpy_helper.from_array(value, name) for name, value in g.parameters.items()]
    graph = helper.make_graph(g.nodes, "random", [], [output], initializer=stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    facts = json.dumps({"parameters": sorted(g.parameters)})
    model.metadata_props.append(onnx.StringStringEntryProto(key=FORWARD_KEY, value=facts))
    return Problem(model, g.parameters)
