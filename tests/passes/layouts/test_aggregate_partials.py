from partc.passes.layouts.aggregate_partials import aggregate_partials
from partc.passes.lowering.lower import lower
from tests.builders.graphs.small_steps import lay_out, lines

HEAD = "step (double[8,4] x, double[8,3] dy, double[4,3] W) => (double[4,3] W_next)"

CLIPPED_STEP = f"""
{HEAD} {{
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    squared = Mul (dW, dW)
    W_next = Sub (W, squared)
}}
"""


def test_gradient_read_twice_is_summed_once_and_before_the_square() -> None:
    graph = lay_out(CLIPPED_STEP, split={"x": 0, "dy": 0})

    aggregate_partials(graph)

    assert graph.made_whole == {("dW", 0)}
    assert lines(lower(graph)) == [
        "xt = Transpose (x)",
        "dW = MatMul (xt, dy)",
        "dW@worker.whole = AllReduce (dW)",
        "squared = Mul (dW@worker.whole, dW@worker.whole)",
        "W_next = Sub (W, squared)",
    ]


def test_two_readers_share_one_sum() -> None:
    graph = lay_out(
        f"""
{HEAD} <double lr = {{0.1}}, int64[2] both = {{0, 1}}> {{
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    norm = ReduceSumSquare <keepdims = 0> (dW, both)
    scaled = Mul (dW, norm)
    step = Mul (scaled, lr)
    W_next = Sub (W, step)
}}
""",
        split={"x": 0, "dy": 0},
    )

    aggregate_partials(graph)

    assert graph.made_whole == {("dW", 0)}


def test_what_ends_smaller_is_summed_later() -> None:
    """A mean of rows is linear: 64 numbers are sent in place of 4,096."""
    graph = lay_out(
        """
step (double[8,64] x, double[8,64] dy, double[64] W) => (double[64] W_next) <int64[1] rows = {0}> {
    xt = Transpose <perm = [1, 0]> (x)
    full = MatMul (xt, dy)
    dW = ReduceMean <keepdims = 0> (full, rows)
    W_next = Sub (W, dW)
}
""",
        split={"x": 0, "dy": 0},
    )

    aggregate_partials(graph)

    assert graph.made_whole == {("dW", 0)}


def test_two_terms_are_added_before_they_are_summed_over_ranks() -> None:
    graph = lay_out(
        f"""
{HEAD} {{
    xt = Transpose <perm = [1, 0]> (x)
    one = MatMul (xt, dy)
    other = Neg (one)
    dW = Add (one, other)
    W_next = Sub (W, dW)
}}
""",
        split={"x": 0, "dy": 0},
    )

    aggregate_partials(graph)

    assert len(graph.made_whole) == 1


def test_a_whole_term_is_not_added_on_every_rank() -> None:
    """Weight decay: W is whole, so the gradient is summed before."""
    graph = lay_out(
        f"""
{HEAD} <double decay = {{0.1}}> {{
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    shrunk = Mul (W, decay)
    decayed = Add (dW, shrunk)
    W_next = Sub (W, decayed)
}}
""",
        split={"x": 0, "dy": 0},
    )

    aggregate_partials(graph)

    assert graph.made_whole == {("dW", 0)}


def test_a_graph_without_partials_is_left_alone() -> None:
    graph = lay_out(
        "step (double[4,3] x, double[4,3] W) => (double[4,3] W_next) { dW = Tanh (x) W_next = Sub (W, dW) }",
        split={"x": None},
    )

    aggregate_partials(graph)

    assert graph.made_whole == frozenset()


def test_messages_have_a_price_of_their_own() -> None:
    """Two small births and one larger sum of them: one message is cheaper than two."""
    text = f"""
{HEAD} <int64[2] both = {{0, 1}}> {{
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    a = ReduceSum <keepdims = 0> (x, both)
    b = ReduceMean <keepdims = 0> (dy, both)
    scalars = Add (a, b)
    wide = Expand (scalars, both_shape)
    root = Tanh (wide)
    part = Mul (dW, root)
    W_next = Sub (W, part)
}}
""".replace("{0, 1}>", "{0, 1}, int64[2] both_shape = {4, 3}>")
    dear, free = (lay_out(text, split={"x": 0, "dy": 0}) for _ in range(2))

    aggregate_partials(dear)
    aggregate_partials(free, message_bytes=0)

    assert len(dear.made_whole & {("scalars", 0), ("wide", 0)}) == 1
    assert not dear.made_whole & {("a", 0), ("b", 0)}
    assert len(free.made_whole & {("a", 0), ("b", 0), ("scalars", 0)}) >= 1
