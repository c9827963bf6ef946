"""Element types that an op does not take together: ONNX's checker and inference leave them to who runs it.

before   Add (float32, float64)          after   refused, with the node, both tensors and a Cast as the remedy

Each operand and result of an op names a type parameter, such as T; those of one parameter are of one type. An
op that is defined for some floats takes all here: Celu is not said to take float64, and is written out in ops
that do. Whether a kernel exists is asked elsewhere.
"""

from collections.abc import Iterator, Sequence

import onnx
from onnx import TensorProto

from partc.runtime.errors import BadModel

_Formal = onnx.defs.OpSchema.FormalParameter
_KINDS = {"float": "float", "double": "float", "int": "int", "bool": "bool", "string": "string"}

_CAST = "cast the tensor to a type that the op is defined for"
# Of (op, operand) where a cast would mean something else.
_FIXES = {
    ("SoftmaxCrossEntropyLoss", "labels"): "give classes, which are integers; of probabilities write out "
    "-(p * log_softmax(scores, -1)).sum(-1).mean()"
}


def check_element_types(inferred: onnx.ModelProto) -> None:
    """Raise BadModel at the first node of a graph, types inferred, whose types do not fit its op."""
    graph = inferred.graph
    types = {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.HasField("tensor_type"):
            types.setdefault(value.name, int(value.type.tensor_type.elem_type))
    versions = {opset.domain: opset.version for opset in inferred.opset_import}
    version = versions.get("", versions.get("ai.onnx", 1))
    for node in graph.node:
        if node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, version, ""):
            _check_node(node, onnx.defs.get_schema(node.op_type, version, ""), types)


def _check_node(node: onnx.NodeProto, schema: onnx.defs.OpSchema, types: dict[str, int]) -> None:
    allowed = {entry.type_param_str: entry.allowed_type_strs for entry in schema.type_constraints}
    bound: dict[str, str] = {}  # type parameter -> the tensor that settled it
    for name, formal in (*_pairs(node.input, schema.inputs), *_pairs(node.output, schema.outputs)):
        element = types.get(name, TensorProto.UNDEFINED)
        if element == TensorProto.UNDEFINED or not formal.is_homogeneous:
            continue
        if _kind(_spell(element)) not in map(_kind, allowed.get(formal.type_str, [formal.type_str])):
            raise BadModel(
                f"{node.op_type} has no meaning for {name!r} of {_spell(element)}",
                at=_place(node),
                fix=f"{_FIXES.get((node.op_type, formal.name), _CAST)}, or export the model again",
            )
        other = bound.setdefault(formal.type_str, name) if formal.type_str in allowed else name
        if types[other] != element:
            raise BadModel(
                f"{other!r} is of {_spell(types[other])} and {name!r} of {_spell(element)}, where "
                f"{node.op_type} takes one type",
                at=_place(node),
                fix="cast one of the two, or export the model again",
            )


def _pairs(names: Sequence[str], formals: Sequence[_Formal]) -> Iterator[tuple[str, _Formal]]:
    """Yield tensors with what the op says of them; the last entry of an op may stand for any number."""
    for index, name in enumerate(names):
        if name and formals:
            yield name, formals[min(index, len(formals) - 1)]


def _kind(spelled: str) -> str:
    """Return the kind of a type such as int64, or as a schema spells it: tensor(float16)."""
    return next((kind for word, kind in _KINDS.items() if word in spelled), spelled)


def _spell(element: int) -> str:
    return str(TensorProto.DataType.Name(element)).lower()


def _place(node: onnx.NodeProto) -> str:
    return f"node {node.name!r} ({node.op_type})"
