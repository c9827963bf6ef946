"""A data input that nothing reads is no input of the plan: no data is needed for it, nor looked at."""

from io import StringIO
from pathlib import Path

import numpy as np
from rich.console import Console

from partc.compiler.inspect import inspect_graph
from partc.runtime.data.feeds import open_source
from partc.runtime.execution.in_process import train_in_process
from tests.builders.graphs.foreign_steps import LINEAR, LINEAR_CONSTANTS, LINEAR_HEAD
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)

# `mask` is read by nothing; `hint` by a node that leads nowhere; `size` in a body.
STEP = f"""
step ({LINEAR_HEAD}, float[8,4] mask, float[8] hint, int64[batch,2] size)
    => (float loss, float[4,3] W_next) <{LINEAR_CONSTANTS}, bool yes = {{1}}> {{ {LINEAR}
    nowhere = Exp (hint)
    rate = If (yes) <
        then_branch = g1 () => (float rate1) {{ rows = Shape <end = 1> (size) r = CastLike (rows, lr)
            zero = Sub (r, r) z = ReduceSum <keepdims = 0> (zero) rate1 = Add (lr, z) }},
        else_branch = g2 () => (float rate2) {{ rate2 = Identity (lr) }}>
    part = Mul (dW, rate)
    W_next = Sub (W, part)
}}
"""


def test_inputs_that_no_output_depends_on_are_told_apart_from_shared_ones() -> None:
    training = import_text(STEP, loss="loss", sample_axes={"mask": 0})

    assert training.unread_inputs == ("mask", "hint")
    assert set(training.data_inputs) == {"x", "t", "size"}
    console = Console(width=200, record=True, file=StringIO())
    console.print(inspect_graph(training).render())
    lines = [line.split("│") for line in console.export_text().splitlines() if "│" in line]
    axes = {line[1].strip(): line[4].strip() for line in lines if len(line) > 5}
    assert axes["mask"] == axes["hint"] == "not read"
    assert axes["x"] == "0"


def test_the_plan_trains_without_them_and_takes_data_for_them(tmp_path: Path) -> None:
    compiled = compile_step(import_text(STEP, loss="loss"), tmp_path / "out", "2x2", sizes={"batch": 8})

    batches = random_batches(compiled.plan, steps=2)
    assert_trains_as_one_device(compiled, batches)

    with_data = {"mask": np.zeros((3, 3)), "hint": np.zeros(1)}
    one = train_in_process(compiled.folder, batches)
    other = train_in_process(compiled.folder, [{**batch, **with_data} for batch in batches])
    np.testing.assert_array_equal(one.variables["W"], other.variables["W"])
    np.savez(tmp_path / "data.npz", **batches[0], **with_data)
    assert set(open_source(str(tmp_path / "data.npz"), compiled.plan).total(0)) == {"x", "t", "size"}
