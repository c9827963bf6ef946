import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest

from partc.passes.graph.training_graph import Gradient, TrainingGraph
from partc.passes.roles.find_gradients import find_gradients, refuse_unfound
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.foreign_steps import (
    ADAFACTOR,
    ADAM,
    CLIPPED,
    COUNTED,
    FORWARD,
    LINEAR,
    LINEAR_CONSTANTS,
    LINEAR_HEAD,
    SGD,
    SQUARED,
    TABLE,
    import_step,
    parse,
)


@pytest.mark.parametrize("text", [SGD, ADAM])
def test_the_gradient_is_where_samples_are_summed_and_the_parameters_shape_is_reached(text: str) -> None:
    assert find_gradients(import_step(text)) == {"W": Gradient("W", dense="dW")}


def test_clipping_by_global_norm_lies_behind_the_gradients() -> None:
    found = find_gradients(import_step(CLIPPED))

    assert {name: gradient.dense for name, gradient in found.items()} == {"W": "dW", "bias": "db"}


def test_moments_by_row_and_by_column_lie_behind_the_gradient() -> None:
    """Their product has the parameter's elements, and depends on the samples through the gradient alone."""
    assert find_gradients(import_step(ADAFACTOR)) == {"W": Gradient("W", dense="dW")}


# The gradient of a direction and of its length, W = length direction / |direction|, by that of W.
NORMED = f"""
step (float[8,4] x, float[8,3] t, float[4,3] V, float[1,3] length)
    => (float loss, float[4,3] V_next, float[1,3] length_next)
<float lr = {{0.1}}, int64[1] zero = {{0}}> {{
    norm = ReduceL2 (V, zero)
    unit = Div (V, norm)
    W = Mul (unit, length) {FORWARD}
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, d)
    along = Mul (dW, unit)
    dl = ReduceSum (along, zero)
    step_l = Mul (dl, lr)
    length_next = Sub (length, step_l)
    radial = Mul (unit, dl)
    tangent = Sub (dW, radial)
    scaled = Mul (tangent, lr)
    V_next = Sub (V, scaled)
}}
"""


def test_a_gradient_that_is_made_of_anothers_is_one() -> None:
    found = find_gradients(import_step(NORMED))

    assert {name: gradient.dense for name, gradient in found.items()} == {"V": "dW", "length": "dl"}


# W = B + turn U, and U is read once more: dW is the gradient of B, and makes a part of that of U.
REUSED = f"""
step ({LINEAR_HEAD.replace("float[4,3] W", "float[4,3] B, float[4,3] U")})
    => (float loss, float[4,3] B_next, float[4,3] U_next)
<{LINEAR_CONSTANTS}, float[4,4] turn = {{1,2,0,0, 0,1,0,0, 3,0,1,0, 0,0,0,1}}> {{
    turned = MatMul (turn, U)
    W = Add (B, turned)
    {LINEAR.replace("loss", "first")}
    other = MatMul (x, U)
    squares = ReduceSumSquare <keepdims = 0> (other)
    loss = Add (first, squares)
    slope = Add (other, other)
    direct = MatMul (xt, slope)
    back = Transpose <perm = [1, 0]> (turn)
    through = MatMul (back, dW)
    dU = Add (direct, through)
    B_part = Mul (dW, lr)
    B_next = Sub (B, B_part)
    U_part = Mul (dU, lr)
    U_next = Sub (U, U_part)
}}
"""


def test_a_part_of_a_gradient_that_is_made_of_anothers_belongs_to_it() -> None:
    found = find_gradients(import_step(REUSED))

    assert {name: gradient.dense for name, gradient in found.items()} == {"B": "dW", "U": "dU"}


def test_a_moving_average_and_a_carried_state_have_no_gradient() -> None:
    assert find_gradients(import_step(CLIPPED)).keys().isdisjoint({"mean", "state"})


def test_a_division_by_a_label_count_lies_before_the_gradient() -> None:
    assert find_gradients(import_step(COUNTED))["W"].dense == "dW"


def test_two_uses_of_a_parameter_give_one_gradient_behind_their_sum() -> None:
    tied = SGD.replace(
        "part = Mul (dW, lr)", "dW1 = MatMul (xt, d)\n both = Add (dW, dW1)\n part = Mul (both, lr)"
    )

    assert find_gradients(import_step(tied))["W"].dense == "both"


def test_views_that_cancel_lie_before_the_gradient() -> None:
    flipped = "turned = Transpose (dW)\n back = Transpose (turned)\n part = Mul (back, lr)"

    assert find_gradients(import_step(SGD.replace("part = Mul (dW, lr)", flipped)))["W"].dense == "back"


def test_a_recorded_gradient_is_left_alone() -> None:
    training = import_step(SGD)
    training.gradients["W"] = Gradient("W", dense="part")

    assert find_gradients(training)["W"].dense == "part"


def test_scatters_of_rows_become_one_scatter_of_indexed_slices() -> None:
    training = import_step(TABLE)

    gradient = find_gradients(training)["E"]

    assert gradient == Gradient("E", dense="dE", ids="E/ids_1", rows="E/rows_1")
    scatters = [node for node in training.graph.nodes if node.op.startswith("Scatter")]
    assert [node.op for node in scatters] == ["ScatterND"]
    tensors = training.graph.tensors()
    assert (tensors[gradient.ids].dtype, list(tensors[gradient.ids].shape)) == (np.int64, [12])
    assert list(tensors[gradient.rows].shape) == [12, 4]


def test_rewriting_scatters_does_not_change_the_step() -> None:
    training = import_step(TABLE)
    before = run(parse(TABLE), table_feeds())

    find_gradients(training)

    np.testing.assert_allclose(run(exported(training), table_feeds()), before, rtol=1e-6)


@pytest.mark.parametrize(
    "zeros", ["Neg (none)", "Abs (none)", "Flatten (none)", "Slice (more_none, first, end)"]
)
def test_what_is_made_of_zeros_alone_is_zeros(zeros: str) -> None:
    """A scatter of rows into it is the rows' sum."""
    sizes = "int64[2] size = {10, 4}, int64[2] larger = {20, 4}, int64[1] first = {0}, int64[1] end = {10}"
    made = f"none = ConstantOfShape (size)\n more_none = ConstantOfShape (larger)\n zeros = {zeros}"
    text = TABLE.replace("int64[2] size = {10, 4}", sizes).replace("zeros = ConstantOfShape (size)", made)
    training = import_step(text)
    before = run(parse(text), table_feeds())

    assert find_gradients(training)["E"].is_sparse
    np.testing.assert_allclose(run(exported(training), table_feeds()), before, rtol=1e-6)


def test_a_scatter_on_the_class_axis_is_no_row_gradient() -> None:
    by_class = TABLE.replace("Expand (column, wide)", "Identity (classes)").replace(
        "int64[6] ids,", "int64[6] ids, int64[6,4] classes,"
    )

    assert not find_gradients(import_step(by_class))["E"].is_sparse


@pytest.mark.parametrize("op", ["Shrink <lambd = 0.1>", "Elu", "Softsign", "Atan", "Gelu"])
def test_a_function_of_each_element_lies_behind_the_gradient(op: str) -> None:
    shrunk = SGD.replace("part = Mul (dW, lr)", f"shrunk = {op} (dW)\n part = Mul (shrunk, lr)")

    assert find_gradients(import_step(shrunk))["W"].dense == "dW"


def test_a_gradient_that_is_squared_before_it_is_complete_is_not_found_and_why_is_told() -> None:
    training = import_step(SQUARED)

    assert find_gradients(training) == {}
    assert training.unfound_gradients == {"W": "node 'Mul_8' (Mul) is not linear in it"}


def test_what_needs_an_unfound_gradient_is_refused() -> None:
    training = import_step(SQUARED)
    find_gradients(training)

    refuse_unfound(training, [])
    with pytest.raises(UnsupportedModel, match="'W' cannot be found") as refusal:
        refuse_unfound(training, ["W"])
    assert "--batch global" in refusal.value.fix


def test_without_a_loss_nothing_is_guessed() -> None:
    training = import_step(SGD)
    training.loss = None

    with pytest.raises(UnsupportedModel, match='name it with "loss" in the sidecar JSON'):
        find_gradients(training)


def combine_two_gradients(op: str) -> str:
    more = f"dW1 = MatMul (xt, d)\n both = {op} (dW, dW1)\n part = Mul (both, lr)"
    return SGD.replace("part = Mul (dW, lr)", more)


def table_feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "ids": rng.integers(0, 10, 6),
        "more": rng.integers(0, 10, (2, 3)),
        "t": rng.normal(size=(6, 4)).astype(np.float32),
        "E": rng.normal(size=(10, 4)).astype(np.float32),
    }


def exported(training: TrainingGraph) -> onnx.ModelProto:
    model = gs.export_onnx(training.graph)
    model.ir_version = 10
    onnx.checker.check_model(model)
    return model


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["E_next"], feeds)[0]
