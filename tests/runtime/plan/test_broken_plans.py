"""The check can fail: plans of the compiler's own, broken by hand in one place, are all rejected.

The step clips by the global norm and keeps momentum, so that every mistake shows. What is edited is
what was written: instructions in plan.json, nodes in segments.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from partc.runtime.plan.plan_folder import read_plan_folder, seal_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import Instruction, Plan, Run, Start, Store, Wait
from tests.builders.plans.compiled_steps import Compiled, compile_step, import_text, random_batches, verified

STEP = """
step (double[4,3] x, double[4,2] t, double[3,2] W, double[2] b, double[3,2] v)
    => (double loss, double[3,2] W_next, double[2] b_next, double[3,2] v_next)
<double quarter = {0.25}, double lr = {0.1}, double kept = {0.9}, double limit = {0.3},
 int64[1] samples = {0}> {
    h = MatMul (x, W)
    y = Add (h, b)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    dy = Mul (d, quarter)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    db = ReduceSum <keepdims = 0> (dy, samples)
    dW2 = ReduceSumSquare <keepdims = 0> (dW)
    db2 = ReduceSumSquare <keepdims = 0> (db)
    total = Add (dW2, db2)
    norm = Sqrt (total)
    larger = Max (norm, limit)
    shrink = Div (limit, larger)
    cW = Mul (dW, shrink)
    cb = Mul (db, shrink)
    old = Mul (kept, v)
    v_next = Add (old, cW)
    sW = Mul (lr, v_next)
    sb = Mul (lr, cb)
    W_next = Sub (W, sW)
    b_next = Sub (b, sb)
}
"""


@pytest.fixture(params=["per-replica", "global"])
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> Compiled:
    training = import_text(STEP, loss="loss", sample_axes={"x": 0, "t": 0})
    return compile_step(training, tmp_path / "out", "1x2", "allreduce", request.param)


def rejected(compiled: Compiled) -> dict[str, str]:
    """Return the verdict on every variable that verify rejects, after 3 steps."""
    broken = replace(compiled, folder=read_plan_folder(compiled.folder.path))
    report = verified(broken, random_batches(compiled.plan, 3))
    found = {check.name: check.verdict for check in report.variables if check.verdict != "equal"}
    assert report.passed == (not found and all(check.is_equal for check in report.losses))
    return found


# ---------------------------------------------------------------- editing what was written


def write_plan(compiled: Compiled, plan: Plan) -> None:
    (compiled.folder.path / "plan.json").write_bytes(encode_plan(plan))
    seal_plan_folder(compiled.folder.path)


def edit_instructions(compiled: Compiled, edit: Callable[[list[Instruction]], list[Instruction]]) -> None:
    instructions = tuple(edit(list(compiled.plan.instructions)))
    write_plan(compiled, msgspec.structs.replace(compiled.plan, instructions=instructions))


def edit_segment(compiled: Compiled, tensor: str, edit: Callable[[onnx.GraphProto, int], None]) -> None:
    """Edit the segment that makes a tensor, given the graph and the place of the node; hash it anew."""
    for run in [i for i in compiled.plan.instructions if isinstance(i, Run)]:
        path = compiled.folder.path / run.segment
        model = onnx.load(path)
        places = [i for i, node in enumerate(model.graph.node) if tensor in node.output]
        if not places:
            continue
        edit(model.graph, places[0])
        onnx.save(model, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files = {**compiled.plan.files, run.segment: digest}
        write_plan(compiled, msgspec.structs.replace(compiled.plan, files=files))
        return
    raise AssertionError(f"no segment makes {tensor}")


def update_of(compiled: Compiled) -> Run:
    """Return the run that writes the variables."""
    variables = {variable.name for variable in compiled.plan.variables}
    runs = [i for i in compiled.plan.instructions if isinstance(i, Run)]
    return next(run for run in runs if variables & {value for _, value in run.writes})


def sent(compiled: Compiled, gradient: str) -> str:
    """Return the value that holds a rank's own term of a gradient in the buffer."""
    return next(n for n in _in_buffers(compiled, gradient) if not n.endswith("@worker.whole"))


def summed(compiled: Compiled, gradient: str) -> str:
    """Return the value that holds the aggregated gradient, in the same place."""
    return next(n for n in _in_buffers(compiled, gradient) if n.endswith("@worker.whole"))


def _in_buffers(compiled: Compiled, gradient: str) -> list[str]:
    return [piece.value for piece in compiled.plan.slices if piece.value.startswith(gradient)]


# ---------------------------------------------------------------- the mistakes


def test_the_plan_as_it_is_passes(compiled: Compiled) -> None:
    assert rejected(compiled) == {}


def test_an_aggregation_left_out_is_rejected(compiled: Compiled) -> None:
    edit_instructions(compiled, lambda kept: [i for i in kept if not isinstance(i, Start | Wait)])

    assert set(rejected(compiled)) == {"W", "b", "v"}


def test_one_gradient_left_out_of_the_aggregation_is_rejected(compiled: Compiled) -> None:
    """The gradient of b is kept out of the buffer: each rank has its own."""
    plan, own, aggregated = compiled.plan, sent(compiled, "db"), summed(compiled, "db")
    kept = tuple(piece for piece in plan.slices if piece.value not in (own, aggregated))

    def read_own(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Run):
            return instruction
        reads = tuple((name, own if value == aggregated else value) for name, value in instruction.reads)
        return msgspec.structs.replace(instruction, reads=reads)

    instructions = tuple(map(read_own, plan.instructions))
    write_plan(compiled, msgspec.structs.replace(plan, slices=kept, instructions=instructions))

    assert "b" in rejected(compiled)


def test_an_update_done_twice_is_rejected(compiled: Compiled) -> None:
    update = update_of(compiled)

    edit_instructions(compiled, lambda kept: [*kept, update])

    assert set(rejected(compiled)) == {"W", "b", "v"}


def test_an_update_left_out_is_rejected_as_no_change(compiled: Compiled) -> None:
    update = update_of(compiled)

    edit_instructions(
        compiled, lambda kept: [i for i in kept if i is not update and not isinstance(i, Store)]
    )

    assert rejected(compiled) == {"W": "did not change", "b": "did not change", "v": "did not change"}


@pytest.mark.parametrize("variable", ["W", "b"])
def test_one_variable_not_updated_is_rejected(compiled: Compiled, variable: str) -> None:
    def keep(graph: onnx.GraphProto, place: int) -> None:
        graph.node[place].CopyFrom(helper.make_node("Identity", [variable], [f"{variable}_next"]))

    edit_segment(compiled, f"{variable}_next", keep)

    assert rejected(compiled)[variable] == "did not change"


def test_a_sum_in_place_of_an_average_is_rejected(compiled: Compiled) -> None:
    """Two replicas: what is averaged is twice as large as a sum."""

    def double(graph: onnx.GraphProto, place: int) -> None:
        node = graph.node[place]
        made = node.output[0]
        node.output[0] = f"{made}.once"
        graph.initializer.append(numpy_helper.from_array(np.array(2.0), "factor"))
        graph.node.insert(place + 1, helper.make_node("Mul", [f"{made}.once", "factor"], [made]))

    edit_segment(compiled, sent(compiled, "dW"), double)

    assert set(rejected(compiled)) >= {"W", "v"}


def test_aggregating_after_the_clip_is_rejected(compiled: Compiled) -> None:
    """Each rank clips its own gradients, and the clipped ones are summed."""
    own = [sent(compiled, "dW"), sent(compiled, "db")]

    edit_segment(compiled, own[0], lambda graph, place: clip_here(graph, own))
    compiled = replace(compiled, folder=read_plan_folder(compiled.folder.path))
    edit_segment(compiled, "shrink", shrink_no_more)

    assert set(rejected(compiled)) == {"W", "b", "v"}


def clip_here(graph: onnx.GraphProto, gradients: list[str]) -> None:
    limit = numpy_helper.from_array(np.array(0.3), "own.limit")
    graph.initializer.append(limit)
    for node in graph.node:
        for index, name in enumerate(node.output):
            if name in gradients:
                node.output[index] = f"{name}.raw"
    nodes = [
        helper.make_node("ReduceSumSquare", [f"{name}.raw"], [f"{name}.own"], keepdims=0)
        for name in gradients
    ]
    nodes.append(helper.make_node("Sum", [f"{name}.own" for name in gradients], ["own.total"]))
    nodes.append(helper.make_node("Sqrt", ["own.total"], ["own.norm"]))
    nodes.append(helper.make_node("Max", ["own.norm", "own.limit"], ["own.larger"]))
    nodes.append(helper.make_node("Div", ["own.limit", "own.larger"], ["own.shrink"]))
    nodes += [helper.make_node("Mul", [f"{name}.raw", "own.shrink"], [name]) for name in gradients]
    graph.node.extend(nodes)


def shrink_no_more(graph: onnx.GraphProto, place: int) -> None:
    graph.initializer.append(numpy_helper.from_array(np.array(1.0), "one"))
    graph.node[place].CopyFrom(helper.make_node("Identity", ["one"], ["shrink"]))
