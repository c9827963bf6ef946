import pytest

from partc.passes.graph.infer_shapes import run_constants
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
