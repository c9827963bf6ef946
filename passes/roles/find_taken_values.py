"""Find which values an integer data input may have: below the size of what it indexes.

ids -> Cast -> Reshape -> Gather(table[1000, 8])                                  -1000 .. 999
labels -> Where (Equal (labels, -100), 0, labels) -> GatherElements (logits[32, 10])  0 .. 9, and -100

ONNX counts negative indices from the end. Of rows that are read or written that is what they mean; a label -1
would train the last class. Where the graph itself sees to other values (Max, Clip, any other Where), it
says nothing about what may come in.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.roles.find_input_ranges import KEEPS_VALUES, index_bound
from partc.runtime.plan.variables import TakenValues

_INDEXES_ROWS = frozenset({"Gather", "GatherND", "ScatterND"})
_TOLERANT = frozenset({"OneHot"})  # defines what a value out of range makes: zeros


def find_taken_values(graph: gs.Graph) -> dict[str, TakenValues]:
    """Return what the integer graph inputs may hold that are used as an index."""
    values_of: dict[str, TakenValues] = {}
    for tensor in graph.inputs:
        if tensor.dtype is not None and np.issubdtype(tensor.dtype, np.integer):
            uses = list(_uses(tensor))
            if uses:
                ignored = frozenset.intersection(*(ignored for *_, ignored in uses))
                low, high = max(low for low, *_ in uses), min(high for _, high, _ in uses)
                values_of[tensor.name] = TakenValues(high, tuple(sorted(ignored)), low)
    return values_of


def _uses(start: gs.Tensor) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Yield the bounds of every index that holds the input's own numbers, and the values kept from it."""
    waiting = deque([(start, frozenset[int]())])
    seen = {start.name}
    while waiting:
        tensor, ignored = waiting.popleft()
        for node in tensor.outputs:
            position = next(i for i, read in enumerate(node.inputs) if read is tensor)
            bound = None if node.op in _TOLERANT else index_bound(node, position)
            if bound is not None:
                yield -bound if node.op in _INDEXES_ROWS else 0, bound, ignored | _ignored_by_loss(node)
            elif (node.op in KEEPS_VALUES and position == 0) or node.op == "Concat":
                more: frozenset[int] | None = frozenset()
            else:
                more = _replaced(node, position, start)
            if bound is None and more is not None:
                for result in node.outputs:
                    if result.name not in seen:
                        seen.add(result.name)
                        waiting.append((result, ignored | more))


def _ignored_by_loss(node: gs.Node) -> frozenset[int]:
    ignored = node.attrs.get("ignore_index")
    return frozenset() if ignored is None else frozenset({int(ignored)})


def _replaced(node: gs.Node, position: int, start: gs.Tensor) -> frozenset[int] | None:
    """Return the value of the input that a Where replaces, None for another node.

    Where (Equal (input, value), other, input)  or  Where (Not (Equal (input, value)), input, other)
    """
    if node.op != "Where" or position == 0 or not node.inputs[0].inputs:
        return None
    condition, when_equal = node.inputs[0].inputs[0], 1
    if condition.op == "Not" and condition.inputs[0].inputs:
        condition, when_equal = condition.inputs[0].inputs[0], 2
    if condition.op != "Equal" or position == when_equal:
        return None
    compared = [tensor for tensor in condition.inputs if isinstance(tensor, gs.Constant)]
    others = [tensor for tensor in condition.inputs if not isinstance(tensor, gs.Constant)]
    if len(compared) != 1 or compared[0].values.size != 1 or _source(others[0]) is not start:
        return None
    return frozenset({int(compared[0].values.item())})


def _source(tensor: gs.Tensor) -> gs.Tensor:
    """Return the tensor whose numbers this one holds."""
    while tensor.inputs and tensor.inputs[0].op in KEEPS_VALUES:
        tensor = tensor.inputs[0].inputs[0]
    return tensor
