"""Nodes that CUDA's kernels are slow at, or do not replay, as several that they are not.

reductions   over the last axes, then over the first: over both at once cuDNN's take ten times as long
products     of few tiles and long sums in several parts, for a GPU computes as many tiles at once as it has
             multiprocessors: 49 of 12,544 terms, ResNet-50's first weight at batch 8, took 12 ms on an H200
Concat       of 32 tensors at most, what CUDA's provider replays (onnxruntime 1.31.1)
"""

from collections import Counter

import onnx
from onnx import helper

from partc.passes.cpu_kernels.segment_values import is_node, read_names
from partc.passes.gpu_kernels.gpu_segment import GpuSegment

MOST_JOINED = 32
_TILE = 32  # rows and columns that cuBLAS computes together where there are few
_TILES_AT_ONCE = 264  # two for each multiprocessor of an H200
_LEAST_SUMMED = 256  # entries of a part's sum


def split_reductions(segment: GpuSegment) -> None:
    """Reduce twice where the first axis and the last ones are reduced, with others between them."""
    segment.rewrite(lambda node: _reduced_twice(segment, node))


def _reduced_twice(segment: GpuSegment, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    is_reduction = is_node(node, "ReduceSum") or is_node(node, "ReduceMean")
    sizes = segment.sizes(node.input[0]) if is_reduction else None
    axes = segment.constants.get(node.input[1]) if len(node.input) == 2 else None
    if not sizes or axes is None:
        return [node]
    rank = len(sizes)
    first, *last = sorted({int(axis) % rank for axis in axes}) or [rank]
    if first != 0 or not last or last != [*range(rank - len(last), rank)] or len(last) == rank - 1:
        return [node]
    keeps = next((each.i for each in node.attribute if each.name == "keepdims"), 1)
    over_last = [node.input[0], segment.integers(*last)]
    inner = segment.node(node.op_type, over_last, f"{node.output[0]}/last", keepdims=keeps)
    over_first = [inner.output[0], segment.integers(0)]
    return [inner, helper.make_node(node.op_type, over_first, node.output, node.name, keepdims=keeps)]


def split_products(segment: GpuSegment) -> None:
    """Make products [b, m, k] [b, k, n] that are summed over b as those of s b parts of k / s each."""
    _ProductSplitter(segment).run()


class _ProductSplitter:
    def __init__(self, segment: GpuSegment) -> None:
        self._segment = segment
        self._reads = Counter(read_names(segment.graph))
        self._makers = {name: node for node in segment.graph.node for name in node.output}
        self._summed = {node.input[0] for node in segment.graph.node if self._sums_first_axis(node)}
        self._in_parts: dict[tuple[str, int, int], str] = {}  # (image, m, parts) -> the operand in parts

    def run(self) -> None:
        self._segment.rewrite(self._split)

    def _sums_first_axis(self, node: onnx.NodeProto) -> bool:
        """Tell whether a node sums over the first axis, which it leaves out, what nothing else reads."""
        if not is_node(node, "ReduceSum") or len(node.input) != 2 or self._reads[node.input[0]] > 1:
            return False
        axes = self._segment.constants.get(node.input[1])
        leaves_out = any(each.name == "keepdims" and each.i == 0 for each in node.attribute)
        return axes is not None and axes.tolist() == [0] and leaves_out

    def _split(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if not is_node(node, "MatMul") or node.output[0] not in self._summed:
            return [node]
        left, right = (self._segment.sizes(name) for name in node.input)
        if left is None or right is None or len(left) != 3 or len(right) != 3 or 0 in (*left, *right):
            return [node]
        (b, m, k), n = left, right[2]
        parts = _parts(k, b * -(-m // _TILE) * -(-n // _TILE))
        if parts == 1:
            return [node]
        cut_left, of_left = self._left_in_parts(node.input[0], left, parts)
        to_parts = self._segment.integers(b * parts, k // parts, n)
        cut_right = self._segment.node("Reshape", [node.input[1], to_parts], f"{node.output[0]}/right")
        product = helper.make_node("MatMul", [of_left, cut_right.output[0]], node.output, node.name)
        return [*cut_left, cut_right, product]

    def _left_in_parts(
        self, name: str, sizes: tuple[int, ...], parts: int
    ) -> tuple[list[onnx.NodeProto], str]:
        """Return the nodes that put an operand in parts, none where its image is already, and the result."""
        maker = self._makers.get(name)
        image = maker.input[0] if maker is not None and is_node(maker, "Reshape") else name
        b, m, k = sizes
        if (image, m, parts) in self._in_parts:
            return [], self._in_parts[image, m, parts]
        make, integers = self._segment.node, self._segment.integers
        cut = make("Reshape", [name, integers(b, m, parts, k // parts)], f"{name}/cut")
        transposed = make("Transpose", cut.output, f"{name}/transposed", perm=[0, 2, 1, 3])
        flat = make("Reshape", [transposed.output[0], integers(b * parts, m, k // parts)], f"{name}/parts")
        self._in_parts[image, m, parts] = flat.output[0]
        return [cut, transposed, flat], flat.output[0]


def _parts(length: int, tiles: int) -> int:
    """Return into how many equal parts a sum of a length is cut where a product has so many tiles."""
    most = min(_TILES_AT_ONCE // tiles, length // _LEAST_SUMMED)
    return max((parts for parts in range(1, most + 1) if length % parts == 0), default=1)


def split_concats(segment: GpuSegment) -> None:
    """Join many tensors in turns."""
    segment.rewrite(lambda node: _joined_in_turns(segment, node))


def _joined_in_turns(segment: GpuSegment, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    if not is_node(node, "Concat") or len(node.input) <= MOST_JOINED:
        return [node]
    axis = next(each.i for each in node.attribute if each.name == "axis")
    joined = [
        segment.node("Concat", node.input[first : first + MOST_JOINED], f"{node.output[0]}/joined", axis=axis)
        for first in range(0, len(node.input), MOST_JOINED)
    ]
    names = [each.output[0] for each in joined]
    return [
        *joined,
        *_joined_in_turns(segment, helper.make_node("Concat", names, node.output, node.name, axis=axis)),
    ]
