"""The user's step in two halves: up to the gradients, of each replica, and from the gradients on, once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import onnx

from partc.compiler.importing.bindings import Bindings
from partc.compiler.model_files.cut_model import cut_model, leaves_of, reached_from
from partc.compiler.verification.nudge_terms import perturb_last_bits, scatter_terms
from partc.compiler.verification.sessions import Array, Session, convolving, is_float
from partc.runtime.errors import BadPlan, UnsupportedModel
from partc.runtime.plan.program import Aggregation, Plan
from partc.runtime.plan.variables import DataInput, DrawnInput

Tensors = dict[str, Array]
TensorKind = Literal["dense", "ids", "rows"]


@dataclass(frozen=True)
class Halves:
    """Which tensors each half of the graph makes."""

    gradients: Mapping[str, TensorKind]
    statistics: tuple[str, ...]  # next values that depend on samples but on no gradient
    updates: tuple[str, ...]  # all other next values
    loss: tuple[str, ...]  # if it depends on no gradient


class SplitStep:
    """One step. `is_whole`: of the total batch at once, as if there were one replica."""

    def __init__(
        self, model: onnx.ModelProto, bindings: Bindings, plan: Plan, sharing: int | None, *, is_whole: bool
    ) -> None:
        self._model, self._plan, self._sharing = model, plan, sharing
        self._bindings = bindings
        self.replicas = 1 if is_whole else plan.replicas
        entries: tuple[DataInput | DrawnInput, ...] = (*plan.data_inputs, *plan.drawn_inputs)
        self._axes: dict[str, int | None] = {entry.name: entry.sample_axis for entry in entries}
        self._outer = {entry.name: entry.outer for entry in plan.drawn_inputs}
        self._shards = {} if is_whole else {inputs.name: inputs for inputs in plan.shard_inputs}
        self._summed = _summed_tensors(bindings, plan.aggregation)
        own = [name for name, inputs in self._shards.items() if inputs.holds == "shard_id"]
        samples = [name for name, axis in self._axes.items() if axis is not None] + own
        self.samples = tuple(samples)
        self.halves = _halves(model, bindings, plan, samples, is_whole)
        self.state = bindings.state

    def step(self, inputs: Mapping[str, Array]) -> tuple[Tensors, Tensors]:
        """Return the variables' next values, and the loss: the mean of the replicas'."""
        parts = self.parts(inputs)
        results = self.update(inputs, self.combine_gradients(parts))
        results |= {name: _mean(name, [part[name] for part in parts]) for name in self.halves.statistics}
        following = {name: results[output] for name, output in self.state.items()}
        return following, {n: _mean_of_scalars([part[n] for part in parts]) for n in self.halves.loss}

    def parts(self, inputs: Mapping[str, Array]) -> list[Tensors]:
        """Return what the first half makes, by replica."""
        return [self.part(inputs, replica) for replica in range(self.replicas)]

    def part(self, inputs: Mapping[str, Array], replica: int) -> Tensors:
        """Return what the first half makes of one replica's samples."""
        return self._run(self._first, self.share(inputs, replica))

    def part_with_other_rounding(self, inputs: Mapping[str, Array], replica: int) -> Tensors:
        """Return a part whose gradients are sums of terms with other last bits."""
        return self._run(self._perturbed, self.share(inputs, replica))

    def part_without_cancelling(self, inputs: Mapping[str, Array], replica: int) -> Tensors:
        """Return a part whose gradients are sums of terms that are up to 2 SCATTER off, each by itself."""
        return self._run(self._scattered, self.share(inputs, replica))

    def combine_gradients(self, parts: Sequence[Tensors]) -> Tensors:
        """Return the gradients of all replicas, put together."""
        return {
            tensor: self._combine(tensor, kind, [part[tensor] for part in parts])
            for tensor, kind in self.halves.gradients.items()
        }

    def share_of_sum(self, tensor: str) -> float:
        """Return how much a change of every replica's gradient counts in what is put together."""
        kind = self.halves.gradients[tensor]
        if kind == "rows":
            return 1.0 if tensor in self._summed else 1.0 / self.replicas
        return float(self.replicas) if tensor in self._summed else 1.0

    def gradients_of(self, variable: str) -> set[str]:
        """Return the gradients of a parameter, or of the parameter that a slot belongs to, but for ids."""
        owners = {entry.name: entry.parameter or entry.name for entry in self._plan.variables}
        gradient = self._bindings.gradients.get(owners.get(variable, variable))
        return {name for name in (gradient.dense, gradient.rows) if name} if gradient else set()

    def update(self, inputs: Mapping[str, Array], gradients: Mapping[str, Array]) -> Tensors:
        """Return what the second half makes of gradients that have met."""
        return self._rest.run({**inputs, **self._shard_values(0), **gradients})

    def share(self, inputs: Mapping[str, Array], replica: int) -> Tensors:
        """Return what one replica reads: its samples, and all that replicas share."""
        if self.replicas == 1:
            return {**inputs, **self._shard_values(replica)}
        shares = {name: self._share(name, array, replica) for name, array in inputs.items()}
        return shares | self._shard_values(replica)

    @cached_property
    def model_of_gradients(self) -> onnx.ModelProto:
        """The first half."""
        return cut_model(self._model, {}, [name for name in self._of_first_half if name not in self._axes])

    @property
    def _of_first_half(self) -> list[str]:
        halves = self.halves
        return [*dict.fromkeys([*halves.gradients, *halves.statistics, *halves.loss])]

    @cached_property
    def _first(self) -> Session:
        return self._session(self.model_of_gradients)

    @cached_property
    def _perturbed(self) -> Session:
        dense = [name for name, kind in self.halves.gradients.items() if kind == "dense"]
        return self._session(perturb_last_bits(self.model_of_gradients, dense))

    @cached_property
    def _scattered(self) -> Session:
        return self._session(scatter_terms(self.model_of_gradients))

    def _session(self, model: onnx.ModelProto) -> Session:
        outputs = [info.name for info in self.model_of_gradients.graph.output]
        return Session(convolving(model, self._sharing), outputs)

    def _run(self, session: Session, share: Tensors) -> Tensors:
        results = session.run(share)
        return {name: results[name] if name in results else share[name] for name in self._of_first_half}

    @cached_property
    def _rest(self) -> Session:
        types = {t: _element_type(t, self._model, self._bindings) for t in self.halves.gradients}
        return Session(cut_model(self._model, types, self.halves.updates), self.halves.updates)

    def _shard_values(self, replica: int) -> Tensors:
        values = {"num_shards": self.replicas, "shard_id": replica}
        return {name: np.array(values[s.holds], s.dtype) for name, s in self._shards.items()}

    def _share(self, name: str, array: Array, replica: int) -> Array:
        axis = self._axes.get(name)
        if axis is None:
            return array
        before, behind = array.shape[:axis], array.shape[axis + 1 :]
        apart = array.reshape(*before, self._outer.get(name, 1), -1, *behind)
        share = np.split(apart, self.replicas, axis=axis + 1)[replica]
        return np.ascontiguousarray(share).reshape(*before, array.shape[axis] // self.replicas, *behind)

    def _combine(self, tensor: str, kind: TensorKind, pieces: Sequence[Array]) -> Array:
        divisor = 1 if tensor in self._summed else self.replicas
        if kind == "dense":
            return np.asarray(np.sum(pieces, axis=0) / divisor, dtype=pieces[0].dtype)
        whole = np.concatenate(pieces, axis=0)
        return (whole / divisor).astype(whole.dtype) if kind == "rows" else whole


# ---------------------------------------------------------------- where to cut


def _halves(
    model: onnx.ModelProto, bindings: Bindings, plan: Plan, samples: Sequence[str], is_whole: bool
) -> Halves:
    gradients = _gradient_tensors(model, bindings, is_whole)
    boundary = set(gradients)
    sample_dependents = reached_from(model.graph, set(samples) - boundary, boundary)
    behind = reached_from(model.graph, boundary, boundary)
    roles = {variable.name: variable.role for variable in plan.variables}
    statistics, updates = [], []
    for variable, output in bindings.state.items():
        if output not in sample_dependents or (is_whole and output in behind):
            updates.append(output)
        elif is_whole and roles.get(variable) != "other":
            continue  # its gradient is not known
        elif output in behind:
            sample_input = min(leaves_of(model.graph, [output], boundary) & (set(samples) - boundary))
            raise UnsupportedModel(
                f"the update of {variable!r} reads {sample_input!r} besides its gradient",
                at=f"next value {output!r}",
                fix="compile with --batch global, or record the gradient behind which no sample is read",
            )
        else:
            statistics.append(output)
    inputs = {info.name for info in model.graph.input}
    unfit = set(bindings.state.values()) | reached_from(model.graph, boundary - inputs, boundary)
    loss = tuple(i.name for i in model.graph.output if i.name == plan.loss and i.name not in unfit)
    return Halves(gradients, tuple(statistics), tuple(updates), loss)


def _gradient_tensors(model: onnx.ModelProto, bindings: Bindings, is_whole: bool) -> dict[str, TensorKind]:
    """Return where the user's graph is cut: at the dense gradient if it has one, else at the slices."""
    tensor_names = {name for node in model.graph.node for name in node.output} | {
        i.name for i in model.graph.input
    }
    kinds: dict[str, TensorKind] = {}
    for variable, gradient in bindings.gradients.items():
        if gradient.dense in tensor_names:
            kinds[str(gradient.dense)] = "dense"
        elif gradient.ids in tensor_names and gradient.rows in tensor_names:
            kinds |= {str(gradient.ids): "ids", str(gradient.rows): "rows"}
        elif not is_whole:
            raise BadPlan(
                f"the plan's model does not hold the gradient of {variable!r}",
                at=f"gradients: {variable}",
                fix="compile the model again",
            )
    return kinds


def _element_type(tensor: str, model: onnx.ModelProto, bindings: Bindings) -> int:
    """Return a gradient's element type: that of its variable, but for ids."""
    types = {info.name: info.type.tensor_type.elem_type for info in model.graph.input}
    for variable, gradient in bindings.gradients.items():
        if tensor in (gradient.dense, gradient.rows):
            return int(types[variable])
    return int(onnx.TensorProto.INT64)


# ---------------------------------------------------------------- averages


def _summed_tensors(bindings: Bindings, aggregation: Aggregation) -> set[str | None]:
    """Return the tensors of those gradients that are summed over the replicas, not averaged."""
    averages = {False: aggregation.average_dense, True: aggregation.average_sparse}
    summed = [g for g in bindings.gradients.values() if not averages[g.ids is not None]]
    return {tensor for gradient in summed for tensor in (gradient.dense, gradient.rows)}


def _mean(name: str, values: Sequence[Array]) -> Array:
    if is_float(values[0]):
        return np.asarray(np.mean(values, axis=0), dtype=values[0].dtype)
    if all(np.array_equal(value, values[0]) for value in values):
        return values[0]
    raise UnsupportedModel(
        "an integer variable depends on each replica's own samples: it has no average",
        at=f"next value {name!r}",
        fix="compile with --batch global",
    )


def _mean_of_scalars(values: Sequence[Array]) -> Array:
    stacked = np.stack(values)
    is_number = stacked.ndim == 1 and is_float(stacked)
    return np.asarray(stacked.mean(), dtype=stacked.dtype) if is_number else stacked
