"""Where variables start: kept as small as the forward graph keeps them, or drawn anew."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Momentum
from tests.checks.training_steps import initial_variables, train

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> test {text}')


def test_a_large_drawn_table_is_never_made_while_building() -> None:
    forward = parse("""(int64[batch] x) => (float[batch,512] y) {
        E = RandomUniform <shape = [800000, 512], low = -0.5, high = 0.5, seed = 7.0> ()
        y = Gather (E, x) }""")

    model = build_training_graph(forward, loss="mse", optimizer=Momentum())

    assert model.ByteSize() < 10_000
    made = {node.output[0]: node for node in model.training_info[0].initialization.node}
    assert made["E.initial"].op_type == "RandomUniform"
    assert {a.name: a.f for a in made["E.initial"].attribute}["seed"] == 7.0
    assert made["E.momentum.initial"].op_type == "ConstantOfShape"


def test_draws_without_a_seed_get_one_each() -> None:
    forward = parse("""(float[batch,3] x) => (float[batch,3] y) {
        V = RandomNormal <shape = [3,3]> () W = RandomNormal <shape = [3,3]> ()
        h = MatMul (x, V) y = MatMul (h, W) }""")

    start = initial_variables(build_training_graph(forward, loss="mse", optimizer=SGD()))

    assert not np.array_equal(start["V"], start["W"])


def test_fresh_parameters_fit_their_use() -> None:
    forward = onnx.load(LIGHT / "light_resnet50.onnx")

    start = initial_variables(
        build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(), reinit=3)
    )

    stem = start["gpu_0/conv1_w_0"]
    np.testing.assert_allclose(stem.std(), np.sqrt(2 / 147), rtol=0.05)
    assert (start["gpu_0/res_conv1_bn_s_0"] == 1).all()
    assert (start["gpu_0/res_conv1_bn_b_0"] == 0).all()
    assert (start["gpu_0/pred_b_0"] == 0).all()
    assert start["gpu_0/pred_w_0"].std() > 0


def test_a_fresh_scale_that_is_unsqueezed_first_is_a_scale() -> None:
    forward = onnx.load(LIGHT / "light_inception_v2.onnx")

    start = initial_variables(
        build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(), reinit=3)
    )

    assert (start["conv1/7x7_s2/bn/sc_w_0"] == 1).all()
    assert (start["conv1/7x7_s2/bn/sc_b_0"] == 0).all()


def test_fresh_statistics_are_those_of_normal_data() -> None:
    forward = onnx.load(LIGHT / "light_resnet50.onnx")

    model = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(), reinit=3)

    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert (constants["gpu_0/res_conv1_bn_rm_0"] == 0).all()
    assert (constants["gpu_0/res_conv1_bn_riv_0"] == 1).all()


def test_external_data_is_found_in_its_folder(tmp_path: Path) -> None:
    W = np.random.default_rng(0).normal(size=(64, 80)).astype(np.float32)
    forward = parse("(float[batch,64] x) => (float[batch,80] y) { y = MatMul (x, W) }")
    forward.graph.initializer.append(numpy_helper.from_array(W, "W"))
    onnx.save(forward, tmp_path / "forward.onnx", save_as_external_data=True, size_threshold=0)

    lazy = onnx.load(tmp_path / "forward.onnx", load_external_data=False)
    model = build_training_graph(lazy, loss="mse", optimizer=SGD(), folder=tmp_path)

    np.testing.assert_array_equal(initial_variables(model)["W"], W)


def test_initializers_that_old_models_list_as_inputs_are_parameters() -> None:
    forward = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["": 9]>
        test (float[1,3] x, float[3,2] W) => (float[1,2] y) <float[3,2] W = {1, 2, 3, 4, 5, 6}> {
        y = MatMul (x, W) }""")

    model = build_training_graph(forward, loss="mse", optimizer=SGD(0.5), batch_size=2)
    x, targets = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    _, after = train(model, [{"x": x, "targets": targets}])

    W = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    np.testing.assert_allclose(after["W"], W - 0.5 * 2 * x.T @ (x @ W) / 4, rtol=1e-6)
