"""The files that the documentation's commands name, small: made by partc's own commands."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx

from tests.checks.command_line import done

from .pages import ROOT

LINEAR = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[8,4] x, float[8,3] y, float[4,3] W, float[3] b)
    => (float loss, float[4,3] W_next, float[3] b_next) {
    rate = Constant <value = float {0.1}> ()
    product = MatMul (x, W)
    sum = Add (product, b)
    difference = Sub (sum, y)
    square = Mul (difference, difference)
    loss = ReduceMean <keepdims = 0> (square)
    scale = Constant <value = float {0.08333333}> ()
    gradient = Mul (difference, scale)
    transposed = Transpose <perm = [1, 0]> (x)
    W_gradient = MatMul (transposed, gradient)
    axes = Constant <value = int64[1] {0}> ()
    b_gradient = ReduceSum <keepdims = 0> (gradient, axes)
    W_change = Mul (W_gradient, rate)
    b_change = Mul (b_gradient, rate)
    W_next = Sub (W, W_change)
    b_next = Sub (b, b_change)
}
"""


def make_stand_ins(folder: Path) -> None:
    """Write a forward model and its step, a step from elsewhere, data, clusters, and plans. The working
    directory must be `folder`, so that paths in plans are as on the pages.
    """
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples" / "cluster-2x2.json", folder / "cluster.json")
    shutil.copy(ROOT / "examples" / "cluster-2x2.json", folder)
    _write_three_hosts(folder)
    done("model", "lenet", "--set", "batch=32", "-o", "net.onnx", "-q")
    for copy in ("model.onnx", "forward.onnx"):
        shutil.copy("net.onnx", copy)
    done("grad", "net.onnx", "--loss", "softmax_cross_entropy", "--lr", "0.01", "-o", "train.onnx", "-q")
    step = onnx.parser.parse_model(LINEAR)
    step.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in (("W", (4, 3)), ("b", (3,)))
    )
    onnx.save(step, "step.onnx")
    shutil.copytree(ROOT / "tests" / "fixtures" / "ort_training" / "cnn", folder / "artifacts")
    random = np.random.default_rng(0)
    images = random.normal(size=(256, 1, 32, 32)).astype(np.float32)
    np.savez("data.npz", x=images, labels=random.integers(0, 10, 256))
    for plan, strategy in (("out", "auto"), ("out-auto", "auto"), ("out-ps", "ps")):
        done("compile", "train.onnx", "-c", "cluster.json", "--strategy", strategy, "-o", plan, "-q")
    for copy in ("out1", "out2"):
        shutil.copytree("out-ps", copy)


def _write_three_hosts(folder: Path) -> None:
    """Write a cluster of three hosts of one worker each."""
    cluster = json.loads((folder / "cluster.json").read_text())
    hosts = [
        {**cluster["hosts"][0], "name": f"host{n}", "devices": [
            {**cluster["hosts"][0]["devices"][0], "name": f"host{n}/cpu0"}
        ]}
        for n in range(3)
    ]  # fmt: skip
    links = [{"ends": [f"host{n}", "switch"], "bytes_per_s": 125e6, "latency_s": 25e-6} for n in range(3)]
    three = {**cluster, "name": "three hosts", "hosts": hosts, "switches": ["switch"], "links": links}
    (folder / "three-hosts.json").write_text(json.dumps(three))
