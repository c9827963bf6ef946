"""Judge from a step's structure whether replicas train what one device trains on the whole batch.

    gradient   averaged over replicas: it must be a mean over the samples     (summed: a sum over them)
    variable   updated from samples beside any gradient: a mean over them
    update     everything behind the gradients must not depend on the batch or its size

What is not so is a departure, with the node that makes it so. A step without departures is proven: the
average of the replicas' gradients is the gradient of the whole batch, whatever the data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import Gradient, TrainingGraph
from partc.passes.indexed_rows.indexed_slices import pairs_of
from partc.passes.replicas.batch_relation import BatchRelation
from partc.passes.replicas.join_replicas import join_replicas
from partc.passes.roles.find_roles import find_roles, gradient_tensors
from partc.runtime.plan.program import Aggregation

SUMS = Aggregation(average_dense=False, average_sparse=False)
NO_MEAN = "it is a sum over the samples, not a mean"


@dataclass(frozen=True, slots=True)
class Departure:
    """What replicas make of a tensor otherwise than one device does, and why."""

    of: Literal["gradient", "variable", "output"]
    name: str  # the parameter, the variable or the output
    why: str
    by_constant: bool = False  # a constant may hold the size of the batch: a sum, of a loss that is a mean
    is_extreme: bool = False  # a maximum or minimum over the samples, which no average resembles


def judge_replicas(
    training: TrainingGraph,
    facts: Facts,
    aggregation: Aggregation = Aggregation(),  # noqa: B008  # frozen
    replicas: int = 2,
) -> tuple[Departure, ...]:
    """Return every departure from one device on the whole batch; none: it is proven.

    `replicas`: how many; what two make of a size may not be what more make of it. Needs: gradients and sample
    axes are known, sizes above one.
    """
    joined = join_replicas(training, facts, find_roles(training).main, replicas)
    judge = _Judge(training, joined, aggregation)
    return (*judge.gradients(), *judge.variables(), *judge.outputs())


@dataclass(frozen=True)
class _Judge:
    training: TrainingGraph
    joined: Mapping[str, BatchRelation]
    aggregation: Aggregation

    def _of(self, tensor: str) -> BatchRelation:
        return self.joined.get(tensor, BatchRelation("alike"))

    def gradients(self) -> Iterator[Departure]:
        summed = replace(self, aggregation=SUMS)
        for name, gradient in self.training.gradients.items():
            averages = (
                self.aggregation.average_sparse if gradient.is_sparse else self.aggregation.average_dense
            )
            by_constant = self._may_hold_sizes() and not self._is_counted(gradient)
            is_sum = by_constant and not summed._why_not(gradient)
            if is_sum and not averages:
                yield Departure(
                    "gradient", name, "the loss is a mean: a constant may divide by the batch's size"
                )
            elif why := self._why_not(gradient):
                yield Departure("gradient", name, why, is_sum)

    def _may_hold_sizes(self) -> bool:
        """Tell whether constants may hold the batch's size: it is fixed, and the loss is a mean."""
        loss, inputs = self.training.loss, self.training.data_inputs.values()
        sizes = [data.shape[data.sample_axis] for data in inputs if data.sample_axis is not None]
        is_fixed = all(isinstance(size, int) for size in sizes)
        return is_fixed and loss is not None and self._of(loss).is_mean

    def _is_counted(self, gradient: Gradient) -> bool:
        """Tell whether the batch's size is known to scale it, since the graph takes it from a shape."""
        return any(self._of(tensor).is_counted for tensor in gradient_tensors(gradient))

    def _why_not(self, gradient: Gradient) -> str:
        return self._why_not_slices(gradient) if gradient.is_sparse else self._why_not_dense(gradient)

    def _why_not_dense(self, gradient: Gradient) -> str:
        averages, joined = self.aggregation.average_dense, self._of(gradient.dense or "")
        return "" if (joined.is_mean if averages else joined.is_sum) else _explain(joined, averages)

    def _why_not_slices(self, gradient: Gradient) -> str:
        """A table that is read twice has two pairs of ids and rows."""
        tensors = self.training.graph.tensors()
        pairs = pairs_of(tensors[gradient.ids], tensors[gradient.rows])
        return next(filter(None, (self._why_not_pair(*pair) for pair in pairs)), "")

    def _why_not_pair(self, ids_name: str, rows_name: str) -> str:
        """Replicas' slices are laid one behind the other, so ids and rows must go together."""
        averages = self.aggregation.average_sparse
        ids, rows = self._of(ids_name), self._of(rows_name)
        if ids.kind == "alike" and ids.power == 0:
            return "" if (rows.is_mean if averages else rows.is_sum) else _explain(rows, averages)
        for joined in (ids, rows):
            if joined.kind == "coupled":
                return joined.why
        places = {(joined.kind, joined.axis, joined.outer) for joined in (ids, rows)}
        if len(places) > 1 or ids.kind != "beside" or ids.axis or ids.power:
            return "its ids and rows lie in different orders"
        form = "divided by the samples" if averages else "a sum over the samples"
        return "" if rows.power == int(averages) else f"it is not {form}"

    def variables(self) -> Iterator[Departure]:
        for name, variable in self.training.variables.items():
            joined = self._of(variable.next)
            if not joined.is_mean:
                is_extreme = joined.kind in ("max", "min")
                yield Departure("variable", name, _explain(joined, True), is_extreme=is_extreme)

    def outputs(self) -> Iterator[Departure]:
        tensors = {tensor.name: tensor for tensor in self.training.graph.outputs}
        for name in self.training.outputs:
            tensor, joined = tensors[name], self._of(name)
            is_averaged = (
                tensor.shape is not None
                and len(tensor.shape) == 0
                and np.issubdtype(tensor.dtype, np.floating)
            )
            if (is_averaged or joined.kind == "alike") and not joined.is_mean:
                yield Departure("output", name, _explain(joined, True))


def _explain(joined: BatchRelation, averages: bool) -> str:
    """Say why the average (or sum) of the replicas' tensors is not the whole batch's."""
    form = "mean" if averages else "sum"
    match joined.kind:
        case "coupled":
            return joined.why
        case "sum" if joined.power == 0 and averages:
            return NO_MEAN
        case "sum" if joined.power == 1 and not averages:
            return "it is a mean over the samples, not a sum"
        case "max" | "min":
            return f"it is the {joined.kind}imum over the samples, not a {form}"
        case "beside":
            return "it holds an entry for every sample of the batch"
        case _:
            return "it depends on the size of the batch"
