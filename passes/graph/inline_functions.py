"""Put functions' bodies in the place of their calls, each call with the defaults of what it leaves out.

    act <alpha = 0.25> (x) => (y) { y = Elu <alpha = @alpha> (x) }

    before   c = act (a)         after   c = Elu <alpha = 0.25> (a)

ONNX's inliner drops an attribute that refers to one which the call leaves out, whatever its default: the
node would then have the default of its own op.
"""

from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import inliner

from partc.passes.graph.bodies import nodes_of
from partc.runtime.errors import BadModel

OpId = tuple[str, str, str]  # domain, type, overload
Defaults = Mapping[OpId, Sequence[onnx.AttributeProto]]


def inline_local_functions(model: onnx.ModelProto, *, convert_version: bool = False) -> onnx.ModelProto:
    """Return a model without functions; the argument stays as it is.

    `convert_version` brings functions of other opsets to the model's. Raises what ONNX's inliner raises, and
    BadModel where a call leaves out what a constant is.
    """
    inlined = inliner.inline_local_functions(_with_defaults(model), convert_version)
    for node in nodes_of(inlined.graph):
        if node.op_type == "Constant" and not node.attribute:
            raise BadModel(
                "a constant has no value: the call of its function leaves the attribute out",
                at=f"the node that makes {node.output[0]!r}",
                fix="give the attribute in the call, or a default in the function",
            )
    return inlined


def inline_selected_functions(model: onnx.ModelProto, functions: list[tuple[str, str]]) -> onnx.ModelProto:
    """Return a model without the functions of these domains and names; the argument stays as it is."""
    return inliner.inline_selected_functions(_with_defaults(model), functions)


def spell_out_defaults(nodes: Iterable[onnx.NodeProto], defaults: Defaults) -> None:
    """Give nodes, in place, the attributes that they leave out."""
    for node in nodes:
        told = {attribute.name for attribute in node.attribute}
        known = defaults.get(_id(node.domain, node.op_type, node.overload), ())
        node.attribute.extend(attribute for attribute in known if attribute.name not in told)


def _id(domain: str, name: str, overload: str) -> OpId:
    return "" if domain == "ai.onnx" else domain, name, overload


def _with_defaults(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with each call's defaults, those of calls in functions and bodies too."""
    defaults = {
        _id(function.domain, function.name, function.overload): function.attribute_proto
        for function in model.functions
        if function.attribute_proto
    }
    if not defaults:
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for graph in (result.graph, *result.functions):
        spell_out_defaults(nodes_of(graph), defaults)
    return result
