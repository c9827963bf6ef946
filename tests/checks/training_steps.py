"""Run a flat training graph in plain onnxruntime, for the tests of compiler/differentiation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from partc.compiler.differentiation.assemble import TRAINING_KEY
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice

# Graphs of one operator have no layers to tell parameters by.
EVERYTHING = ParameterChoice(train=("*",))

Arrays = dict[str, np.ndarray]


def facts_of(model: onnx.ModelProto) -> dict[str, Any]:  # Any: parsed JSON
    return next(json.loads(p.value) for p in model.metadata_props if p.key == TRAINING_KEY)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # ScatterND adds to one row from two threads without a lock
    return ort.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        # It keeps a double's scale as a float32 attribute: the result is right to 1e-7 only.
        disabled_optimizers=["MatMulScaleFusion", "MatmulTransposeFusion"],
    )


def initial_variables(model: onnx.ModelProto) -> Arrays:
    names = facts_of(model)["state"]
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name in names}
    for training in model.training_info:
        made = helper.make_model(
            training.initialization, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
        )
        outputs = dict(zip((o.name for o in made.graph.output), session(made).run(None, {}), strict=True))
        values |= {b.key: outputs[b.value] for b in training.initialization_binding}
    assert values.keys() == names.keys()
    return values


def train(
    model: onnx.ModelProto,
    batches: Sequence[Mapping[str, np.ndarray]],
    start: Arrays | None = None,
) -> tuple[list[float], Arrays]:
    """Return the loss of every step, and the variables after the last."""
    onnx.checker.check_model(model)
    facts = facts_of(model)
    variables = initial_variables(model) if start is None else start
    step = session(model)
    losses = []
    for batch in batches:
        outputs = step.run([facts["loss"], *facts["state"].values()], {**variables, **batch})
        losses.append(float(outputs[0]))
        variables = dict(zip(facts["state"], outputs[1:], strict=True))
    return losses, variables


def fetch(model: onnx.ModelProto, name: str, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return any tensor of the first step."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if name not in {output.name for output in copy.graph.output}:
        copy.graph.output.append(onnx.ValueInfoProto(name=name))
    fetched: np.ndarray = session(copy).run([name], {**initial_variables(model), **feeds})[0]
    return fetched
