"""Sums of squares times constants, over constants, over sizes and over counts, in graphs of fixed batch.

What a loss makes of any number of samples is written down in numpy. A batch per replica is chosen where that
is a mean whatever the batch; elsewhere the batch is global, and either way ranks train what numpy trains.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.planning.choose_reading import choose_reading, judge_step
from partc.compiler.verification.ranks import launch_in_process
from partc.runtime.errors import UnsupportedModel
from tests.builders.plans.compiled_steps import compile_step, import_text, random_batches
from tests.builders.plans.session_plans import start_of

WIDTH, RATE = 5, 0.1
Weights = Callable[[np.ndarray, float], np.ndarray]  # mask [n, 1], constant -> gradient by residual [n, 1]


@dataclass(frozen=True)
class Way:
    """A loss as text, of squares e2 and a constant c; what it multiplies 2 e with; whether that is a mean."""

    loss: str
    weights: Weights
    is_mean: bool
    gradient: str = "dy = Mul (e, scale)"


WAYS = {
    "mean": Way("loss = ReduceMean <keepdims = 0> (e2)", lambda m, c: 1 / (WIDTH * len(m)) + 0 * m, True),
    "mean of sums": Way(
        "s = ReduceSum <keepdims = 0> (e2, last) loss = ReduceMean <keepdims = 0> (s)",
        lambda m, c: 1 / len(m) + 0 * m,
        True,
    ),
    "mean times a constant": Way(
        "s = ReduceMean <keepdims = 0> (e2) loss = Mul (s, c)",
        lambda m, c: c / (WIDTH * len(m)) + 0 * m,
        True,
    ),
    "sum over the size": Way(
        "s = ReduceSum <keepdims = 0> (e2) n = Size (e2) count = CastLike (n, c) loss = Div (s, count)",
        lambda m, c: 1 / (WIDTH * len(m)) + 0 * m,
        True,
    ),
    "sum times a constant over the samples": Way(
        "s = ReduceSum <keepdims = 0> (e2) cs = Mul (c, s) n = Shape <start = 0, end = 1> (x) "
        "count = CastLike (n, c) l = Div (cs, count) loss = Squeeze (l)",
        lambda m, c: c / len(m) + 0 * m,
        True,
    ),
    "sum times a constant": Way(
        "s = ReduceSum <keepdims = 0> (e2) loss = Mul (s, c)", lambda m, c: c + 0 * m, False
    ),
    "sum over a constant": Way(
        "s = ReduceSum <keepdims = 0> (e2) loss = Div (s, c)", lambda m, c: 1 / c + 0 * m, False
    ),
    "sum of what a constant multiplies": Way(
        "ce = Mul (c, e2) loss = ReduceSum <keepdims = 0> (ce)", lambda m, c: c + 0 * m, False
    ),
    "sum of means times a constant": Way(
        "s = ReduceMean <keepdims = 0> (e2, last) r = ReduceSum <keepdims = 0> (s) loss = Mul (r, c)",
        lambda m, c: c / WIDTH + 0 * m,
        False,
    ),
    "sum over a count": Way(
        "me = Mul (mask, e2) s = ReduceSum <keepdims = 0> (me) count = ReduceSum <keepdims = 0> (mask) "
        "loss = Div (s, count)",
        lambda m, c: m / m.sum(),
        False,
        "dm = Mul (e, mask) dt = Mul (dm, two) dy = Div (dt, count)",
    ),
}
BATCHES = (2, 4, 6, 10)


def constants_of(batch: int) -> Iterator[float]:
    """Yield what people multiply sums with: weights, and 1 / the batch."""
    yield from (0.5, 0.1, 0.01, 3.0, 1 / batch, 1 / (WIDTH * batch))


def step_of(way: Way, batch: int, constant: float) -> str:
    scale = 2 * float(way.weights(np.ones((batch, 1)), constant)[0, 0])
    return f"""
step (double[{batch},4] x, double[{batch},{WIDTH}] t, double[{batch},1] mask, double[4,{WIDTH}] W)
    => (double loss, double[4,{WIDTH}] W_next)
<double c = {{{constant!r}}}, double scale = {{{scale!r}}}, double lr = {{{RATE}}}, double two = {{2}},
 int64[1] last = {{-1}}> {{
    y = MatMul (x, W)
    e = Sub (y, t)
    e2 = Mul (e, e)
    {way.loss}
    {way.gradient}
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}}"""


def trained(way: Way, constant: float, weight: np.ndarray, batch: dict[str, np.ndarray]) -> np.ndarray:
    residual = batch["x"] @ weight - batch["t"]
    return weight - RATE * batch["x"].T @ (2 * way.weights(batch["mask"], constant) * residual)


@pytest.mark.parametrize("name", WAYS)
def test_a_batch_per_replica_is_chosen_where_the_loss_is_a_mean_of_any_number_of_samples(name: str) -> None:
    way = WAYS[name]
    for batch in BATCHES:
        for constant in constants_of(batch):
            reading = choose_reading(import_text(step_of(way, batch, constant)), 2, None, {})

            assert reading.batch == ("per-replica" if way.is_mean else "global"), (batch, constant)


@pytest.mark.parametrize(("seed", "name"), list(enumerate(WAYS)))
def test_ranks_train_what_the_loss_makes_of_their_total_batch(seed: int, name: str, tmp_path: Path) -> None:
    way, rng = WAYS[name], np.random.default_rng(seed)
    for number, batch in enumerate(rng.choice(BATCHES, 2, replace=False).tolist()):
        constant = float(rng.choice([*constants_of(batch)]))
        training = import_text(step_of(way, batch, constant))
        reading = choose_reading(training, 2, None, {})

        compiled = compile_step(training, tmp_path / f"{number}", "1x2", batch=reading.batch)

        (data,) = random_batches(compiled.plan, 1, seed)
        data["mask"] = rng.integers(1, 4, (len(data["x"]), 1)).astype(float)
        assert len(data["x"]) == batch * (2 if way.is_mean else 1)
        expected = trained(way, constant, start_of(compiled.folder)["W"], data)
        with launch_in_process(compiled.folder, [data], 1, 0) as ranks:
            ranks.step()
            np.testing.assert_allclose(ranks.read("W"), expected, rtol=1e-9, atol=1e-12)


def test_a_constant_that_may_be_one_by_the_batch_is_shown_to_who_knows() -> None:
    for batch, part in product(BATCHES, (1, WIDTH)):
        constant = 1 / (part * batch)
        text = step_of(WAYS["sum times a constant"], batch, constant)

        (why,) = {departure.why for departure in judge_step(import_text(text), {})}
        assert f"if {constant:.6g} stands for 1 / {part * batch} of a batch of {batch}, it is a mean" in why
        assert "--batch per-replica is exact" in why


@pytest.mark.parametrize("constant", [0.3, 3.0, 1.0, 1 / 7])
def test_a_constant_that_is_no_share_of_the_batch_is_not_shown(constant: float) -> None:
    (why,) = {
        departure.why
        for departure in judge_step(import_text(step_of(WAYS["sum times a constant"], 4, constant)), {})
    }

    assert why == "it is a sum over the samples, not a mean"


def test_the_user_who_knows_is_told_where_the_batch_cannot_be_shared() -> None:
    with pytest.raises(UnsupportedModel, match=r"if 0\.05 stands for 1 / 20 of a batch of 4, it is a mean"):
        choose_reading(import_text(step_of(WAYS["sum over a constant"], 4, 20.0)), 5, None, {})
