"""Change the terms of the sums that a step's gradients are made of.

before   dy ── ReduceSum ── Reshape ── db        after   dy ── Mul (1 + width x) ── ReduceSum ── Reshape ── db

Of the last sums by their last bits, x of -1 to 1: what rounding can do. A sum whose terms cancel, as a bias'
gradient does where every label is as frequent as expected, is nothing but rounding. The last bits of
variables do not tell: a bias of zero has none.

Of all sums by more, x of -2 to 0: terms that cancel do so no longer, and what is still zero is a sum of
zeros, however it is rounded: a row that is not read, a unit that a ReLU shut off. What decides anything (a
comparison, an index, a sign) is left as it is, and so is all that it follows from: the ReLU stays shut off.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.model_files.cut_model import reads_of
from partc.compiler.verification.sessions import eps_of
from partc.passes.graph.bodies import subgraphs_of
from partc.passes.graph.inline_functions import inline_local_functions

SCATTER = 2.0**-10  # far more than eps, and too little for another step
REARRANGING = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
DRAWN = (TensorProto.FLOAT, TensorProto.DOUBLE)  # what ONNX Runtime draws; it casts to the others
FLOATS = (*DRAWN, TensorProto.FLOAT16, TensorProto.BFLOAT16)
STEPWISE = frozenset({"Ceil", "Floor", "Round", "Sign"})  # floats that decide
OF_SHAPES = frozenset({"Shape", "Size"})
# An element of the result has one term. All other ops are taken for sums.
OF_ONE_TERM = REARRANGING | frozenset(
    "Concat ConstantOfShape Div Expand Flatten Gather GatherElements GatherND Mul Neg Pad Pow Reciprocal "
    "Slice Split Sqrt Tile Where".split()
)


class Nudge(NamedTuple):
    """Factors 1 + width x, x drawn from `low` to `high`."""

    low: float
    high: float
    width: float


def perturb_last_bits(model: onnx.ModelProto, gradients: Collection[str]) -> onnx.ModelProto:
    """Return a model whose gradients' terms are multiplied by 1 - eps to 1 + eps, drawn at every run."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    made_by = {name: node for node in result.graph.node for name in node.output if name}
    last = [node for name in gradients if (node := _summing_node(name, made_by)) is not None]
    _multiply_operands(result.graph, last, element_types(result), None)
    return result


def scatter_terms(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose sums' terms are multiplied by 1 - 2 SCATTER to 1, drawn at every run."""
    result = inline_local_functions(model)
    graph, types = result.graph, element_types(result)
    discrete = _discrete_tensors(graph, types)
    constants = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    constants |= {tensor.name for tensor in graph.initializer}
    sums = [
        node
        for node in graph.node
        if node.op_type not in OF_ONE_TERM
        and discrete.isdisjoint(node.output)
        and not any(subgraphs_of(node))
    ]
    exact = {name: kind for name, kind in types.items() if name not in constants}
    # Downwards, or the largest number, which masks scores, becomes infinite.
    _multiply_operands(graph, sums, exact, Nudge(-2.0, 0.0, SCATTER))
    return result


def _summing_node(gradient: str, made_by: dict[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    """Return the node whose result, but for its order, is the gradient."""
    node = made_by.get(gradient)
    while node is not None and node.op_type in REARRANGING:
        node = made_by.get(node.input[0])
    return node


def _discrete_tensors(graph: onnx.GraphProto, types: dict[str, int]) -> set[str]:
    """Return what is no float, a condition or an index, and the tensors that such follow from."""
    names: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type in OF_SHAPES:
            continue
        decides = node.op_type in STEPWISE or any(subgraphs_of(node))
        if decides or any(types.get(name) not in FLOATS or name in names for name in node.output if name):
            names |= reads_of(node) | set(node.output)
    return names


def _multiply_operands(
    graph: onnx.GraphProto,
    sums: Iterable[onnx.NodeProto],
    types: dict[str, int],
    nudge: Nudge | None,
) -> None:
    """Multiply what `sums` read by 1 + width x; `nudge` None: by what changes the last bits of their type."""
    used_names = {name for node in graph.node for name in (*node.input, *node.output)}
    perturbed: dict[str, str] = {}
    for node in sums:
        for index, name in enumerate(node.input):
            if types.get(name) in FLOATS:
                perturbed.setdefault(name, _unused_name(f"{name}.nudged", used_names))
                node.input[index] = perturbed[name]
    factors = _RandomFactors(used_names)
    new = {
        name: factors.multiply(name, result, types[name], nudge or _last_bits(types[name]))
        for name, result in perturbed.items()
    }
    node_outputs = {name for node in graph.node for name in node.output}
    nodes = [node for name in perturbed if name not in node_outputs for node in new[name]]
    for node in graph.node:
        nodes += [node, *(factor_node for name in node.output for factor_node in new.get(name, ()))]
    del graph.node[:]
    graph.node.extend([*factors.constants, *nodes])


def _last_bits(element: int) -> Nudge:
    return Nudge(-1.0, 1.0, eps_of(np.dtype(helper.tensor_dtype_to_np_dtype(element))))


class _RandomFactors:
    """What multiplies tensors by factors that are drawn at every run. `constants`: nodes that all share."""

    def __init__(self, used_names: set[str]) -> None:
        self.constants: list[onnx.NodeProto] = []
        self._random, self._used_names = np.random.default_rng(0), used_names
        self._names: dict[tuple[float, int], str] = {}

    def multiply(self, name: str, result: str, element: int, nudge: Nudge) -> list[onnx.NodeProto]:
        """Return the nodes for a tensor. Seeds lie far apart: of near ones, the first numbers are near.

        The attributes of a random op are float32, which has no number between 1 and 1 + eps of float64.
        """
        uniform, numbers, offsets, factors = (
            f"{result}.{part}" for part in ("drawn", "numbers", "offsets", "factors")
        )
        drawn_type, seed = element if element in DRAWN else TensorProto.FLOAT, self._random.integers(1, 2**31)
        random_numbers = helper.make_node(
            "RandomUniformLike", [name], [uniform], f"{uniform}.node",
            low=nudge.low, high=nudge.high, seed=float(seed), dtype=drawn_type,
        )  # fmt: skip
        width, one = self._constant(nudge.width, element), self._constant(1.0, element)
        cast = helper.make_node("Cast", [uniform], [numbers], f"{numbers}.node", to=element)
        casts, numbers = ([], uniform) if drawn_type == element else ([cast], numbers)
        return [
            random_numbers,
            *casts,
            helper.make_node("Mul", [numbers, width], [offsets], f"{offsets}.node"),
            helper.make_node("Add", [offsets, one], [factors], f"{factors}.node"),
            helper.make_node("Mul", [name, factors], [result], f"{result}.node"),
        ]

    def _constant(self, value: float, element: int) -> str:
        if (value, element) not in self._names:
            name = _unused_name(f"{value}.{TensorProto.DataType.Name(element)}", self._used_names)
            number = numpy_helper.from_array(np.array(value, helper.tensor_dtype_to_np_dtype(element)))
            self.constants.append(helper.make_node("Constant", [], [name], f"{name}.node", value=number))
            self._names[value, element] = name
        return self._names[value, element]


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element types of all tensors of a graph that shape inference knows."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    infos = (*graph.input, *graph.value_info, *graph.output)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _unused_name(name: str, used_names: set[str]) -> str:
    while name in used_names:
        name += "_"
    used_names.add(name)
    return name
