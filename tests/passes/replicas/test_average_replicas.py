import onnx_graphsurgeon as gs
import pytest

from partc.compiler.importing.bindings import GradientTensors
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.replicas.average_replicas import average_replicas
from partc.passes.roles.find_roles import find_roles
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.small_steps import line_of, training_of

DENSE = """
step (double[4,3] x, double[4,2] dy, double[3,2] W) => (double loss, double[3,2] W_next)
<int64[2] both = {0, 1}> {
    loss = ReduceMean <keepdims = 0> (dy, both)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    squared = Mul (dW, dW)
    W_next = Sub (W, squared)
}
"""


def averaged(text: str, split: dict[str, int | None], **options: object) -> tuple[TrainingGraph, list[str]]:
    training = training_of(text, split, **options)  # type: ignore[arg-type]
    result = average_replicas(training, set(find_roles(training).main))
    return result, [line_of(node) for node in result.graph.nodes]


def nodes_that_meet(graph: gs.Graph) -> set[tuple[str, str]]:
    return {(n.op, n.inputs[0].name) for n in graph.nodes if n.op in ("Average", "Stack")}


def test_every_reader_of_a_gradient_reads_the_average() -> None:
    training, lines = averaged(DENSE, {"x": 0, "dy": 0})

    assert "dW.average = Average (dW)" in lines
    assert "squared = Mul (dW.average, dW.average)" in lines
    assert training.gradients["W"].dense == "dW.average"


def test_a_scalar_output_is_averaged_for_the_user() -> None:
    training, lines = averaged(DENSE, {"x": 0, "dy": 0})

    assert "loss.average = Average (loss)" in lines
    assert training.outputs == ("loss.average",)
    assert training.output_names == {"loss.average": "loss"}


def test_a_tensor_of_the_user_may_be_called_an_average() -> None:
    training = training_of(DENSE, {"x": 0, "dy": 0})
    training.graph.tensors()["squared"].name = "dW.average"

    averaged = average_replicas(training, set(find_roles(training).main))

    lines = [line_of(node) for node in averaged.graph.nodes]
    assert "dW.average_1 = Average (dW)" in lines
    assert "dW.average = Mul (dW.average_1, dW.average_1)" in lines
    assert averaged.gradients["W"].dense == "dW.average_1"


def test_what_all_replicas_have_alike_is_left_alone() -> None:
    training, lines = averaged(DENSE, {"x": None, "dy": None})

    assert not nodes_that_meet(training.graph)
    assert "W_next = Sub (W, squared)" in lines


SPARSE = """
step (int64[4] ids, int64[5] shared, double[4,2] d, double[5,2] s, double[9,2] E) => (double[9,2] E_next)
<int64[1] last = {-1}> {
    own = Tanh (d)
    mixed = MatMul (s, half)
    theirs = Mul (mixed, weight)
    all_ids = Concat <axis = 0> (ids, shared)
    rows = Concat <axis = 0> (own, theirs)
    positions = Unsqueeze (all_ids, last)
    minus = Neg (rows)
    E_next = ScatterND <reduction = "add"> (E, positions, minus)
}
""".replace("half", "square").replace(
    "<int64[1] last = {-1}>", "<int64[1] last = {-1}, double[2,2] square = {1, 2, 3, 4}>"
)
WEIGHED = SPARSE.replace(
    "theirs = Mul (mixed, weight)", "weight = ReduceSum <keepdims = 0> (d) theirs = Mul (mixed, weight)"
)
SLICES = {"E": GradientTensors(ids="all_ids", rows="rows")}


def test_slices_are_laid_in_a_row_but_averaged_where_replicas_share_their_ids() -> None:
    training, _ = averaged(WEIGHED, {"ids": 0, "d": 0, "shared": None, "s": None}, gradients=SLICES)

    assert nodes_that_meet(training.graph) == {("Stack", "ids"), ("Stack", "own"), ("Average", "theirs")}


def test_shapes_behind_a_stack_are_those_of_all_replicas() -> None:
    training, _ = averaged(WEIGHED, {"ids": 0, "d": 0, "shared": None, "s": None}, gradients=SLICES)

    facts = infer_facts(training, {}, replicas=3)

    assert facts.shape("all_ids") == (3 * 4 + 5,)
    assert facts.shape("positions") == (3 * 4 + 5, 1)
    assert facts.shape("minus") == (3 * 4 + 5, 2)


def test_what_ten_thousand_replicas_stack_is_not_spelled_out() -> None:
    """Inference would propagate 6 million elements of ids; it is given no memory for that."""
    many = WEIGHED.replace("int64[4] ids", "int64[600] ids").replace("double[4,2] d,", "double[600,2] d,")
    training, _ = averaged(many, {"ids": 0, "d": 0, "shared": None, "s": None}, gradients=SLICES)

    facts = infer_facts(training, {}, replicas=10_000)

    assert facts.shape("minus") == (10_000 * 600 + 5, 2)


STATISTIC = """
step (double[4,3] x, double[3] mean, double[3,2] W) => (double[3] mean_next, double[3,2] W_next)
<int64[1] rows = {0}> {
    batch = ReduceMean <keepdims = 0> (x, rows)
    mean_next = Add (mean, batch)
    dW = MatMul (xt, y)
    W_next = Sub (W, dW)
}
""".replace("dW =", "xt = Transpose (x) y = MatMul (x, W) dW =")


def test_a_statistic_of_the_data_is_averaged_when_it_is_kept() -> None:
    training, _ = averaged(STATISTIC, {"x": 0}, gradients={"W": GradientTensors(dense="dW")})

    assert nodes_that_meet(training.graph) == {("Average", "mean_next"), ("Average", "dW")}
    assert training.variables["mean"].next == "mean_next.average"


def test_a_count_of_each_replicas_own_data_has_no_average() -> None:
    text = STATISTIC.replace("double[3] mean", "int64[3] mean").replace(
        "mean_next = Add (mean, batch)", "whole = Cast <to = 7> (batch) mean_next = Add (mean, whole)"
    )

    with pytest.raises(UnsupportedModel, match="synchronously with --batch global"):
        averaged(text, {"x": 0}, gradients={"W": GradientTensors(dense="dW")})
