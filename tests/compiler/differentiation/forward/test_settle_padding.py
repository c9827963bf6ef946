"""Windows with gaps and "same" padding, against the same windows with pads written out."""

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.model_files.open_model import open_model
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.foreign_steps import parse

FORWARD = """
forward (float[2,2,HEIGHT,9] x) => (float loss) {
    y = Conv <ATTRIBUTES, dilations = [2, 3], strides = [S, 1]> (x, K)
    square = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (square)
}
"""
# Of 3 x 4 entries with gaps of 2 and 3 over 7 x 9, by hand: 4 and 9 in all, whatever these strides.
PADS = {"SAME_UPPER": [2, 4, 2, 5], "SAME_LOWER": [2, 5, 2, 4]}


def trained(attributes: str, stride: int, height: str = "7") -> dict[str, np.ndarray]:
    text = FORWARD.replace("ATTRIBUTES", attributes)
    model = parse(text.replace("HEIGHT", height).replace("S,", f"{stride},"))
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(2, 2, 3, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(kernel, "K"))
    step = build_training_graph(model, loss="loss", optimizer=SGD(0.1))
    x = rng.normal(size=(2, 2, 7, 9)).astype(np.float32)
    names = [output.name for output in step.graph.output]
    return dict(zip(names, open_model(step).run(names, {"x": x, "K": kernel}), strict=True))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("auto_pad", PADS)
def test_same_is_as_much_as_is_written_out(stride: int, auto_pad: str) -> None:
    same = trained(f'auto_pad = "{auto_pad}"', stride)

    written = trained(f"pads = {PADS[auto_pad]}", stride)
    assert same.keys() == written.keys()
    for name, value in written.items():
        np.testing.assert_allclose(same[name], value, rtol=1e-6, err_msg=name)


def test_strides_over_an_open_size_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"Conv with auto_pad=SAME_UPPER.*\n.*node.*\n.*explicit pads"):
        trained('auto_pad = "SAME_UPPER"', 2, "h")
