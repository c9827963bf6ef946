"""The reference of verify: the user's own graph in plain onnxruntime on one thread, on one device.

    global        every step runs the whole graph on the total batch
    per replica   every step runs the graph up to its gradients on each replica's samples, averages
                  or sums them (indexed slices: laid one behind the other, rows divided by the replicas), and
                  runs the rest of the same graph once, with the averages in the gradients' place.
                  What depends on samples but on no gradient (running statistics) is averaged.

None of partc's passes takes part but one: the graph is only cut in two. What it draws is given, though, as it
is to the ranks: its random ops are replaced by inputs as in compiler/importing/draw_random_inputs.py. And
where ranks on CPUs compute convolutions otherwise than ONNX Runtime does, so does the reference, since
rounding decides about a ReLU at zero; each such convolution is compared with ONNX Runtime's own
(compare_bodies.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from partc.compiler.cut_model import cut_model, leaves_of, reached_from
from partc.compiler.importing.bindings import Bindings, read_bindings
from partc.compiler.importing.draw_random_inputs import draw_random_inputs
from partc.compiler.verification.compare_bodies import differences, probe_of, with_chosen_bodies
from partc.compiler.verification.seen_gradients import SeenGradient, SeenTensors, nudged
from partc.runtime.device import INEXACT_IN_DOUBLE
from partc.runtime.errors import BadPlan, UnsupportedModel
from partc.runtime.program import Aggregation, DataInput, DrawnInput, Plan
from partc.runtime.shards import shards_of_replica

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]
IR_VERSION = 10  # every onnxruntime that partc supports reads it


class Stepped(NamedTuple):
    """What a step makes."""

    variables: Tensors  # their next values
    outputs: Tensors  # scalars: the replicas' mean
    gradients: dict[str, SeenGradient]  # by parameter


class Reference(Protocol):
    """One training step on one device."""

    def step(self, variables: Mapping[str, Array], batch: Mapping[str, Array]) -> Stepped:
        """Train one step on a total batch."""

    def compare_bodies(
        self, variables: Mapping[str, Array], batch: Mapping[str, Array]
    ) -> Mapping[str, float]:
        """Return result -> difference, of convolutions that ONNX Runtime would compute otherwise.

        It is the largest one of any element, as a part of the largest element.
        """


def make_reference(plan: Plan, model_path: Path) -> Reference:
    """Return the reference for a plan's reading of the batch."""
    model = onnx.load(model_path)
    model.ir_version = min(model.ir_version, IR_VERSION)
    bindings = read_bindings(model, model_path)
    if not bindings.state:
        raise BadPlan(
            "the plan's model does not say which outputs are next values",
            at=str(model_path),
            fix="compile the model again",
        )
    _check_gradients(plan, bindings, model_path)
    model, _ = draw_random_inputs(model)
    on_cpu = all(rank.kind == "cpu" for rank in plan.ranks)
    if plan.batch == "global":
        return _Whole(model, bindings, plan.replicas if on_cpu else None)
    return _PerReplica(model, bindings, plan, 1 if on_cpu else None)


def _check_gradients(plan: Plan, bindings: Bindings, model_path: Path) -> None:
    trained = {variable.name for variable in plan.variables if variable.role == "parameter"}
    if plan.batch == "per-replica" and (missing := trained - bindings.gradients.keys()):
        raise BadPlan(
            f"the plan's model does not say where the gradient of {min(missing)!r} is",
            at=str(model_path),
            fix="compile the model again",
        )


class _Session:
    """Some outputs of a model, on one thread: ScatterND with duplicate indices races on two."""

    def __init__(self, model: onnx.ModelProto, outputs: Sequence[str]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._outputs = list(outputs)
        if not outputs:
            return  # onnxruntime takes no graph without nodes
        self._session = ort.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(INEXACT_IN_DOUBLE),
        )
        self._reads = [info.name for info in self._session.get_inputs()]

    def run(self, tensors: Mapping[str, Array]) -> Tensors:
        if not self._outputs:
            return {}
        results = self._session.run(self._outputs, {name: tensors[name] for name in self._reads})
        return dict(zip(self._outputs, results, strict=True))


class _Convolving:
    """Some outputs of a model that may convolve.

    `sharing`: ranks on CPUs that share the model's batch, and choose bodies for their share; None: none do.
    """

    def __init__(self, model: onnx.ModelProto, outputs: Sequence[str], sharing: int | None) -> None:
        self._model, self._sharing = model, sharing
        self._session = _Session(model if sharing is None else with_chosen_bodies(model, sharing), outputs)
        self.run = self._session.run

    def compare_bodies(self, tensors: Mapping[str, Array]) -> Mapping[str, float]:
        if self._sharing is None:
            return {}
        probe, results = probe_of(self._model, self._sharing)
        return differences(results, _Session(probe, [info.name for info in probe.graph.output]).run(tensors))


class _Whole:
    def __init__(self, model: onnx.ModelProto, bindings: Bindings, sharing: int | None) -> None:
        self._state = bindings.state
        results = [info.name for info in model.graph.output]
        self._shown = [name for name in results if name not in set(bindings.state.values())]
        self._seen = SeenTensors(model, bindings)
        added = [name for name in self._seen.names if name not in results]
        model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in added)
        self._session = _Convolving(model, results + added, sharing)

    def step(self, variables: Mapping[str, Array], batch: Mapping[str, Array]) -> Stepped:
        results = self._session.run({**variables, **batch})
        following = {name: results[output] for name, output in self._state.items()}
        again = self._session.run({**nudged(variables), **batch}) if self._seen.names else {}
        outputs = {name: results[name] for name in self._shown}
        return Stepped(following, outputs, self._seen.gradients({**batch, **results}, [results], again))

    def compare_bodies(
        self, variables: Mapping[str, Array], batch: Mapping[str, Array]
    ) -> Mapping[str, float]:
        return self._session.compare_bodies({**variables, **batch})


@dataclass(frozen=True)
class _Split:
    """Which outputs each half of the graph makes."""

    gradients: tuple[tuple[str, bool], ...]  # (tensor, whether it is averaged rather than laid in a row)
    statistics: tuple[str, ...]  # next values that depend on samples but on no gradient
    updates: tuple[str, ...]  # all other next values
    shown: tuple[str, ...]  # outputs that depend on no gradient


class _PerReplica:
    def __init__(self, model: onnx.ModelProto, bindings: Bindings, plan: Plan, sharing: int | None) -> None:
        self._state = bindings.state
        self._replicas = plan.replicas
        entries: tuple[DataInput | DrawnInput, ...] = (*plan.data_inputs, *plan.drawn_inputs)
        self._axes: dict[str, int | None] = {entry.name: entry.sample_axis for entry in entries}
        self._outer = {entry.name: entry.outer for entry in plan.drawn_inputs}
        self._plan = plan
        self._rows = {g.rows for g in bindings.gradients.values() if g.rows is not None}
        self._summed = _summed_tensors(bindings, plan.aggregation)
        own = [given.name for given in plan.shard_inputs if given.holds == "shard_id"]
        self._seen = SeenTensors(model, bindings)
        self._split = split = _split(model, bindings, self._axes | dict.fromkeys(own, 0))
        cut = {tensor: _element_type(tensor, model, bindings) for tensor, _ in split.gradients}
        first = [*cut, *split.statistics, *split.shown]
        computed = [name for name in first if name not in self._axes]
        self._first = _Convolving(cut_model(model, {}, computed), computed, sharing)
        self._rest = _Session(cut_model(model, cut, split.updates), split.updates)

    def step(self, variables: Mapping[str, Array], batch: Mapping[str, Array]) -> Stepped:
        parts = []
        for replica in range(self._replicas):
            share = self._shares(batch, replica)
            parts.append(share | self._first.run({**variables, **share}))
        met = {tensor: self._meet(tensor, averaged, parts) for tensor, averaged in self._split.gradients}
        results = self._rest.run({**variables, **batch, **shards_of_replica(self._plan, 0), **met})
        results |= {name: _mean(name, [part[name] for part in parts]) for name in self._split.statistics}
        shown = {name: np.stack([part[name] for part in parts]) for name in self._split.shown}
        following = {name: results[output] for name, output in self._state.items()}
        outputs = {name: _mean_of_scalars(value) for name, value in shown.items()}
        again = self._first.run({**nudged(variables), **self._shares(batch, 0)})
        return Stepped(following, outputs, self._seen.gradients(met, parts, again))

    def compare_bodies(
        self, variables: Mapping[str, Array], batch: Mapping[str, Array]
    ) -> Mapping[str, float]:
        """Of the first replica."""
        return self._first.compare_bodies({**variables, **self._shares(batch, 0)})

    def _shares(self, batch: Mapping[str, Array], replica: int) -> Tensors:
        shares = {name: self._share(name, array, replica) for name, array in batch.items()}
        return shares | shards_of_replica(self._plan, replica)

    def _share(self, name: str, array: Array, replica: int) -> Array:
        axis = self._axes[name]
        if axis is None:
            return array
        before, behind = array.shape[:axis], array.shape[axis + 1 :]
        apart = array.reshape(*before, self._outer.get(name, 1), -1, *behind)
        share = np.split(apart, self._replicas, axis=axis + 1)[replica]
        return np.ascontiguousarray(share).reshape(*before, array.shape[axis] // self._replicas, *behind)

    def _meet(self, tensor: str, averaged: bool, parts: Sequence[Tensors]) -> Array:
        pieces = [part[tensor] for part in parts]
        divisor = 1 if tensor in self._summed else self._replicas
        if averaged:
            return np.asarray(np.sum(pieces, axis=0) / divisor, dtype=pieces[0].dtype)
        whole = np.concatenate(pieces, axis=0)
        return (whole / divisor).astype(whole.dtype) if tensor in self._rows else whole


# ---------------------------------------------------------------- where to cut


def _split(model: onnx.ModelProto, bindings: Bindings, axes: Mapping[str, int | None]) -> _Split:
    gradients = _gradient_tensors(model, bindings)
    cut = {tensor for tensor, _ in gradients}
    samples = {name for name, axis in axes.items() if axis is not None} - cut
    sampled = reached_from(model.graph, samples, cut)
    behind = reached_from(model.graph, cut, cut)
    statistics, updates = [], []
    for variable, output in bindings.state.items():
        if output not in sampled:
            updates.append(output)
        elif output in behind:
            read = min(leaves_of(model.graph, [output], cut) & samples)
            raise UnsupportedModel(
                f"the update of {variable!r} reads {read!r} besides its gradient",
                at=f"next value {output!r}",
                fix="compile with --batch global, or record the gradient behind which no sample is read",
            )
        else:
            statistics.append(output)
    following = set(bindings.state.values())
    unfit = following | reached_from(model.graph, cut - set(axes), cut)
    shown = [info.name for info in model.graph.output if info.name not in unfit]
    return _Split(gradients, tuple(statistics), tuple(updates), tuple(shown))


def _gradient_tensors(model: onnx.ModelProto, bindings: Bindings) -> tuple[tuple[str, bool], ...]:
    """Return where the user's graph is cut: at the dense gradient if it has one, else at the slices."""
    known = {name for node in model.graph.node for name in node.output} | {i.name for i in model.graph.input}
    found: list[tuple[str, bool]] = []
    for variable, gradient in bindings.gradients.items():
        if gradient.dense in known:
            found.append((str(gradient.dense), True))
        elif gradient.ids in known and gradient.rows in known:
            found += [(str(gradient.ids), False), (str(gradient.rows), False)]
        else:
            raise BadPlan(
                f"the plan's model does not hold the gradient of {variable!r}",
                at=f"gradients: {variable}",
                fix="compile the model again",
            )
    return tuple(dict.fromkeys(found))


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
    if np.issubdtype(values[0].dtype, np.floating):
        return np.asarray(np.mean(values, axis=0), dtype=values[0].dtype)
    if all(np.array_equal(value, values[0]) for value in values):
        return values[0]
    raise UnsupportedModel(
        "an integer variable depends on each replica's own samples: it has no average",
        at=f"next value {name!r}",
        fix="compile with --batch global",
    )


def _mean_of_scalars(stacked: Array) -> Array:
    is_number = stacked.ndim == 1 and np.issubdtype(stacked.dtype, np.floating)
    return np.asarray(stacked.mean(), dtype=stacked.dtype) if is_number else stacked
