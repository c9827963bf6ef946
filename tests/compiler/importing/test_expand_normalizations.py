"""Training normalisations whose statistics ONNX Runtime would overwrite train as numpy says."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.compiler.verification.sessions import Session
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

STEP = """
step (float[8,3] x, float[3] W, float[3] M, float[3] V)
    => (float loss, float[3] W_next, float[3] M_next, float[3] V_next)
<CONSTANTS> {
    MADE
    h = Mul (x, W)
    y, m, v = BatchNormalization <training_mode = 1> (h, OPERANDS)
    s = Add (m, v)
    squares = Mul (y, y)
    cubes = Mul (squares, y)
    loss = ReduceMean <keepdims = 0> (cubes)
    sample = Constant <value = int64 {5}> ()
    W_next = Gather (squares, sample)
    M_next = Add (s, READ_LATE)
    V_next = Mul (v, v)
}
"""
ONES, ZEROS = "float[3] one = {1, 1, 1}", "float[3] zero = {0, 0, 0}"
APART = f"{ONES}, {ZEROS}, float[3] unit = {{1, 1, 1}}, float[3] none = {{0, 0, 0}}"
NODES = " ".join(
    f"{name} = Constant <value = float[3] {{{number}, {number}, {number}}}> ()"
    for name, number in (("one", 1.0), ("zero", 0.0), ("unit", 1.0), ("none", 0.0))
)
MADE = "made = Add (M, one) spread = Mul (V, unit)"
# constants, nodes before, what is normalised with, what is read behind
CASES = {
    "equal initializers": (APART, "", "one, zero, none, unit", "M"),
    "equal Constant nodes": ("", NODES, "one, zero, none, unit", "M"),
    "one constant": (f"{ONES}, {ZEROS}", "", "one, zero, zero, one", "M"),
    "a variable that is read behind": (APART, "", "one, zero, M, V", "M"),
    "a variable that is a scale": (APART, "", "V, zero, M, V", "zero"),
    "one variable as both": (APART, "", "one, zero, V, V", "M"),
    "computed ones": (APART, MADE, "spread, zero, made, spread", "made"),
}


def step_of(case: str) -> onnx.ModelProto:
    constants, made, operands, late = CASES[case]
    text = STEP.replace("MADE", made).replace("OPERANDS", operands).replace("READ_LATE", late)
    return with_values(text.replace("<CONSTANTS>", f"<{constants}>" if constants else ""))


def with_values(text: str) -> onnx.ModelProto:
    model = parse(text)
    for name, values in (("W", [0.5, -1, 2]), ("M", [1, 2, 3]), ("V", [4, 5, 6])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.float32), name))
    return model


def expected(case: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    known = feeds | {"one": ones, "unit": ones, "zero": zeros, "none": zeros}
    known |= {"made": feeds["M"] + 1, "spread": feeds["V"]}
    _, _, operands, late = CASES[case]
    scale, bias, mean, variance = (known[name] for name in operands.split(", "))
    h = feeds["x"] * feeds["W"]
    y = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) * scale + bias
    m, v = 0.9 * mean + 0.1 * h.mean(0), 0.9 * variance + 0.1 * h.var(0)
    return {"W_next": (y * y)[5], "M_next": m + v + known[late], "V_next": v * v}


BOUND = GraphOptions(state={"W": "W_next", "M": "M_next", "V": "V_next"}, loss="loss")


@pytest.mark.parametrize("case", CASES)
def test_what_is_verified_against_is_right_and_what_is_trained_is_alike(case: str, tmp_path: Path) -> None:
    training = import_training_graph(step_of(case), BOUND)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(8, 3)).astype(np.float32)}
    feeds |= {name: rng.uniform(0.5, 2, 3).astype(np.float32) for name in ("W", "M", "V")}
    session = Session(onnx.load_from_string(training.source), ["W_next", "M_next", "V_next"])

    for _ in range(2):  # what is overwritten is so for the steps behind, too
        results = session.run(feeds)
        for name, value in expected(case, feeds).items():
            np.testing.assert_allclose(results[name], value, rtol=1e-5, err_msg=name)

    compiled = compile_step(training, tmp_path / "out", "1x1")
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


def test_statistics_that_are_variables_of_their_own_are_left_to_onnxruntime() -> None:
    model = step_of("a variable that is read behind")
    late = next(node for node in model.graph.node if node.output[0] == "M_next")
    late.input[1] = "zero"

    (node,) = (n for n in import_training_graph(model, BOUND).graph.nodes if n.op == "BatchNormalization")

    assert node.attrs["training_mode"] == 1


def test_a_step_of_an_opset_without_a_training_mode_is_written_out_too() -> None:
    model = step_of("equal initializers")
    model.opset_import[0].version = 13
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            node.ClearField("attribute")
            node.output.extend(["saved_mean", "saved_variance"])

    (node,) = (n for n in import_training_graph(model, BOUND).graph.nodes if n.op == "BatchNormalization")

    assert "training_mode" not in node.attrs


IN_A_BODY = """
step (float[8,3] x, float[3] W, float[3] M, float[3] V)
    => (float loss, float[3] W_next, float[3] M_next, float[3] V_next)
<float[3] one = {1, 1, 1}, float[3] zero = {0, 0, 0}> {
    loss = ReduceMean <keepdims = 0> (x)
    positive = Greater (loss, loss)
    W_next, M_next, V_next = If (positive) <
        then_branch = normalised () => (float[3] w, float[3] m, float[3] v) {
            y, m, v = BatchNormalization <training_mode = 1> (x, one, zero, OPERANDS)
            w = Neg (m)
        },
        else_branch = kept () => (float[3] w2, float[3] m2, float[3] v2) {
            w2 = Add (W, one)
            m2 = Add (W, W)
            v2 = Add (zero, zero)
        }>
}
"""


def test_in_a_body_it_is_refused_unless_its_statistics_are_variables_of_its_own() -> None:
    constants, variables = (IN_A_BODY.replace("OPERANDS", names) for names in ("zero, one", "M, V"))

    with pytest.raises(UnsupportedModel, match=r"the body of If,.*\n  at:  node .*\n  fix: normalise"):
        import_training_graph(with_values(constants), BOUND)
    assert import_training_graph(with_values(variables), BOUND).functions
