"""Find what of the user's graph a communication is about: nodes, variables and inputs, by their names.

AllReduce MatMul_8@worker.part           the node that makes MatMul_8
AllToAllRows Gather_5.pull.found         Gather_5, and the table that it looks up
AllGather b.sent.AllGather and 1 more    variables b and W
"""

import re
from collections.abc import Mapping

import onnx_graphsurgeon as gs

from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.runtime.plan.program import Plan, Start

LABEL = re.compile(r"\S+ (?P<value>.*?)(?: and \d+ more)?(?: #\d+)?")
MOMENT = re.compile(r"#\d+$")


class SubjectFinder:
    """Knows what buffers hold, and what values mean. `helped`: communication -> the node that it is for."""

    def __init__(
        self, plan: Plan, lowered: LoweredGraph, training: TrainingGraph, helped: Mapping[str, str]
    ) -> None:
        self._lowered, self._training, self._helped = lowered, training, helped
        self._sent: dict[str, gs.Node] = {}  # value -> the communication that first reads it
        for node in lowered.nodes:
            if is_communication(node) and node.inputs:
                self._sent.setdefault(node.inputs[0].name, node)
        self._in_buffer: dict[str, list[str]] = {}
        for place in (*plan.slices, *(place for rank in plan.ranks[:1] for place in rank.slices)):
            self._in_buffer.setdefault(place.buffer, []).append(place.value)
        self._made_by = {t.name: node.name for node in training.graph.nodes for t in node.outputs}
        self._reads = {n.name: [t.name for t in n.inputs] for n in training.graph.nodes}
        self._parameter_of = {
            tensor: gradient.parameter
            for gradient in training.gradients.values()
            for tensor in (gradient.dense, gradient.rows, gradient.ids)
            if tensor is not None
        }
        self._known: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}

    def find(self, start: Start) -> tuple[str, ...]:
        """Return the names, each once."""
        key = start.label, start.reads
        if key not in self._known:
            label = LABEL.fullmatch(start.label)
            first = [label["value"]] if label is not None else []
            inside = [MOMENT.sub("", v) for read in start.reads for v in self._in_buffer.get(read, ())]
            nodes = [self._sent[value] for value in dict.fromkeys((*first, *inside)) if value in self._sent]
            self._known[key] = tuple(dict.fromkeys(name for node in nodes for name in self._subjects(node)))
        return self._known[key]

    def _subjects(self, node: gs.Node) -> tuple[str, ...]:
        value = node.inputs[0].name
        tensors = (self._lowered.meanings.get(t.name, ("", None))[0] for t in (*node.inputs, *node.outputs))
        tensor = next((name for name in tensors if name), "")
        owner, variables = self._helped.get(node.name, ""), self._training.variables
        if ".pull" in value and owner:
            return (owner, *(name for name in self._reads[owner] if name in variables))
        before = (value.partition(mark)[0] for mark in (".push", ".sent.", ".gradient"))
        of_variable = next((name for name in before if name != value and name in variables), None)
        if not tensor and of_variable is not None:
            return (of_variable,)
        if tensor in self._parameter_of:
            return (self._parameter_of[tensor], *self._maker(tensor))
        return self._maker(tensor) or ((tensor,) if tensor else (owner,) if owner else ())

    def _maker(self, tensor: str) -> tuple[str, ...]:
        return (self._made_by[tensor],) if tensor in self._made_by else ()
