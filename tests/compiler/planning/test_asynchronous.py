from pathlib import Path

import msgspec
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Optimizer
from partc.compiler.planning.asynchronous import _check_updates, _settle_stores, strategy_of_sessions
from partc.cost.cluster.cluster import view_of_session
from partc.cost.strategy import STRATEGY_FORMAT, Strategy
from partc.models.catalogue import build_model
from partc.runtime.asynchronous.sessions.session import own_ranks, servers_of
from partc.runtime.errors import BadUsage, UnsupportedModel
from partc.runtime.plan.boxes import is_empty
from partc.runtime.plan.program import Run, Start, Store, Wait
from tests.builders.plans.compiled_steps import cluster_of, import_text
from tests.builders.plans.session_plans import compile_sessions

# The gradient grows with the steps, and it is made on the workers.
COUNTED_LOSS = """
step (double[8,4] x, double[4] W, int64 count) => (double loss, double[4] W_next, int64 count_next)
<double lr = {0.5}, int64 one = {1}> {
    age = Cast <to = 11> (count)
    y = Mul (x, W)
    z = Mul (y, age)
    loss = ReduceMean <keepdims = 0> (z)
    xs = Mul (x, age)
    axis = Constant <value = int64[1] {0}> ()
    dW = ReduceMean <keepdims = 0> (xs, axis)
    part = Mul (lr, dW)
    W_next = Sub (W, part)
    count_next = Add (count, one)
}
"""


def test_a_session_is_one_worker_and_every_server() -> None:
    view = view_of_session(cluster_of("2x3"))

    assert [(host.name, len(host.devices), host.server) for host in view.hosts] == [
        ("session", 1, False),
        ("host0", 0, True),
        ("host1", 0, True),
    ]


@pytest.mark.parametrize("cluster", ["2x2", "2x2s"])
def test_everything_that_is_trained_is_on_servers(tmp_path: Path, cluster: str) -> None:
    plan = compile_sessions("mlp, momentum, clipped", tmp_path / "out", cluster).plan

    assert [(w.host, w.device) for w in plan.asynchronous][:2] == [
        ("host0", f"host0/{'gpu' if cluster.endswith('s') else 'cpu'}0"),
        ("host0", f"host0/{'gpu' if cluster.endswith('s') else 'cpu'}1"),
    ]
    assert len(own_ranks(plan)) == (2 if cluster.endswith("s") else 1)
    assert all(is_empty(piece.box) for rank in own_ranks(plan) for piece in rank.pieces)
    owned = {piece.variable for rank in servers_of(plan) for piece in rank.pieces}
    assert owned == {variable.name for variable in plan.variables}


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.001)])
@pytest.mark.parametrize("cluster", ["2x1", "2x2s"])
def test_all_is_pushed_before_any_of_it_is_applied(
    tmp_path: Path, optimizer: Optimizer, cluster: str
) -> None:
    """Whatever links and rows would make of the order of a step that waits for all."""
    sizes = {"vocab": 2000, "embedding": 128, "cells": 128, "projection": 64, "steps": 4, "samples": 128}
    step = build_training_graph(build_model("lm", batch=16, **sizes), loss="loss", optimizer=optimizer)

    assert compile_sessions(step, tmp_path / "out", cluster).plan.asynchronous


def test_no_variable_lies_where_messages_land(tmp_path: Path) -> None:
    plan = compile_sessions("lm, adagrad, clipped", tmp_path / "out").plan

    for rank in servers_of(plan):
        variables = {piece.value for piece in rank.pieces}
        assert not variables & {piece.value for piece in (*plan.slices, *rank.slices)}


def test_the_report_says_that_it_departs_from_one_device(tmp_path: Path) -> None:
    compile_sessions("mlp, sgd", tmp_path / "out")

    page = (tmp_path / "out" / "report.html").read_text()

    assert "Asynchronous: 4\u00a0workers train on samples of their own" in page
    assert "the result is not the single device’s" in page


def test_what_workers_compute_with_a_counter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"'count' changes with every push.*\n.*\n  fix: train it sync"
    ):
        compile_sessions(import_text(COUNTED_LOSS), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_strategies_under_which_workers_meet_are_refused() -> None:
    assert strategy_of_sessions("auto", "per-replica") == strategy_of_sessions("ps", "per-replica") == "ps"
    own = Strategy(STRATEGY_FORMAT, "per-replica", {})
    assert strategy_of_sessions(own, "per-replica") is own
    with pytest.raises(BadUsage, match=r"'hybrid', under which workers meet\n.*\n  fix: use ps"):
        strategy_of_sessions("hybrid", "per-replica")
    with pytest.raises(BadUsage, match="fix: leave --batch out"):
        strategy_of_sessions("ps", "global")


def run(reads: str, writes: str, segment: str = "s.onnx") -> Run:
    return Run("server", segment, *(tuple((v, v) for v in text.split()) for text in (reads, writes)))


def test_a_store_moves_to_where_its_value_is_made_but_not_before_the_last_reader() -> None:
    start = Start(0, "all_reduce", "servers", "server", "server", ("g",), ("g",))
    first, last = Store("server", "V.next", "V"), Store("server", "W.next", "W")
    program = (run("W g", "W.next V.next"), start, Wait(0), run("W", "norm"), first, last)

    settled = _settle_stores(program)

    assert settled == (program[0], first, start, Wait(0), program[3], last)


HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
# What the segment makes of W: itself and something stale, or only something stale.
FRESH = "step (float[2] W, float[2] t) => (float[2] W_next) { W_next = Add (W, t) }"
STALE = "step (float[2] W, float[2] t) => (float[2] W_next) { W_next = Neg (t) }"


@pytest.mark.parametrize(
    ("early", "segment", "behind_a_wait", "is_lost"),
    [
        ("x", STALE, False, False),  # nothing of W in it
        ("W", FRESH, False, False),  # a stale gradient on top of W as it is
        ("W", STALE, False, True),
        ("W", FRESH, True, True),  # stored a turn later
    ],
)
def test_an_update_that_would_lose_pushes_is_refused(
    tmp_path: Path, early: str, segment: str, behind_a_wait: bool, is_lost: bool
) -> None:
    plan = compile_sessions("foreign, counted", tmp_path / "out").plan
    rank = servers_of(plan)[1]
    (tmp_path / "update.onnx").write_bytes(onnx.parser.parse_model(HEAD + segment).SerializeToString())
    meet = Start(0, "all_reduce", "servers", "server", "server", ("t",), ("t",))
    again = msgspec.structs.replace(meet, tag_id=1)
    update = Run("server", "update.onnx", (("W", "W"), ("t", "t")), (("W_next", "next"),))
    between = (again, Wait(1)) if behind_a_wait else ()
    program = (run(early, "t"), meet, Wait(0), update, *between, Store("server", "next", "W"))
    changed = msgspec.structs.replace(plan, instructions=program)

    if is_lost:
        with pytest.raises(UnsupportedModel, match="what others push meanwhile would be lost"):
            _check_updates(changed, rank, tmp_path)
    else:
        _check_updates(changed, rank, tmp_path)


# A parameter without rows, beside one that has some.
SCALED = """
step (double[8,4] x, double[8] t, double[4] W, double S) => (double loss, double[4] W_next, double S_next)
<double lr = {0.5}> {
    y = MatMul (x, W)
    d = Sub (y, t)
    ds = Mul (d, S)
    loss = ReduceMean <keepdims = 0> (ds)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, ds)
    dS = ReduceSum <keepdims = 0> (d)
    part = Mul (lr, dW)
    W_next = Sub (W, part)
    part_of_S = Mul (lr, dS)
    S_next = Sub (S, part_of_S)
}
"""


def test_a_parameter_that_servers_cannot_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'S' cannot live on servers.*\n.*\n  fix: let its update"):
        compile_sessions(import_text(SCALED), tmp_path / "out")


# What a worker keeps of its samples: the largest so far, and how many were positive.
KEPT = """
step (double[8,4] x, double[4] W, double top, int64 count)
    => (double loss, double[4] W_next, double top_next, int64 count_next)
<double lr = {0.5}, double zero = {0}> {
    y = Mul (x, W)
    loss = ReduceMean <keepdims = 0> (y)
    axis = Constant <value = int64[1] {0}> ()
    dW = ReduceMean <keepdims = 0> (x, axis)
    part = Mul (lr, dW)
    W_next = Sub (W, part)
    largest = ReduceMax <keepdims = 0> (x)
    top_next = TOP
    positive = Greater (x, zero)
    ones = Cast <to = 7> (positive)
    found = ReduceSum <keepdims = 0> (ones)
    count_next = COUNT
}
"""
LARGEST = KEPT.replace("TOP", "Max (top, largest)").replace("COUNT", "Identity (count)")
COUNTED_SAMPLES = KEPT.replace("TOP", "Identity (top)").replace("COUNT", "Add (count, found)")


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (LARGEST, r"a largest or smallest value.*\n  at:  next value of 'top'"),
        (COUNTED_SAMPLES, r"an integer variable.*\n  at:  next value 'count_next'"),
    ],
)
def test_what_has_no_mean_over_workers_is_refused_but_of_one_worker(
    tmp_path: Path, step: str, what: str
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{what}\n  fix: train it synchronously"):
        compile_sessions(import_text(step), tmp_path / "out", "2x2")

    assert compile_sessions(import_text(step), tmp_path / "out", "1x1").plan.asynchronous


def test_a_step_in_which_nothing_is_pushed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no variable is updated by a gradient that could be pushed"):
        compile_sessions(import_text(AVERAGE), tmp_path / "out")


AVERAGE = """
step (double[8,4] x, double[4] mean) => (double loss, double[4] mean_next)
<double kept = {0.9}, int64[1] axis = {0}> {
    loss = ReduceMean <keepdims = 0> (x)
    new = ReduceMean <keepdims = 0> (x, axis)
    old = Mul (mean, kept)
    mean_next = Add (old, new)
}
"""
