"""Say a step in fewer nodes, before anything else looks at it.

    before   a = Mul (x, x)      c = Add (one, two)      after   a = Mul (x, x)
             b = Mul (x, x)      z = Mul (y, c)                  y = Add (a, a)
             y = Add (a, b)      d = Exp (y)                     z = Mul (y, three)

Folded is what small constants alone make, and only to something no larger: zeros of a table's size stay
a ConstantOfShape. Merged are nodes of the main computation that depend on the data. The same node in the
update may have another value, for it reads gradients that are averaged, and so may one beside a gradient.
What constants and sizes make is cheap, and each reader may want it elsewhere. Verification's reference runs
the user's own graph. ONNX Runtime folds, so what is folded leaves as a model of ONNX.

Expand CastLike to Cast: its second operand lends its type alone, not its place in the cluster.

before   y = CastLike (x, batch)        after   y = Cast <to = type of batch> (x)
"""

from collections.abc import Hashable, Iterable, Set
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import SMALL, Facts
from partc.passes.graph.infer_shapes import run_constants
from partc.passes.graph.operation_builder import onnx_number
from partc.passes.graph.reachability import drop_unread_nodes
from partc.passes.graph.training_graph import IR_VERSION, TrainingGraph
from partc.passes.roles.find_roles import find_roles

STANDARD = ("", "ai.onnx", None)
SIZES = frozenset({"Shape", "Size"})  # do not depend on values: what they make is cheap, as constants are


def simplify(training: TrainingGraph) -> None:
    """Skip identities, fold constants, merge equal nodes, drop what nothing reads.

    Needs: gradients are known. Leaves: every tensor that `training` names; the outputs' values.
    """
    graph, named = training.graph, training.named_tensors
    _skip_identities(graph, named)
    _fold_constants(graph, named)
    main = find_roles(training).main
    data = {*training.data_inputs, *training.drawn_inputs}
    _merge_equal_nodes([node for node in graph.nodes if node.name in main], named, data)
    drop_unread_nodes(graph, named)


def _makes_named(node: gs.Node, named: Set[str]) -> bool:
    return any(output.name in named for output in node.outputs)


def _has_body(node: gs.Node) -> bool:
    return any(isinstance(value, gs.Graph) for value in node.attrs.values())


def _replace(old: gs.Tensor, new: gs.Tensor) -> None:
    """Let every reader of a tensor read another one: those in bodies are among them."""
    for reader in list(old.outputs):
        reader.inputs = [new if tensor is old else tensor for tensor in reader.inputs]


# ---------------------------------------------------------------- constants


def _fold_constants(graph: gs.Graph, named: Set[str]) -> None:
    folded: list[gs.Node] = []
    known: set[int] = set()  # by identity: hashing a tensor compares its values
    for node in graph.nodes:
        if not _makes_named(node, named) and _is_foldable(node, known):
            folded.append(node)
            known.update(id(output) for output in node.outputs)
    if not folded:
        return
    outputs = [output for node in folded for output in node.outputs]
    model: onnx.ModelProto = gs.export_onnx(gs.Graph(folded, [], outputs, opset=graph.opset))
    model.ir_version = IR_VERSION
    values = run_constants(model)
    for node in folded:
        outputs = list(node.outputs)
        node.outputs.clear()
        for output in outputs:
            output.to_constant(values[output.name])
    folded_ids = {id(node) for node in folded}
    graph.nodes = [node for node in graph.nodes if id(node) not in folded_ids]


def _is_foldable(node: gs.Node, known: Set[int]) -> bool:
    if node.domain not in STANDARD or not node.inputs or _has_body(node):
        return False
    if not all(isinstance(tensor, gs.Constant) or id(tensor) in known for tensor in node.inputs):
        return False
    input_size, output_size = (sum(map(_elements, tensors)) for tensors in (node.inputs, node.outputs))
    return output_size <= input_size <= SMALL and all(map(_is_number, node.outputs))


def _elements(tensor: gs.Tensor) -> float:
    """Return how many elements a tensor has, infinity if that is not known."""
    sizes = tensor.shape
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        return float("inf")
    return float(prod(sizes))


def _is_number(tensor: gs.Tensor) -> bool:
    """Tell whether numpy itself knows the elements."""
    if tensor.dtype is None or isinstance(tensor.dtype, int):  # ONNX's number where numpy has none
        return False
    return np.dtype(tensor.dtype).kind in "biuf"


# ---------------------------------------------------------------- equal nodes


def _skip_identities(graph: gs.Graph, named: Set[str]) -> None:
    """Let readers of a copy read the original, unless that is a gradient, which is averaged."""
    for node in graph.nodes:
        is_copy = node.op == "Identity" and node.domain in STANDARD
        if is_copy and not _makes_named(node, named) and node.inputs[0].name not in named:
            _replace(node.outputs[0], node.inputs[0])


def _merge_equal_nodes(nodes: Iterable[gs.Node], named: Set[str], data: Set[str]) -> None:
    """Let the first of equal nodes that depend on the data stand for all. Needs: sorted nodes."""
    varying = set(data)
    first: dict[Hashable, gs.Node] = {}
    for node in nodes:
        if node.op in SIZES or not any(tensor.name in varying for tensor in node.inputs):
            continue
        varying.update(output.name for output in node.outputs)
        if _makes_named(node, named) or _has_body(node):
            continue
        twin = first.setdefault(_spelling(node), node)
        if twin is not node:
            for output, same in zip(node.outputs, twin.outputs, strict=True):
                _replace(output, same)


def _spelling(node: gs.Node) -> Hashable:
    """Return what two nodes have in common if they make the same."""
    attributes = tuple(sorted((name, _value(value)) for name, value in node.attrs.items()))
    outputs = tuple(bool(output.name) for output in node.outputs)
    return node.op, node.domain or "", attributes, tuple(map(_operand, node.inputs)), outputs


def _operand(tensor: gs.Tensor) -> Hashable:
    """Return a small constant's value, another tensor's name."""
    is_small = isinstance(tensor, gs.Constant) and _elements(tensor) <= SMALL
    return _value(tensor.values) if is_small else tensor.name


def _value(value: object) -> str:
    """Spell a value so that equal spellings have equal bytes."""
    value = value.values if isinstance(value, gs.Constant) else value
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    return repr(value)


def expand_casts(training: TrainingGraph, facts: Facts) -> None:
    """Replace every CastLike of the graph."""
    for node in training.graph.nodes:
        if node.op == "CastLike":
            node.op = "Cast"
            node.attrs = {"to": onnx_number(facts.dtypes[node.outputs[0].name])}
            node.inputs = [node.inputs[0]]
