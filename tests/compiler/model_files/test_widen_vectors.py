"""Products with vectors, which ONNX Runtime computes wrongly of a transposed matrix, against NumPy."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.model_files.open_model import open_model
from partc.compiler.options import GraphOptions
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    random_batches,
    verified,
)

FORWARD = """
forward (float[4,5,5] x) => (float loss) {
    left = LEFT
    right = RIGHT
    y = MatMul (left, right)
    square = Mul (y, y)
    mean = ReduceMean <keepdims = 0> (square)
    other = ReduceMean <keepdims = 0> (x)
    loss = Mul (mean, other)
}
"""
READ = {
    "samples": "Identity (x)",
    "samples' transposes": "Transpose <perm = [0, 2, 1]> (x)",
    "matrix": "Identity (W)",
    "transpose": "Transpose (W)",
    "vector": "Identity (v)",
    "made vector": "Tanh (v)",
}
NUMPY = {
    "samples": lambda x, W, v: x,
    "samples' transposes": lambda x, W, v: x.transpose(0, 2, 1),
    "matrix": lambda x, W, v: W,
    "transpose": lambda x, W, v: W.T,
    "vector": lambda x, W, v: v,
    "made vector": lambda x, W, v: np.tanh(v),
}


WITHIN = {
    "a function": """
    <ir_version: 10, opset_import: ["": 21, "own": 1]>
    step (float[4,5] x, float[5,5] W, float[5] u) => (float loss, float[5] u_next, float[5,5] W_next)
    {
        u_next = own.turned (W, u)
        y = MatMul (x, W)
        loss = ReduceMean <keepdims = 0> (y)
        W_next = Tanh (W)
    }
    <opset_import: ["": 21, "own": 1], domain: "own"> turned (A, b) => (c) { c = own.times (A, b) }
    <opset_import: ["": 21], domain: "own"> times (A, b) => (c) { t = Transpose (A) c = MatMul (t, b) }
    """,
    "a branch of a function": """
    <ir_version: 10, opset_import: ["": 21, "own": 1]>
    step (float[4,5] x, float[5,5] W, float[5] u) => (float loss, float[5] u_next, float[5,5] W_next)
    {
        r = own.turned (W, u)
        u_next = Identity (r)
        y = MatMul (x, W)
        loss = ReduceMean <keepdims = 0> (y)
        W_next = Tanh (W)
    }
    <opset_import: ["": 21], domain: "own"> turned (A, b) => (c)
    {
        yes = Constant <value = bool {1}> ()
        c = If (yes) <
            then_branch = then () => (float[5] made) { t = Transpose (A) made = MatMul (t, b) },
            else_branch = else () => (float[5] kept) { kept = Identity (b) }
        >
    }
    """,
    "a loop": """
    <ir_version: 10, opset_import: ["": 21]>
    step (float[4,5] x, float[5,5] W, float[5] u) => (float loss, float[5] u_next, float[5,5] W_next)
    {
        one = Constant <value = int64 {1}> ()
        yes = Constant <value = bool {1}> ()
        r = Loop (one, yes, u) <body = b (int64 i, bool go, float[] v) => (bool on, float[5] made) {
            on = Identity (go)
            t = Transpose (W)
            made = MatMul (t, v)
        }>
        u_next = Identity (r)
        y = MatMul (x, W)
        loss = ReduceMean <keepdims = 0> (y)
        W_next = Tanh (W)
    }
    """,
}


@pytest.mark.parametrize("place", WITHIN)
def test_products_within_others_are_those_of_numpy(place: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(WITHIN[place])
    rng = np.random.default_rng(0)
    W, u = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 5), (5,)))
    for name, value in {"W": W, "u": u}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    options = GraphOptions(state={"u": "u_next", "W": "W_next"}, loss="loss", sample_axes={"x": 0})

    compiled = compile_step(import_training_graph(model, options), tmp_path / "out", "1x2", "allreduce")

    assert verified(compiled, random_batches(compiled.plan, 2)).passed
    feeds = {"x": np.zeros((4, 5), np.float32), "W": W, "u": u}
    np.testing.assert_allclose(open_model(model).run(["u_next"], feeds)[0], W.T @ u, rtol=1e-4)


TRAINED = [sides for sides in product(READ, READ) if not all(side.startswith("samples") for side in sides)]


@pytest.mark.parametrize(("left", "right"), TRAINED)
def test_products_of_any_ranks_are_those_of_numpy(left: str, right: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, W, v = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 5, 5), (5, 5), (5,)))
    model = parse(FORWARD.replace("LEFT", READ[left]).replace("RIGHT", READ[right]))
    stored = {"W": W, "v": v}
    read = {name for name in stored if any(f"({name})" in READ[side] for side in (left, right))}
    for name in read:
        model.graph.initializer.append(onnx.numpy_helper.from_array(stored[name], name))
    step = build_training_graph(
        model, loss="loss", optimizer=SGD(1.0), parameters=ParameterChoice(train=tuple(read))
    )

    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", "global")

    expected = (np.matmul(NUMPY[left](x, W, v), NUMPY[right](x, W, v)) ** 2).mean() * x.mean()
    feeds = {"x": x} | {name: stored[name] for name in read}
    names = [output.name for output in step.graph.output]
    plain = ort.InferenceSession(step.SerializeToString()).run(names, feeds)
    np.testing.assert_allclose(plain[names.index("loss")], expected, rtol=1e-4)
    for name, value, exact in zip(names, plain, open_model(step).run(names, feeds), strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-3, atol=1e-5, err_msg=name)
    assert_trains_as_one_device(compiled, [{"x": x}])
