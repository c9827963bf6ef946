"""Time-major steps that cut and join the axis of time and samples: no rank needs another's samples."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.runtime.plan.program import Start
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

# [T, B, d] as [T B, d], as an exporter writes it; each step is 8 rows
FORWARD = """
forward (double[3,8,6] x) => (double loss)
<double[6,6] W, double[6,5] V, int64[2] rows = {24, 6}> {
    flat = Reshape (x, rows)
    h = MatMul (flat, W)
    CUT
    y = MatMul (cut, V)
    square = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (square)
}
"""
CUTS = {
    "Slice": """
        start = Constant <value = int64[1] {8}> ()
        end = Constant <value = int64[1] {-8}> ()
        axis = Constant <value = int64[1] {0}> ()
        cut = Slice (h, start, end, axis)
    """,
    "Split": """
        lengths = Constant <value = int64[3] {8, 8, 8}> ()
        one, two, three = Split <axis = 0> (h, lengths)
        cut = Mul (one, three)
    """,
    "Split by count": """
        one, two, three = Split <axis = 0, num_outputs = 3> (h)
        cut = Concat <axis = 0> (three, one)
    """,
    "Pad": """
        pads = Constant <value = int64[4] {8, 0, 0, 0}> ()
        end = Constant <value = int64[4] {0, 0, 8, 0}> ()
        later = Pad (h, pads)
        longer = Pad (h, end)
        cut = Add (later, longer)
    """,
}


@pytest.mark.parametrize("cut", CUTS)
def test_samples_stay_where_they_are(cut: str, tmp_path: Path) -> None:
    model = parse(FORWARD.replace("CUT", CUTS[cut]))
    rng = np.random.default_rng(0)
    for name, shape in {"W": (6, 6), "V": (6, 5)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    del model.graph.value_info[:]
    step = build_training_graph(model, loss="loss", optimizer=Momentum(0.1))
    training = import_training_graph(step, GraphOptions(sample_axes={"x": 1}))

    compiled = compile_step(training, tmp_path / "out", "2x2", "allreduce", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3))
    kinds = {start.kind for start in compiled.plan.instructions if isinstance(start, Start)}
    assert kinds <= {"all_reduce", "reduce", "broadcast"}
