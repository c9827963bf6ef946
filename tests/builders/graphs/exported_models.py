"""Give graphs written as text the metadata that torch.onnx.export(dynamo=True) leaves in a file."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

FX_NODE = "pkg.torch.onnx.fx_node"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED = "pkg.onnxscript.optimizer.folded_from"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"


def stored_model(text: str, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Return a model of opset 21 with these initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in values.items())
    return model


def as_exported(
    model: onnx.ModelProto,
    *,
    parameters: tuple[str, ...] = (),
    buffers: tuple[str, ...] = (),
    gone: tuple[str, ...] = (),
    folded: Mapping[str, tuple[str, ...]] | None = None,
    operations: Mapping[str, str] | None = None,
    renewed: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """Add metadata.

    `gone`: parameters that are no initializers any more. `folded`: tensor -> its sources. `operations`: a
    node's first output -> what PyTorch's operation reads, as `%x, %p_W`; an Identity's is a detach.
    `renewed`: a buffer -> its next value.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    kinds = dict.fromkeys(parameters, "PARAMETER") | dict.fromkeys(buffers, "BUFFER")
    for name, kind in kinds.items():
        _describe(model, tensors[name], KIND, kind)
    for name, sources in (folded or {}).items():
        _describe(model, tensors[name], FOLDED, repr(sorted(sources)))
    lines = [f"p_{name.replace('.', '_')}: PARAMETER target='{name}'" for name in (*parameters, *gone)]
    lines += [f"b_{name.replace('.', '_')}: BUFFER target='{name}' persistent=True" for name in buffers]
    outputs = [f"{result}: BUFFER_MUTATION target='{name}'" for name, result in (renewed or {}).items()]
    signature = "\n".join(
        ["", "# inputs", *lines, "x: USER_INPUT", "", "# outputs", *outputs, "y: USER_OUTPUT", ""]
    )
    model.graph.metadata_props.add(key=SIGNATURE, value=signature)
    for node in model.graph.node:
        if reads := (operations or {}).get(node.output[0]):
            name = "detach" if node.op_type == "Identity" else "op"
            target = f"torch.ops.aten.{name}.default"
            text = f"%{node.output[0]} : [num_users=1] = call_function[target={target}](args = ({reads}))"
            node.metadata_props.add(key=FX_NODE, value=text)
    return model


def _describe(model: onnx.ModelProto, tensor: onnx.TensorProto, key: str, value: str) -> None:
    info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
    info.metadata_props.add(key=key, value=value)
    model.graph.value_info.append(info)


def call(operation: str, arguments: str, named: str = "") -> str:
    """Return the text of an operation: `batch_norm.default`, its arguments, and those by name."""
    target = f"torch.ops.aten.{operation}"
    return f"%r : [num_users=3] = call_function[target={target}](args = ({arguments}), kwargs = {{{named}}})"


def with_operations(model: onnx.ModelProto, operations: Mapping[str, str]) -> onnx.ModelProto:
    """Return the model, whose nodes that make these results now tell their operations, whole texts."""
    for node in model.graph.node:
        if text := operations.get(node.output[0], ""):
            node.metadata_props.add(key=FX_NODE, value=text)
    return model
