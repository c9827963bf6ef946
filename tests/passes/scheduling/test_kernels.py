"""A node's key says what takes time in it, no more, and the kernel is made of it again."""

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import helper

from partc.passes.layouts.configuration import data_parallel
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.kernels import (
    MOST_HOT_ELEMENTS,
    Kernel,
    KernelNamer,
    Operand,
    absorbed_transposes,
    parse_kernel,
)
from partc.passes.scheduling.segment_work import WorkCounter
from partc.runtime.plan.program import ABSORBED

FLOAT = np.dtype(np.float32)
SHAPES = {"x": (32, 64), "w": (64, 16), "wt": (16, 64), "y": (32, 16), "ids": (128,), "many": (None, 4)}

KEYS = [
    "MatMul(float32[32,64], float32[64,16])",
    "Add(float32[32,64], float32)",
    "Mul(hot(float32[32,64]), 0)",
    "hot(Mul(float32[32,64], float32[32,64]))",
    "Conv(float32[8,64,56,56], float32[64,64,3,3], None, group=1, pads=[1, 1, 1, 1])",
    "Pow(float32[64], float32(2.0))",
    "ReduceSum(float32[32,64], int64[1](-1), keepdims=1)",
    "MatMul(Transpose(float32[64,32], perm=[1, 0]), float32[64,16])",
    "MatMul(hot(Transpose(float32[64,32], perm=[1, 0])), float32[64,16])",
    "partc.SumRows(int64[128], float32[128,64], body='3f29c0d1')[2]",
    "LSTM(float32[2,3,4], direction='forward', hidden_size=4)",
    "Gather(float32[100,4], int64[2,2](0, 1, 2, 3))",
]


def value(name: str, dtype: np.dtype = FLOAT) -> gs.Variable:
    return gs.Variable(name, dtype=dtype)


def node(op: str, inputs: list[gs.Tensor], output: str = "y", **attributes: object) -> gs.Node:
    return gs.Node(op, f"{output}.node", attributes, inputs, [value(output)])


def key_of(made: gs.Node, hot: frozenset[str] = frozenset(), **known: gs.Node) -> str | None:
    return KernelNamer(SHAPES, {}, {}).key(made, hot, known)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_read_back(key: str) -> None:
    assert parse_kernel(key).key == key


@pytest.mark.parametrize("text", ["", "1 +", "MatMul", "f(x for x in y)", "f('a')", "f(Wrong(x, perm=[0]))"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not|no "):
        parse_kernel(text)


def test_names_and_the_order_of_attributes_do_not_count() -> None:
    one = node("Gemm", [value("x"), value("w")], alpha=1.0, transB=0)
    other = gs.Node("Gemm", "elsewhere", {"transB": 0, "alpha": 1.0}, [value("x"), value("w")], [value("z")])

    assert key_of(one) == key_of(other) == "Gemm(float32[32,64], float32[64,16], alpha=1.0, transB=0)"


def test_what_takes_another_time_has_another_key() -> None:
    x, w = value("x"), value("w")
    nodes = [
        node("MatMul", [x, w]),
        node("MatMul", [value("x", np.dtype(np.float64)), w]),
        node("MatMul", [value("wt"), w]),
        node("Mul", [x, x]),
        node("Mul", [x, value("x2")]),
        node("Softmax", [x], axis=0),
        node("Softmax", [x], axis=1),
        node("ReduceSum", [x, gs.Constant("axes", np.array([0]))]),
        node("ReduceSum", [x, gs.Constant("axes", np.array([1]))]),
    ]
    namer = KernelNamer(SHAPES | {"x2": (32, 64)}, {}, {})

    keys = [namer.key(each, frozenset(), {}) for each in nodes]

    assert None not in keys
    assert len(set(keys)) == len(nodes)
    assert namer.key(nodes[3], frozenset({"x"}), {}) == "Mul(hot(float32[32,64]), 0)"


def test_the_value_of_a_rate_does_not_count_and_an_exponent_does() -> None:
    rates = [node("Mul", [value("x"), gs.Constant("r", np.array(r, np.float32))]) for r in (0.1, 0.2)]
    powers = [node("Pow", [value("x"), gs.Constant("p", np.array(p, np.float32))]) for p in (2.0, 3.0)]

    assert len({key_of(each) for each in rates}) == 1
    assert len({key_of(each) for each in powers}) == 2


def test_what_cannot_be_told_has_no_key() -> None:
    large = {"large": (MOST_HOT_ELEMENTS,)}
    body = gs.Graph(nodes=[])

    assert key_of(node("Reshape", [value("x"), value("ids")])) is None, "a view"
    assert key_of(node("Expand", [value("x"), value("ids")])) is None, "its size is a value"
    assert key_of(node("Neg", [value("many")])) is None, "its size follows the data"
    assert key_of(node("Neg", [value("unknown")])) is None
    assert key_of(node("If", [value("x")], then_branch=body)) is None
    assert KernelNamer(large, {}, {}).key(node("Neg", [value("large")]), frozenset({"large"}), {}) is None


def test_a_function_is_told_by_its_body_and_those_that_it_calls() -> None:
    def functions(inner: str) -> dict[str, onnx.FunctionProto]:
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        bodies = {"Outer": "Inner", "Inner": inner}
        return {
            name: helper.make_function(
                "own", name, ["a"], ["b"], [helper.make_node(op, ["a"], ["b"], domain="own")], opsets
            )
            for name, op in bodies.items()
        }

    called = gs.Node("Outer", "f", {}, [value("x")], [value("y")], domain="own")
    keys = [
        KernelNamer(SHAPES, functions(inner), {}).key(called, frozenset(), {}) for inner in ("Neg", "Exp")
    ]

    assert all(key is not None and key.startswith("own.Outer(float32[32,64], body=") for key in keys)
    assert keys[0] != keys[1]


def test_a_transpose_that_only_products_read_vanishes_in_them() -> None:
    turned = node("Transpose", [value("w")], "wt", perm=[1, 0])
    product = node("MatMul", [value("y"), value("wt")], "dx")
    lowered = LoweredGraph(
        data_parallel(1).meshes,
        nbytes={"w": 4096, "wt": 4096, "y": 2048},
        shapes={**SHAPES, "dx": (32, 64)},
    )

    work = WorkCounter(lowered, 1).count([turned, product], {"dx"})

    assert [kernel.key for kernel in work.kernels] == [
        ABSORBED,
        "MatMul(float32[32,16], Transpose(float32[64,16], perm=[1, 0]))",
    ]
    assert work.kernels[0].touched_bytes == 8192
    assert sum(kernel.touched_bytes for kernel in work.kernels) == work.touched_bytes
    summed = node("Add", [value("wt"), value("wt")], "s")
    assert not absorbed_transposes([turned, product, summed], set()), "another op reads it as well"
    assert not absorbed_transposes([turned, product], {"wt"}), "others want it"
    heads = node("Transpose", [value("x")], "h", perm=[0, 2, 1, 3])
    assert not absorbed_transposes([heads], set()), "it moves more than the last two axes"


def test_alike_kernels_are_counted_together_and_add_up() -> None:
    lowered = LoweredGraph(data_parallel(1).meshes, nbytes={"x": 100, "a": 100, "b": 100}, shapes=SHAPES)
    nodes = [node("Relu", [value("x")], "a"), node("Relu", [value("x")], "b")]
    lowered.flops = {each.name: 5 for each in nodes}

    (kernel,) = WorkCounter(lowered, 1).count(nodes, {"a", "b"}).kernels

    assert (kernel.key, kernel.count, kernel.flops, kernel.touched_bytes) == (
        "Relu(float32[32,64])",
        2,
        10,
        400,
    )


def test_an_operand_may_be_read_in_parts() -> None:
    made = node("Relu", [value("x")], "a")
    namer = KernelNamer(SHAPES, {}, {(made.name, 0): (8, 64)})

    assert namer.key(made, frozenset(), {}) == "Relu(float32[8,64])"


def test_kernels_are_plain_values() -> None:
    kernel = Kernel("", "Add", (Operand("float32", (2,)), 0))

    assert parse_kernel(kernel.key) == kernel
    assert hash(kernel) == hash(parse_kernel("Add(float32[2], 0)"))
