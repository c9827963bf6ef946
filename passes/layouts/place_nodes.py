"""Place every node of a step at a stage, and every variable, given where some nodes are to run.

forward    a node is at the greatest stage of what it reads; what comes of data alone, of variables alone, or
           of both without a product, such as a table's rows, is where it is read first
backward   at the last stage not behind the gradients that it reads at which what it reads of the forward
           pass is at hand: dX = dY W^T runs where W is, a mask that all stages have where dY is. A weight's
           gradient from activations of several stages is made where the weight is
update     where its variable is kept, which is where the forward pass reads it first; what joins the
           gradients of several stages, such as a norm, where most of it is
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.graph.facts import UNKNOWN
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.configuration import Places
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.search.operators.forward_nodes import forward_nodes


def place_nodes(analysis: Analysis, stage_of: Mapping[str, int], stages: int) -> Places:
    """Return the stage of every node and variable. `stage_of`: nodes of the main computation -> stage."""
    placing = _Placing(analysis, stage_of, stages)
    placing.place_forward()
    placing.place_backward()
    placing.place_updates()
    placing.bring_to_readers()
    return Places(placing.stage, placing.homes)


def find_mixed(forward: Iterable[gs.Node], training: TrainingGraph) -> set[str]:
    """Return the names of the forward nodes that come of data and of variables."""
    of_variables, of_data = 1, 2
    sources: dict[str, int] = dict.fromkeys(training.variables, of_variables)
    fed = (*training.data_inputs, *training.drawn_inputs, *training.shard_inputs)
    sources.update(dict.fromkeys(fed, of_data))
    mixed: set[str] = set()
    for node in forward:
        reached = 0
        for tensor in node.inputs:
            reached |= sources.get(tensor.name, 0)
        sources.update((tensor.name, reached) for tensor in node.outputs)
        if reached == of_variables | of_data:
            mixed.add(node.name)
    return mixed


def find_chain(training: TrainingGraph, forward: Sequence[gs.Node], backward: Sequence[gs.Node]) -> set[str]:
    """Return what comes of the loss in the backward pass, not of some layer's own activations alone.

    It depends on forward nodes as late as all gradients do.
    """
    mixed = find_mixed(forward, training)
    late: dict[str, int] = {}
    for place, node in enumerate(forward):
        if node.name in mixed:
            late.update((tensor.name, place) for tensor in node.outputs)
    for node in backward:
        latest = max((late.get(tensor.name, -1) for tensor in node.inputs), default=-1)
        late.update((tensor.name, latest) for tensor in node.outputs)
    gradients = [g.dense or g.rows for g in training.gradients.values()]
    stages = (late.get(name, -1) for name in gradients if name is not None)
    first = min((place for place in stages if place >= 0), default=0)
    return {t.name for node in backward for t in node.outputs if late.get(t.name, -1) >= first}


def find_served(backward: Sequence[gs.Node], ends: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return node -> the parameters whose gradients come from it: of each the bit of its number in `ends`.

    `ends`: parameter -> tensors that are its gradient, or terms of it.
    """
    reached: dict[str, int] = {}  # by tensor
    for number, tensors in enumerate(ends.values()):
        for tensor in tensors:
            reached[tensor] = reached.get(tensor, 0) | 1 << number
    served: dict[str, int] = {}
    for node in reversed(backward):
        served[node.name] = reduce(or_, (reached.get(tensor.name, 0) for tensor in node.outputs), 0)
        for tensor in node.inputs:
            reached[tensor.name] = reached.get(tensor.name, 0) | served[node.name]
    return served


class _Placing:
    """The stages found so far."""

    def __init__(self, analysis: Analysis, stage_of: Mapping[str, int], stages: int) -> None:
        self.analysis = analysis
        self.training = analysis.training
        self.stage_of = stage_of
        self.last = stages - 1
        self.forward = forward_nodes(analysis.training, analysis.main)
        training = analysis.training
        self.fed = {*training.data_inputs, *training.drawn_inputs, *training.shard_inputs}
        self.stage: dict[str, int] = {}  # of nodes
        self.tensor_stage: dict[str, int] = {}  # of tensors that have been placed with their node
        self.at_hand: dict[str, set[int]] = {}  # tensor of the forward pass -> stages that have it
        self.homes: dict[str, int] = {}
        self.of_backward = {tensor.name for node in self._backward() for tensor in node.outputs}
        self.chain = find_chain(analysis.training, self.forward, self._backward())
        self.alone: set[str] = set()  # of the backward pass: what comes of the forward pass without the loss
        self.serves = self._served()

    def _put(self, node: gs.Node, stage: int) -> None:
        self.stage[node.name] = stage
        self.tensor_stage.update((tensor.name, stage) for tensor in node.outputs)

    def place_forward(self) -> None:
        """Place the nodes that the outputs come from; then tell which stages have which of their tensors."""
        mixed = find_mixed(self.forward, self.training)
        for node in self.forward:
            behind = [self.tensor_stage[t.name] for t in node.inputs if t.name in self.tensor_stage]
            if node.name in self.stage_of or (node.name in mixed and (behind or self._is_product(node))):
                self._put(node, self.stage_of.get(node.name, max(behind, default=0)))
        readers: dict[str, int] = {}
        for node in reversed(self.forward):
            if node.name not in self.stage:
                self._put(node, min((readers[t.name] for t in node.outputs if t.name in readers), default=0))
            for tensor in node.inputs:
                first = readers.get(tensor.name, self.last)
                readers[tensor.name] = min(first, self.stage[node.name])
        for node in self.forward:
            for tensor in (*node.inputs, *node.outputs):
                if not isinstance(tensor, gs.Constant):  # these are everywhere
                    self.at_hand.setdefault(tensor.name, set()).add(self.stage[node.name])

    def _is_product(self, node: gs.Node) -> bool:
        rule = rule_of(node, self.analysis.facts)
        return rule is not None and rule.is_contraction

    def place_backward(self) -> None:
        """Place the other nodes of the main computation."""
        for node in self._backward():
            behind = [
                self.tensor_stage[t.name]
                for t in node.inputs
                if t.name in self.of_backward and t.name not in self.alone
            ]
            least, where = min(behind, default=self.last), self._where_at_hand(node)
            latest = self._last_at_hand(node, where, least)
            self._put(node, self.stage_of.get(node.name, latest))
            if not behind and not any(tensor.name in self.chain for tensor in node.outputs):
                self.alone.update(tensor.name for tensor in node.outputs)
                if where is not None:
                    self.at_hand.update((tensor.name, where or {latest}) for tensor in node.outputs)

    def _last_at_hand(self, node: gs.Node, where: set[int] | None, least: int) -> int:
        """Return the last stage not behind `least` that has all that a node reads.

        Where there is none, what one parameter's gradient alone comes from runs where that is read, and else
        a node where the last of what it reads is made.
        """
        if where is None:
            return least
        if allowed := [stage for stage in where if stage <= least]:
            return max(allowed)
        readers = self.at_hand.get(self.serves.get(node.name, ""))
        if not readers:
            return self._last_maker(node, least)
        return max((stage for stage in readers if stage <= least), default=min(readers))

    def _backward(self) -> list[gs.Node]:
        forward = {node.name for node in self.forward}
        nodes = self.training.graph.nodes
        return [node for node in nodes if node.name in self.analysis.main and node.name not in forward]

    def bring_to_readers(self) -> None:
        """Let nodes of the backward pass that one earlier stage alone reads run there, if that sends no more.

        What another node there reads is sent anyhow. What ends in the gradient of a variable that one stage
        reads is made there, though every stage is fed the data. Of one that several read, each sends its term
        of the gradient.
        """
        averaged = self._averaged()  # tensor -> what it is the average of, over replicas
        readers: dict[str, list[gs.Node]] = {}
        for node in self.training.graph.nodes:
            if not any(tensor.name in averaged for tensor in node.outputs):
                for tensor in node.inputs:
                    readers.setdefault(averaged.get(tensor.name, tensor.name), []).append(node)
        of_one = {  # tensor -> the only parameter whose gradient it is, or becomes
            averaged.get(tensor, tensor): gradient.parameter
            for gradient in self.training.gradients.values()
            for tensor in (gradient.dense, gradient.ids, gradient.rows)
            if tensor is not None and len(self.at_hand.get(gradient.parameter, ())) == 1
        }
        for node in reversed(self._backward()):
            reading = [reader for tensor in node.outputs for reader in readers.get(tensor.name, ())]
            ends = {of_one.get(t.name) for r in reading if r.name in self.analysis.main for t in r.outputs}
            ends |= {of_one[tensor.name] for tensor in node.outputs if tensor.name in of_one}
            if len(ends) == 1 and None not in ends:
                of_one.update((tensor.name, *ends) for tensor in node.outputs)
            stages = {self.stage[reader.name] for reader in reading}
            is_alone = len(stages) == 1 and node.name not in self.stage_of
            if is_alone and self._may_run_at(node, min(stages), len(ends) == 1 and None not in ends, readers):
                self._put(node, min(stages))
        for node in self.training.graph.nodes:
            if gradients := [averaged[tensor.name] for tensor in node.outputs if tensor.name in averaged]:
                self._put(node, self.tensor_stage[gradients[0]])

    def _served(self) -> dict[str, str]:
        """Return of what comes of the loss, node -> the parameter whose gradient alone comes from it."""
        averaged = self._averaged()
        ends = {
            gradient.parameter: [averaged.get(t, t) for t in (gradient.dense, gradient.rows) if t is not None]
            for gradient in self.training.gradients.values()
        }
        found = find_served(self._backward(), ends)
        of_one = {1 << number: parameter for number, parameter in enumerate(ends)}
        return {
            node.name: of_one[found[node.name]]
            for node in self._backward()
            if found[node.name] in of_one and any(tensor.name in self.chain for tensor in node.outputs)
        }

    def _averaged(self) -> dict[str, str]:
        """Map gradients that update nodes average over replicas to what the backward pass makes."""
        gradients = {g.dense or g.rows for g in self.training.gradients.values()}
        gradient_of: dict[str, str] = {}
        for node in self.training.graph.nodes:
            sources = [tensor.name for tensor in node.inputs if tensor.name in self.of_backward]
            if node.name not in self.analysis.main and len(sources) == 1:
                gradient_of.update((t.name, sources[0]) for t in node.outputs if t.name in gradients)
        return gradient_of

    def _may_run_at(
        self, node: gs.Node, stage: int, ends: bool, readers: Mapping[str, Sequence[gs.Node]]
    ) -> bool:
        where = self._where_at_hand(node)
        if not any(tensor.name in self.chain for tensor in node.outputs):
            return not where or stage in where  # what it reads follows it
        if where is not None and stage not in where:
            return False
        stages = {t.name: self.tensor_stage[t.name] for t in node.inputs if t.name in self.of_backward}
        nbytes = self.analysis.facts.nbytes
        sent = sum(
            nbytes(name)
            for name, maker in stages.items()
            if maker != stage
            and all(reader is node or self.stage[reader.name] != stage for reader in readers[name])
        )
        is_early = all(maker >= stage for maker in stages.values())
        return is_early and (ends or sent <= sum(nbytes(tensor.name) for tensor in node.outputs))

    def _where_at_hand(self, node: gs.Node) -> set[int] | None:
        """Return the stages that have all that a node reads of the forward pass; None: all of them."""
        stages: set[int] | None = None
        for tensor in node.inputs:
            if tensor.name in self.at_hand and tensor.name not in self.fed:
                own = self.at_hand[tensor.name]
                stages = own if stages is None else stages & own
        return stages

    def _last_maker(self, node: gs.Node, default: int) -> int:
        makers = [
            self.tensor_stage[t.name]
            for t in node.inputs
            if t.name in self.at_hand and t.name in self.tensor_stage
        ]
        return max(makers, default=default)

    def place_updates(self) -> None:
        """Place what is outside the main computation, and every variable."""
        training, followers = self.training, self.analysis.followers
        for name in training.variables:
            leader = followers.get(name) or name
            if leader in self.at_hand:
                self.homes[name] = min(self.at_hand[leader])
        arriving = {
            tensor: self.homes[gradient.parameter]
            for gradient in training.gradients.values()
            for tensor in (gradient.dense, gradient.ids, gradient.rows)
            if tensor is not None and gradient.parameter in self.homes
        }
        next_of = {variable.next: name for name, variable in training.variables.items()}
        for node in training.graph.nodes:
            if node.name in self.stage:
                continue
            written_variables = [next_of[t.name] for t in node.outputs if t.name in next_of]
            homes = [self.homes[name] for name in written_variables if name in self.homes]
            self._put(node, homes[0] if homes else self._where_most_is(node, arriving))
        for name, variable in training.variables.items():
            self.homes.setdefault(name, self.tensor_stage.get(variable.next, 0))

    def _where_most_is(self, node: gs.Node, arriving: Mapping[str, int]) -> int:
        """Return the stage that has most of what an update reads; of a tie the first.

        Rows of which only the data tells how many there are count more than all else: they may not be sent
        between meshes of different shapes, and elsewhere they are no scalar.
        """
        bytes_at: dict[int, tuple[int, int]] = {}
        facts = self.analysis.facts
        for tensor in node.inputs:
            places = (known.get(tensor.name) for known in (arriving, self.homes, self.tensor_stage))
            stage = next((place for place in places if place is not None), None)
            if stage is not None:
                varying, nbytes = bytes_at.get(stage, (0, 0))
                varies = UNKNOWN in facts.shape(tensor.name)
                bytes_at[stage] = varying + varies, nbytes + facts.nbytes(tensor.name)
        return max(bytes_at, key=lambda stage: (bytes_at[stage], -stage), default=0)


def crossing(nodes: Iterable[gs.Node], places: Places) -> dict[tuple[int, int], set[str]]:
    """Return what goes from a stage to another: (from, to) -> tensors."""
    maker_stage = {tensor.name: places.nodes[node.name] for node in nodes for tensor in node.outputs}
    maker_stage.update(places.variables)
    tensors_between: dict[tuple[int, int], set[str]] = {}
    for node in nodes:
        stage = places.nodes[node.name]
        for tensor in node.inputs:
            if maker_stage.get(tensor.name, stage) != stage:
                tensors_between.setdefault((maker_stage[tensor.name], stage), set()).add(tensor.name)
    return tensors_between
