"""Lookups of one table that can be asked for at once are one request of its owners."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.runtime.data.initial import InitialValues
from partc.runtime.execution.in_process import RanksInProcess
from partc.runtime.plan.program import Start
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
    verified,
)

ROWS, WIDTH = 20, 4
# Ids of a step each, of two steps, from the table's end, and of what was looked up before.
LOOKUPS = f"""
forward (int64[12, 4] x, float[12, {WIDTH}] t) => (float[] loss)
<int64 s0 = {{0}}, int64 s1 = {{1}}, int64[2] pair = {{2, 3}}, int64 rows = {{{ROWS}}},
 int64[1] steps = {{1}}> {{
    i0 = Gather <axis = 1> (x, s0)
    i1 = Gather <axis = 1> (x, s1)
    from_end = Sub (i1, rows)
    both = Gather <axis = 1> (x, pair)
    e0 = Gather (E, i0)
    first = Tanh (e0)
    e1 = Gather (E, from_end)
    next = Add (first, e1)
    h = Tanh (next)
    scores = MatMul (h, W)
    best = ArgMax <axis = 1, keepdims = 0> (scores)
    chosen = Gather (E, best)
    e_both = Gather (E, both)
    summed = ReduceSum <keepdims = 0> (e_both, steps)
    y = Sum (h, chosen, summed)
    d = Sub (y, t)
    squares = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (squares)
}}
"""
# The second half of each row is looked at alone: cut on the owners, before rows are sent.
CUT = f"""
forward (int64[12, 2] x, float[12, {WIDTH}] t) => (float[] loss)
<int64 s0 = {{0}}, int64 s1 = {{1}}, int64[1] from = {{2}}, int64[1] to = {{4}}, int64[1] last = {{1}}> {{
    i0 = Gather <axis = 1> (x, s0)
    i1 = Gather <axis = 1> (x, s1)
    e0 = Gather (E, i0)
    e1 = Gather (E, i1)
    half = Slice (e1, from, to, last)
    twice = Concat <axis = 1> (half, half)
    h = Add (e0, twice)
    y = MatMul (h, W)
    best = ReduceMax <keepdims = 1> (y, last)
    d = Sub (best, t)
    squares = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (squares)
}}
"""


def step_of(text: str) -> onnx.ModelProto:
    forward, rng = parse(text), np.random.default_rng(0)
    for name, shape in (("E", (ROWS, WIDTH)), ("W", (WIDTH, ROWS))):
        values = rng.normal(size=shape).astype(np.float32)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1))


def pulls(compiled: Compiled) -> list[Start]:
    """Return the messages by which hosts' servers hear what is looked up."""
    starts = [each for each in compiled.plan.instructions if isinstance(each, Start)]
    return [each for each in starts if each.kind == "gather_rows" and "pull" in each.label]


CASES = list(product(("2x2", "3x1", "2x2s"), ("ps", "hybrid"), ("per-replica", "global")))


@pytest.mark.parametrize(("cluster", "strategy", "batch"), CASES[::3])
@pytest.mark.parametrize("without", [(), ("local-aggregation",)])
def test_what_comes_of_data_is_asked_for_at_once(
    cluster: str, strategy: str, batch: str, without: tuple[str, ...], tmp_path: Path
) -> None:
    """And what comes of the rows of others behind these."""
    training = import_training_graph(step_of(LOOKUPS))
    done = compile_step(training, tmp_path / "out", cluster, strategy, batch, without=without)

    assert len(pulls(done)) == 2
    assert_trains_as_one_device(done, random_batches(done.plan, 3, high=ROWS))


@pytest.mark.parametrize(("cluster", "strategy", "batch"), CASES)
def test_rows_that_are_looked_up_are_handed_out(
    cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    """As the table had them before the step: of all samples, or of each replica's."""
    outputs = f"(float[] loss, float[12, {WIDTH}] e0, float[12, 2, {WIDTH}] e_both)"
    step = step_of(LOOKUPS.replace("(float[] loss)", outputs))
    done = compile_step(import_training_graph(step), tmp_path / "out", cluster, strategy, batch)
    (batch_of_all,) = random_batches(done.plan, 1, high=ROWS)

    found = RanksInProcess(done.folder).step(batch_of_all)

    rows, ids = InitialValues(done.folder).part("E"), batch_of_all["x"]
    own = (done.plan.replicas, -1) if batch == "per-replica" else (-1,)
    np.testing.assert_array_equal(found["e0"], rows[ids[:, 0].reshape(own)])
    np.testing.assert_array_equal(found["e_both"], rows[ids[:, 2:].reshape(*own, 2)])


def test_rows_that_are_cut_on_their_owners_are_asked_for_apart(tmp_path: Path) -> None:
    done = compile_step(import_training_graph(step_of(CUT)), tmp_path / "out", "2x2", "ps", "global")

    assert len(pulls(done)) == 2
    assert_trains_as_one_device(done, random_batches(done.plan, 3, high=ROWS))


@pytest.mark.parametrize("strategy", ["ps", "hybrid"])
def test_an_unrolled_recurrence_asks_once_a_step(strategy: str, tmp_path: Path) -> None:
    forward = build_model("rnntc", batch=8, steps=6, vocab=50, embedding=8, cells=8, classes=4)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adagrad(0.1))
    done = compile_step(import_training_graph(step), tmp_path / "out", "2x2", strategy, "global")

    assert len(pulls(done)) == 1
    assert verified(done, random_batches(done.plan, 2)).passed


def test_ids_may_be_far_behind_those_of_the_first_lookup(tmp_path: Path) -> None:
    """Farther than Python recurses: what they come of is made in order."""
    links = (f"x{n} = Mul (r{n}, three) r{n + 1} = Mod (x{n}, rows)" for n in range(120))
    step = step_of(f"""
        forward (int64[8] r0, float[8, {WIDTH}] t) => (float[] loss)
        <int64 three = {{3}}, int64 rows = {{{ROWS}}}> {{
            e0 = Gather (E, r0)
            {" ".join(links)}
            e1 = Gather (E, r120)
            scores = MatMul (e0, W)
            back = Transpose (W)
            hidden = MatMul (scores, back)
            y = Add (hidden, e1)
            d = Sub (y, t)
            squares = Mul (d, d)
            loss = ReduceMean <keepdims = 0> (squares)
        }}""")
    done = compile_step(import_training_graph(step), tmp_path / "out", "2x2", "ps", "global")

    assert len(pulls(done)) == 1
    assert_trains_as_one_device(done, random_batches(done.plan, 2, high=ROWS))
