"""What a session takes at once, its order held against ONNX Runtime's own."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime as ort

from partc.passes.scheduling.session_memory import session_bytes, session_order, vanishing_values

LAYERS = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[8,4] x, float[4,6] w1, float[6,3] w2, float[8,3] dy) => (float y, float[6,3] dw2, float[4,6] dw1)
<float zero = {0.0}> {
    s1 = MatMul (x, w1)
    o1 = Relu (s1)
    y3 = MatMul (o1, w2)
    y = ReduceMean <keepdims = 0> (y3)
    o1t = Transpose <perm = [1, 0]> (o1)
    dw2 = MatMul (o1t, dy)
    w2t = Transpose <perm = [1, 0]> (w2)
    do1 = MatMul (dy, w2t)
    mask = Greater (o1, zero)
    ds1 = Where (mask, do1, zero)
    xt = Transpose <perm = [1, 0]> (x)
    dw1 = MatMul (xt, ds1)
}
"""


def nodes_of(text: str) -> list[gs.Node]:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    for node in model.graph.node:
        node.name = node.output[0]
    return list(gs.import_onnx(model).nodes)


def sizes_of(nodes: list[gs.Node]) -> dict[str, int]:
    return {
        t.name: int(np.prod(t.shape)) * np.dtype(t.dtype).itemsize for node in nodes for t in node.outputs
    }


def test_the_order_is_the_one_in_which_onnx_runtime_runs_them(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(LAYERS)
    for node in model.graph.node:
        node.name = node.output[0]
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    session.run(None, {entry.name: np.ones(entry.shape, np.float32) for entry in session.get_inputs()})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [e["name"].removesuffix("_kernel_time") for e in events if e["name"].endswith("_kernel_time")]

    assert [node.name for node in session_order(nodes_of(LAYERS))] == ran


def test_what_gradients_of_weights_read_is_kept_until_the_end_and_where_takes_both_operands() -> None:
    nodes = nodes_of(LAYERS)
    results = {"y", "dw1", "dw2"}
    sizes = sizes_of(nodes)
    absorbed = vanishing_values(nodes, results, sizes)
    made = {name: nbytes for name, nbytes in sizes.items() if name not in absorbed | results}

    assert absorbed == {"o1t", "w2t", "xt"}
    layer = 8 * 6 * 4
    # o1, which lies where s1 lay, do1, ds1, what Where takes of do1 and of zero, and the mask of bools
    assert session_bytes(nodes, made, results) == 5 * layer + 8 * 6


def test_an_elementwise_op_writes_over_what_is_read_last_and_a_reshape_makes_nothing() -> None:
    nodes = nodes_of("""
        <ir_version: 10, opset_import: ["" : 20]>
        chain (float[4,4] x) => (float[4,4] last) <int64[2] shape = {2, 8}> {
            a = MatMul (x, x)
            b = Exp (a)
            c = Reshape (b, shape)
            d = Neg (c)
            e = Reshape (x, shape)
            last = Transpose <perm = [1, 0]> (e)
        }
    """)

    assert session_bytes(nodes, sizes_of(nodes), {"last"}) == 64 + 64  # a, b, c and d are one; last


def test_a_value_that_is_read_again_is_not_written_over() -> None:
    nodes = nodes_of("""
        <ir_version: 10, opset_import: ["" : 20]>
        fork (float[4,4] x) => (float[4,4] last) {
            a = MatMul (x, x)
            b = Exp (a)
            last = MatMul (a, b)
        }
    """)

    assert session_bytes(nodes, sizes_of(nodes), {"last"}) == 3 * 64


def test_updates_in_blocks_are_never_whole() -> None:
    nodes = nodes_of("""
        <ir_version: 10, opset_import: ["" : 20]>
        update (float[1024,1024] w, float[1024,1024] g) => (float[1024,1024] w_next) {
            a = Mul (g, g)
            b = Add (a, w)
            c = Sqrt (b)
            w_next = Sub (w, c)
        }
    """)

    assert vanishing_values(nodes, {"w_next"}, sizes_of(nodes)) == {"a", "b", "c"}
