"""Find the exclusive upper bound of integer data inputs from what they index.

ids -> Cast -> Reshape -> Gather(table[1000, 8])   : ids < 1000
labels -> Unsqueeze -> GatherElements(logits[32, 10], axis = 1)   : labels < 10
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

# Ops whose output holds the same numbers as their first input, all or some of them.
KEEPS_VALUES = frozenset({"Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split"})
KEEPS_VALUES |= {"Squeeze", "Tile", "Transpose", "Unsqueeze"}
# Ops whose output holds numbers of their first input, or of any: Concat, Max, Min and Where.
_KEEPS_RANGE = KEEPS_VALUES | {"Concat", "Gather", "GatherElements", "Max", "Min", "Where", "Pad"}


def find_input_ranges(graph: gs.Graph) -> dict[str, int]:
    """Return `high` of every integer graph input that the graph uses as an index."""
    ranges: dict[str, int] = {}
    for tensor in graph.inputs:
        if tensor.dtype is not None and np.issubdtype(tensor.dtype, np.integer):
            bounds = list(_bounds(tensor))
            if bounds:
                ranges[tensor.name] = min(bounds)
    return ranges


def _bounds(start: gs.Tensor) -> Iterator[int]:
    waiting, seen = deque([start]), {start.name}
    while waiting:
        tensor = waiting.popleft()
        for node in tensor.outputs:
            position = next(i for i, read in enumerate(node.inputs) if read is tensor)
            bound = index_bound(node, position)
            if bound is not None:
                yield bound
            elif _carries(node, position):
                for result in node.outputs:
                    if result.name not in seen:
                        seen.add(result.name)
                        waiting.append(result)


def _carries(node: gs.Node, position: int) -> bool:
    if node.op == "Where":
        return position > 0
    return node.op in _KEEPS_RANGE and (position == 0 or node.op in ("Concat", "Max", "Min"))


def index_bound(node: gs.Node, position: int) -> int | None:
    """Return the size that input `position` of `node` must stay below, where it is an index."""
    if node.op in ("Gather", "GatherElements", "ScatterElements") and position == 1:
        return _size(node.inputs[0], int(node.attrs.get("axis", 0)))
    if node.op in ("ScatterND", "GatherND") and position == 1:
        depth = node.inputs[1].shape[-1] if node.inputs[1].shape else None
        batch_dims = int(node.attrs.get("batch_dims", 0))
        return _size(node.inputs[0], batch_dims) if depth == 1 else None
    if node.op == "OneHot" and position == 0:
        depth_tensor = node.inputs[1]
        return int(depth_tensor.values.reshape(-1)[0]) if isinstance(depth_tensor, gs.Constant) else None
    if node.op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and position == 1:
        return _size(node.inputs[0], 1)
    return None


def _size(tensor: gs.Tensor, axis: int) -> int | None:
    shape = tensor.shape
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    size = shape[axis]
    return size if isinstance(size, int) else None
