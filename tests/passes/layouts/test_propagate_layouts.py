import pytest

from partc.passes.layouts.decide_on_servers import NotServable
from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split, served_rows
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.small_steps import lay_out

WORKER_WHOLE = Layout("worker", Replicate())
SUM = Layout("worker", Partial("sum"))

STEP = """
step (double[3,8,4] x, double[24,2] t, double[4,2] W) => (double largest, double[4,2] W_next)
<double lr = {0.1}, int64[2] flat = {24, 4}> {
    rows = Reshape (x, flat)
    y = MatMul (rows, W)
    largest = ReduceMax <keepdims = 0> (y)
    turned = Transpose <perm = [1, 0]> (rows)
    dW = MatMul (turned, y)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}
"""


def placements(text: str, **options: object) -> dict[str, Layout]:
    return lay_out(text, split={"x": 1, "t": None}, **options).layouts  # type: ignore[arg-type]


def test_a_split_follows_its_factor_through_a_reshape() -> None:
    layouts = placements(STEP)

    assert layouts["x"] == Layout("worker", Split(1))
    assert layouts["rows"] == layouts["y"] == Layout("worker", Split(0, outer=3))
    assert layouts["turned"] == Layout("worker", Split(1, outer=3))


def test_a_product_over_the_samples_is_a_sum_still_to_be_made_and_stays_one_behind_linear_ops() -> None:
    layouts = placements(STEP)

    assert layouts["dW"] == layouts["part"] == SUM
    assert layouts["largest"] == Layout("worker", Partial("max"))


def test_what_nothing_splits_is_whole() -> None:
    layouts = placements(STEP)

    assert layouts["W"] == layouts["W_next"] == WORKER_WHOLE
    assert "t" not in layouts  # nothing reads it


def test_an_update_runs_where_its_rows_are() -> None:
    layouts = placements(STEP, methods={"W": "servers"})

    assert layouts["W"] == layouts["part"] == layouts["W_next"] == served_rows("W")
    assert layouts["dW"] == SUM
    assert layouts["y"].site == "worker"


def test_a_product_of_two_partial_sums_is_computed_from_wholes() -> None:
    layouts = placements(STEP.replace("part = Mul (dW, lr)", "part = Mul (dW, dW)"))

    assert (layouts["dW"], layouts["part"]) == (SUM, WORKER_WHOLE)


def test_samples_that_do_not_divide_are_cut_unevenly_and_followed() -> None:
    layouts = placements(STEP, ranks=3)

    assert layouts["x"] == Layout("worker", Split(1, uneven=8))
    assert layouts["rows"] == layouts["y"] == Layout("worker", Split(0, outer=3, uneven=8))
    assert layouts["dW"] == SUM


def test_more_replicas_than_samples_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="use a batch that is a multiple of 9"):
        placements(STEP, ranks=9)


def test_an_update_that_mixes_rows_cannot_be_served() -> None:
    text = STEP.replace("part = Mul (dW, lr)", "part = Softmax <axis = 0> (dW)")

    with pytest.raises(NotServable, match="keep this parameter on the workers"):
        placements(text, methods={"W": "servers"})


@pytest.mark.parametrize(
    ("op", "kept"),
    [
        ("Neg (dW)", True),
        ("Add (dW, dW)", True),
        ("Div (dW, lr)", True),
        ("Div (lr, dW)", False),
        ("Add (dW, lr)", False),
        ("Tanh (dW)", False),
        ("Sub (dW, zero)", True),
        ("Where (yes, dW, zero)", True),
        ("Where (yes, dW, lr)", False),
        ("Max (dW, dW)", False),
    ],
)
def test_partial_sums_pass_linear_ops_alone(op: str, kept: bool) -> None:
    text = STEP.replace("part = Mul (dW, lr)", f"part = {op}")
    text = text.replace("double lr = {0.1}", "double lr = {0.1}, double zero = {0.0}, bool yes = {1}")

    assert (placements(text)["part"] == SUM) == kept


@pytest.mark.parametrize(
    ("joined", "kept"),
    [("x, t", False), ("x, y, t", True), ("x, t, t", False), ("x, y", True)],
)
def test_parts_are_joined_in_parts_unless_as_much_would_be_cut_as_was(joined: str, kept: bool) -> None:
    text = f"""
    step (double[4,8] x, double[4,8] t, double[4,8] W) => (double loss, double[4,8] W_next) {{
        y = Neg (x)
        rows = Concat <axis = 1> ({joined})
        loss = ReduceSum <keepdims = 0> (rows)
        dW = Mul (W, loss)
        W_next = Sub (W, dW)
    }}
    """
    parts = joined.count(",") + 1

    assert placements(text)["rows"] == (Layout("worker", Split(1, outer=parts)) if kept else WORKER_WHOLE)
