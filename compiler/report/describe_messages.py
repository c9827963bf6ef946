"""Communications in words: what is moved, of which variable, between whom.

Start all_to_all_rows "AllToAllRows Gather:Gather_184.pull.found"
->  AllToAllv   "send the rows of softmax.weight to the hosts that asked for them"
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import onnx_graphsurgeon as gs

from partc.compiler.compilation import Compilation
from partc.compiler.report.methods import method_of_label
from partc.compiler.report.units import count, join_words
from partc.passes.replicas.average_replicas import AVERAGE, REPLICA_DOMAIN
from partc.runtime.plan.program import Plan, Start

NAMES_TOLD = 2
MICROBATCH = ", micro-batch "  # and its number, which ends a sentence

SHORT = {
    "all_reduce": "AllReduce",
    "reduce": "Reduce",
    "broadcast": "Broadcast",
    "reduce_scatter": "ReduceScatter",
    "all_gather": "AllGather",
    "shift_ahead": "Shift",
    "shift_back": "Shift",
    "exchange": "Exchange",
    "gather_rows": "Gatherv",
    "scatter_rows": "Scatterv",
    "all_gather_rows": "AllGatherv",
    "all_to_all_rows": "AllToAllv",
}

_WHOM = {
    "workers": "all workers",
    "servers": "all servers",
    "host": "each host\u2019s workers and server",
}


# Ops that join rows, or lay them out otherwise; Mod: ids that count from the end; Stack: those of replicas.
_LAYING_OUT = (
    "Concat",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Identity",
    "Cast",
    "Mod",
    "Stack",
)


@dataclass(frozen=True, slots=True)
class Words:
    """What the page calls an instruction.

    kind: its colour, which is the method that it serves, or compute
    short: what fits on a bar
    what: a sentence without its full stop
    """

    kind: str
    short: str
    what: str


@dataclass(frozen=True)
class MessageNames:
    """Names the values that a plan's communications move, by the variables they are of."""

    compilation: Compilation

    def words(self, start: Start) -> Words:
        """Return a communication in words."""
        sentence = self._tell(start)
        microbatch = re.search(r" #(\d+)$", start.label)
        if microbatch is not None:
            sentence += f"{MICROBATCH}{int(microbatch[1]) + 1}"
        return Words(method_of_label(start.label), SHORT[start.kind], f"{sentence[0].upper()}{sentence[1:]}")

    def _tell(self, start: Start) -> str:
        if start.kind in ("gather_rows", "scatter_rows", "all_to_all_rows"):
            return self._tell_rows(start)
        if start.kind == "all_gather_rows":
            return self._tell_gathered(start)
        subject = self.subject(start)
        whom = _WHOM.get(start.group, _along(start))
        match start.kind:
            case "all_reduce":
                verb = {"sum": "sum", "max": "find the largest of", "min": "find the smallest of"}
                levels = ", within hosts first" if start.by_levels else ""
                return f"{verb[start.reduction]} {subject} over {whom}{levels}"
            case "reduce":
                return f"sum {subject} on each host\u2019s server"
            case "reduce_scatter":
                where = "at the servers that own it" if start.receivers == "server" else "each rank its part"
                return f"sum {subject}, {where}"
            case "all_gather":
                if start.senders == "server":
                    return f"collect {subject} from the servers that own it, on all servers"
                return f"collect the parts of {subject} on {whom}"
            case "broadcast":
                return f"hand {subject} to {_receivers(start)}"
            case "shift_ahead" | "shift_back":
                neighbour = "next" if start.kind == "shift_ahead" else "previous"
                return f"hand the border of {subject} to the {neighbour} rank"
        return f"send the parts of {subject} that other ranks need"

    def _tell_rows(self, start: Start) -> str:
        value = start.reads[0].partition("#")[0]
        requested, name = ".pull" in value, self._table(value)
        asks = re.search(r"\.pull\.(own|host)", value) is not None and "found" not in value
        match start.kind:
            case "gather_rows" if asks:
                return f"tell each host\u2019s server which rows of {name} its workers need"
            case "gather_rows":
                return f"collect the gradients of {name}\u2019s touched rows on each host\u2019s server"
            case "scatter_rows":
                return f"hand each worker the rows of {name} that it needs"
            case _ if asks:
                return f"ask the servers that own them for rows of {name}"
            case _ if requested:
                return f"send the rows of {name} to the hosts that asked for them"
        return f"send the gradients of {name}\u2019s touched rows to the servers that own them"

    def _tell_gathered(self, start: Start) -> str:
        """Tell an AllGatherv: of rows that workers touched, or of any value whose parts differ in size."""
        if start.senders != start.receivers:
            return f"hand {self.subject(start)} to {_receivers(start)}"
        whom = _WHOM.get(start.group, _along(start))
        table = self._touched_table(self._tensor(start.reads[0]))
        if table is None:
            return f"collect the parts of {self.subject(start)} on {whom}"
        if whom == _WHOM["workers"]:
            return f"give every worker the gradients of {table}\u2019s touched rows"
        return f"collect the gradients of {table}\u2019s touched rows on {whom}"

    # ------------------------------------------------------------ what is moved

    def subject(self, start: Start) -> str:
        """Return what a communication moves."""
        values = self._in_buffers.get(start.reads[0], (start.reads[0],))
        tensors = list(dict.fromkeys(self._tensor(value) for value in values))
        gradients = [self._gradients[tensor] for tensor in tensors if tensor in self._gradients]
        others = [tensor for tensor in tensors if tensor not in self._gradients]
        parts = []
        if gradients:
            noun = "gradient" if len(gradients) == 1 else "gradients"
            parts.append(f"the {noun} of {_some(gradients)}")
        if others:
            parts.append(_some([_readable(self._averaged.get(tensor, tensor)) for tensor in others]))
        return join_words(parts)

    def _table(self, value: str) -> str:
        """Return the parameter whose rows a value holds, or has the ids of."""
        prefix = re.split(r"\.(?:pull|push|exchange)\b", value)[0]
        if prefix in self._tables or prefix in self._variables:
            return self._tables.get(prefix, prefix)
        return self._parameter_behind(self._tensor(value))

    def _touched_table(self, tensor: str) -> str | None:
        """Return the parameter of whose sparse gradient a tensor is a part, laid out otherwise perhaps."""
        ahead, seen = deque([tensor]), {tensor}
        while ahead:
            name = ahead.popleft()
            if name in self._row_gradients:
                return self._row_gradients[name]
            nodes = [node for node in self._readers.get(name, ()) if node.op in _LAYING_OUT]
            results = [result.name for node in nodes for result in node.outputs]
            ahead += [result for result in results if result not in seen]
            seen.update(results)
        return None

    def _parameter_behind(self, tensor: str) -> str:
        """Return the parameter into whose gradient a tensor goes, or else its own name."""
        ahead, seen = deque([tensor]), {tensor}
        while ahead:
            name = ahead.popleft()
            if name in self._gradients:
                return self._gradients[name]
            results = [result.name for node in self._readers.get(name, ()) for result in node.outputs]
            ahead += [result for result in results if result not in seen]
            seen.update(results)
        return _readable(self._averaged.get(tensor, tensor))

    def _tensor(self, value: str) -> str:
        """Return the tensor of the user's graph that a value holds, or its sum, or a part of it."""
        name = value.partition("#")[0].partition("@")[0]
        pieces = name.split(".")
        for stop in range(len(pieces), 0, -1):
            prefix = ".".join(pieces[:stop])
            if prefix in self.compilation.lowered.meanings:
                return self.compilation.lowered.meanings[prefix][0]
            if prefix in self._tensors:
                return prefix
        return name

    @cached_property
    def _in_buffers(self) -> dict[str, tuple[str, ...]]:
        plan = self.compilation.plan
        values_of: dict[str, list[str]] = {}
        for piece in (*plan.slices, *(piece for rank in plan.ranks[:1] for piece in rank.slices)):
            values_of.setdefault(piece.buffer, []).append(piece.value)
        return {buffer: tuple(values) for buffer, values in values_of.items()}

    @cached_property
    def _gradients(self) -> dict[str, str]:
        """Return whose gradient a tensor is."""
        parameters = {}
        for gradient in self.compilation.analysis.training.gradients.values():
            for tensor in (gradient.dense, gradient.rows, gradient.ids):
                if tensor is not None:
                    parameters[tensor] = gradient.parameter
        return parameters

    @cached_property
    def _averaged(self) -> dict[str, str]:
        """Return what each mean over replicas is the mean of."""
        nodes = self.compilation.analysis.training.graph.nodes
        means = [node for node in nodes if (node.domain, node.op) == (REPLICA_DOMAIN, AVERAGE)]
        return {node.outputs[0].name: node.inputs[0].name for node in means}

    @cached_property
    def _row_gradients(self) -> dict[str, str]:
        """Return whose rows or ids a tensor is, of sparse gradients."""
        return {
            tensor: gradient.parameter
            for gradient in self.compilation.analysis.training.gradients.values()
            for tensor in (gradient.rows, gradient.ids)
            if tensor is not None
        }

    @cached_property
    def _variables(self) -> frozenset[str]:
        return frozenset(variable.name for variable in self.compilation.plan.variables)

    @cached_property
    def _tables(self) -> dict[str, str]:
        """Return the table that each Gather reads, by the node's name."""
        nodes = self.compilation.analysis.training.graph.nodes
        return {node.name: node.inputs[0].name for node in nodes if node.op == "Gather"}

    @cached_property
    def _readers(self) -> dict[str, list[gs.Node]]:
        readers: dict[str, list[gs.Node]] = {}
        for node in self.compilation.analysis.training.graph.nodes:
            for operand in node.inputs:
                readers.setdefault(operand.name, []).append(node)
        return readers

    @cached_property
    def _tensors(self) -> frozenset[str]:
        return frozenset(self.compilation.analysis.facts.shapes)


def with_words(compilation: Compilation) -> Plan:
    """Return the plan with its communications in words, each as a part of a sentence."""
    names, plan = MessageNames(compilation), compilation.plan
    instructions = tuple(
        msgspec.structs.replace(i, words=_within_a_sentence(names.words(i).what))
        if isinstance(i, Start)
        else i
        for i in plan.instructions
    )
    return msgspec.structs.replace(plan, instructions=instructions)


def _within_a_sentence(words: str) -> str:
    return f"{words[0].lower()}{words[1:]}"


def _along(start: Start) -> str:
    """Name the ranks of a mesh that meet along one of its axes, or several."""
    return f"the ranks {_axes(start)}" if _axes(start) else f"the ranks of {start.senders}"


def _axes(start: Start) -> str:
    """Name the axes of a mesh along which ranks meet, empty where they meet otherwise."""
    site, _, axes = start.group.partition(".")
    of = "" if site == "worker" else f" of {site}"
    return f"along {axes.replace('*', ' and ')}{of}" if axes else ""


def _receivers(start: Start) -> str:
    if start.group == "host":
        return "the workers of each host"
    return {"worker": "all workers", "server": "the servers"}.get(start.receivers, start.receivers)


def _readable(tensor: str) -> str:
    """Return a tensor's name, or the node for what the compiler made of it, such as Op:node/gradient/Mul."""
    match = re.match(r"(?:\w+:)?(.+?)/gradient/", tensor)
    if match:
        return f"the gradient at {match[1]}"
    part = re.match(r"\w+:(.+)/([A-Za-z]+)(?:_\d+)?$", tensor)
    return f"the {part[2]} in {part[1]}" if part else tensor


def _some(names: Iterable[str]) -> str:
    distinct: Sequence[str] = list(dict.fromkeys(names))
    if len(distinct) <= NAMES_TOLD + 1:
        return join_words(distinct)
    return f"{', '.join(distinct[:NAMES_TOLD])} and {count(len(distinct) - NAMES_TOLD)} more"
