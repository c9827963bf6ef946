"""What ONNX Runtime takes at once while a CPU runs a segment, without what has memory of its own.

    order     not the segment's: from the results back, each node behind those that it reads. Gradients of
              weights are results, and so are made last, and what they read is kept until then
    in place  an elementwise op writes over what is read for the last time, a Reshape makes nothing
    within    Where makes what it takes of either operand before it joins the two

Source: Graph::ReverseDFSFrom, PlannerImpl::FindReusableInput and where_op.cc of onnxruntime 1.31.1.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.cpu_kernels.block_updates import LEAST_ELEMENTS
from partc.passes.scheduling.kernels import absorbed_transposes
from partc.passes.scheduling.segment_work import cached_values

_SAME_MEMORY = frozenset(["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"])
_IN_PLACE = frozenset(
    [
        "Abs",
        "Add",
        "Cast",
        "Div",
        "Elu",
        "Exp",
        "LeakyRelu",
        "Log",
        "Mul",
        "Neg",
        "Not",
        "Reciprocal",
        "Relu",
        "Sigmoid",
        "Sqrt",
        "Sub",
        "Tanh",
    ]
)


def session_bytes(nodes: Sequence[gs.Node], sizes: Mapping[str, int], read_later: AbstractSet[str]) -> int:
    """Return the most bytes that a segment's values take at once. `read_later` ones last until its end."""
    ordered = session_order(nodes)
    reads = Counter(tensor.name for node in ordered for tensor in node.inputs)
    held: dict[str, str] = {}  # value -> the first that had its memory
    readers: Counter[str] = Counter()  # of memory, that are still to come
    sized: dict[str, int] = {}  # memory -> its bytes
    now = peak = 0
    for node in ordered:
        inputs = [held[tensor.name] for tensor in node.inputs if tensor.name in held]
        for name in (tensor.name for tensor in node.outputs if tensor.name):
            is_view = node.op in _SAME_MEMORY and not inputs and name not in read_later
            nbytes = 0 if is_view else sizes.get(name, 0)
            shared = None if name in read_later else _shared(node, nbytes, inputs, readers, sized)
            held[name] = memory = shared or name
            if shared is None:
                sized[memory] = nbytes
                now += nbytes
            # What is read later has a reader who never comes.
            readers[memory] += reads[name] + (name in read_later)
        within = 2 * sizes.get(node.outputs[0].name, 0) if node.op == "Where" else 0
        peak = max(peak, now + within)
        readers.subtract(inputs)
        touched = {*inputs, *(held[tensor.name] for tensor in node.outputs if tensor.name)}
        now -= sum(sized.pop(memory, 0) for memory in touched if readers[memory] == 0)
    return peak


def vanishing_values(
    nodes: Sequence[gs.Node], read_later: AbstractSet[str], sizes: Mapping[str, int]
) -> set[str]:
    """Return what a CPU's segment never makes whole: of updates in blocks, and transposed factors."""
    in_blocks = {
        tensor.name
        for node in nodes
        for tensor in node.outputs
        if sizes.get(tensor.name, 0) >= LEAST_ELEMENTS * np.dtype(tensor.dtype).itemsize
    }
    return (in_blocks & cached_values(nodes, read_later)) | absorbed_transposes(nodes, read_later).keys()


def session_order(nodes: Sequence[gs.Node]) -> list[gs.Node]:
    """Return nodes as ONNX Runtime runs them: depth first from those that nobody reads, the last first."""
    maker = {tensor.name: index for index, node in enumerate(nodes) for tensor in node.outputs if tensor.name}
    made_by = [
        sorted({maker[tensor.name] for tensor in node.inputs if tensor.name in maker}) for node in nodes
    ]
    inner = {index for makers in made_by for index in makers}
    stack = [(index, False) for index in range(len(nodes)) if index not in inner]
    entered: set[int] = set()
    ordered: list[gs.Node] = []
    while stack:
        index, leaves = stack.pop()
        if leaves:
            ordered.append(nodes[index])
        elif index not in entered:
            entered.add(index)
            stack.append((index, True))
            stack += ((before, False) for before in made_by[index])
    return ordered


def _shared(
    node: gs.Node, nbytes: int, inputs: Sequence[str], readers: Counter[str], sized: Mapping[str, int]
) -> str | None:
    """Return the memory of an operand that a result lies in, None if it gets its own."""
    is_absorbed = node.op == "Transpose" and not nbytes  # its reader reads what it read
    if node.op in _SAME_MEMORY or is_absorbed:
        return inputs[0] if inputs else None
    if node.op in _IN_PLACE:
        return next((m for m in inputs if readers[m] == inputs.count(m) and sized.get(m) == nbytes), None)
    return None
