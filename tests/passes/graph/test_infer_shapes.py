import numpy as np
import onnx
import pytest

from partc.passes.graph.infer_shapes import infer_shapes, limited_memory, run_constants, try_inference
from partc.runtime.errors import BadModel
from tests.builders.graphs.foreign_steps import parse

MISFIT = """
constants () => (int64[a,b] grid)
<int64 zero = {0}, int64 one = {1}, int64 count = {16},
 int64[2] eight = {8, 1}> {
    places = Range (zero, count, one)
    grid = Reshape (places, eight)
}
"""


def test_constants_that_cannot_be_computed_are_raised_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A shape that takes no larger batch is an answer to whoever asks: no line of onnxruntime's is."""
    with pytest.raises(BadModel, match="constants that cannot be computed"):
        run_constants(parse(MISFIT))

    assert capfd.readouterr().err == ""


def chain(nodes: int) -> onnx.ModelProto:
    made = [onnx.helper.make_node("Neg", [f"v{n}"], [f"v{n + 1}"]) for n in range(nodes)]
    ends = [onnx.helper.make_tensor_value_info(f"v{n}", onnx.TensorProto.FLOAT, [4]) for n in (0, nodes)]
    return onnx.helper.make_model(onnx.helper.make_graph(made, "chain", ends[:1], ends[1:]))


def test_a_model_of_many_nodes_has_more_room_and_no_model_has_any() -> None:
    with limited_memory(chain(20_000)):
        assert np.empty(1 << 30, np.uint8).nbytes == 1 << 30
    with pytest.raises(MemoryError), limited_memory(chain(20)):
        np.empty(1 << 30, np.uint8)
    with pytest.raises(MemoryError), limited_memory(chain(200_000)):
        np.empty(1 << 33, np.uint8)


def outer(op: str, size: int) -> onnx.ModelProto:
    """Combine two vectors of a graph, one down and one across, and add a matrix of computed sizes."""
    return parse(f"""
    outer (float[3] down, float[2] across, float[6] flat) => (float[a,b] sum)
    <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] size = {{{size}}}, int64[1] two = {{2}}> {{
        column = Unsqueeze (down, one)
        row = Unsqueeze (across, zero)
        grid = {op} (column, row)
        sizes = Concat <axis = 0> (size, two)
        matrix = Reshape (flat, sizes)
        sum = Add (grid, matrix)
    }}
    """)


@pytest.mark.parametrize("op", ["Mul", "Add", "Sub"])
def test_products_of_columns_and_rows_have_shapes_that_fit(op: str) -> None:
    """ONNX's propagation of values takes vectors that it does not know for shapes."""
    inferred = infer_shapes(outer(op, 3), strict_mode=True, data_prop=True)

    (result,) = inferred.graph.output
    assert [dim.dim_value for dim in result.type.tensor_type.shape.dim] == [3, 2]


def test_beside_such_a_product_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadModel, match="shapes do not fit"):
        infer_shapes(outer("Mul", 4), strict_mode=True, data_prop=True)


def flat_step(entries: int) -> onnx.ModelProto:
    """Update a vector of all parameters, and use it as a matrix of computed sizes."""
    vector = f"float[{entries}]"
    return parse(f"""
    flat_step ({vector} weight, {vector} slope, float[a,b] x) => ({vector} next, float[c,d] h)
    <float rate = {{0.1}}, int64[1] half = {{{entries // 2}}}, int64[1] two = {{2}}> {{
        scaled = Mul (slope, rate)
        step = Add (scaled, scaled)
        next = Sub (weight, step)
        sizes = Concat <axis = 0> (half, two)
        matrix = Reshape (next, sizes)
        h = MatMul (x, matrix)
    }}
    """)


@pytest.mark.parametrize("strict", [False, True])
def test_a_vector_of_millions_of_parameters_is_no_list_of_sizes(strict: bool) -> None:
    model = flat_step(20_000_000)

    try_inference(model)
    inferred = infer_shapes(model, strict_mode=strict, data_prop=True)

    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    assert shapes["step"] == [20_000_000]
    assert shapes["matrix"] == [10_000_000, 2]
    assert list(inferred.graph.node) == list(model.graph.node)
    assert inferred.opset_import == model.opset_import
