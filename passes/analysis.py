"""What is known of a step before its strategy: the record that choosing, laying out and lowering share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.change_homes import NodeOrder
from partc.passes.layouts.layouts import Split
from partc.passes.roles.find_roles import Roles

WeightAxis = tuple[tuple[tuple[str, int], ...], int]  # a mesh's axes and their sizes, and one of them


@dataclass(frozen=True)
class Analysis:
    """A training graph whose replicas meet where they must, and what is known about it."""

    training: TrainingGraph
    facts: Facts
    roles: Roles
    main: frozenset[str]
    zeros: frozenset[str]
    followers: Mapping[str, str | None]  # variable -> the parameter whose rows it shares
    servable: frozenset[str]  # parameters whose update can run on a part of their rows
    replicas: int
    per_replica: bool
    workers: tuple[str, ...] = ()  # the names of the cluster's devices
    # Remembered, because several strategies of the same step ask: by a mesh's axes and the axis asked for,
    # where weights are split (tensor_parallel.py).
    weight_splits: dict[WeightAxis, Mapping[str, Split]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def stored(self) -> frozenset[str]:
        """Return the tensors that come from variables and constants alone."""
        return find_stored(self.training)

    @cached_property
    def order(self) -> NodeOrder:
        """Return the nodes in their order, and who reads and makes each tensor."""
        return NodeOrder.of(self.training)

    def fewest_samples(self) -> int | None:
        """Return how many samples a batch has, of the data input that has fewest; None: no input has any."""
        fed = [entry for entry in self.training.data_inputs.values() if entry.sample_axis is not None]
        return min((self.facts.shape(entry.name)[entry.sample_axis or 0] for entry in fed), default=None)


def find_stored(training: TrainingGraph) -> frozenset[str]:
    """Return the tensors that come from variables and constants alone."""
    names = set(training.variables)
    for node in training.graph.nodes:
        reads = [t.name for t in node.inputs if t.inputs or not isinstance(t, gs.Constant)]
        if reads and names.issuperset(filter(None, reads)):
            names.update(tensor.name for tensor in node.outputs)
    return frozenset(names)
