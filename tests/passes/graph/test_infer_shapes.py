import numpy as np
import onnx
import pytest

from partc.passes.graph.infer_shapes import limited_memory, run_constants
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
