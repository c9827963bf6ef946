"""Tell what communications send, in words; what becomes of it the page says by their kind.

AllReduce MatMul_8@worker.part           the result of MatMul_8
AllToAllRows Gather_5.pull.found         the rows of embedding that Gather_5 looks up
AllGather b.sent.AllGather and 1 more    variable b, variable W
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from partc.compiler.report.operators.group_nodes import NodeGroups, Way
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.runtime.plan.program import Kind, Plan, Start

LABEL = re.compile(r"(?P<op>\S+) (?P<value>.*?)(?: and \d+ more)?(?: #(?P<part>\d+))?")
MOMENT = re.compile(r"#\d+$")


@dataclass(frozen=True, slots=True)
class Sent:
    """Something that is sent: in words, and the names of the nodes and variables that it is about."""

    words: str
    subjects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A communication: its kind, all that it sends, and its micro-batch, counted from 1; 0 without any."""

    kind: Kind
    sent: tuple[Sent, ...]
    microbatch: int


class MessageDescriber:
    """Describes the plan's communications."""

    def __init__(
        self,
        plan: Plan,
        lowered: LoweredGraph,
        training: TrainingGraph,
        groups: NodeGroups,
        helped: Mapping[str, str],
    ) -> None:
        self._lowered, self._training, self._groups, self._helped = lowered, training, groups, helped
        self._sent: dict[str, gs.Node] = {}  # value -> the communication that first reads it
        for node in lowered.nodes:
            if is_communication(node) and node.inputs:
                self._sent.setdefault(node.inputs[0].name, node)
        self._in_buffer: dict[str, list[str]] = {}
        for place in (*plan.slices, *(place for rank in plan.ranks[:1] for place in rank.slices)):
            self._in_buffer.setdefault(place.buffer, []).append(place.value)
        self._made_by = {t.name: node.name for node in training.graph.nodes for t in node.outputs}
        self._parameter_of = {
            tensor: gradient.parameter
            for gradient in training.gradients.values()
            for tensor in (gradient.dense, gradient.rows, gradient.ids)
            if tensor is not None
        }
        self._reads = {n.name: [t.name for t in n.inputs] for n in training.graph.nodes}
        self._known: dict[tuple[str, str, tuple[str, ...]], Message] = {}

    def describe(self, start: Start) -> Message:
        """Return a communication in words."""
        key = start.kind, start.label, start.reads
        if key not in self._known:
            self._known[key] = self._describe(start)
        return self._known[key]

    def _describe(self, start: Start) -> Message:
        found = LABEL.fullmatch(start.label)
        first = [found["value"]] if found is not None else []
        microbatch = int(found["part"]) + 1 if found is not None and found["part"] else 0
        inside = [MOMENT.sub("", v) for read in start.reads for v in self._in_buffer.get(read, ())]
        nodes = [self._sent[value] for value in dict.fromkeys((*first, *inside)) if value in self._sent]
        return Message(start.kind, tuple(dict.fromkeys(map(self._tell, nodes))), microbatch)

    def _tell(self, node: gs.Node) -> Sent:
        """Return what a communication sends, and what of the user's graph that is."""
        value = node.inputs[0].name
        tensors = (self._lowered.meanings.get(t.name, ("", None))[0] for t in (*node.inputs, *node.outputs))
        tensor = next((name for name in tensors if name), "")
        owner = self._helped.get(node.name, "")
        if ".pull" in value and owner:
            tables = [name for name in self._reads[owner] if name in self._training.variables]
            rows = "rows" if ".found" in value or ".asked" in value else "ids of the rows"
            table = tables[0] if tables else "a table"
            return Sent(f"the {rows} of {table} that {owner} looks up", (owner, *tables))
        if ".push" in value:
            parameter = value.partition(".push")[0]
            return Sent(f"the rows of the gradient of {parameter}", (parameter,))
        of_gradient, of_copy = value.partition(".gradient")[0], value.partition(".sent.")[0]
        if not tensor and of_copy in self._training.variables:
            return Sent(f"variable {of_copy}", (of_copy,))
        if tensor in self._parameter_of or (not tensor and of_gradient in self._training.gradients):
            parameter = self._parameter_of.get(tensor, of_gradient)
            return Sent(f"the gradient of {parameter}", (parameter, *self._maker(tensor)))
        if tensor in self._training.variables:
            return Sent(f"variable {tensor}", (tensor,))
        if tensor in self._made_by:
            return Sent(self._result(self._made_by[tensor]), (self._made_by[tensor],))
        if tensor:
            return Sent(f"input {tensor}", (tensor,))
        return Sent(f"what {owner} reads", (owner,)) if owner else Sent("values", ())

    def _maker(self, tensor: str) -> Sequence[str]:
        return [self._made_by[tensor]] if tensor in self._made_by else []

    def _result(self, name: str) -> str:
        if self._groups.ways.get(name) is Way.GRADIENT and name in self._groups.gradient_of:
            return f"a gradient of {self._groups.gradient_of[name]}"
        return f"the result of {name}"
