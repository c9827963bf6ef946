"""Steps whose If, Loop and Scan read tensors around them: split ones, variables, gradients, constants."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.importing.outline_bodies import BODY_DOMAIN, outline_bodies
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)

HEAD = "double[8,4] x, double[8,3] t, double[4,3] W, double[4,3] m"
STEP = """
step (HEAD) => (double loss, double[4,3] W_next, double[4,3] m_next)
<double lr = {0.1}, double keep = {0.9}, double zero = {0}, int64 three = {3}, bool yes = {1}> {
    y = MatMul (x, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (x)
    BODY
    dy = Mul (d, s)
    dW = MatMul (xt, dy)
    kept = Mul (m, keep)
    m_next = Add (kept, dW)
    UPDATE
    W_next = Sub (W, part)
}
""".replace("HEAD", HEAD)
PLAIN_BODY, PLAIN_UPDATE = "s = Identity (lr)", "part = Mul (m_next, lr)"
BODIES = {
    "If on data": """level = ReduceMean <keepdims = 0> (x) high = Greater (level, zero)
        s = If (high) <then_branch = g1 () => (double s1) { a = Abs (t) s1 = ReduceMean <keepdims = 0> (a) },
                       else_branch = g2 () => (double s2) { s2 = Identity (lr) }>""",
    "Loop over data": """s = Loop (three, yes, zero) <body = g (int64 i, bool go, double h) =>
        (bool more, double next) { more = Identity (go) a = Abs (x) b = ReduceMean <keepdims = 0> (a)
            c = Mul (b, lr) next = Add (h, c) }>""",
    "If in a Loop": """s = Loop (three, yes, zero) <body = g (int64 i, bool go, double h) =>
        (bool more, double next) { more = Identity (go)
            next = If (yes) <
                then_branch = g1 () => (double n1) { a = Abs (t) b = ReduceMean <keepdims = 0> (a)
                    n1 = Add (h, b) },
                else_branch = g2 () => (double n2) { n2 = Identity (h) }> }>""",
}
UPDATES = {
    "If on a variable": """level = ReduceMean <keepdims = 0> (m) high = Greater (level, zero)
        part = If (high) <then_branch = g1 () => (double[4,3] p1) { p1 = Mul (m_next, lr) },
                          else_branch = g2 () => (double[4,3] p2) { p2 = Mul (dW, lr) }>""",
    "Loop over a gradient": """start = Mul (W, zero)
        part = Loop (three, yes, start) <body = g (int64 i, bool go, double[4,3] h) =>
        (bool more, double[4,3] next) { more = Identity (go) a = Mul (dW, lr) next = Add (h, a) }>""",
    "Scan": """start = Mul (W, zero)
        unused, part = Scan (lr, W) <num_scan_inputs = 1, body = g (double l, double[3] w) =>
        (double same, double[3] out) { same = Identity (l) b = Mul (w, l) e = Exp (lr) out = Mul (b, e) }>""",
}
CASES = [pytest.param(body, PLAIN_UPDATE, id=name) for name, body in BODIES.items()]
CASES += [pytest.param(PLAIN_BODY, update, id=name) for name, update in UPDATES.items() if name != "Scan"]


def text_of(body: str, update: str) -> str:
    return STEP.replace("BODY", body).replace("UPDATE", update)


@pytest.mark.parametrize("batch", ["per-replica", "global"])
@pytest.mark.parametrize(("body", "update"), CASES)
def test_they_train_as_one_device(tmp_path: Path, body: str, update: str, batch: str) -> None:
    training = import_text(text_of(body, update), loss="loss")
    assert set(training.gradients) == {"W"}

    compiled = compile_step(training, tmp_path / "out", "2x2", "hybrid", batch)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, steps=2))


@pytest.mark.parametrize("read", ["h", "lr"])
def test_what_a_loop_carries_out_may_be_an_output(tmp_path: Path, read: str) -> None:
    body = f"""s = Identity (lr)
        last = Loop (three, yes, y) <body = g (int64 i, bool go, double[8,3] h) =>
        (bool more, double[8,3] next) {{ more = Identity (go) a = Abs (h) next = Add (a, {read}) }}>"""
    text = text_of(body, PLAIN_UPDATE).replace("=> (", "=> (double[8,3] last, ", 1)

    compiled = compile_step(import_text(text, loss="loss"), tmp_path / "out", "2x2", "hybrid", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, steps=2))


@pytest.mark.parametrize("name", UPDATES)
def test_functions_read_all_and_only_what_they_name(name: str) -> None:
    model = parse(text_of(PLAIN_BODY, UPDATES[name]))

    assert outline_bodies(model) == 1

    (function,) = model.functions
    (call,) = (node for node in model.graph.node if node.domain == BODY_DOMAIN)
    assert list(call.input) == list(function.input)
    if name != "Scan":  # whose node names it
        assert "lr" not in function.input  # a small constant goes inside
    onnx.checker.check_model(model, full_check=True)


def test_bodies_that_read_nothing_around_them_stay() -> None:
    text = text_of(PLAIN_BODY, UPDATES["Scan"]).replace("e = Exp (lr)", "e = Exp (l)")

    assert outline_bodies(parse(text)) == 0
