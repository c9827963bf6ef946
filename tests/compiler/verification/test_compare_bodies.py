import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partc.compiler.verification.compare_bodies import differences, probe_of, with_chosen_bodies
from partc.passes.cpu_kernels import winograd_tiles
from tests.builders.graphs.rewritten_models import values
from tests.passes.cpu_kernels.test_winograd import CASES, convolution, ops

CASE = CASES[0]


def measured(model: onnx.ModelProto) -> dict[str, float]:
    probe, results = probe_of(model, 1)
    onnx.checker.check_model(probe, full_check=True)
    session = ort.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feeds = values(model)
    read = {entry.name for entry in session.get_inputs()}
    found = session.run(None, {name: value for name, value in feeds.items() if name in read})
    return differences(results, {n: np.asarray(v) for n, v in zip(names, found, strict=True)})


def test_every_chosen_body_is_compared() -> None:
    told = measured(convolution(*CASE))

    assert [*told] == ["y", "dx", "dW"]
    assert all(0 < difference < 1e-5 for difference in told.values())


def test_one_device_chooses_for_the_share_of_a_rank() -> None:
    """Eight samples of 512 channels are worth tiles, one is not."""
    model = convolution(8, 512, 512, 7, 7, (1, 1, 1, 1))

    assert len(probe_of(model, replicas=1)[1]) == 3
    assert probe_of(model, replicas=8)[1] == []


def test_the_model_itself_is_left_alone() -> None:
    model = convolution(*CASE)
    before = model.SerializeToString(deterministic=True)

    chosen = with_chosen_bodies(model, 1)
    probe_of(model, 1)

    assert model.SerializeToString(deterministic=True) == before
    assert "Conv" not in ops(chosen)


def test_a_wrong_body_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map from products to outputs takes part in y, and its transpose in dW; dx needs it too."""
    wrong = winograd_tiles.of_target().copy()
    wrong[3, 5] += 0.01
    monkeypatch.setattr(winograd_tiles, "of_target", lambda: wrong)

    assert all(difference > 1e-4 for difference in measured(convolution(*CASE)).values())


def test_a_result_of_zeros_has_no_largest_element() -> None:
    nothing = {"y/body/difference": np.float32(0), "y/body/largest": np.float32(0)}

    assert differences(["y"], nothing) == {"y": 0.0}
    assert differences(["y"], nothing | {"y/body/difference": np.float32(2)}) == {"y": 2.0}


def test_a_model_without_convolutions_has_nothing_to_compare() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> step (float[2] x) => (float[2] y) { y = Relu (x) }'
    )

    _, results = probe_of(model, 1)

    assert results == []
