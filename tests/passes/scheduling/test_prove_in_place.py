"""What may be written over, and that training is right where it may not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.data.initial import InitialValues
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.program import Run, Store
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
    verified,
)

HEAD = "double[8,4] x, double[8,3] t, double[4,3] W"
GRADIENT = """
    y = MatMul (x, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (x)
    dy = Mul (d, scale)
    dW = MatMul (xt, dy)
    part = Mul (dW, lr)
"""
CONSTANTS = (
    "double scale = {0.08}, double lr = {0.1}, double kept = {0.9}, double new = {0.1}, double one = {1.0}, "
    "int64[2] whole = {4, 3}, int64[1] flat_shape = {12}, double[3,3] square = {1, 2, 3, 4, 5, 6, 7, 8, 9}"
)

PLAIN = "W_next = Sub (W, part)"


def step(body: str, variables: str = "", outputs: str = "") -> str:
    return f"""
step ({HEAD}{variables}) => (double loss, double[4,3] W_next{outputs}) <{CONSTANTS}> {{ {GRADIENT} {body} }}
"""


def compiled(tmp_path: Path, text: str, cluster: str = "1x2") -> Compiled:
    training = import_text(text, loss="loss")
    return compile_step(training, tmp_path / "out", cluster, "allreduce", "global")


def stored(step: Compiled) -> set[str]:
    """Return the variables that are copied into, for want of a proof."""
    return {i.target for i in step.plan.instructions if isinstance(i, Store)}


def written(step: Compiled) -> set[str]:
    runs = [i for i in step.plan.instructions if isinstance(i, Run)]
    return {value for run in runs for _, value in run.writes} & {v.name for v in step.plan.variables}


def test_a_plain_update_is_written_over_the_variable(tmp_path: Path) -> None:
    done = compiled(tmp_path, step(PLAIN))

    assert (written(done), stored(done)) == ({"W"}, set())
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


def test_an_update_whose_result_is_broadcast_is_still_in_place(tmp_path: Path) -> None:
    done = compiled(tmp_path, step("change = ReduceMean (part) W_next = Sub (W, change)"))

    assert stored(done) == set()
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


OTHER_READERS = {
    "beside the update": ("W_next = Sub (W, part) old = Mul (W, part) m_next = Add (m, old)", {"W"}),
    "in an earlier segment": ("W_next = Sub (W, part) old = Mul (W, new) m_next = Add (m, old)", set()),
    "behind the update": ("W_next = Sub (W, part) moved = Sub (W_next, W) m_next = Add (m, moved)", {"W"}),
    "before the update": (
        "old = Mul (W, part) more = Mul (old, part) W_next = Sub (W, more) m_next = Add (m, more)",
        set(),
    ),
}


@pytest.mark.parametrize("reader", OTHER_READERS)
def test_a_reader_of_the_old_value_forbids_it_unless_it_comes_first(tmp_path: Path, reader: str) -> None:
    body, kept = OTHER_READERS[reader]

    done = compiled(tmp_path, step(body, ", double[4,3] m", ", double[4,3] m_next"))

    assert stored(done) == kept
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


def test_who_reads_what_was_pulled_from_servers_reads_the_variable(tmp_path: Path) -> None:
    """What workers read of it is the servers' own memory, and the loss is computed behind the update."""
    text = """step (double[8,4] x, double[4,4] W) => (double loss, double[4,4] W_next) {
        h = MatMul (x, W) s = Mul (h, x) loss = ReduceSum <keepdims = 0> (s)
        xt = Transpose <perm = [1, 0]> (x) dW = MatMul (xt, x) W_next = Sub (W, dW) }"""

    done = compile_step(import_text(text, loss="loss"), tmp_path / "out", "2x2", "ps", "global")

    assert_trains_as_one_device(done, random_batches(done.plan, 3))


VIEWS = {
    "Reshape": "same = Reshape (k, whole)",
    "Identity": "same = Identity (k)",
    "Transpose": "same = Transpose <perm = [0, 1]> (k)",
    "Mul": "same = Mul (k, one)",
    "twice": "flat = Reshape (k, flat_shape) same = Reshape (flat, whole)",
}
K_AND_M = ", double[4,3] k, double[4,3] m", ", double[4,3] k_next, double[4,3] m_next"


@pytest.mark.parametrize("view", VIEWS)
def test_who_reads_the_same_memory_by_another_name_reads_the_variable(tmp_path: Path, view: str) -> None:
    """The view comes before the update; another reader of it, in the same segment, does not."""
    body = (
        f"{PLAIN} {VIEWS[view]} k_next = Mul (same, kept) old = MatMul (same, square) m_next = Add (m, old)"
    )

    done = compiled(tmp_path, step(body, *K_AND_M))

    assert stored(done) == {"k"}
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


@pytest.mark.parametrize("view", VIEWS)
def test_an_update_that_reads_a_view_is_in_place_if_it_works_point_by_point(
    tmp_path: Path, view: str
) -> None:
    body = (
        f"{PLAIN} {VIEWS[view]} k_next = MatMul (same, square) more = Identity (m) m_next = Mul (more, kept)"
    )

    done = compiled(tmp_path, step(body, *K_AND_M))

    assert stored(done) == {"k"}
    assert "m" in written(done)
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


def test_an_average_reads_the_next_value(tmp_path: Path) -> None:
    body = f"{PLAIN} old = Mul (m, kept) fresh = Mul (W_next, new) m_next = Add (old, fresh)"

    done = compiled(tmp_path, step(body, ", double[4,3] m", ", double[4,3] m_next"))

    assert stored(done) == set()
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


def test_variables_that_change_places_are_copied(tmp_path: Path) -> None:
    body = f"{PLAIN} a_next = Identity (b) b_next = Identity (a)"
    variables, results = ", double[3] a, double[3] b", ", double[3] a_next, double[3] b_next"

    done = compiled(tmp_path, step(body, variables, results))

    assert {"a", "b"} <= stored(done) | {"a", "b"} - written(done)
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


def test_a_variable_that_never_changes_keeps_its_value(tmp_path: Path) -> None:
    done = compiled(tmp_path, step(f"{PLAIN} k_next = Identity (k)", ", double[3] k", ", double[3] k_next"))
    report = verified_report(done)

    assert report["k"] == 0.0
    assert report["W"] > 0.0


def verified_report(done: Compiled) -> dict[str, float]:
    report = verified(done, random_batches(done.plan, 3))
    assert report.passed, report.summary()
    return {check.name: check.max_change for check in report.variables}


def test_two_variables_may_share_a_next_value(tmp_path: Path) -> None:
    body = f"{PLAIN} last_next = Identity (W_next)"

    done = compiled(tmp_path, step(body, ", double[4,3] last", ", double[4,3] last_next"))

    assert "W" in written(done)
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


@pytest.mark.parametrize("shown", ["old = Identity (W)", "old = Mul (W, one)"])
def test_an_output_shows_the_old_value(tmp_path: Path, shown: str) -> None:
    done = compiled(tmp_path, step(f"{PLAIN} {shown}", "", ", double[4,3] old"))

    assert_trains_as_one_device(done, random_batches(done.plan, 3))
    assert_shows(done, "old", lambda before, after: before)


def test_an_output_may_be_the_next_value(tmp_path: Path) -> None:
    done = compiled(tmp_path, step(f"{PLAIN} new_W = Identity (W_next)", "", ", double[4,3] new_W"))

    assert_shows(done, "new_W", lambda before, after: after)


def assert_shows(done: Compiled, output: str, wanted: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    batches = random_batches(done.plan, 1)
    before = InitialValues(done.folder).part("W")
    result = train_in_process(done.folder, batches)
    assert not np.array_equal(before, result.variables["W"])
    np.testing.assert_allclose(result.outputs[0][output], wanted(before, result.variables["W"]), rtol=1e-12)


def test_every_ranks_row_of_a_table_is_updated_where_it_lies(tmp_path: Path) -> None:
    text = """
step (int64[8] ids, double[8,2] t, double[10,2] E) => (double loss, double[10,2] E_next)
<double lr = {0.1}, int64[1] last = {-1}, int64[2] size = {10, 2}> {
    e = Gather (E, ids)
    d = Sub (e, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    zeros = ConstantOfShape <value = double[1] {0.0}> (size)
    column = Unsqueeze (ids, last)
    dE = ScatterND <reduction = "add"> (zeros, column, d)
    part = Mul (dE, lr)
    E_next = Sub (E, part)
}
"""
    done = compile_step(import_text(text, loss="loss"), tmp_path / "out", "2x1", "ps", "global")

    assert (written(done), stored(done)) == ({"E"}, set())
    assert_trains_as_one_device(done, random_batches(done.plan, 3))
