"""What was gathered once is not gathered again in another form: of messages counted in plans, and trained."""

from pathlib import Path

import pytest

from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)


def step(forms: str) -> str:
    """Return a step whose `a` and `b`, of divided columns, are read whole, and as `abt` on the way back."""
    return f"""
    step (double[8,6] x, double[6,8] A, double[6,8] B, double[16,4] C)
        => (double loss, double[6,8] A_next, double[6,8] B_next, double[16,4] C_next) {{
        u = MatMul (x, A) a = Tanh (u) v = MatMul (x, B) b = Sigmoid (v)
        C0, C1 = Split <axis = 0, num_outputs = 2> (C)
        ya = MatMul (a, C0) yb = MatMul (b, C1) y = Add (ya, yb) dy = Tanh (y)
        loss = ReduceMean <keepdims = 0> (y)
        {forms}
        dC = MatMul (abt, dy)
        xt = Transpose <perm = [1, 0]> (x)
        aa = Mul (a, a) bb = Mul (b, b) dA = MatMul (xt, aa) dB = MatMul (xt, bb)
        A_next = Sub (A, dA) B_next = Sub (B, dB) C_next = Sub (C, dC)
    }}"""


FORMS = {
    "turned": """at = Transpose <perm = [1, 0]> (a) bt = Transpose <perm = [1, 0]> (b)
        abt = Concat <axis = 0> (at, bt)""",
    "joined": "ab = Concat <axis = 1> (a, b) abt = Transpose <perm = [1, 0]> (ab)",
    "folded": """blocks = Constant <value_ints = [2, 4, 8]> () flat = Constant <value_ints = [8, 8]> ()
        a3 = Reshape (a, blocks) a2 = Reshape (a3, flat) ab = Concat <axis = 1> (a2, b)
        abt = Transpose <perm = [1, 0]> (ab)""",
}


@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_what_was_gathered_is_turned_and_not_gathered_again(tmp_path: Path, forms: str) -> None:
    training = import_text(step(forms), sample_axes={"x": 0})
    maker = {tensor.name: node.name for node in training.graph.nodes for tensor in node.outputs}
    strategy = Strategy(
        MESH_STRATEGY_FORMAT,
        "global",
        {},
        mesh={"data": 1, "tensor": 2},
        variables={name: {"tensor": AxisSplit(1)} for name in "ABC"},
        ops=tuple(OpConfig(maker[value], {"out:1": 2}) for value in ("ya", "yb", "dC")),
    )

    compiled = compile_step(training, tmp_path / "out", "2x1", strategy, "global")

    starts = [i for i in compiled.plan.instructions if isinstance(i, Start) and i.kind == "all_gather"]
    assert sum(start.payload_bytes for start in starts) == 2 * 8 * 8 * 8, [s.label for s in starts]
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
