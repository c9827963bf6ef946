"""Find the axis along which each data input holds one entry per sample, from the graph's structure.

A candidate axis is split into single entries and the split is carried forward through the sharding
rules, from the data to the loss. Where it meets a data input that is still whole, that input is split
alike. The sample axis is the candidate that gets through: it never meets a variable (a feature axis
does) and no op must put it together again (a time axis is: by a recurrence, by attention). Inputs that
the split never reaches are the same for all replicas.

Where samples are coupled (a contrastive loss, a roll) no candidate gets through. Then axis 0 counts, and
sizes that inputs share; if another axis is as likely, the user is asked.

Draws that replicas would have to make for their own samples are refused where these cannot be told apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.reachability import ancestors, descendants
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.decide_layouts import decide_by_rule
from partc.passes.layouts.layouts import Partial, Placement, Replicate, Split
from partc.passes.roles.find_zeros import find_zeros
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import node_facts, rule_of
from partc.runtime.errors import UnsupportedModel, some_of

ROUNDS = 8  # each lets the split reach at least one more input


def find_sample_axes(
    training: TrainingGraph, declared: Mapping[str, int | None], facts: Facts
) -> dict[str, int | None]:
    """Return the sample axis of every data input, None where it has none; `declared` ones stay.

    Raises UnsupportedModel where two readings of the graph are as likely.
    """
    inputs = training.data_inputs
    if all(name in declared for name in inputs):
        return dict(declared)
    search = _Search.of(training, facts)
    known_axes = {name: axis for name, axis in declared.items() if axis is not None}
    if known_axes:
        outcome = search.share(search.spread(known_axes), declared)
        return _complete(inputs, outcome.axes, declared)
    shapes = {name: search.facts.shape(name) for name in inputs if name not in declared}
    candidates = [(n, axis) for n, shape in shapes.items() for axis, size in enumerate(shape) if size > 1]
    trials = [search.spread({name: axis}) for name, axis in candidates]
    leading = {name: 0 for name, shape in shapes.items() if shape}
    if all(shapes[name][0] == 1 for name in leading):
        # A batch of one leaves no trace. It is in front, unless the entries of another axis stay apart.
        trials = [trial for trial in trials if not trial.obstacles and not trial.summed]
        if not trials:
            return _complete(inputs, leading, declared)
    return _complete(inputs, _choose(search, trials, declared).axes, declared)


def _choose(search: "_Search", trials: list["_Trial"], declared: Mapping[str, int | None]) -> "_Trial":
    """Return the likeliest reading: one that gets through, else one on axis 0 that fits most inputs."""
    best = min(trials, key=lambda trial: (trial.obstacles, -len(trial.axes)))
    shared = [(search.share(trial, declared), trial.obstacles) for trial in trials]
    front, obstacles = min(shared, key=lambda entry: (-entry[0].on_front, entry[1]))
    if best.obstacles == 0:
        best = search.share(best, declared)
        if (wider := search.doubt(best, declared)) is not None:
            raise _ask(wider, best)
        if len(best.axes) >= front.on_front:
            return best
    is_as_likely = (front.on_front, -obstacles) >= (len(best.axes), -best.obstacles)
    if (
        front.agrees_with(best)
        or (best.variables and not front.variables)
        or (best.obstacles and is_as_likely)
    ):
        return front
    raise _ask(front, best)


def _ask(front: "_Trial", best: "_Trial") -> UnsupportedModel:
    """Offer both readings."""

    def spell(trial: "_Trial") -> str:
        axes = {name: str(trial.axes.get(name, "none")) for name in (*front.axes, *best.axes)}
        return " ".join(f"--sample-axis {name}={axis}" for name, axis in axes.items())

    return UnsupportedModel(
        "two axes of the data may count its samples, and the graph does not tell which",
        at=f"data inputs {some_of(sorted({*front.axes, *best.axes}))}",
        fix=f"say which: {spell(front)}, or {spell(best)}",
    )


def find_drawn_splits(training: TrainingGraph, facts: Facts) -> dict[str, Split]:
    """Return how drawn inputs follow the samples; those that are missing are the same for all replicas.

    Needs: the data inputs' sample axes. A draw is split as the tensor that it is shaped like, or as its
    readers want it.
    """
    axes = {
        n: entry.sample_axis for n, entry in training.data_inputs.items() if entry.sample_axis is not None
    }
    if not training.drawn_inputs or not axes:
        return {}
    trial = _Search.of(training, facts).spread(axes)
    like = {name: trial.placements.get(entry.like or "") for name, entry in training.drawn_inputs.items()}
    splits = {name: placement for name, placement in like.items() if isinstance(placement, Split)}
    return trial.drawn | splits


def find_sample_splits(training: TrainingGraph, facts: Facts) -> dict[str, Split]:
    """Return the tensors that hold samples, and along what: those that a split of the data reaches.

    Needs: the data inputs' sample axes.
    """
    axes = {
        n: entry.sample_axis for n, entry in training.data_inputs.items() if entry.sample_axis is not None
    }
    placements = _Search.of(training, facts, to_the_end=True).spread(axes).placements if axes else {}
    return {name: placement for name, placement in placements.items() if isinstance(placement, Split)}


def _complete(
    inputs: Mapping[str, object], axes: Mapping[str, int], declared: Mapping[str, int | None]
) -> dict[str, int | None]:
    return {name: declared[name] if name in declared else axes.get(name) for name in inputs}


@dataclass
class _Trial:
    """How far a split got: the inputs it reached, and what stood in its way."""

    axes: dict[str, int]
    variables: int = 0  # how often it met a variable
    gathered: int = 0  # how often it had to be put together again
    summed: int = 0  # how often all its parts were summed, or compared, for what is not linear in that
    grew: bool = False
    placements: dict[str, Placement] = field(default_factory=dict)
    followed: set[tuple[str, Split]] = field(default_factory=set)
    drawn: dict[str, Split] = field(default_factory=dict)  # drawn inputs that it reached

    @property
    def obstacles(self) -> int:
        """Count what stood in its way."""
        return self.variables + self.gathered

    @property
    def on_front(self) -> int:
        """Count the inputs whose samples are on axis 0."""
        return sum(axis == 0 for axis in self.axes.values())

    def agrees_with(self, other: "_Trial") -> bool:
        """Tell whether two readings have the samples of all inputs that both reach on the same axis."""
        both = self.axes.keys() & other.axes.keys()
        return bool(both) and all(self.axes[name] == other.axes[name] for name in both)


@dataclass(frozen=True)
class _Search:
    training: TrainingGraph
    facts: Facts
    zeros: frozenset[str]
    nodes: tuple[gs.Node, ...]  # those that lead to the loss
    producers: Mapping[str, gs.Node]
    constants: Mapping[str, gs.Constant]  # that these nodes read
    rules: Mapping[str, ShardingRule | None]

    @classmethod
    def of(cls, training: TrainingGraph, facts: Facts, to_the_end: bool = False) -> "_Search":
        graph = training.graph
        loss = None if to_the_end else training.loss
        ends = [t.name for t in graph.outputs] if loss is None else [loss]
        leading = ancestors(graph, ends)
        nodes = tuple(n for n in graph.nodes if any(t.name in leading for t in n.outputs))
        producers = {tensor.name: node for node in nodes for tensor in node.outputs}
        read = {tensor.name: tensor for node in nodes for tensor in node.inputs}
        constants = {name: tensor for name, tensor in read.items() if isinstance(tensor, gs.Constant)}
        rules = {node.name: rule_of(node, facts) for node in nodes}
        return cls(training, facts, find_zeros(graph, facts), nodes, producers, constants, rules)

    def spread(self, axes: Mapping[str, int]) -> _Trial:
        """Carry a split of data inputs forward until it reaches no further input."""
        name, axis = next(iter(axes.items()))
        ranks = self.facts.shape(name)[axis]
        known = dict(axes)
        for _ in range(ROUNDS):
            trial = self._carry(known, ranks)
            if not trial.grew:
                break
            known = trial.axes
        return trial

    def share(self, trial: _Trial, declared: Mapping[str, int | None]) -> _Trial:
        """Add the inputs that the split did not reach, and whose axis 0 is as long as its samples.

        Where the split gets through to the loss, only those that do not stand in its way.
        """
        for name in self._as_long(trial, declared):
            wider = trial if name in trial.axes else self.spread({**trial.axes, name: 0})
            if wider.obstacles == 0 or trial.obstacles:
                trial = wider
        return trial

    def doubt(self, trial: _Trial, declared: Mapping[str, int | None]) -> _Trial | None:
        """Return another reading of a split that gets through: one more input may hold samples too.

        Its axis 0 is as long, and no axis of features; both together are in each other's way, as the two
        sides of all pairs are.
        """
        for name in self._as_long(trial, declared):
            if self.spread({name: 0}).variables == 0:
                return self.spread({**trial.axes, name: 0})
        return None

    def _as_long(self, trial: _Trial, declared: Mapping[str, int | None]) -> list[str]:
        """Return the inputs that a split did not reach whose axis 0 is as long as its samples."""
        shapes = {name: data.shape for name, data in self.training.data_inputs.items()}
        sizes = {shapes[name][axis] for name, axis in trial.axes.items()}
        free = shapes.keys() - trial.axes.keys() - declared.keys()
        return [name for name, shape in shapes.items() if name in free and shape and shape[0] in sizes]

    def _carry(self, axes: Mapping[str, int], ranks: int) -> _Trial:
        trial = _Trial(dict(axes), placements={name: Split(axis) for name, axis in axes.items()})
        for node in self.nodes:
            placements = [trial.placements.get(tensor.name, Replicate()) for tensor in node.inputs]
            if node.op in ("Shape", "Size") or not any(isinstance(p, Split | Partial) for p in placements):
                continue
            known = node_facts(node, self.facts, self.zeros)
            decision = decide_by_rule(known, placements, ranks)
            for tensor, has, wants in zip(node.inputs, placements, decision.inputs, strict=True):
                if isinstance(has, Split) and wants != has:
                    trial.gathered += 1
                elif isinstance(has, Partial) and wants != has:
                    trial.summed += 1
                elif isinstance(wants, Split) and wants != has:
                    self._reach(trial, tensor.name, wants)
            trial.placements |= {t.name: p for t, p in zip(node.outputs, decision.outputs, strict=True)}
        return trial

    def _reach(self, trial: _Trial, tensor: str, split: Split) -> None:
        """Follow a whole tensor that is wanted split back to the data it is made from."""
        waiting = [(tensor, split)]
        while waiting:
            tensor, split = waiting.pop()
            if (tensor, split) in trial.followed:
                continue
            trial.followed.add((tensor, split))
            if tensor in self.producers:
                operands = self._split_operands(self.producers[tensor], tensor, split)
                trial.gathered += operands is None
                waiting += reversed(operands or [])
            else:
                self._arrive(trial, tensor, split)

    def _arrive(self, trial: _Trial, tensor: str, split: Split) -> None:
        """Count a split that was followed back to what the step is given."""
        if tensor in self.training.data_inputs:
            if split.outer == 1 and tensor not in trial.axes:
                trial.axes[tensor] = split.axis
                trial.grew = True
            elif trial.axes.get(tensor) != split.axis:
                trial.gathered += 1
        elif tensor in self.training.drawn_inputs:
            trial.drawn.setdefault(tensor, split)
        elif tensor in self.training.variables:
            trial.variables += 1
        elif tensor in self.constants:
            trial.gathered += not _has_equal_entries(self.constants[tensor].values, split)

    def _split_operands(self, node: gs.Node, tensor: str, split: Split) -> list[tuple[str, Split]] | None:
        """Return the operands that are split where a result is, and along what; None: none."""
        rule = self.rules[node.name]
        index = next(i for i, output in enumerate(node.outputs) if output.name == tensor)
        rule_and_factor = (
            None if rule is None else rule.factor_at(rule.outputs[index], split.axis, split.outer)
        )
        if rule_and_factor is None or rule_and_factor[1] in rule_and_factor[0].whole:
            return None
        refined, factor = rule_and_factor
        positions = [
            (operand.name, None if dims is None else refined.position_of(dims, factor))
            for operand, dims in zip(node.inputs, refined.inputs, strict=True)
        ]
        return [(name, Split(*position)) for name, position in positions if position is not None]


def _has_equal_entries(value: np.ndarray, split: Split) -> bool:
    """Tell whether a constant is the same for every entry along a split, and tells none by its place."""
    if value.shape[split.axis] % split.outer:
        return False
    shape = (*value.shape[: split.axis], split.outer, -1, *value.shape[split.axis + 1 :])
    apart = value.reshape(shape)
    return bool(np.all(apart == np.take(apart, [0], split.axis + 1)))


def check_draws(training: TrainingGraph) -> None:
    """Raise UnsupportedModel for a draw that is shaped like what each replica has its own of.

    With no sample axis, all replicas would draw the same numbers for different samples. (One batch for all
    needs no axis: there is one draw, as on one device.)
    """
    gradients = frozenset(t for g in training.gradients.values() for t in (g.dense, g.ids, g.rows) if t)
    own = (
        descendants(training.graph, training.varying_inputs(), gradients) - gradients
    )  # these are everybody's
    for drawn in training.drawn_inputs.values():
        if drawn.sample_axis is None and drawn.like in own:
            raise UnsupportedModel(
                f"random numbers are drawn like {drawn.like!r}, whose sample axis partc cannot find",
                at=f"draw {drawn.name!r} {list(drawn.shape)}",
                fix="compile with --batch global, or draw the numbers outside and feed them as a data input",
            )
