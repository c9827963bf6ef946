"""ONNX's own test cases of its ops, as gradients to compare with central differences.

In float64; where onnxruntime lacks a float64 kernel, in ONNX's reference. The same gradients then run in
onnxruntime in float32, for which it has more kernels.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from warnings import catch_warnings, simplefilter

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from partc.compiler.differentiation.differentiate import differentiate
from partc.compiler.differentiation.forward.bring_forward import OPSET
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.objective import state_objective
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.parameters.find_parameters import FORWARD_KEY
from partc.compiler.differentiation.rules.table import CONSTANT_INPUTS, FLAT_OPS
from partc.compiler.differentiation.tensor_types import FLOATS
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN
from tests.checks.training_steps import Arrays, session

STEP = 1e-6
MOST_POSITIONS = 10  # of one input, whose slopes are compared
Run = Callable[[list[str], Arrays], list[np.ndarray]]


@dataclass(frozen=True)
class Problem:
    """A forward model whose float inputs are parameters; `total` is a weighted sum of its first output."""

    model: onnx.ModelProto
    parameters: Arrays


@cache
def onnx_cases() -> dict[str, tuple[onnx.ModelProto, list[object]]]:
    """Return name -> (model, inputs) of every case, but those that spell a function out."""
    from onnx.backend.test.case.node import collect_testcases  # it makes 1,900 cases: seconds

    with catch_warnings():
        simplefilter("ignore")  # some cases divide by zero on purpose
        cases = collect_testcases(None)
    return {
        case.name: (case.model, [_as_array(value) for value in case.data_sets[0][0]])
        for case in cases
        if case.model is not None and case.data_sets and not case.name.endswith("_expanded")
    }


def _as_array(value: object) -> object:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def why_unusable(model: onnx.ModelProto, inputs: list[object]) -> str | None:
    """Say why a case has no gradient to compare, None if it has one."""
    graph = model.graph
    if len(graph.node) != 1:
        return "more than one node"
    if graph.node[0].domain:
        return "not a standard op"
    if graph.node[0].op_type in FLAT_OPS:
        return "an op that does not change with its inputs"
    arrays = [value for value in inputs if isinstance(value, np.ndarray | np.generic)]
    if len(arrays) < len(inputs) or any(array.dtype.kind in "OUST" for array in arrays):
        return "text, sequences or optionals"
    if not any(_is_float(value) for value in graph.output):
        return "no float output"
    fixed = _fixed_inputs(graph.node[0])
    if not any(_is_float(value) and value.name not in fixed for value in graph.input):
        return "no float input"
    return None


def _is_float(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type in FLOATS


def _fixed_inputs(node: onnx.NodeProto) -> set[str]:
    constant = CONSTANT_INPUTS.get(node.op_type, frozenset())
    return {node.input[index] for index in constant if index < len(node.input)}


def problem(model: onnx.ModelProto, inputs: list[object], element: int) -> Problem:
    """Make a case's float inputs parameters of the given element type, its other inputs constants."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph, node = changed.graph, changed.graph.node[0]
    parameters = _store_inputs(graph, node, inputs, element)
    for attribute in node.attribute:
        if attribute.name in ("to", "stash_type") and attribute.i in FLOATS:
            attribute.i = element
    output = next(value for value in graph.output if _is_float(value))
    output.type.tensor_type.elem_type = element
    for value in [value for value in graph.output if value.name != output.name]:
        graph.output.remove(value)
    reads = [helper.make_node("Identity", [name], [name.removesuffix(".given")]) for name in parameters]
    nodes = [*reads, node, *_weighted_sum(output)]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.output.append(helper.make_tensor_value_info("total", element, []))
    facts = json.dumps({"parameters": sorted(parameters)})
    changed.metadata_props.append(onnx.StringStringEntryProto(key=FORWARD_KEY, value=facts))
    changed.ir_version = 10
    return Problem(changed, parameters)


def _store_inputs(graph: onnx.GraphProto, node: onnx.NodeProto, inputs: list[object], element: int) -> Arrays:
    fixed = _fixed_inputs(node)
    parameters: Arrays = {}
    for value, given in zip(graph.input, inputs, strict=True):
        array, name = np.asarray(given), value.name
        if _is_float(value) and name in fixed:
            # Resize's scales are float32 whatever it resizes.
            array = array if node.op_type == "Resize" else array.astype(_dtype(element))
        elif _is_float(value):
            name = f"{name}.given"
            parameters[name] = array = array.astype(_dtype(element))
        graph.initializer.append(numpy_helper.from_array(array, name))
    del graph.input[:]
    return parameters


def _dtype(element: int) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(element)


def _weighted_sum(output: onnx.ValueInfoProto) -> list[onnx.NodeProto]:
    shape = [size.dim_value for size in output.type.tensor_type.shape.dim]
    dtype = _dtype(output.type.tensor_type.elem_type)
    weights = numpy_helper.from_array(np.asarray(np.random.default_rng(8).normal(size=shape), dtype))
    return [
        helper.make_node("Constant", [], ["loss_weights"], value=weights),
        helper.make_node("Mul", [output.name, "loss_weights"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted"], ["total"], keepdims=0),
    ]


class Erf(OpRun):
    """ONNX's reference rounds it to float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(np.vectorize(math.erf, otypes=[x.dtype])(x)),)


class Pad(OpRun):
    """ONNX's reference refuses negative amounts."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        amounts: np.ndarray,
        value: np.ndarray | None = None,
        axes: np.ndarray | None = None,
        mode: str = "constant",
    ) -> tuple[np.ndarray]:
        widths = np.zeros((x.ndim, 2), np.int64)
        widths[slice(None) if axes is None else axes] = amounts.reshape(2, -1).T
        for axis, (before, after) in enumerate(widths.tolist()):
            kept = np.arange(max(0, -before), x.shape[axis] - max(0, -after))
            x = np.take(x, kept, axis)
        options = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
        return (np.pad(x, np.maximum(widths, 0), mode=mode, **options),)  # type: ignore[call-overload]


def in_onnxruntime(model: onnx.ModelProto) -> Run:
    """Return onnxruntime's way to run a model."""
    return session(model).run  # type: ignore[no-any-return]  # onnxruntime is untyped


def anyhow(model: onnx.ModelProto) -> Run:
    """Run a model in onnxruntime; in ONNX's reference where onnxruntime lacks a kernel."""
    try:
        return in_onnxruntime(model)
    except Exception:  # onnxruntime's own error classes are private
        return ReferenceEvaluator(model, new_ops=[Erf, Pad]).run  # type: ignore[return-value]


def gradients(
    forward: onnx.ModelProto,
    runner: Callable[[onnx.ModelProto], Run],
    trained: ParameterChoice = ParameterChoice(),  # noqa: B008  # frozen
) -> Arrays:
    """Differentiate `total`, run the gradient graph, and return every parameter's dense gradient."""
    objective = state_objective(forward, "total", None, None, trained)
    graph = objective.model.graph
    taken = {name for node in graph.node for name in (node.name, *node.input, *node.output)}
    build = NodeBuilder(taken)
    found = differentiate(build, graph, objective.types, objective.flow, loss="total", opset=OPSET)
    outputs = {gradient.parameter: gradient.dense or "" for gradient in found}
    names = list(dict.fromkeys(outputs.values()))
    model = helper.make_model(
        helper.make_graph(
            build.nodes,
            "gradients",
            [],
            [onnx.ValueInfoProto(name=name) for name in names],
            initializer=[*graph.initializer, *build.constants],
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(FUNCTION_DOMAIN, 1)],
        functions=list(build.functions.values()),
        ir_version=10,
    )
    values = dict(zip(names, runner(model)(names, {}), strict=True))
    return {parameter: values[name] for parameter, name in outputs.items()}


def slopes(problem: Problem, name: str) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield (position, d total / d entry) at some positions; not at a kink, a jump or a pole."""
    start = problem.parameters[name]
    total = _total(problem)
    here = total({})
    positions = list(np.ndindex(start.shape))
    chosen = np.random.default_rng(3).permutation(len(positions))[:MOST_POSITIONS]
    for position in (positions[index] for index in chosen):
        step = STEP * max(1.0, abs(float(start[position])))
        moved = []
        for shift in (-step, step):
            shifted = start.copy()
            shifted[position] += shift
            moved.append(total({name: shifted}))
        left, right = (here - moved[0]) / step, (moved[1] - here) / step
        if np.isfinite([left, right]).all() and abs(left - right) <= 1e-3 * (1 + abs(left) + abs(right)):
            yield position, (moved[1] - moved[0]) / (2 * step)


def _total(problem: Problem) -> Callable[[Arrays], float]:
    free = onnx.ModelProto()
    free.CopyFrom(problem.model)
    kept = [tensor for tensor in free.graph.initializer if tensor.name not in problem.parameters]
    del free.graph.initializer[:]
    free.graph.initializer.extend(kept)
    for key, value in problem.parameters.items():
        free.graph.input.append(helper.make_tensor_value_info(key, TensorProto.DOUBLE, value.shape))
    run = anyhow(free)
    return lambda changed: float(run(["total"], {**problem.parameters, **changed})[0])
