"""The distributed step as one graph: what each site computes, joined by communications.

Compute nodes are standard ONNX and belong to one site, whose ranks all run them on their own
pieces. Communication nodes have domain `partc.communication`:

    AllReduce        partial -> whole, among the ranks of one site        (two levels: host, global)
    Push             worker partials -> the rows that each server owns, summed
    Pull             the rows that each server owns -> whole on all workers
    ToServers        whole on workers -> whole on servers
    ToWorkers        whole on servers -> whole on workers
    AllGatherRows    pieces along axis 0 -> whole on all workers, and their sizes
    GatherRows       what a host's workers have -> one behind the other on the host's server, and sizes
    ScatterRows      the reverse, by sizes
    AllToAllRows     servers exchange rows by owner, and sizes
    ShareRows        pieces along axis 0 of the servers -> whole on all servers, and sizes
    SpreadRows       whole on servers -> whole on their hosts' workers, whatever its size
    FeedRows         whole on workers -> whole on servers, whatever its size
"""

from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.layouts.layouts import Layout
from partc.runtime.plan.program import Site

COMMUNICATION_DOMAIN = "partc.communication"

Values = list[int] | list[float] | int | float


@dataclass(frozen=True, slots=True)
class State:
    """A variable held at a site: the value that holds it and the value that succeeds it."""

    variable: str
    site: Site
    value: str
    next: str


@dataclass
class LoweredGraph:
    """Compute and communication nodes in a topological order."""

    nodes: list[gs.Node] = field(default_factory=list)
    site_of: dict[str, Site] = field(default_factory=dict)  # compute node -> site
    native: dict[str, Layout] = field(default_factory=dict)  # original tensor -> layout
    meanings: dict[str, tuple[str, Layout]] = field(default_factory=dict)  # value -> original tensor
    states: list[State] = field(default_factory=list)
    outputs: list[tuple[str, str, Layout]] = field(default_factory=list)  # (name, value, layout)
    shapes: dict[str, tuple[int | None, ...]] = field(default_factory=dict)  # one rank's; None: varies
    nbytes: dict[str, int] = field(default_factory=dict)  # one rank's share, expected
    flops: dict[str, int] = field(default_factory=dict)  # compute node -> one rank's operations
    original: dict[str, str] = field(default_factory=dict)  # compute node -> the node it stands for
    constants: set[str] = field(default_factory=set)  # values that each rank is given (its place)
    _emitted: dict[str, gs.Variable] = field(default_factory=dict)

    def emit(
        self,
        op: str,
        inputs: list[gs.Tensor],
        output: str,
        dtype: np.dtype,
        site: Site,
        **attributes: object,
    ) -> gs.Variable:
        """Append a compute node with one output, unless it was emitted before; return the output."""
        if output not in self._emitted:
            self._emitted[output] = gs.Variable(output, dtype=dtype)
            node = gs.Node(op, f"{output}.node", attributes, inputs, [self._emitted[output]])
            self.append(node, site)
        return self._emitted[output]

    def place(self, name: str) -> gs.Variable:
        """Return a value int64[1] that every rank is given: its replica, or its first row of a
        parameter and its number of rows."""
        self.constants.add(name)
        self.shapes[name] = (1,)
        return gs.Variable(name, dtype=np.dtype(np.int64))

    def append(self, node: gs.Node, site: Site) -> None:
        """Append a compute node."""
        self.nodes.append(node)
        self.site_of[node.name] = site

    def communicate(
        self, op: str, inputs: list[gs.Tensor], outputs: list[gs.Variable], **attributes: object
    ) -> None:
        """Append a communication node."""
        name = f"{op}.{outputs[0].name}"
        self.nodes.append(gs.Node(op, name, attributes, inputs, outputs, domain=COMMUNICATION_DOMAIN))

    def prune(self) -> None:
        """Delete nodes whose results nobody reads."""
        wanted = {state.next for state in self.states} | {value for _, value, _ in self.outputs}
        kept: list[gs.Node] = []
        for node in reversed(self.nodes):
            if any(tensor.name in wanted for tensor in node.outputs):
                wanted.update(tensor.name for tensor in node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]


def is_communication(node: gs.Node) -> bool:
    """Tell whether a node moves data between ranks."""
    return bool(node.domain == COMMUNICATION_DOMAIN)


def constant(
    name: str, values: "list[int] | list[float] | int | float", dtype: "type | np.dtype"
) -> gs.Constant:
    """Return a small constant tensor."""
    return gs.Constant(name, np.array(values, dtype=dtype))
