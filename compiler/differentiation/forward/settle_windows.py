"""Say how many windows a pooling has where rounding up would begin one in the padding behind the image.

    before   MaxPool <kernel_shape = [2], strides = [2], pads = [1, 1], ceil_mode = 1>     of 5 entries
    after    MaxPool <kernel_shape = [2], strides = [2], pads = [1, 1], ceil_mode = 0>     3 windows

PyTorch, ONNX Runtime and opset 22 leave such a window out, the shape inference of older opsets counts it: 4.
What it has written into a file of values behind such a pooling is forgotten, to be inferred again.
"""

from collections.abc import Mapping

import onnx
from onnx import helper

from partc.compiler.differentiation.forward.expand_ops import reads_of
from partc.compiler.differentiation.tensor_types import Shape, type_of, without_large_values
from partc.passes.graph.bodies import nodes_of, subgraphs_of
from partc.passes.graph.infer_shapes import infer_shapes
from partc.passes.windows.windows import AxisSizes, Windows, lay_windows
from partc.runtime.errors import UnsupportedModel

COUNTING_OPSET = 22  # the first whose shape inference counts windows as they are run
POOLINGS = ("AveragePool", "LpPool", "MaxPool")


def settle_windows(model: onnx.ModelProto) -> None:
    """Rewrite, in place, poolings of known sizes. Raises BadModel, UnsupportedModel."""
    if not any(map(_rounds_up, nodes_of(model.graph))):
        return
    _forget_types(model.graph, set())
    counting = without_large_values(model)
    for opset in counting.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = max(opset.version, COUNTING_OPSET)
    _settle_graph(model.graph, infer_shapes(counting, data_prop=True).graph, {})


def _rounds_up(node: onnx.NodeProto) -> bool:
    is_pooling = node.op_type in POOLINGS and node.domain in ("", "ai.onnx")
    return is_pooling and any(a.i for a in node.attribute if a.name == "ceil_mode")


def _forget_types(graph: onnx.GraphProto, outer: set[str]) -> None:
    """Remove what is declared of values that a pooling that rounds up makes, or leads to."""
    behind = set(outer)
    for node in graph.node:
        if _rounds_up(node) or not behind.isdisjoint(reads_of(node)):
            behind.update(node.output)
        for body in subgraphs_of(node):
            _forget_types(body, behind)
    remaining = [value for value in graph.value_info if value.name not in behind]
    del graph.value_info[:]
    graph.value_info.extend(remaining)


def _settle_graph(
    graph: onnx.GraphProto, inferred: onnx.GraphProto, outer: Mapping[str, Shape | None]
) -> None:
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    shapes = {**outer, **{value.name: type_of(value).shape for value in values}}
    for node, twin in zip(graph.node, inferred.node, strict=True):
        if _rounds_up(node):
            source, target = _space(shapes.get(node.input[0])), _space(shapes.get(node.output[0]))
            if source and len(source) == len(target):
                _settle_pooling(node, source, target)
        for body, its_twin in zip(subgraphs_of(node), subgraphs_of(twin), strict=True):
            _settle_graph(body, its_twin, shapes)


def _space(shape: Shape | None) -> AxisSizes:
    """Return the spatial sizes, nothing where they are not known."""
    sizes = tuple(size for size in (shape or ())[2:] if isinstance(size, int))
    return sizes if len(sizes) == len(shape or ()) - 2 else ()


def _settle_pooling(node: onnx.NodeProto, source: AxisSizes, target: AxisSizes) -> None:
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    auto_pad, rank = attributes.get("auto_pad", b"NOTSET").decode(), len(source)
    if auto_pad.startswith("SAME"):  # every window of these begins in the image
        return
    ones = (1,) * rank
    strides = tuple(attributes.get("strides") or ones)
    pads = [0] * (2 * rank) if auto_pad == "VALID" else list(attributes.get("pads") or (0,) * (2 * rank))
    windows = lay_windows(
        attributes["kernel_shape"],
        strides,
        tuple(attributes.get("dilations") or ones),
        tuple(pads),
        auto_pad,
        source,
        target,
    )
    # Padding behind the last window: where there is some, rounding up has begun a window in it.
    behind = [end - after for end, after in zip(pads[rank:], windows.after, strict=True)]
    left_out = [axis for axis in range(rank) if behind[axis] > 0]
    if left_out and min(behind) >= 0:
        _set(node, "ceil_mode", 0)
    elif left_out:
        _check_read(node, windows, left_out)
        for axis in left_out:
            pads[rank + axis] = windows.after[axis]
        _set(node, "pads", pads)


def _check_read(node: onnx.NodeProto, windows: Windows, axes: list[int]) -> None:
    """Raise UnsupportedModel where no padding makes as many windows as there are: entries are in none."""
    for axis in axes:
        if windows.after[axis] < 0:
            raise UnsupportedModel(
                f"windows that leave out the last {-windows.after[axis]} of {windows.source[axis]} entries "
                f"of axis {axis + 2}, and reach beyond the end of another",
                at=f"node {node.name or node.output[0]!r} ({node.op_type} with ceil_mode)",
                fix="slice those entries off ahead of it",
            )


def _set(node: onnx.NodeProto, name: str, value: int | list[int]) -> None:
    others = [entry for entry in node.attribute if entry.name != name]
    del node.attribute[:]
    node.attribute.extend([*others, helper.make_attribute(name, value)])
