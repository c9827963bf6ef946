"""Count a model's parameters without making them, dense and sparse apart."""

import json
import math
from dataclasses import dataclass

import onnx
from onnx import numpy_helper

from partc.models.graph_builder import METADATA_KEY


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Elements of parameters; sparse are those of tables that only Gathers read, row by row."""

    dense: int
    sparse: int


def count_parameters(model: onnx.ModelProto) -> ParameterCount:
    """Return the parameters of a model that this package built."""
    facts = next(entry.value for entry in model.metadata_props if entry.key == METADATA_KEY)
    makers = {node.output[0]: node for node in model.graph.node}
    counted = {"dense": 0, "sparse": 0}
    for name in json.loads(facts)["parameters"]:
        readers = [node for node in model.graph.node if name in node.input]
        is_table = all(node.op_type == "Gather" and node.input[0] == name for node in readers)
        counted["sparse" if is_table else "dense"] += math.prod(_shape(makers[name], makers))
    return ParameterCount(**counted)


def _shape(maker: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> tuple[int, ...]:
    """Return the shape that a draw, or a ConstantOfShape of a constant, makes."""
    shape = next((attribute.ints for attribute in maker.attribute if attribute.name == "shape"), None)
    if shape is not None:
        return tuple(shape)
    (attribute,) = makers[maker.input[0]].attribute
    if attribute.name == "value_ints":
        return tuple(attribute.ints)
    return tuple(int(size) for size in numpy_helper.to_array(attribute.t))
