"""Segments for GPUs compute what those for CPUs do; here on the CPU, where the former run as well."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.verify import launch_in_process, verify
from partc.models.catalogue import build_model
from partc.passes.gpu_kernels.ordered_sums import sum_rows_in_order
from partc.passes.gpu_kernels.rewrite_for_gpu import rewrite_for_gpu
from partc.passes.indexed_rows.indexed_slices import sum_rows_function
from tests.builders.plans.compiled_steps import compile_step, random_batches

OPSET = 21
SIZES = {
    "mlp": {"sizes": (6, 8, 4), "batch": 8},
    "lm": {"vocab": 60, "embedding": 8, "cells": 8, "projection": 8, "steps": 3, "samples": 16, "batch": 8},
    "resnet50": {"width": 4, "image": 32, "classes": 10, "batch": 8, "blocks": (1, 1, 1, 1)},
}


@pytest.mark.parametrize(
    ("model", "strategy"), [("mlp", "allreduce"), ("lm", "hybrid"), ("resnet50", "data")]
)
def test_a_plan_for_gpus_trains_as_one_device(tmp_path: Path, model: str, strategy: str) -> None:
    optimizer = Adagrad(0.1, initial_accumulator=1e-6) if model == "lm" else Momentum(0.1)
    loss = "loss" if model == "lm" else "softmax_cross_entropy"
    step = build_training_graph(build_model(model, **SIZES[model]), loss=loss, optimizer=optimizer)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "2x1s", strategy, "global")
    segments = [onnx.load(path) for path in (tmp_path / "out/segments").glob("*-worker-*.onnx")]
    assert segments and not any(segment.functions for segment in segments)

    report = verify(
        compiled.folder, steps=2, data=random_batches(compiled.plan, 2), launcher=launch_in_process
    )

    assert report.passed, report.summary()


@pytest.mark.parametrize("shape", [(7, 3), (1,), (300, 2, 4), (0, 3), (257,), (64, 5)])
def test_rows_are_summed_in_order(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(shape))
    feeds = {"ids": random.integers(0, 9, shape[0]), "rows": random.standard_normal(shape).astype(np.float32)}
    row = "".join(f", {axis}" for axis in "ab"[: len(shape) - 1])
    graph = onnx.parser.parse_graph(
        f"sums (int64[n] ids, float[n{row}] rows) => (int64[u] unique, float[u{row}] summed)"
        "{ unique, summed = partc.SumRows (ids, rows) }"
    )
    results = []
    for function in (sum_rows_function(OPSET), sum_rows_in_order(OPSET)):
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("partc", 1)]
        model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
        results.append(ort.InferenceSession(model.SerializeToString()).run(None, feeds))

    np.testing.assert_array_equal(results[1][0], results[0][0])
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-5, atol=1e-5)


REDUCTIONS = """
<ir_version: 10, opset_import: ["" : 21]>
reduce (float[4,3,5,6] x) => (float[3] mean, float[1,3,1,1] kept, float[6] left, int64[4] sizes) {
    all_but_channels = Constant <value_ints = [0, 2, -1]> ()
    others = Constant <value_ints = [0, 1, 2]> ()
    mean = ReduceMean <keepdims = 0> (x, all_but_channels)
    kept = ReduceSum (x, all_but_channels)
    left = ReduceSum <keepdims = 0> (x, others)
    count = Size (kept)
    sizes = Shape (x)
    unused = Neg (count)
}
"""


def test_reductions_are_split_and_sizes_fixed() -> None:
    before = onnx.parser.parse_model(REDUCTIONS)
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 3, 5, 6)).astype(np.float32)}
    expected = ort.InferenceSession(before.SerializeToString()).run(None, feeds)

    after, _ = rewrite_for_gpu(before)

    actual = ort.InferenceSession(after.SerializeToString()).run(None, feeds)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    ops = Counter(node.op_type for node in after.graph.node)
    assert (ops["ReduceMean"], ops["ReduceSum"], ops["Size"], ops["Shape"]) == (2, 3, 0, 1)


PRODUCTS = """
<ir_version: 10, opset_import: ["" : 21]>
products (float[2,6,4096] y, float[2,4096,5] one, float[2,4096,3] other)
    => (float[6,5] of_one, float[6,3] of_other) {
    first = Constant <value_ints = [0]> ()
    by_one = MatMul (y, one)
    of_one = ReduceSum <keepdims = 0> (by_one, first)
    by_other = MatMul (y, other)
    of_other = ReduceSum <keepdims = 0> (by_other, first)
}
"""


def test_products_of_few_tiles_are_made_in_parts() -> None:
    before = onnx.parser.parse_model(PRODUCTS)
    random = np.random.default_rng(0)
    feeds = {
        name: random.standard_normal((2, *sizes), np.float32)
        for name, sizes in {"y": (6, 4096), "one": (4096, 5), "other": (4096, 3)}.items()
    }
    expected = ort.InferenceSession(before.SerializeToString()).run(None, feeds)

    after, inferred = rewrite_for_gpu(before)

    actual = ort.InferenceSession(after.SerializeToString()).run(None, feeds)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    ops = Counter(node.op_type for node in after.graph.node)
    assert (ops["MatMul"], ops["Transpose"]) == (2, 1)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    assert shapes["by_one"] == [32, 6, 5]


@pytest.mark.parametrize(("count", "concats"), [(32, 1), (33, 3), (49, 3), (32 * 32 + 1, 36)])
def test_many_tensors_are_joined_in_turns(count: int, concats: int) -> None:
    names = ", ".join(f"x{number}" for number in range(count))
    inputs = ", ".join(f"float[2,1] x{number}" for number in range(count))
    before = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> join ({inputs}) => (float[2,{count}] all)'
        f" {{ all = Concat <axis = 1> ({names}) }}"
    )

    after, _ = rewrite_for_gpu(before)

    feeds = {f"x{number}": np.full((2, 1), number, np.float32) for number in range(count)}
    (joined,) = ort.InferenceSession(after.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(joined, np.tile(np.arange(count, dtype=np.float32), (2, 1)))
    assert len(after.graph.node) == concats
    assert max(len(node.input) for node in after.graph.node) <= 32


NAMED = """
<ir_version: 10, opset_import: ["" : 21]>
named (float[4,3,5] x, float[2,6,4096] y, float[2,4096,5] z, bool c)
    => (float[3] total, float[6,5] of_one, float[2,6,5] kept) {
    axes = Constant <value_ints = [0, 2]> ()
    first = Constant <value_ints = [0]> ()
    "integers/2" = Neg (x)
    "total/last" = Abs ("integers/2")
    total = ReduceSum <keepdims = 0> ("total/last", axes)
    by_one = MatMul (y, z)
    of_one = ReduceSum <keepdims = 0> (by_one, first)
    kept = If (c) <then_branch = t () => (float[2,6,5] same) { same = Identity (by_one) },
                   else_branch = e () => (float[2,6,5] less) { less = Neg (by_one) }>
}
"""


def test_names_of_the_model_and_what_bodies_read_are_left_alone() -> None:
    before = onnx.parser.parse_model(NAMED)
    random = np.random.default_rng(0)
    shapes = {"x": (4, 3, 5), "y": (2, 6, 4096), "z": (2, 4096, 5)}
    feeds = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    feeds |= {"c": np.array(True)}
    expected = ort.InferenceSession(before.SerializeToString()).run(None, feeds)

    after, _ = rewrite_for_gpu(before)

    actual = ort.InferenceSession(after.SerializeToString()).run(None, feeds)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
