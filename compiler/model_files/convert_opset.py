"""Convert a model to a newer opset by ONNX's converter, and repair what that does to it.

It writes down what types it infers, of poolings by an older count of their windows: declared ones stay alone.
Of BatchNormalization it loses the mode:

before 14   y, mean, var, saved_mean, saved_var = BatchNormalization (..)    several outputs: it trains
from 14     y, mean, var = BatchNormalization <training_mode = 1> (..)       an attribute tells

The converter refuses saved outputs, read or not, and forgets to set the attribute: the layer would then
normalise by its running statistics. PyTorch's TorchScript exporter writes such layers up to opset 13.
"""

from collections.abc import Iterator

import onnx
from onnx import helper

from partc.passes.graph.bodies import nodes_of, subgraphs_of
from partc.runtime.errors import UnsupportedModel

MODE_OPSET = 14  # the first whose BatchNormalization has a training_mode
FIRST_SAVED = 3  # of the outputs: what a backward pass would reuse


def convert_opset(model: onnx.ModelProto, version: int, target: int) -> onnx.ModelProto:
    """Return a model of opset `version` in `target`. Raises UnsupportedModel, and what ONNX raises."""
    converted = _convert(model, version, target)
    _keep_declared(converted.graph, model.graph)
    return converted


def _convert(model: onnx.ModelProto, version: int, target: int) -> onnx.ModelProto:
    """Convert a model; a BatchNormalization keeps its mode."""
    training = _training_normalizations(model.graph) if version < MODE_OPSET else []
    if not training:
        return onnx.version_converter.convert_version(model, target)
    read_names = set(_read_names(model.graph))
    trimmed = onnx.ModelProto()
    trimmed.CopyFrom(model)
    for node in _training_normalizations(trimmed.graph):
        if saved := sorted(read_names.intersection(node.output[FIRST_SAVED:])):
            raise UnsupportedModel(
                f"its saved statistics {saved[0]!r} are read, which opset {MODE_OPSET} knows no more",
                at=f"node {node.name or node.output[0]!r} (BatchNormalization of opset {version})",
                fix=f"compute them from the layer's input, or export with opset {MODE_OPSET} or higher",
            )
        del node.output[FIRST_SAVED:]
    converted = onnx.version_converter.convert_version(trimmed, target)
    results = {node.output[0] for node in training}
    for node in nodes_of(converted.graph):
        if node.op_type == "BatchNormalization" and node.output[0] in results:
            node.attribute.append(helper.make_attribute("training_mode", 1))
    return converted


def _keep_declared(graph: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Let the values of a graph, and of its bodies, have the types that the original declares, or none."""
    types = {value.name: value for value in original.value_info}
    kept = [types[value.name] for value in graph.value_info if value.name in types]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    outputs = {value.name: value for value in original.output}
    for output in graph.output:
        if output.name in outputs:
            output.CopyFrom(outputs[output.name])
    for body, its_original in zip(_bodies(graph), _bodies(original), strict=True):
        _keep_declared(body, its_original)


def _bodies(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    return [body for node in graph.node for body in subgraphs_of(node)]


def _training_normalizations(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in nodes_of(graph) if node.op_type == "BatchNormalization" and any(node.output[1:])]


def _read_names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _read_names(attribute.g)
