"""ONNX's own cases for an op, as things to differentiate: every float input becomes a parameter.

The loss is a weighted sum of all float outputs, so that no gradient is symmetric by luck. In float64
wherever ONNX Runtime has the kernels that the training graph needs, else in float32.
"""

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node
from onnx.backend.test.case.test_case import TestCase
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidGraph,
    NotImplemented,
    RuntimeException,
)

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import BadModel
from tests.checks.training_steps import EVERYTHING, Arrays, facts_of, session

MINIMUM_OPSET = 13
MISSING_KERNEL = (NotImplemented, InvalidGraph, Fail, RuntimeException)
BY_REFERENCE = ("test_attention",)  # ONNX Runtime 1.31 leaves rows that see no key at NaN or at an average
IN_FLOAT32 = ("test_group_normalization", "test_mvn")  # even the function's own body is


@dataclass(frozen=True)
class Case:
    name: str
    model: onnx.ModelProto
    inputs: Arrays
    outputs: Arrays


def cases_of(module: str) -> dict[str, Case]:
    """Return the cases of one module of onnx.backend.test.case.node, but for spelled-out functions."""
    cases = {}
    for case in _exported(module):
        opset = max(o.version for o in case.model.opset_import if o.domain in ("", "ai.onnx"))
        if not case.data_sets or opset < MINIMUM_OPSET or "_expanded" in case.name:
            continue
        inputs, outputs = case.data_sets[0]
        if any(isinstance(value, list | tuple) for value in (*inputs, *outputs)):
            continue  # sequences
        graph = case.model.graph
        cases[case.name.removeprefix("test_")] = Case(
            case.name,
            case.model,
            dict(zip((value.name for value in graph.input), map(np.asarray, inputs), strict=True)),
            dict(zip((value.name for value in graph.output), map(np.asarray, outputs), strict=True)),
        )
    return cases


def _exported(module: str) -> list[TestCase]:
    """Run one module: collect_testcases runs all of them, which takes 8 s, and only once in a process."""
    name = f"{node.__name__}.{module}"
    node._TargetOpType = None
    before = len(node._NodeTestCases)
    if name in sys.modules:
        importlib.reload(sys.modules[name])
    else:
        importlib.import_module(name)
    return list(node._NodeTestCases[before:])


def differentiable(
    case: Case, inputs: Arrays, outputs: Sequence[str], dtype: type[np.floating]
) -> onnx.ModelProto:
    """Return the case's model with its inputs stored, floats as `dtype`, and a scalar output `total`."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = element
    for name, array in inputs.items():
        wide = array.astype(dtype) if array.dtype in (np.float32, np.float64) else array
        graph.initializer.append(numpy_helper.from_array(wide.copy(order="C"), name))
    del graph.input[:]
    _add_weighted_sum(graph, {name: case.outputs[name].shape for name in outputs}, dtype)
    return model


def _add_weighted_sum(
    graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]], dtype: type[np.floating]
) -> None:
    for position, (name, shape) in enumerate(shapes.items()):
        weights = np.asarray(np.random.default_rng(position).normal(size=shape)).astype(dtype)
        nodes = [
            helper.make_node("Constant", [], [f"{name}.w"], value=numpy_helper.from_array(weights)),
            helper.make_node("Mul", [name, f"{name}.w"], [f"{name}.wy"]),
            helper.make_node("ReduceSum", [f"{name}.wy"], [f"{name}.sum"], keepdims=0),
        ]
        graph.node.extend(nodes)
    graph.node.append(helper.make_node("Sum", [f"{name}.sum" for name in shapes], ["total"]))
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph.output.append(helper.make_tensor_value_info("total", element, []))


@dataclass(frozen=True)
class Differentiated:
    """A case's training graph, run once."""

    dtype: type[np.floating]
    outputs: Arrays
    gradients: Arrays


def differentiate_case(case: Case, inputs: Arrays, outputs: Sequence[str]) -> Differentiated:
    """Run one step of the case's training graph: in float64, or in float32 where a kernel is missing."""
    try:
        return _differentiate(case, inputs, outputs, np.float64)
    except (*MISSING_KERNEL, BadModel):
        return _differentiate(case, inputs, outputs, np.float32)


def _differentiate(
    case: Case, inputs: Arrays, outputs: Sequence[str], dtype: type[np.floating]
) -> Differentiated:
    built = build_training_graph(
        differentiable(case, inputs, outputs, dtype), loss="total", optimizer=SGD(1.0), parameters=EVERYTHING
    )
    onnx.checker.check_model(built)
    facts = facts_of(built)
    state = facts["state"]
    start = {t.name: numpy_helper.to_array(t) for t in built.graph.initializer if t.name in state}
    names = [output.name for output in built.graph.output]
    values = dict(zip(names, session(built).run(names, start), strict=True))
    return Differentiated(
        dtype, values, {name: start[name] - values[state[name]] for name in facts["gradients"]}
    )


def slope(case: Case, inputs: Arrays, outputs: Sequence[str], way: Arrays) -> float:
    """Return d total / d t of inputs + t way, by central differences of the case's model."""
    dtype, step = (np.float32, 1e-2) if case.name.startswith(IN_FLOAT32) else (np.float64, 1e-6)
    ends = []
    for shift in (step, -step):
        moved = {name: value + shift * way[name] if name in way else value for name, value in inputs.items()}
        model = differentiable(case, moved, outputs, dtype)
        ends.append(_total(model, by_reference=case.name.startswith(BY_REFERENCE)))
    return (ends[0] - ends[1]) / (2 * step)


def _total(model: onnx.ModelProto, *, by_reference: bool) -> float:
    """Run in ONNX Runtime, or in ONNX's reference evaluator where a kernel is missing or deviates."""
    if not by_reference:
        with contextlib.suppress(*MISSING_KERNEL):
            return float(session(model).run(["total"], {})[0])
    return float(ReferenceEvaluator(model).run(["total"], {})[0])
