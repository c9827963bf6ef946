"""The standard's own training form: the graph and the algorithm are joined, its ops written out."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.graph.training_graph import StoredTensor, TrainingGraph
from partc.runtime.errors import BadModel, UnsupportedModel

PREVIEW = "ai.onnx.preview.training"
FORWARD = """
forward (int64[6] ids) => (float[6,3] y) {
    h = Gather (E, ids)
    y = MatMul (h, W)
}
"""
ALGORITHM = """
algorithm (float[6,3] t) => (float loss) {
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    one = Constant <value_int = 1> ()
    T_next = Add (T, one)
}
"""
START = {
    "E": np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4),
    "W": np.linspace(-1, 2, 12, dtype=np.float32).reshape(4, 3),
}
IDS = np.array([0, 2, 2, 4, 1, 0])
TARGET = np.ones((6, 3), np.float32)


def standard_model(optimizer: str, slots: str, **attributes: object) -> onnx.ModelProto:
    graph, algorithm = onnx.parser.parse_graph(FORWARD), onnx.parser.parse_graph(ALGORITHM)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in START.items())
    kept = [f"{name}_{slot}" for slot in slots for name in START]
    for name in kept:
        algorithm.initializer.append(numpy_helper.from_array(np.zeros_like(START[name[0]]), name))
    algorithm.initializer.append(helper.make_tensor("R", TensorProto.FLOAT, [], [0.1]))
    algorithm.initializer.append(helper.make_tensor("T", TensorProto.INT64, [], [0]))
    state = {name: f"{name}_next" for name in (*START, *kept)}
    gradients = [f"d{name}" for name in START]
    algorithm.node.append(
        helper.make_node(
            "Gradient",
            [*START, "ids", "t"],
            gradients,
            domain=PREVIEW,
            xs=list(START),
            zs=["ids", "t"],
            y="loss",
        )
    )
    inputs = ["R", "T", *START, *gradients, *kept]
    algorithm.node.append(
        helper.make_node(optimizer, inputs, list(state.values()), domain=PREVIEW, **attributes)
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(PREVIEW, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    training = model.training_info.add(algorithm=algorithm)
    for variable, output in (*state.items(), ("T", "T_next")):
        training.update_binding.add(key=variable, value=output)
        elem_type = TensorProto.INT64 if variable == "T" else TensorProto.FLOAT
        shape = [] if variable == "T" else START[variable[0]].shape
        training.algorithm.output.append(helper.make_tensor_value_info(output, elem_type, shape))
    return model


def gradients_at(E: np.ndarray, W: np.ndarray) -> dict[str, np.ndarray]:
    error = 2 * (E[IDS] @ W - TARGET) / TARGET.size
    dE = np.zeros_like(E)
    np.add.at(dE, IDS, error @ W.T)
    return {"E": dE, "W": E[IDS].T @ error}


def momentum(X: np.ndarray, G: np.ndarray, slots: list[np.ndarray], step: int) -> np.ndarray:
    G = G + 0.01 * X
    slots[0] = 0.9 * slots[0] + (0.5 if step else 1.0) * G
    return X - 0.1 * slots[0]


def nesterov(X: np.ndarray, G: np.ndarray, slots: list[np.ndarray], step: int) -> np.ndarray:
    slots[0] = 0.9 * slots[0] + G
    return X - 0.1 * (G + 0.9 * slots[0])


def adagrad(X: np.ndarray, G: np.ndarray, slots: list[np.ndarray], step: int) -> np.ndarray:
    slots[0] = slots[0] + G * G
    return X - 0.1 / (1 + step * 0.1) * G / (np.sqrt(slots[0]) + 1e-6)


def adam(X: np.ndarray, G: np.ndarray, slots: list[np.ndarray], step: int) -> np.ndarray:
    slots[0] = 0.8 * slots[0] + 0.2 * G
    slots[1] = 0.9 * slots[1] + 0.1 * G * G
    rate = 0.1 * np.sqrt(1 - 0.9**step) / (1 - 0.8**step) if step else 0.1
    return X - rate * slots[0] / (np.sqrt(slots[1]) + 1e-6)


STANDARD = {"alpha": 0.9, "beta": 0.5, "mode": "standard", "norm_coefficient": 0.01}
NESTEROV = {"alpha": 0.9, "beta": 1.0, "mode": "nesterov", "norm_coefficient": 0.0}


@pytest.mark.parametrize(
    ("optimizer", "slots", "attributes", "update"),
    [
        ("Momentum", "v", STANDARD, momentum),
        ("Momentum", "v", NESTEROV, nesterov),
        ("Adagrad", "h", {"decay_factor": 0.1}, adagrad),
        ("Adam", "vh", {"alpha": 0.8, "beta": 0.9}, adam),
    ],
)
def test_three_steps_follow_the_standards_formulas(optimizer, slots, attributes, update) -> None:
    training = import_training_graph(standard_model(optimizer, slots, **attributes))
    session = onnxruntime.InferenceSession(training.source, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    values = {name: initial_of(training, name) for name in training.variables}
    expected = {name: value.astype(np.float64) for name, value in START.items()}
    kept = {name: [np.zeros(value.shape) for _ in slots] for name, value in START.items()}

    for step in range(3):
        results = dict(zip(outputs, session.run(None, {**values, "ids": IDS, "t": TARGET}), strict=True))
        values = {name: results[variable.next] for name, variable in training.variables.items()}
        gradients = gradients_at(**expected)
        expected = {n: update(X, gradients[n], kept[n], step) for n, X in expected.items()}

    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-4, atol=1e-6)
    assert values["T"] == 3


def test_its_gradients_are_recorded_and_an_embeddings_is_sparse() -> None:
    training = import_training_graph(standard_model("Adagrad", "h"))

    assert training.loss == "loss"
    assert training.forward_outputs == ("y",)
    assert training.gradients["W"].dense == "dW"
    assert training.gradients["E"].is_sparse


def initial_of(training: TrainingGraph, name: str) -> np.ndarray:
    initial = training.variables[name].initial
    assert isinstance(initial, StoredTensor)
    return initial.load()


def test_an_update_of_what_is_no_initializer_is_refused() -> None:
    model = standard_model("Adagrad", "h")
    model.training_info[0].update_binding[0].key = "gone"

    with pytest.raises(BadModel, match="fix: add the initializer 'gone'"):
        import_training_graph(model)


def test_two_algorithms_are_refused() -> None:
    model = standard_model("Adagrad", "h")
    model.training_info.append(model.training_info[0])

    with pytest.raises(UnsupportedModel, match="fix: keep the one that should be compiled"):
        import_training_graph(model)


def test_a_gradient_at_another_value_is_refused() -> None:
    model = standard_model("Adagrad", "h")
    gradient = next(n for n in model.training_info[0].algorithm.node if n.op_type == "Gradient")
    gradient.input[0] = "W"

    with pytest.raises(UnsupportedModel, match="fix: give the node 'E' itself as its input"):
        import_training_graph(model)
