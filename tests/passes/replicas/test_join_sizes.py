"""Which power of the number of replicas a number has that follows from the batch's size."""

import pytest

from partc.compiler.planning.choose_reading import choose_reading
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.replicas.batch_relation import BatchRelation
from partc.passes.replicas.join_replicas import join_replicas
from partc.passes.roles.find_roles import find_roles
from tests.builders.plans.compiled_steps import import_text

SAMPLES = 12
# Numbers of the batch's size that are the same for 12 and 24 samples, or twice as large, and not so for more.
CUT_OFF = {
    "quotient": "q = Div (n, sixteen) m = Max (q, one)",
    "largest": "m = Min (n, thirty)",
    "least": "m = Max (n, thirty)",
}


def step_of(number: str, batch: str) -> str:
    """Return a step in which a mean's gradient is multiplied with a number `m`."""
    return f"""
step (float[{batch},4] x, float[{batch},3] t, float[4,3] W) => (float loss, float[4,3] W_next)
<int64 sixteen = {{16}}, int64 thirty = {{30}}, int64 one = {{1}},
 float rate = {{0.1}}, float third = {{0.3}}> {{
    y = MatMul (x, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    ns = Shape <start = 0, end = 1> (x)
    n = Squeeze (ns)
    f = CastLike (n, rate)
    {number}
    dx = Div (d, f)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dx)
    c = CastLike (m, rate)
    lr = Mul (c, rate)
    u = Mul (dW, lr)
    W_next = Sub (W, u)
}}"""


def join(number: str, replicas: int) -> BatchRelation:
    training = import_text(step_of(number, "N"))
    facts = infer_facts(training, {"N": SAMPLES})
    return join_replicas(training, facts, find_roles(training).main, replicas)["lr"]


@pytest.mark.parametrize("replicas", [2, 3, 5, 6, 7, 48, 1000])
@pytest.mark.parametrize(
    ("number", "power"),
    [
        ("m = Mul (f, rate)", -1),
        ("r = Reciprocal (f) m = Mul (r, third)", 1),
        ("e = Div (third, f) m = Mul (e, e)", 2),
        ("m = Div (f, f)", 0),
    ],
)
def test_a_power_is_told_for_any_number_of_replicas(number: str, power: int, replicas: int) -> None:
    assert join(number, replicas) == BatchRelation("alike", power)


@pytest.mark.parametrize("number", CUT_OFF)
def test_a_number_that_is_cut_off_has_no_power_for_replicas_beyond_it(number: str) -> None:
    assert join(CUT_OFF[number], 2).kind == "alike"
    assert join(CUT_OFF[number], 4).kind == "sizes"


@pytest.mark.parametrize("batch", ["N", str(SAMPLES)])
@pytest.mark.parametrize("number", CUT_OFF)
def test_the_batch_of_all_replicas_decides(number: str, batch: str) -> None:
    sizes = {"N": SAMPLES} if batch == "N" else {}

    reading = choose_reading(import_text(step_of(CUT_OFF[number], batch)), 4, None, sizes)

    assert reading.batch == "global"
    assert "is told the size of the batch" in reading.departures[0]
