"""Find what runs once per micro-batch: all that comes from a part of the batch.

x ─ Slice(microbatch) ─> x' ─ MatMul ─> y ─ MatMul ─> dW' ─ sum over micro-batches ─> dW ─ update
    repeated ....................................................................   once .......
"""

from collections.abc import Collection
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from partc.passes.layouts.meshes import Meshes
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.runtime.errors import UnsupportedModel

REARRANGING = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})


@dataclass(frozen=True)
class Repeated:
    """What there is of every micro-batch.

    count   micro-batches of a step
    values  that differ from one to the next
    nodes   names of compute and communication nodes that run for each
    mark    what stands between a value's name and a micro-batch's number, and in no other name
    """

    count: int
    values: frozenset[str]
    nodes: frozenset[str]
    mark: str = "#"

    def name(self, value: str, microbatch: int | None) -> str:
        """Return the name of a value of a micro-batch: one that all share has one name."""
        is_shared = microbatch is None or value not in self.values
        return value if is_shared else f"{value}{self.mark}{microbatch}"

    def value_of(self, name: str) -> str:
        """Return the value that a name stands for, of whatever micro-batch."""
        value, mark, _ = name.rpartition(self.mark)
        return value if mark and value in self.values else name


def find_repeated(lowered: LoweredGraph) -> Repeated:
    """Return what differs between micro-batches: what comes of a part of the batch, up to where they join.

    Raises UnsupportedModel.
    """
    values = {*lowered.moment_constants}
    if not values:
        return Repeated(lowered.meshes.microbatches, frozenset(), frozenset())
    nodes: set[str] = set()
    for node in lowered.nodes:
        if not joins_microbatches(node, lowered.meshes) and any(t.name in values for t in node.inputs):
            nodes.add(node.name)
            values.update(tensor.name for tensor in node.outputs)
    lasting = {state.next for state in lowered.states} | {value for _, value, _ in lowered.outputs}
    _repeat_views(lowered, lasting, values, nodes)
    _check_lasting(lasting & values)
    mark = "#"
    while any(mark in tensor.name for node in lowered.nodes for tensor in (*node.inputs, *node.outputs)):
        mark += "#"
    return Repeated(lowered.meshes.microbatches, frozenset(values), frozenset(nodes), mark)


def _check_lasting(repeated: Collection[str]) -> None:
    """Refuse results that would be made, or updated, once in every micro-batch, such as of sizes of a part.

    Raises UnsupportedModel.
    """
    if repeated:
        raise UnsupportedModel(
            "a result is made of a size that micro-batches have of their own: it would be made once for each",
            at=f"value {min(repeated)!r}",
            fix="compile without micro-batches, or export the model with fixed sizes",
        )


def _repeat_views(lowered: LoweredGraph, lasting: set[str], values: set[str], nodes: set[str]) -> None:
    """Let what only turns a variable about run with those who read it: their products do that themselves.

    So does what constants make, such as a gradient of ones: it would be kept until the last has read it.
    """
    of_constants = _made_of_constants(lowered)
    readers: dict[str, set[str]] = {}
    for node in reversed(lowered.nodes):
        reads_it = set().union(*(readers.get(tensor.name, set()) for tensor in node.outputs))
        is_lasting = any(tensor.name in lasting for tensor in node.outputs)
        may_be_again = node.op in REARRANGING or node.name in of_constants
        if may_be_again and reads_it and reads_it <= nodes and not is_lasting:
            nodes.add(node.name)
            values.update(tensor.name for tensor in node.outputs)
        for tensor in node.inputs:
            readers.setdefault(tensor.name, set()).add(node.name)


def _made_of_constants(lowered: LoweredGraph) -> set[str]:
    """Return the names of the nodes that read nothing else."""
    nodes: set[str] = set()
    values: set[str] = set()
    for node in lowered.nodes:
        read = (tensor for tensor in node.inputs if tensor.name and not isinstance(tensor, gs.Constant))
        if not is_communication(node) and all(tensor.name in values for tensor in read):
            nodes.add(node.name)
            values.update(tensor.name for tensor in node.outputs)
    return nodes


def joins_microbatches(node: gs.Node, meshes: Meshes) -> bool:
    """Tell whether a node makes one value of what there is of every micro-batch."""
    axis = meshes.microbatch_axis
    return axis is not None and is_communication(node) and node.attrs.get("axes") == (axis,)
