"""Say how much padding "same" is, where a convolution's windows have gaps: ONNX Runtime computes no such
auto_pad.

    before   Conv <auto_pad = SAME_UPPER, dilations = [2, 2]>     after   Conv <pads = [2, 2, 2, 2], ...>

PyTorch's padding="same" is exported so. Without gaps it stays, for sizes may be open.
"""

from collections.abc import Sequence

import onnx
from onnx import helper

from partc.compiler.differentiation.tensor_types import Types
from partc.passes.windows.windows import lay_windows
from partc.runtime.errors import UnsupportedModel


def settle_padding(graph: onnx.GraphProto, types: Types) -> None:
    """Rewrite, in place, windows with gaps. Raises UnsupportedModel where strides meet sizes not known."""
    for node in graph.node:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        auto_pad = attributes.get("auto_pad", b"NOTSET").decode()
        dilations = attributes.get("dilations", ())
        is_conv = node.op_type == "Conv" and node.domain in ("", "ai.onnx")
        if is_conv and auto_pad.startswith("SAME") and any(size > 1 for size in dilations):
            kernel = attributes.get("kernel_shape") or _spatial(types, node.input[1])
            strides = attributes.get("strides") or (1,) * len(dilations)
            source = _spatial(types, node.input[0]) or (None,) * len(dilations)
            pads = _same(node, auto_pad, kernel, strides, dilations, source)
            left = [entry for entry in node.attribute if entry.name not in ("auto_pad", "pads")]
            del node.attribute[:]
            node.attribute.extend([*left, helper.make_attribute("pads", pads)])


def _spatial(types: Types, tensor: str) -> tuple[int | None, ...]:
    known = types.get(tensor)
    shape = known.shape if known is not None and known.shape is not None else ()
    return tuple(size if isinstance(size, int) else None for size in shape[2:])


def _same(
    node: onnx.NodeProto,
    auto_pad: str,
    kernel: Sequence[int | None],
    strides: Sequence[int],
    dilations: Sequence[int],
    source: Sequence[int | None],
) -> list[int]:
    """Return the entries before and behind each axis: without strides any size has as many."""
    sizes = [size or (1 if stride == 1 else None) for size, stride in zip(source, strides, strict=True)]
    fixed, of_kernel = ([size for size in each if size is not None] for each in (sizes, kernel))
    if len(fixed) < len(dilations) or len(of_kernel) < len(dilations):
        raise UnsupportedModel(
            f"{node.op_type} with auto_pad={auto_pad}, dilations and strides, of a size that is left open",
            at=f"node {node.name!r}",
            fix="export the model with fixed sizes, or with explicit pads",
        )
    target = tuple(-(-size // stride) for size, stride in zip(fixed, strides, strict=True))
    windows = lay_windows(of_kernel, tuple(strides), tuple(dilations), (), auto_pad, tuple(fixed), target)
    return [*windows.before, *(max(0, after) for after in windows.after)]
