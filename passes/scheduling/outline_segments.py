"""Tell what segments would read and write, without writing them: enough to simulate a plan.

chunk   a = MatMul (x, w)   b = Add (a, bias)   ->   reads x, w, bias   writes b
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from partc.passes.scheduling.schedule import Chunk
from partc.passes.scheduling.write_segments import PartialShape, Segment, adds_in_place


@dataclass
class SegmentOutliner:
    """Takes the place of a SegmentWriter where nobody will run what it makes.

    `names_kernels`: it is told apart what could be measured by itself.
    """

    functions: Mapping[str, onnx.FunctionProto]  # by name
    shapes: dict[str, PartialShape]
    dtypes: dict[str, np.dtype] = field(default_factory=dict)
    names_kernels: bool = True
    on_cpu: bool = True  # workers' segments run on CPUs

    def __post_init__(self) -> None:
        self._racing = _racing(self.functions)

    def make(self, chunk: Chunk, read_later: set[str], in_place: AbstractSet[str]) -> Segment:
        """Return what the segment of a chunk would be, as SegmentWriter does."""
        results: list[str] = []
        reads: dict[str, None] = {}
        for node in chunk.nodes:
            results += [tensor.name for tensor in node.outputs if tensor.name]
        own = set(results)
        for node in chunk.nodes:
            for tensor in node.inputs:
                if tensor.name and tensor.name not in own and not isinstance(tensor, gs.Constant):
                    reads[tensor.name] = None
                    self.dtypes[tensor.name] = tensor.dtype
            self.dtypes.update((tensor.name, tensor.dtype) for tensor in node.outputs)
        writes = tuple(name for name in results if name in read_later)
        return Segment("", tuple(reads), writes, any(self._races(node) for node in chunk.nodes))

    def _races(self, node: gs.Node) -> bool:
        return node.op in self._racing or (node.op == "ScatterND" and "reduction" in node.attrs)


def _racing(functions: Mapping[str, onnx.FunctionProto]) -> set[str]:
    """Return the functions in which a ScatterND adds, in their own body or in one that they call."""
    racing = {name for name, function in functions.items() if any(map(adds_in_place, function.node))}
    while True:
        calling = {
            name
            for name, function in functions.items()
            if name not in racing and any(node.op_type in racing for node in function.node)
        }
        if not calling:
            return racing
        racing |= calling
