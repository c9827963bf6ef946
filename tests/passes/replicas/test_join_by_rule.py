"""Which axis holds the samples where a Reshape divides them: what is proven of it, and what is not."""

import pytest

from partc.passes.graph.infer_facts import infer_facts
from partc.passes.replicas.batch_relation import BatchRelation
from partc.passes.replicas.join_replicas import join_replicas
from partc.passes.roles.find_roles import find_roles
from tests.builders.plans.compiled_steps import import_text

SAMPLES = 12
# Groups of samples, and what is made of each: a fixed number of groups is larger for a larger batch.
FIXED_GROUPS = {
    "mean of halves": ("r = Reshape (d, halves)", "h = ReduceMean <keepdims = 1> (r, one)"),
    "maximum of thirds": ("r = Reshape (d, thirds)", "h = ReduceMax <keepdims = 1> (r, one)"),
    "Softmax": ("r = Reshape (d, halves)", "h = Softmax <axis = 1> (r)"),
    "gram matrix": ("r = Reshape (d, halves) q = Transpose <perm = [0, 2, 1]> (r)", "h = MatMul (q, r)"),
    "CumSum": ("r = Reshape (d, halves)", "h = CumSum (r, axis)"),
    "reversed": ("r = Reshape (d, halves)", "h = Slice (r, end, begin, one, back)"),
    "of a size": ("r = Reshape (d, counted)", "h = ReduceMean <keepdims = 1> (r, one)"),
    "of a size that begins late": (
        "r = Reshape (d, many)",
        "h = ReduceMean <keepdims = 1> (r, one)",
    ),
    "of two outputs": (
        "both = Concat <axis = 0> (d, y) r = Reshape (both, quarters)",
        "h = ReduceMean <keepdims = 1> (r, one)",
    ),
    "samples last": (
        "dt = Transpose <perm = [1, 0]> (d) r = Reshape (dt, last_halves)",
        "h = ReduceMean <keepdims = 1> (r, two)",
    ),
}
FIXED_SIZES = {
    "pairs": ("r = Reshape (d, pairs)", "h = ReduceMean <keepdims = 1> (r, one)"),
    "pairs of a size": ("r = Reshape (d, counted_pairs)", "h = ReduceMean <keepdims = 1> (r, one)"),
    "a sample's own": ("r = Reshape (d, kept)", "h = Softmax <axis = 1> (r)"),
    "two outputs": (
        "both = Concat <axis = 0> (d, y) r = Reshape (both, halves)",
        "h = ReduceMean <keepdims = 1> (r, zero)",
    ),
}
FROZEN = ("r = Reshape (d, frozen)", "h = Softmax <axis = 1> (r)")  # an exporter wrote the batch's size


def join(way: tuple[str, str], batch: str) -> BatchRelation:
    """Return how what is made of groups follows from the replicas'."""
    text = f"""
step (float[{batch},4] x, float[{batch},3] t, float[4,3] W) => (float loss, float[4,3] W_next)
<int64[3] halves = {{2, -1, 3}}, int64[3] quarters = {{4, -1, 3}}, int64[2] thirds = {{3, -1}},
 int64[3] pairs = {{-1, 2, 3}}, int64[3] kept = {{0, -1, 1}}, int64[2] frozen = {{{SAMPLES}, -1}},
 int64[3] last_halves = {{3, 2, -1}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64 axis = {{1}},
 int64[1] two = {{2}}, int64[1] three = {{3}}, int64[1] minus = {{-1}}, int64[1] end = {{-1}},
 int64[1] begin = {{-1000}}, int64[1] back = {{-1}}, int64[1] few = {{9}}, float lr = {{0.1}}> {{
    y = MatMul (x, W)
    d = Sub (y, t)
    n = Shape <start = 0, end = 1> (x)
    half = Div (n, two)
    counted = Concat <axis = 0> (two, half, three)
    counted_pairs = Concat <axis = 0> (half, two, three)
    late = Div (n, few)
    many = Concat <axis = 0> (late, minus, three)
    {way[0]}
    {way[1]}
    loss = ReduceMean <keepdims = 0> (h)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, d)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}}"""
    training = import_text(text)
    facts = infer_facts(training, {"N": SAMPLES} if batch == "N" else {})
    return join_replicas(training, facts, find_roles(training).main)["h"]


@pytest.mark.parametrize("batch", ["N", str(SAMPLES)])
@pytest.mark.parametrize("way", FIXED_GROUPS)
def test_a_fixed_number_of_groups_takes_samples_together(way: str, batch: str) -> None:
    joined = join(FIXED_GROUPS[way], batch)

    assert joined.kind == "coupled"
    assert "(Reshape) takes samples together" in joined.why


@pytest.mark.parametrize("batch", ["N", str(SAMPLES)])
@pytest.mark.parametrize("way", FIXED_SIZES)
def test_groups_of_a_fixed_size_lie_side_by_side(way: str, batch: str) -> None:
    assert join(FIXED_SIZES[way], batch).kind == "beside"


def test_a_constant_of_the_batch_s_size_stands_for_it_where_the_batch_is_fixed() -> None:
    assert join(FROZEN, str(SAMPLES)).kind == "beside"
    assert join(FROZEN, "N").kind == "coupled"
