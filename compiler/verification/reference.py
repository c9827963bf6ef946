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

Float types that a variable's change passes through on its way: the narrowest rounds it most.

    W float32 ── Cast ── W16 ── MatMul ── ... ── dW16 ── Cast ── dW float32 ── Sub ── W' float32

W is stored in float32, and its change is a float16 number: summed in another order, it is another one. What
counts is what nodes compute from samples: all else is the same on both sides, bit by bit. A way ends where
something is no float, for what is decided (whether a gradient overflowed) is not rounded.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper

from partc.compiler.importing.bindings import Bindings, read_bindings
from partc.compiler.importing.draw_random_inputs import draw_random_inputs
from partc.compiler.model_files.cut_model import cut_model, leaves_of, reached_from, reads_of
from partc.compiler.verification.compare_bodies import differences, probe_of
from partc.compiler.verification.nudge_terms import FLOATS, element_types
from partc.compiler.verification.rounding import RoundingError, measure_rounding
from partc.compiler.verification.sessions import Array, Session, convolving, eps_of
from partc.compiler.verification.split_step import SplitStep, Tensors
from partc.compiler.verification.touched_rows import Uses, distinct_rows, find_tables, places, read_by_places
from partc.passes.graph.inline_functions import inline_local_functions
from partc.passes.graph.training_graph import IR_VERSION
from partc.runtime.errors import BadPlan
from partc.runtime.plan.program import Plan, rounding_of

TABLE_LIMIT_BYTES = 1 << 26  # a table that is larger is given by the rows that a step touches


class StepResult(NamedTuple):
    """What a step makes."""

    variables: Tensors  # their next values; of tables, the rows that were given
    outputs: Tensors  # the loss: a scalar is the replicas' mean


class Reference:
    """One training step on one device.

    `tables`: the variables of which a step is given some rows, those that `rows` names.
    `passed_types`: variable, or loss -> the narrowest float type that its change passes through; no entry:
    none does.
    """

    def __init__(self, plan: Plan, model: onnx.ModelProto, bindings: Bindings, large_bytes: int) -> None:
        self._plan = plan
        on_cpu = all(rank.kind == "cpu" for rank in plan.ranks)
        is_global = plan.batch == "global"
        self._sharing = (plan.replicas if is_global else 1) if on_cpu else None
        self._sizes = {v.name: v.shape[0] for v in plan.variables if v.shape}
        if large := _large(plan, large_bytes):
            model = inline_local_functions(model)  # ids and rows of one call are computed apart
        self.tables = find_tables(model, bindings.state, large)
        whole, model = model, read_by_places(model, self.tables, bindings.state)
        self._split = SplitStep(model, bindings, plan, self._sharing, is_whole=is_global)
        self._rows = RowsOfBatch(whole, self.tables, self._split, plan)
        self._probed = model if is_global else self._split.model_of_gradients
        self._whole: Session | None = None
        if is_global:
            loss = [info.name for info in model.graph.output if info.name == plan.loss]
            results = [*dict.fromkeys([*bindings.state.values(), *loss])]
            self._whole = Session(convolving(model, self._sharing), results)
        self._state = bindings.state
        of_results = passed_types(model, [*bindings.state.values(), plan.loss or ""], self._split.samples)
        names = {output: name for name, output in bindings.state.items()}
        self.passed_types = {names.get(result, result): dtype for result, dtype in of_results.items()}
        if rounding := rounding_of(plan):
            summed = [variable.name for variable in plan.variables if variable.dtype == "float32"]
            self.passed_types |= dict.fromkeys(summed, np.dtype(rounding))

    def rows(self, variables: Mapping[str, Array], batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return the rows of the tables that a step on a total batch touches, int64[k] ascending."""
        return self._rows.find({**variables, **batch})

    def step(
        self,
        variables: Mapping[str, Array],
        batch: Mapping[str, Array],
        rows: Mapping[str, Array] | None = None,
    ) -> StepResult:
        """Train one step on a total batch. `rows`: which rows of the tables `variables` holds."""
        inputs = self._step_inputs(variables, batch, rows)
        if self._whole is None:
            return StepResult(*self._split.step(inputs))
        results = self._whole.run(inputs)
        following = {name: results[output] for name, output in self._state.items()}
        return StepResult(following, {n: v for n, v in results.items() if n == self._plan.loss})

    def rounding(
        self,
        variables: Mapping[str, Array],
        batch: Mapping[str, Array],
        rows: Mapping[str, Array] | None = None,
        thoroughly: bool = False,
    ) -> RoundingError:
        """Measure what rounding may make of a step (rounding.py)."""
        inputs = self._step_inputs(variables, batch, rows)
        return measure_rounding(self._split, inputs, set(variables), self.passed_types, thoroughly)

    def compare_bodies(
        self,
        variables: Mapping[str, Array],
        batch: Mapping[str, Array],
        rows: Mapping[str, Array] | None = None,
    ) -> Mapping[str, float]:
        """Return result -> difference, of convolutions that ONNX Runtime would compute otherwise.

        It is the largest one of any element, as a part of the largest element; per replica, of the first.
        """
        if self._sharing is None:
            return {}
        probe, results = probe_of(self._probed, self._sharing)
        if not results:
            return {}
        share = self._split.share(self._step_inputs(variables, batch, rows), 0)
        return differences(results, Session(probe, [info.name for info in probe.graph.output]).run(share))

    def _step_inputs(
        self, variables: Mapping[str, Array], batch: Mapping[str, Array], rows: Mapping[str, Array] | None
    ) -> Tensors:
        return {**variables, **batch, **places(rows or {}, self._sizes)}


def make_reference(plan: Plan, model_path: Path, large_bytes: int = TABLE_LIMIT_BYTES) -> Reference:
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
    return Reference(plan, model, bindings, large_bytes)


def _large(plan: Plan, large_bytes: int) -> list[str]:
    return [
        variable.name
        for variable in plan.variables
        if variable.shape
        and int(np.prod(variable.shape, dtype=np.int64)) * np.dtype(variable.dtype).itemsize > large_bytes
    ]


def _check_gradients(plan: Plan, bindings: Bindings, model_path: Path) -> None:
    parameters = {variable.name for variable in plan.variables if variable.role == "parameter"}
    if plan.batch == "per-replica" and (missing := parameters - bindings.gradients.keys()):
        raise BadPlan(
            f"the plan's model does not say where the gradient of {min(missing)!r} is",
            at=str(model_path),
            fix="compile the model again",
        )


class RowsOfBatch:
    """Finds the rows of large tables that a step touches, on the samples of all replicas.

    Indices before the gradients are found replica by replica, those behind them of all replicas together.
    """

    def __init__(self, model: onnx.ModelProto, tables: Uses, split: SplitStep, plan: Plan) -> None:
        self._tables, self._split = tables, split
        self._sizes = {v.name: v.shape[0] for v in plan.variables if v.name in tables}
        graph = model.graph
        indices = dict.fromkeys(index for index_names in tables.values() for index in index_names)
        boundary = set(split.halves.gradients)
        behind = reached_from(graph, boundary, boundary) - boundary
        later = [index for index in indices if index in behind]
        self._ids = leaves_of(graph, later, boundary) & boundary if later else set()
        inputs = {info.name for info in graph.input}
        constants = {tensor.name for tensor in graph.initializer}
        self._early = [*dict.fromkeys([*(i for i in indices if i not in behind), *self._ids])]
        early_outputs = [name for name in self._early if name not in inputs | constants]
        self._first = Session(cut_model(model, {}, early_outputs), early_outputs)
        self._constants = {
            t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name in self._early
        }
        id_types = dict.fromkeys(self._ids, int(onnx.TensorProto.INT64))
        self._rest = Session(cut_model(model, id_types, later), later)

    def find(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the rows that a step touches, by table: int64[k] ascending."""
        if not self._tables:
            return {}
        parts = []
        for replica in range(self._split.replicas):
            share = {**self._constants, **self._split.share(inputs, replica)}
            parts.append(share | self._first.run(share))
        index_values = {
            name: np.concatenate([part[name].reshape(-1) for part in parts]) for name in self._early
        }
        ids = {name: np.concatenate([part[name] for part in parts], axis=0) for name in self._ids}
        index_values |= self._rest.run({**inputs, **ids})
        return {
            table: distinct_rows([index_values[index] for index in indices], self._sizes[table])
            for table, indices in self._tables.items()
        }


# Ops that hand elements on as they are.
KEEPS_ELEMENTS = frozenset(
    "Concat Expand Flatten Gather GatherElements GatherND Identity Pad Reshape Slice Split Squeeze Tile "
    "Transpose Unsqueeze Where".split()
)


def passed_types(
    model: onnx.ModelProto, results: Iterable[str], samples: Collection[str]
) -> dict[str, np.dtype[np.generic]]:
    """Return the narrowest float type on the way from `samples` to each result; no entry: no float is."""
    inlined = inline_local_functions(model)
    graph, types = inlined.graph, element_types(inlined)
    of_samples = reached_from(graph, samples, ())
    rounding: dict[str, np.dtype[np.generic]] = {}  # tensor -> the narrowest type so far, its own included
    for node in graph.node:
        before = [rounding[name] for name in reads_of(node) if name in rounding]
        for name in node.output:
            element = types.get(name)
            if not name or name not in of_samples or (element is not None and element not in FLOATS):
                continue
            own = [] if element is None or node.op_type in KEEPS_ELEMENTS else [_dtype(element)]
            if before or own:
                rounding[name] = max([*before, *own], key=eps_of)
    return {name: rounding[name] for name in results if name in rounding}


def _dtype(element: int) -> np.dtype[np.generic]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(element))
