"""Write If, Loop and Scan as plain nodes: the gradient then follows from those.

    If     condition known      the branch that is taken
           condition computed   both branches, and Where chooses: branches have equal shapes
    Loop   trip count known     the body once per iteration
    Scan   length known         the body once per step, on the pieces of one Split per input

Tensors of a branch or body get fresh names; what the node itself made keeps its name. Weights that a body
holds become weights of the graph. Nodes that make no floats stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.differentiation.forward.expand_ops import (
    names_in_subgraphs,
    outer_names_in,
    reads_of_subgraphs,
    rename_reads,
)
from partc.compiler.differentiation.sizes.knowledge import Knowledge
from partc.compiler.differentiation.tensor_types import FLOATS, infer_types
from partc.passes.graph.operation_builder import FunctionBuilder
from partc.runtime.errors import BadModel, UnsupportedModel

MAX_STEPS = 4096  # an unrolled graph beyond this is no graph that anybody wants

# What a tensor of a subgraph is called in the graph that is built.
NameMap = Mapping[str, str]


def unroll_control_flow(model: onnx.ModelProto, opset: int) -> None:
    """Replace If, Loop and Scan that make floats, in place. Raises UnsupportedModel."""
    graph = model.graph
    if not any(node.op_type in ("If", "Loop", "Scan") for node in graph.node):
        return
    knowledge = Knowledge(graph, opset, infer_types(model))
    kept = [node for node in graph.node if not _is_unrolled(node)]
    names = outer_names_in(graph).union(*map(names_in_subgraphs, kept))
    unrolling = _Unrolling(FunctionBuilder(names), knowledge)
    for node in graph.node:
        if not _is_unrolled(node):
            unrolling.keep(node)
            continue
        results = unrolling.results_of(node, {})
        for name, result in zip(node.output, results, strict=True):
            if name:
                unrolling.keep(
                    helper.make_node("Identity", [result], [name], name=f"{node.name or name}/{name}")
                )
    del graph.node[:]
    graph.node.extend(unrolling.build.nodes)
    graph.initializer.extend(unrolling.weights)


def _is_unrolled(node: onnx.NodeProto) -> bool:
    """Tell whether a node has subgraphs through which a gradient may flow."""
    if node.op_type not in ("If", "Loop", "Scan") or node.domain not in ("", "ai.onnx"):
        return False
    outputs = [
        value for attribute in node.attribute if attribute.HasField("g") for value in attribute.g.output
    ]
    elements = [value.type.tensor_type.elem_type for value in outputs]
    return any(element in FLOATS or element == TensorProto.UNDEFINED for element in elements)


@dataclass
class _Unrolling:
    """The graph that is built."""

    build: FunctionBuilder
    knowledge: Knowledge
    weights: list[TensorProto] = field(default_factory=list)
    weight_names: dict[bytes, str] = field(default_factory=dict)

    def keep(self, node: onnx.NodeProto) -> None:
        """Emit a node of the outer graph."""
        self.build.copy(node)
        self.knowledge.saw(node)

    def results_of(self, node: onnx.NodeProto, names: NameMap) -> Sequence[str]:
        """Emit a node of a subgraph; return its outputs' names."""
        if _is_unrolled(node):
            place, scope = f"node {node.name or node.output[0]!r} ({node.op_type})", self.build.scope
            self.build.scope = f"{scope}{node.name or node.output[0]}/"
            results = _UNROLLERS[node.op_type](self, _Subgraphs(node, names, place))
            self.build.scope = scope
            return results
        renamed = onnx.NodeProto()
        renamed.CopyFrom(node)
        rename_reads(renamed, names)
        before = len(self.build.nodes)
        emitted_names = self.build.emit(renamed)
        for emitted in self.build.nodes[before:]:
            self.knowledge.saw(emitted)
        return emitted_names

    def inline(self, graph: onnx.GraphProto, inputs: Sequence[str], names: NameMap) -> list[str]:
        """Emit a branch or body; return what its outputs are called."""
        inner = dict(names)
        inner |= {tensor.name: self._weight(tensor) for tensor in graph.initializer}
        inner |= dict(zip((value.name for value in graph.input), inputs, strict=True))
        for node in graph.node:
            inner |= {
                name: result
                for name, result in zip(node.output, self.results_of(node, inner), strict=False)
                if name
            }
        return [inner.get(value.name, value.name) for value in graph.output]

    def _weight(self, tensor: TensorProto) -> str:
        """Return the name that a body's weight has in the graph; equal names with equal values are one."""
        key = tensor.SerializeToString(deterministic=True)
        if key not in self.weight_names:
            copy = TensorProto()
            copy.CopyFrom(tensor)
            copy.name = self.weight_names[key] = self.build.fresh(tensor.name)
            self.weights.append(copy)
            self.knowledge.learn(copy.name, tensor)
        return self.weight_names[key]

    def constant(self, value: np.ndarray) -> str:
        """Emit a constant."""
        name = self.build.constant(value)
        self.knowledge.learn(name, numpy_helper.from_array(value))
        return name


@dataclass(frozen=True, slots=True)
class _Subgraphs:
    """A node with subgraphs, and the names around it."""

    node: onnx.NodeProto
    names: NameMap
    place: str

    def input(self, index: int) -> str:
        """Return what an input is called in the graph that is built, empty where it is left out."""
        if index >= len(self.node.input):
            return ""
        return self.names.get(self.node.input[index], self.node.input[index])

    def graph(self, name: str) -> onnx.GraphProto:
        """Return a branch or body."""
        graph: onnx.GraphProto = next(a.g for a in self.node.attribute if a.name == name)
        return graph

    def integers(self, name: str, default: Sequence[int]) -> list[int]:
        """Return a list attribute."""
        attribute = next((a for a in self.node.attribute if a.name == name), None)
        return list(default) if attribute is None else list(attribute.ints)


# ---------------------------------------------------------------- the three


def _unroll_if(to: _Unrolling, at: _Subgraphs) -> list[str]:
    constant = to.knowledge.value(at.input(0))
    if constant is not None:
        return to.inline(at.graph("then_branch" if _single(at, constant) else "else_branch"), (), at.names)
    condition = to.build.op("Reshape", at.input(0), to.constant(np.zeros(0, np.int64)))
    branches = []
    for name in ("then_branch", "else_branch"):
        names = _guard_branch(to, at, (condition, name == "then_branch"))
        branches.append(to.inline(at.graph(name), (), names))
    return [to.build.op("Where", condition, *pair) for pair in zip(*branches, strict=True)]


def _guard_branch(to: _Unrolling, at: _Subgraphs, taken: tuple[str, bool]) -> NameMap:
    """Let a branch that is not taken read ones: its gradient, which is 0, then meets no NaN on its way."""
    condition, when = taken
    names = dict(at.names)
    for name in sorted(reads_of_subgraphs(at.node)):
        outer = at.names.get(name, name)
        type_ = to.knowledge.types.get(outer)
        if type_ is not None and type_.is_float:
            one = to.constant(np.array(1, type_.dtype))
            names[name] = to.build.op("Where", condition, *((outer, one) if when else (one, outer)))
    return names


def _unroll_loop(to: _Unrolling, at: _Subgraphs) -> list[str]:
    body, scope = at.graph("body"), to.build.scope
    state = [at.input(index) for index in range(2, len(at.node.input))]
    condition = at.input(1) or to.constant(np.array(True))
    collected: list[list[str]] = [[] for _ in range(len(body.output) - 1 - len(state))]
    count = _trip_count(to, at)
    iteration = 0
    while (count is None or iteration < count) and _goes_on(to, at, condition, iteration):
        to.build.scope = f"{scope}{iteration}/"
        position = to.constant(np.array(iteration, np.int64))
        condition, *results = to.inline(body, (position, condition, *state), at.names)
        state = results[: len(state)]
        for pieces, result in zip(collected, results[len(state) :], strict=True):
            pieces.append(result)
        iteration += 1
    to.build.scope = scope
    return [*state, *(_stack(to, at, pieces, 0) for pieces in collected)]


def _trip_count(to: _Unrolling, at: _Subgraphs) -> int | None:
    if not at.input(0):
        return None
    count = to.knowledge.value(at.input(0))
    if count is None:
        raise _unknown(at, f"its trip count {at.input(0)!r} is computed while training")
    return int(_single(at, count))


def _goes_on(to: _Unrolling, at: _Subgraphs, condition: str, iteration: int) -> bool:
    goes_on = to.knowledge.value(condition)
    if goes_on is None:
        raise _unknown(at, f"whether iteration {iteration} happens is computed while training")
    if _single(at, goes_on) and iteration >= MAX_STEPS:
        raise _unknown(at, f"it has more than {MAX_STEPS} iterations")
    return bool(_single(at, goes_on))


def _single(at: _Subgraphs, value: np.ndarray) -> float:
    if value.size != 1:
        raise BadModel(
            f"a condition or trip count of shape {list(value.shape)}",
            at=at.place,
            fix=f"give the {at.node.op_type} one element",
        )
    return float(value.item())


def _unknown(at: _Subgraphs, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"this {at.node.op_type} cannot be unrolled: {reason}",
        at=at.place,
        fix="export the model with fixed sizes and a fixed number of steps",
    )


def _unroll_scan(to: _Unrolling, at: _Subgraphs) -> list[str]:
    body, scope = at.graph("body"), to.build.scope
    scanned = next(attribute.i for attribute in at.node.attribute if attribute.name == "num_scan_inputs")
    first = len(at.node.input) - scanned
    state = [at.input(index) for index in range(first)]
    pieces = _pieces(to, at, first, scanned)
    collected: list[list[str]] = [[] for _ in range(len(body.output) - first)]
    for step in range(len(pieces[0])):
        to.build.scope = f"{scope}{step}/"
        results = to.inline(body, (*state, *(piece[step] for piece in pieces)), at.names)
        state = results[:first]
        for outputs, result in zip(collected, results[first:], strict=True):
            outputs.append(result)
    to.build.scope = scope
    axes = at.integers("scan_output_axes", [0] * len(collected))
    backwards = at.integers("scan_output_directions", [0] * len(collected))
    ordered = [outputs[::-1] if back else outputs for outputs, back in zip(collected, backwards, strict=True)]
    stacks = [_stack(to, at, outputs, axis) for outputs, axis in zip(ordered, axes, strict=True)]
    return [*state, *stacks]


def _pieces(to: _Unrolling, at: _Subgraphs, first: int, scanned: int) -> list[list[str]]:
    """Return the pieces of every scanned input, in the order in which the body meets them."""
    axes = at.integers("scan_input_axes", [0] * scanned)
    backwards = at.integers("scan_input_directions", [0] * scanned)
    pieces_of_inputs = []
    for index, (axis, back) in enumerate(zip(axes, backwards, strict=True)):
        tensor = at.input(first + index)
        type_ = to.knowledge.types.get(tensor)
        shape = () if type_ is None or type_.shape is None else type_.shape
        length = shape[axis] if -len(shape) <= axis < len(shape) else None
        if not isinstance(length, int) or not 0 < length <= MAX_STEPS:
            raise _unknown(
                at, f"the length {length!r} of {tensor!r} along axis {axis} is not known, or too large"
            )
        sizes = to.constant(np.ones(length, np.int64))
        slices = to.build.call("Split", (tensor, sizes), length, axis=axis)
        pieces = [to.build.op("Squeeze", piece, to.constant(np.array([axis]))) for piece in slices]
        pieces_of_inputs.append(pieces[::-1] if back else pieces)
    return pieces_of_inputs


def _stack(to: _Unrolling, at: _Subgraphs, pieces: Sequence[str], axis: int) -> str:
    if not pieces:
        raise _unknown(at, "it has no iterations, but outputs of each")
    wide = [to.build.op("Unsqueeze", piece, to.constant(np.array([axis]))) for piece in pieces]
    return wide[0] if len(wide) == 1 else to.build.op("Concat", *wide, axis=axis)


_UNROLLERS = {"If": _unroll_if, "Loop": _unroll_loop, "Scan": _unroll_scan}
