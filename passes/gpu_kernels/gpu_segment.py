"""A segment while it is rewritten for a GPU: what is known of its values, and new nodes for it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.passes.cpu_kernels.segment_values import FreshNames, known_shapes


class GpuSegment:
    """A model whose functions are inlined; `inferred`: the same with the shapes of its values.

    `is_rewritten`: some of its nodes are others than they were.
    """

    def __init__(self, model: onnx.ModelProto, inferred: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        self.outputs = {output.name for output in self.graph.output}
        self.constants = {each.name: numpy_helper.to_array(each) for each in self.graph.initializer}
        self._shapes = known_shapes(inferred.graph)
        self._names = FreshNames(self.graph)
        self._integers: dict[tuple[int, ...], str] = {}
        self.is_rewritten = False

    def sizes(self, value: str) -> tuple[int, ...] | None:
        """Return a value's shape, None where it is not wholly known."""
        shape = self._shapes.get(value, (None,))
        known = tuple(size for size in shape if size is not None)
        return known if len(known) == len(shape) else None

    def rewrite(self, rewriting: Callable[[onnx.NodeProto], list[onnx.NodeProto]]) -> None:
        """Put what a rewriting makes of each node in its place."""
        before = list(self.graph.node)
        nodes = [new for node in before for new in rewriting(node)]
        if len(nodes) == len(before) and all(new is node for new, node in zip(nodes, before, strict=True)):
            return
        self.is_rewritten = True
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    def node(self, op: str, reads: Sequence[str], hint: str, **attributes: Any) -> onnx.NodeProto:
        """Return a node that makes a new value, called after the hint, and is called as it is."""
        name = self._names.fresh(hint)
        return helper.make_node(op, reads, [name], name, **attributes)

    def fix(self, value: str, array: np.ndarray) -> None:
        """Let a value be a constant."""
        self.constants[value] = array
        self.graph.initializer.append(numpy_helper.from_array(array, value))

    def integers(self, *values: int) -> str:
        """Return a constant int64 vector's name."""
        if values not in self._integers:
            self._integers[values] = self._names.fresh(f"integers/{'x'.join(map(str, values))}")
            self.fix(self._integers[values], np.array(values, np.int64))
        return self._integers[values]

    def name_nodes(self) -> None:
        """Name the nodes of functions' bodies, which have no names, after what they make."""
        for node in self.graph.node:
            node.name = node.name or self._names.fresh(node.output[0])
