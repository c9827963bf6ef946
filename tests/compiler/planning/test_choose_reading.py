"""Which reading of the batch is taken, what is told of it, and what is refused."""

from pathlib import Path

import pytest

from partc.compiler.planning.choose_reading import (
    are_of_outputs,
    choose_reading,
    describe_departures,
    judge_step,
)
from partc.passes.replicas.judge_replicas import NO_MEAN, Departure
from partc.passes.roles.find_gradients import find_gradients
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.program import Aggregation
from tests.builders.graphs.foreign_steps import (
    ADAM,
    CLIPPED,
    COUNTED,
    LINEAR,
    LINEAR_CONSTANTS,
    SGD,
    SQUARED,
    TABLE,
    import_step,
)
from tests.builders.plans.compiled_steps import compile_step, import_text

SUMS = Aggregation(average_dense=False, average_sparse=False)
SUMMED = SGD.replace("ReduceMean", "ReduceSum").replace("0.0833333", "2.0")
# The gradient is that of the sum, 24 times as large as the slope of the loss that is shown.
SUM_BEHIND_A_MEAN = SGD.replace("0.0833333", "2.0")

PEAK = f"""
step (float[8,4] x, float[8,3] t, float[4,3] W, float peak)
    => (float loss, float[4,3] W_next, float peak_next)
<{LINEAR_CONSTANTS}> {{ {LINEAR}
    part = Mul (dW, lr)
    W_next = Sub (W, part)
    top = ReduceMax <keepdims = 0> (x)
    peak_next = Max (peak, top)
}}
"""


def test_a_mean_over_samples_is_proven() -> None:
    reading = choose_reading(import_text(SGD), 4, None, {})

    assert (reading.batch, reading.departures) == ("per-replica", ())


@pytest.mark.parametrize("text", [COUNTED, CLIPPED, SUMMED, SUM_BEHIND_A_MEAN, PEAK, SQUARED])
def test_what_is_no_mean_is_global_where_the_batch_divides(text: str) -> None:
    reading = choose_reading(import_text(text), 4, None, {})

    assert reading.batch == "global"
    assert reading.departures


@pytest.mark.parametrize("text", [COUNTED, CLIPPED, SUMMED, SUM_BEHIND_A_MEAN, PEAK, SQUARED])
def test_it_is_global_too_where_earlier_replicas_take_a_sample_more(text: str) -> None:
    assert choose_reading(import_text(text), 3, None, {}).batch == "global"


@pytest.mark.parametrize("text", [COUNTED, CLIPPED, SUMMED, SUM_BEHIND_A_MEAN, PEAK, SQUARED])
def test_what_is_no_mean_of_fewer_samples_than_replicas_is_refused_with_both_remedies(text: str) -> None:
    with pytest.raises(UnsupportedModel, match="a batch of 8 cannot be divided") as refusal:
        choose_reading(import_text(text), 9, None, {})

    assert "--batch global with a graph of batch 9" in refusal.value.fix
    assert "--batch per-replica" in refusal.value.fix


def test_a_batch_of_no_size_of_its_own_must_divide() -> None:
    training = import_text(COUNTED.replace("[8,", "[N,"))

    assert choose_reading(training, 4, None, {"N": 8}).batch == "global"
    with pytest.raises(UnsupportedModel, match="a batch of 8 cannot be divided") as refusal:
        choose_reading(training, 3, None, {"N": 8})
    assert "--batch global with --size N=9" in refusal.value.fix


def test_a_batch_per_replica_that_was_asked_for_is_told_in_the_plan_and_the_report(tmp_path: Path) -> None:
    compiled = compile_step(import_text(COUNTED), tmp_path / "out", "1x2")

    (gradient, _) = compiled.plan.departures
    assert gradient.startswith(
        "the gradient of W: node 'Div_9' (Div) divides by what is summed over the samples"
    )
    report = (tmp_path / "out" / "report.html").read_text()
    assert "is not what one device makes of" in report
    assert "Div_9" in report


def test_of_a_proven_step_the_plan_tells_nothing(tmp_path: Path) -> None:
    assert compile_step(import_text(SGD), tmp_path / "out", "1x2").plan.departures == ()


def test_a_running_maximum_has_no_average() -> None:
    with pytest.raises(UnsupportedModel, match="a largest or smallest value") as refusal:
        choose_reading(import_text(PEAK), 4, "per-replica", {})

    assert refusal.value.at == "next value of 'peak'"


def test_an_unfound_gradient_is_needed_by_averaged_replicas_alone() -> None:
    with pytest.raises(UnsupportedModel, match="the gradient of 'W' cannot be found"):
        choose_reading(import_text(SQUARED), 4, "per-replica", {})
    assert choose_reading(import_text(SQUARED), 1, "per-replica", {}).departures == ()


def test_summed_gradients_are_one_device_s_where_the_loss_is_a_sum() -> None:
    assert not judge_step(import_text(SUMMED), {}, SUMS)[1:]  # the loss is shown as an average
    assert choose_reading(import_text(SUMMED), 3, None, {}, SUMS).batch == "per-replica"
    assert any(departure.of == "gradient" for departure in judge_step(import_text(SGD), {}, SUMS))


@pytest.mark.parametrize(("text", "is_slope"), [(SGD, True), (SUM_BEHIND_A_MEAN, False), (ADAM, False)])
def test_a_constant_in_the_gradient_is_told_by_the_slope_of_the_loss(text: str, is_slope: bool) -> None:
    departures = judge_step(import_text(text), {})

    assert all(departure.by_constant for departure in departures)
    assert (not departures) == is_slope


def test_a_table_s_slices_are_judged_too() -> None:
    training = import_step(TABLE)
    find_gradients(training)

    assert [departure.name for departure in judge_step(training, {})] == ["E"]


def test_one_replica_alone_is_one_device() -> None:
    assert choose_reading(import_text(COUNTED), 1, None, {}).departures == ()


def test_departures_of_outputs_alone_leave_the_training_exact() -> None:
    outputs = [Departure("output", "n", "it depends on the size of the batch")]
    both = [*outputs, Departure("gradient", "W", "it depends on the size of the batch")]

    assert are_of_outputs(describe_departures(outputs))
    assert not are_of_outputs(describe_departures(both))


# The mean squares of 8 samples of 5 numbers, in the ways that people write them: the loss, and what each
# sample's gradient is of the residual e.
MEANS = {
    "all at once": ("loss = ReduceMean <keepdims = 0> (e2)", 2 / 40),
    "one axis after the other": (
        "m = ReduceMean <keepdims = 0> (e2, last)\n loss = ReduceMean <keepdims = 0> (m)",
        2 / 40,
    ),
    "a sum of a sample's numbers": (
        "m = ReduceSum <keepdims = 0> (e2, last)\n loss = ReduceMean <keepdims = 0> (m)",
        2 / 8,
    ),
    "by the size": (
        "n = Size (e2)\n count = CastLike (n, half)\n sum = ReduceSum <keepdims = 0> (e2)\n"
        "loss = Div (sum, count)",
        2 / 40,
    ),
    "by a number of the shape": (
        "n = Shape <start = 0, end = 1> (x)\n count = CastLike (n, half)\n"
        "sum = ReduceSum <keepdims = 0> (e2)\n column = Div (sum, count)\n"
        "loss = ReduceSum <keepdims = 0> (column)",
        2 / 8,
    ),
    "halved": ("m = ReduceMean <keepdims = 0> (e2)\n loss = Mul (m, half)", 1 / 40),
    "halved in the loss alone": ("m = ReduceMean <keepdims = 0> (e2)\n loss = Mul (m, half)", 2 / 40),
    "halved in the gradient alone": ("loss = ReduceMean <keepdims = 0> (e2)", 1 / 40),
}


def mean_squares(loss: str, scale: float) -> str:
    """Return a step by hand, in which each sample's gradient is the residual times a constant."""
    return f"""
step (float[8,4] x, float[8,5] t, float[4,5] W) => (float loss, float[4,5] W_next)
<float scale = {{{scale}}}, float lr = {{0.1}}, float half = {{0.5}}, int64[1] last = {{-1}}> {{
    y = MatMul (x, W)
    e = Sub (y, t)
    e2 = Mul (e, e)
    {loss}
    xt = Transpose <perm = [1, 0]> (x)
    dy = Mul (e, scale)
    dW = MatMul (xt, dy)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}}"""


@pytest.mark.parametrize("way", MEANS)
def test_a_constant_is_told_to_be_one_by_the_batch_s_size_however_the_mean_is_written(way: str) -> None:
    loss, scale = MEANS[way]

    assert judge_step(import_text(mean_squares(loss, scale)), {}) == ()


@pytest.mark.parametrize("way", MEANS)
@pytest.mark.parametrize("factor", [8, 40])
def test_a_constant_that_lacks_the_batch_s_size_is_a_sum_whatever_the_loss_that_is_shown(
    way: str, factor: int
) -> None:
    loss, scale = MEANS[way]

    departures = judge_step(import_text(mean_squares(loss, scale * factor)), {})

    assert [(departure.of, departure.name) for departure in departures] == [("gradient", "W")]


def test_in_a_small_batch_half_a_mean_may_be_a_sum_and_is_not_guessed() -> None:
    loss, _ = MEANS["halved in the loss alone"]
    text = mean_squares(loss, 2 / 20).replace("[8,", "[4,")

    assert [departure.of for departure in judge_step(import_text(text), {})] == ["gradient"]


def test_a_sum_times_a_constant_is_not_guessed_to_be_a_mean() -> None:
    """A loss of 0.025 times a sum of 40 squares may as well be a weighted sum: nothing in the graph tells."""
    loss = (
        "weight = Constant <value_float = 0.025> ()\n s = ReduceSum <keepdims = 0> (e2)\n"
        "loss = Mul (s, weight)"
    )

    assert choose_reading(import_text(mean_squares(loss, 2 / 40)), 4, None, {}).batch == "global"


# The gradient is a mean by the batch's size, and a rate of that size takes it back: 0.05 of the batch's 8.
GROWING_RATES = {
    "of the samples": "f = CastLike (n, half)\n rate = Mul (f, part_of_8)\n u = Mul (dW, rate)",
    "of all numbers": (
        "c = Size (e)\n f = CastLike (c, half)\n rate = Mul (f, part_of_40)\n u = Mul (dW, rate)"
    ),
    "of every sample": (
        "f = CastLike (n, half)\n rate = Mul (f, part_of_8)\n s = Shape (xm)\n rates = Expand (rate, s)\n"
        "xs = Mul (xm, rates)\n xst = Transpose <perm = [1, 0]> (xs)\n u = MatMul (xst, e)"
    ),
}


@pytest.mark.parametrize("batch", ["8", "N"])
@pytest.mark.parametrize("rate", GROWING_RATES)
def test_a_rate_by_the_batch_s_own_size_is_no_constant_that_makes_a_mean(rate: str, batch: str) -> None:
    text = f"""
step (float[{batch},4] x, float[{batch},5] t, float[4,5] W) => (float loss, float[4,5] W_next)
<float half = {{0.5}}, float part_of_8 = {{0.05}}, float part_of_40 = {{0.01}}> {{
    y = MatMul (x, W)
    e = Sub (y, t)
    e2 = Mul (e, e)
    loss = ReduceMean <keepdims = 0> (e2)
    n = Shape <start = 0, end = 1> (x)
    count = CastLike (n, half)
    xm = Div (x, count)
    xt = Transpose <perm = [1, 0]> (xm)
    dW = MatMul (xt, e)
    {GROWING_RATES[rate]}
    W_next = Sub (W, u)
}}"""
    sizes = {"N": 8} if batch == "N" else {}

    (departure,) = judge_step(import_text(text), sizes)

    assert (departure.of, departure.why) == ("gradient", NO_MEAN)
    assert choose_reading(import_text(text), 4, None, sizes).batch == "global"
