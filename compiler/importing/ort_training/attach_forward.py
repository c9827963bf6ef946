"""Gradient ops that only name what is left of their forward op get the forward op's inputs too.

    before   GatherGrad (shape_of_E, ids, dy)     after   GatherGrad ( , ids, dy, E)
             MaxPoolGrad (dy, mask)                       MaxPoolGrad (dy, , x)

Only partc reads the added inputs: the ops are lowered next. Inputs that only onnxruntime's own kernels
need (statistics kept from the forward pass, positions of maxima) are dropped.
"""

from collections.abc import Callable, Mapping

import onnx

from partc.runtime.errors import UnsupportedModel

_Makers = Mapping[str, onnx.NodeProto]


def attach_forward(graph: onnx.GraphProto) -> None:
    """Append inputs in place. Raises UnsupportedModel where the forward op is not found."""
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type in _ATTACH:
            node.input.extend(_ATTACH[node.op_type](node, makers))
        if node.op_type in _EPSILON:
            _copy_epsilon(node, makers)
        for position in _UNREAD.get(node.op_type, ()):
            node.input[position] = ""


def _of_shapes(*positions: int) -> Callable[[onnx.NodeProto, _Makers], list[str]]:
    """Find the tensors whose shapes are inputs."""

    def find(node: onnx.NodeProto, makers: _Makers) -> list[str]:
        nodes = []
        for position in positions:
            maker = makers.get(node.input[position])
            if maker is None or maker.op_type != "Shape":
                raise _missing_forward(node, "Shape")
            nodes.append(maker.input[0])
        return nodes

    return find


def _of_slice(node: onnx.NodeProto, makers: _Makers) -> list[str]:
    """Behind dy, shape, starts, ends, and axes and steps that may be left out."""
    return [""] * (6 - len(node.input)) + _of_shapes(1)(node, makers)


def _of_mask(node: onnx.NodeProto, makers: _Makers) -> list[str]:
    maker = makers.get(node.input[1])
    if maker is None or maker.op_type != "MaxPool":
        raise _missing_forward(node, "MaxPool")
    return [maker.input[0]]


def _of_average(node: onnx.NodeProto, makers: _Makers) -> list[str]:
    """AveragePoolGrad reads nothing but dy: its forward op has its attributes, and gives it its name."""
    alike = [
        maker
        for maker in makers.values()
        if maker.op_type == "AveragePool" and _attributes(maker) == _attributes(node)
    ]
    matching = [maker for maker in alike if node.output[0].startswith(f"{maker.input[0]}_grad")]
    if not matching:
        raise _missing_forward(node, "AveragePool")
    return [max(matching, key=lambda maker: len(maker.input[0])).input[0]]


def _of_lengths(node: onnx.NodeProto, makers: _Makers) -> list[str]:
    maker = makers.get(node.input[1])
    if maker is None or maker.op_type != "ConcatTraining":
        raise _missing_forward(node, "ConcatTraining")
    return list(maker.input)


def _copy_epsilon(node: onnx.NodeProto, makers: _Makers) -> None:
    """Give a normalisation's gradient the epsilon that its forward op, which made the statistics, has."""
    maker = makers.get(node.input[_EPSILON[node.op_type]])
    if maker is None:
        raise _missing_forward(node, node.op_type.removesuffix("Grad"))
    attribute_names = {attribute.name for attribute in node.attribute}
    node.attribute.extend(a for a in maker.attribute if a.name == "epsilon" and a.name not in attribute_names)


def _attributes(node: onnx.NodeProto) -> set[bytes]:
    return {attribute.SerializeToString(deterministic=True) for attribute in node.attribute}


def _missing_forward(node: onnx.NodeProto, forward: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the {forward} that this {node.op_type} belongs to is not found",
        at=f"node {node.name or node.output[0]!r}",
        fix="give the training model as generate_artifacts wrote it",
    )


_ATTACH: Mapping[str, Callable[[onnx.NodeProto, _Makers], list[str]]] = {
    "AveragePoolGrad": _of_average,
    "BroadcastGradientArgs": _of_shapes(0, 1),
    "GatherElementsGrad": _of_shapes(1),
    "GatherGrad": _of_shapes(0),
    "MaxPoolGrad": _of_mask,
    "SliceGrad": _of_slice,
    "SplitTraining": _of_lengths,
}
# By op type, the input that the forward op made.
_EPSILON: Mapping[str, int] = {"LayerNormalizationGrad": 4, "SimplifiedLayerNormalizationGrad": 3}
# Inputs that partc's rules do without.
_UNREAD: Mapping[str, tuple[int, ...]] = {
    "BatchNormalizationGrad": (3, 4),
    "BroadcastGradientArgs": (0, 1),
    "GatherElementsGrad": (1,),
    "GatherGrad": (0,),
    "LayerNormalizationGrad": (3, 4),
    "MaxPoolGrad": (1,),
    "SimplifiedLayerNormalizationGrad": (3,),
    "SliceGrad": (1,),
    "SplitTraining": (1,),
}
