"""ONNX's checker, held to what makes a model wrong.

It also refuses what no one needs: an output without a stated shape, which inference finds, and
GroupNormalization of opsets 18 to 20, which was deprecated after PyTorch had exported it and
onnxruntime had run it. And it looks for external data in the current folder, not beside the model.

What the installed onnxruntime reads is found by asking it: its package does not say.
"""

from collections.abc import Iterator
from functools import cache

import onnx
import onnxruntime
from onnx import TensorProto, helper

from partc.passes.graph.infer_shapes import limited_memory
from partc.runtime.errors import BadModel

# Deprecated, and computed nevertheless -> the opset that has it with the same attributes and inputs.
COMPUTED = {"GroupNormalization": 21}


def run_checker(model: onnx.ModelProto) -> None:
    """Raise BadModel at what onnx.checker refuses; external data is not looked at."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    _make_external_inputs(light.graph)
    _state_shapes(light.graph)
    try:
        with limited_memory(light):
            _check_deprecated(light)
            onnx.checker.check_model(light)
    except Exception as error:  # the checker's C++ raises more than its ValidationError
        raise BadModel(
            str(error).split("\n\n==> Context:")[0].strip(),
            at=str(error).rpartition("==> Context:")[2].strip() or "onnx.checker",
            fix="mend the node or tensor that the ONNX checker names, or export the model again",
        ) from error


def _make_external_inputs(graph: onnx.GraphProto) -> None:
    input_names = {info.name for info in graph.input}
    for tensor in [t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL]:
        graph.initializer.remove(tensor)
        if tensor.name not in input_names:
            info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            graph.input.append(info)


def _state_shapes(graph: onnx.GraphProto) -> None:
    """The checker asks that outputs state a shape, and compares it with nothing."""
    for info in graph.output:
        if info.type.HasField("tensor_type") and not info.type.tensor_type.HasField("shape"):
            info.type.tensor_type.shape.SetInParent()


def _check_deprecated(model: onnx.ModelProto) -> None:
    """Check deprecated nodes that are computed as those of a later opset, then make them ops of any."""
    versions = {opset.domain or "": opset.version for opset in model.opset_import}
    version = versions.get("", versions.get("ai.onnx", 1))
    for node in _nodes(model.graph):
        later = COMPUTED.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if later is None or not onnx.defs.get_schema(node.op_type, version).deprecated:
            continue
        context = onnx.checker.C.CheckerContext()
        context.ir_version = model.ir_version
        context.opset_imports = {"": later}
        onnx.checker.check_node(node, context)
        node.op_type = "Identity"
        del node.input[1:]
        del node.attribute[:]


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _nodes(body)


@cache
def newest_opset() -> int:
    """Return the newest version of ONNX's operator set that the installed onnxruntime reads."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y])
    for version in range(onnx.defs.onnx_opset_version(), 1, -1):
        opset = helper.make_opsetid("", version)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception:  # onnxruntime's own error classes are private
            continue
        return version
    raise AssertionError("onnxruntime reads no opset")
