"""Which axis counts the samples, where they are coupled, and where two readings remain."""

import re
from pathlib import Path

import numpy as np
import pytest
from onnx.numpy_helper import from_array

from partc.compiler.commands.arguments.parse_options import parse_axes
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.planning.choose_reading import choose_reading
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.coupled_steps import COUPLED, coupled_step
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)

KINDS = [*COUPLED, "contrastive"]


def axes_of(training: TrainingGraph) -> dict[str, int | None]:
    return {name: data.sample_axis for name, data in training.data_inputs.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_samples_lie_on_axis_0_and_train_globally(kind: str, tmp_path: Path) -> None:
    training = import_training_graph(coupled_step(kind))

    assert set(axes_of(training).values()) == {0}
    reading = choose_reading(training, 4, None, {})
    assert reading.batch == "global"
    assert re.search(r"the gradient of .*: node '.+' \(.+\)", reading.departures[0])
    compiled = compile_step(training, tmp_path / "out", "2x2", batch="global")
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_three_replicas_share_eight_coupled_samples_unevenly(kind: str, tmp_path: Path) -> None:
    training = import_training_graph(coupled_step(kind))

    compiled = compile_step(training, tmp_path / "out", "1x3", batch=None)

    assert compiled.plan.batch == "global"
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_nine_replicas_cannot_share_eight_coupled_samples(kind: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        choose_reading(import_training_graph(coupled_step(kind)), 9, None, {})

    assert "a batch of 8 cannot be divided" in refusal.value.what
    assert "--batch global" in refusal.value.fix and "--batch per-replica" in refusal.value.fix


def offered(fix: str) -> list[dict[str, int | None]]:
    """Return the readings that a refusal offers, as the command line takes them."""
    offers = re.findall(r"(?:--sample-axis \S+=(?:\d|none) ?)+", fix)
    return [parse_axes(re.findall(r"\S+=(?:\d|none)", offer)) for offer in offers]


# Coupled over the first axis, each place of the second on its own; targets are per entry of the first.
TWO_READINGS = """
step (float[8,6,4] x, float[8] t, float[4] W) => (float loss, float[4] W_next)
<int64[1] places = {1}, int64[1] last = {2}, float lr = {0.1}> {
    s = Softmax <axis = 0> (x)
    y = MatMul (s, W)
    m = ReduceMean <keepdims = 0> (y, places)
    d = Sub (m, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    ms = ReduceMean <keepdims = 0> (s, places)
    dW = MatMul (d, ms)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}
"""


def test_where_two_readings_remain_both_are_offered() -> None:
    with pytest.raises(UnsupportedModel, match="two axes of the data may count its samples") as refusal:
        import_text(TWO_READINGS)

    found = offered(refusal.value.fix)
    assert found == [{"x": 0, "t": 0}, {"x": 1, "t": None}]
    for axes in found:
        assert axes_of(import_text(TWO_READINGS, sample_axes=axes)) == axes


# `aside` is as long as the batch, and the loss does not read it; `scale` is as long too, but along the
# features.
ALIKE = """
step (float[4,4] x, float[4,3] t, float[4] aside, float[4] scale, float[4,3] W)
    => (float loss, float[4,3] W_next, float[4] shown)
<float lr = {0.1}> {
    shown = Exp (aside)
    scaled = Mul (x, scale)
    y = MatMul (scaled, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (scaled)
    dW = MatMul (xt, d)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}
"""


def test_an_input_of_equal_size_is_of_samples_where_nothing_contradicts() -> None:
    assert axes_of(import_text(ALIKE)) == {"x": 0, "t": 0, "aside": 0, "scale": None}


def test_a_split_is_followed_back_through_a_thousand_nodes() -> None:
    links = "".join(f"a{i + 1} = Tanh (a{i}) " for i in range(1500))
    text = ALIKE.replace("shown = Exp (aside)", f"shown = Exp (aside) a0 = Neg (t) {links}")
    text = text.replace("Sub (y, t)", "Sub (y, a1500)")

    assert axes_of(import_text(text))["t"] == 0


# Every x is held against every other z: as many negatives for all, or the other half of the batch.
ALL_PAIRS = """
step (float[4,3] x, float[4,3] z, float[3,2] W) => (float loss, float[3,2] W_next)
<float lr = {0.1}> {
    a = MatMul (x, W)
    b = MatMul (z, W)
    bt = Transpose <perm = [1, 0]> (b)
    scores = MatMul (a, bt)
    sq = Tanh (scores)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, a)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}
"""


def test_the_two_sides_of_all_pairs_may_both_be_samples() -> None:
    with pytest.raises(UnsupportedModel, match="two axes of the data may count its samples") as refusal:
        import_text(ALL_PAIRS)

    assert offered(refusal.value.fix) == [{"x": 0, "z": 0}, {"x": 0, "z": None}]


def test_a_batch_of_one_is_in_front(tmp_path: Path) -> None:
    training = import_text(
        """step (float[1,6] x, float[1,3] y, float[6,3] w) => (float loss, float[6,3] w_next) {
            h = MatMul (x, w) d = Sub (h, y) q = Mul (d, d) loss = ReduceMean <keepdims = 0> (q)
            xt = Transpose (x) two = Constant <value_float = 0.6666667> () e = Mul (d, two)
            dw = MatMul (xt, e) w_next = Sub (w, dw) }""",
        loss="loss",
    )

    assert axes_of(training) == {"x": 0, "y": 0}
    compiled = compile_step(training, tmp_path / "out", "2x2")
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


BAG = """
bag (int64[1,6] ids, float[1,2] y) => (float loss)
<float[10,4] E, float[4,2] W, int64[1] words = {1}> {
    rows = Gather (E, ids)
    POOLED
    h = MatMul (pooled, W)
    e = Sub (h, y)
    q = Mul (e, e)
    loss = ReduceMean <keepdims = 0> (q)
}
"""
POOLED = {
    "mean": "pooled = ReduceMean <keepdims = 0> (rows, words)",
    "bounded sum": "sum = ReduceSum <keepdims = 0> (rows, words) pooled = Tanh (sum)",
    "largest": "pooled = ReduceMax <keepdims = 0> (rows, words)",
    "root of squares": "sq = Mul (rows, rows) m = ReduceMean <keepdims = 0> (sq, words) pooled = Sqrt (m)",
}


def step_of(forward: str) -> TrainingGraph:
    model = parse(forward)
    rng = np.random.default_rng(0)
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name in "EW"]:
        model.graph.initializer.remove(tensor)
    for info in [info for info in model.graph.value_info if info.name in "EW"]:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        model.graph.initializer.append(from_array(rng.normal(size=shape).astype(np.float32), info.name))
    del model.graph.value_info[:]
    return import_training_graph(build_training_graph(model, loss="loss", optimizer=SGD(0.1)))


@pytest.mark.parametrize("pooled", POOLED)
def test_a_batch_of_one_bag_is_in_front_where_its_words_are_taken_together(
    pooled: str, tmp_path: Path
) -> None:
    training = step_of(BAG.replace("POOLED", POOLED[pooled]))

    assert axes_of(training) == {"ids": 0, "y": 0}
    compiled = compile_step(training, tmp_path / "out", "2x2")
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=3))


def test_words_of_one_text_that_stay_apart_are_samples() -> None:
    text = BAG.replace("POOLED", "pooled = Tanh (rows)").replace("float[1,2] y", "float[1,6,2] y")

    assert axes_of(step_of(text)) == {"ids": 1, "y": 1}
