"""Updates in blocks: the same numbers, to the last bit, wherever the result lies."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser, shape_inference

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import LAMB, Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.passes.cpu_kernels import block_updates as blocking
from partc.passes.cpu_kernels.block_updates import block_updates
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
ADAM = """
step (float[6,8] w, float[6,8] m, float[6,8] v, float[6,8] g, float rate)
    => (float[6,8] w2, float[6,8] m2, float[6,8] v2) <float a = {0.9}, float[1] b = {0.1}> {
    am = Mul (m, a)  bg = Mul (g, b)  m2 = Add (am, bg)
    av = Mul (v, a)  gg = Mul (g, g)  bgg = Mul (b, gg)  v2 = Add (av, bgg)
    s = Sqrt (v2)  q = Div (m2, s)  d = Mul (q, rate)  w2 = Sub (w, d)
}"""
# The update is scaled by its own norm: what makes the norm lies in one Scan, what it scales in another.
SCALED_BY_NORM = """
step (float[6,8] w, float[6,8] m, float[6,8] v, float[6,8] g, float rate)
    => (float[6,8] w2, float[6,8] m2) <float a = {0.9}, float[1] b = {0.1}> {
    am = Mul (m, a)  bg = Mul (g, b)  m1 = Add (am, bg)  m2 = Sub (m1, v)
    mm = Mul (m2, m2)  norm = ReduceSum <keepdims = 0> (mm)
    scaled = Div (m2, norm)  d = Mul (scaled, rate)  half = Mul (d, a)  w2 = Sub (w, half)
}"""
# The result is read as a whole besides, and an operand comes from a node behind the first reader.
READ_BESIDES = """
step (float[6,8] w, float[6,8] m, float[6,8] v, float[6,8] g, float rate)
    => (float[6,8] w2, float[8,6] turned) <float a = {0.9}> {
    am = Mul (m, a)  av = Mul (v, a)  early = Transpose (am)
    gt = Transpose (early)  n = Add (gt, av)  d = Mul (n, rate)  d2 = Mul (d, a)  w2 = Sub (w, d2)
    turned = Transpose (w2)
}"""

# A row that is broadcast does not go with blocks; what is left of the chain is short.
SHORT = """
step (float[6,8] w, float[6,8] g, float[8] row) => (float[6,8] w2) <float a = {0.9}> {
    d = Mul (g, row)  e = Mul (d, a)  f = Mul (e, a)  w2 = Sub (w, f)
}"""

TWO = """
step (float[6,8] w, float[6,8] m, float[6,8] v, float[6,8] g) => (float[6,8] w2, float[6,8] m2) {
    a = Mul (w, g)  b = Mul (a, g)  c = Mul (b, g)  w2 = Sub (c, g)
    d = Mul (m, v)  e = Mul (d, v)  f = Mul (e, v)  m2 = Sub (f, v)
}"""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "LEAST_ELEMENTS", 24)
    monkeypatch.setattr(blocking, "LEAST_IN_BLOCK", 4)
    monkeypatch.setattr(blocking, "MOST_IN_BLOCK", 16)


def model_of(text: str) -> onnx.ModelProto:
    model = parser.parse_model(HEADER + text)
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def blocked(text: str, in_place: set[str]) -> tuple[onnx.ModelProto, int]:
    model = model_of(text)
    changed = block_updates(model, shape_inference.infer_shapes(model), in_place)
    onnx.checker.check_model(model, full_check=True)
    return model, changed


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    inputs = [(i.name, [d.dim_value for d in i.type.tensor_type.shape.dim]) for i in model.graph.input]
    feeds = {name: random.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in inputs}
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, feeds)]


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Reshape"]


@pytest.mark.parametrize(
    ("text", "in_place", "left"),
    [
        (ADAM, {"w2", "m2", "v2"}, ["Scan"]),
        (ADAM, {"v2"}, ["Scan"]),
        (SCALED_BY_NORM, {"w2", "m2"}, ["Scan", "ReduceSum", "Scan"]),
        (READ_BESIDES, {"w2"}, ["Mul", "Transpose", "Transpose", "Scan", "Transpose"]),
    ],
)
def test_blocks_give_the_same_bits(text: str, in_place: set[str], left: list[str]) -> None:
    model, _ = blocked(text, in_place)

    assert ops(model) == left
    for found, wanted in zip(run(model), run(model_of(text)), strict=True):
        np.testing.assert_array_equal(found.ravel(), wanted.ravel())


def test_the_file_is_the_same_in_every_process() -> None:
    """Names hash differently in every process: segments are files that ranks must make alike."""
    code = """
from tests.passes.cpu_kernels import test_block_updates as t
t.blocking.LEAST_ELEMENTS, t.blocking.LEAST_IN_BLOCK, t.blocking.MOST_IN_BLOCK = 24, 4, 16
model, _ = t.blocked(t.TWO, {'w2', 'm2'})
import hashlib; print(hashlib.sha256(model.SerializeToString()).hexdigest())"""
    made = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    ]

    assert len(set(made)) == 1


def test_what_is_written_in_place_is_declared_in_blocks() -> None:
    model, _ = blocked(ADAM, {"w2", "m2"})

    shapes = {o.name: [d.dim_value for d in o.type.tensor_type.shape.dim] for o in model.graph.output}
    assert shapes == {"w2": [3, 16], "m2": [3, 16], "v2": [6, 8]}


@pytest.mark.parametrize(
    ("text", "in_place"),
    [
        (ADAM, set()),  # not an update
        (ADAM.replace("[6,8]", "[53]"), {"w2"}),  # divides into no blocks
        (ADAM.replace("[6,8]", "[n,8]"), {"w2"}),
        (SHORT, {"w2"}),
    ],
)
def test_what_blocks_do_not_fit_stays(text: str, in_place: set[str]) -> None:
    model, changed = blocked(text, in_place)

    assert changed == 0
    assert "Scan" not in ops(model)


@pytest.mark.parametrize("optimizer", [Adam(0.01), LAMB(0.01)], ids=["adam", "lamb"])
@pytest.mark.parametrize(("cluster", "strategy"), [("1x2", "allreduce"), ("2x2", "hybrid"), ("1x1", "auto")])
def test_ranks_that_update_in_blocks_train_as_one_device(
    optimizer: Adam | LAMB, cluster: str, strategy: str, tmp_path: Path
) -> None:
    forward = build_model("mlp", sizes=(12, 16, 8), batch=4, dtype="float64")
    built = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=optimizer)

    done = compile_step(import_training_graph(built), tmp_path / "out", cluster, strategy)

    segments = [onnx.load(path) for path in (done.folder.path / "segments").glob("*.onnx")]
    assert any(node.op_type == "Scan" for segment in segments for node in segment.graph.node)
    assert_trains_as_one_device(done, random_batches(done.plan, 3))
