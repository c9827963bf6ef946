"""Write standard nodes into a graph, in the place of one that they say in other words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.operation_builder import onnx_number

Attribute = int | float | str | Sequence[int]


class NodeWriter:
    """Nodes in order, under names that start with a scope and that nothing else in the graph bears.

    A result has its first operand's element type, unless one is given.
    """

    def __init__(self, taken: set[str], scope: str) -> None:
        self.nodes: list[gs.Node] = []
        self._taken = taken
        self._scope = scope

    def op(
        self,
        op: str,
        *inputs: gs.Tensor,
        dtype: np.dtype | None = None,
        out: gs.Tensor | None = None,
        domain: str | None = None,
        **attributes: Attribute,
    ) -> gs.Tensor:
        """Write a node with one result: `out`, or a fresh tensor."""
        name = self.fresh(op)
        result = gs.Variable(name, dtype=np.dtype(dtype or inputs[0].dtype)) if out is None else out
        self.nodes.append(gs.Node(op, name, dict(attributes), list(inputs), [result], domain=domain))
        return result

    def fresh(self, hint: str) -> str:
        """Return a name that nothing else bears."""
        names = (f"{self._scope}/{hint}{f'_{number}' if number else ''}" for number in count())
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name

    def ints(self, *values: int) -> gs.Constant:
        """Return int64[n]."""
        return gs.Constant(self.fresh("ints"), np.array(values, np.int64))

    def scalar(self, value: float, dtype: np.dtype) -> gs.Constant:
        """Return a scalar of an element type."""
        return gs.Constant(self.fresh("scalar"), np.array(value, dtype))

    def cast(self, tensor: gs.Tensor, dtype: np.dtype, out: gs.Tensor | None = None) -> gs.Tensor:
        """Return a tensor of an element type, in `out` if that is given."""
        if tensor.dtype == dtype and out is None:
            return tensor
        return self.op("Cast", tensor, dtype=dtype, out=out, to=onnx_number(dtype))


class Rewriting(NodeWriter):
    """What stands in a node's place: nodes that read its operands and write its results, while it reads and
    writes nothing any more. `zeros`: tensors known to be zero."""

    def __init__(self, node: gs.Node, facts: Facts, zeros: frozenset[str], taken: set[str]) -> None:
        super().__init__(taken, node.name)
        self.node = node
        self.facts = facts
        self.zeros = zeros
        self._inputs, self._outputs = list(node.inputs), list(node.outputs)
        node.inputs.clear()
        node.outputs.clear()
        for tensor in (*self._inputs, *self._outputs):
            if tensor.name and not isinstance(tensor, gs.Constant):
                tensor.dtype = facts.dtypes[tensor.name]

    def x(self, index: int) -> gs.Tensor:
        """Return an operand."""
        return self._inputs[index]

    def reads(self, index: int) -> bool:
        """Tell whether the node has an operand."""
        return index < len(self._inputs) and bool(self._inputs[index].name)

    def y(self, index: int = 0) -> gs.Tensor:
        """Return a result."""
        return self._outputs[index]

    def makes(self, index: int) -> bool:
        """Tell whether the node has a result."""
        return index < len(self._outputs) and bool(self._outputs[index].name)

    def shape(self, index: int) -> tuple[int, ...]:
        """Return an operand's shape under the assumed sizes."""
        return self.facts.shape(self._inputs[index].name)

    def number(self, name: str, default: float) -> float:
        """Return an attribute as it is stored, in 32 bits."""
        return float(np.float32(self.node.attrs.get(name, default)))

    def axis(self, default: int, rank: int) -> int:
        """Return the attribute `axis`, counted from the front."""
        return int(self.node.attrs.get("axis", default)) % rank

    def narrow(self, op: str, *inputs: gs.Tensor, dtype: np.dtype, out: gs.Tensor | None = None) -> gs.Tensor:
        """Write a node whose result is wanted in an element type that may be narrower than its operands'."""
        if inputs[0].dtype == dtype:
            return self.op(op, *inputs, out=out)
        return self.cast(self.op(op, *inputs), dtype, out)


def accumulated_in(dtype: np.dtype) -> np.dtype:
    """Return the element type in which sums of an element type are made."""
    return np.dtype(np.float32) if np.dtype(dtype).itemsize < 4 else np.dtype(dtype)


@dataclass(frozen=True, slots=True)
class Form:
    """How an op is written in others, and for which nodes that can be done."""

    write: Callable[[Rewriting], None]
    fits: Callable[[gs.Node, Facts], bool] = lambda node, facts: True
