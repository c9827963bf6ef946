"""Windows over the axis of samples, as over one sequence: micro-batches have no neighbours to read from."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.verify import launch_in_process, verify
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import compile_step

FORWARD = """
forward (float[8,4] x) => (float loss) <float[4,6] w, float[3,6,3] k, int64[1] zero = {0}> {
    z = MatMul (x, w)
    t = Transpose <perm = [1, 0]> (z)
    u = Unsqueeze (t, zero)
    p = WINDOW
    q = Mul (p, p)
    loss = ReduceMean <keepdims = 0> (q)
}
"""
WINDOWS = {
    "conv": "Conv <kernel_shape = [3], pads = [1, 1]> (u, k)",
    "max": "MaxPool <kernel_shape = [3], strides = [2], pads = [1, 1]> (u)",
    "max of all": "MaxPool <kernel_shape = [3], pads = [1, 1]> (u)",
    "average": "AveragePool <kernel_shape = [2], strides = [2]> (u)",
}
STRATEGIES = {
    "1x2": ("pipeline=2", "data=2,microbatches=2"),
    "1x1": ("microbatches=4",),
    "2x2": ("tensor=2,microbatches=2",),
}
CASES = [
    (window, cluster, name) for window in WINDOWS for cluster, names in STRATEGIES.items() for name in names
]


@pytest.mark.parametrize(("window", "cluster", "strategy"), CASES)
def test_micro_batches_are_gathered_for_windows_over_them(
    tmp_path: Path, window: str, cluster: str, strategy: str
) -> None:
    text = FORWARD.replace("WINDOW", WINDOWS[window])
    model = parse(text if window == "conv" else text.replace(", float[3,6,3] k", ""))
    rng = np.random.default_rng(0)
    for name, shape in [("w", (4, 6)), *([("k", (3, 6, 3))] if window == "conv" else [])]:
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    del model.graph.value_info[:]
    step = build_training_graph(model, loss="loss", optimizer=SGD(0.1))

    compile_step(import_training_graph(step), tmp_path / "out", cluster, strategy, "global")
    found = verify(tmp_path / "out", steps=3, launcher=launch_in_process)

    assert found.passed, found.summary()
