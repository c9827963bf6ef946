"""verify on plans written by hand: right ones pass, and every kind of mistake is seen."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.verify import launch_in_process, verify
from partc.runtime.errors import BadData, BadPlan, BadUsage
from partc.runtime.plan.plan_folder import read_plan_folder, seal_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import Aggregation, Instruction, Plan, Run, Start, Wait
from tests.builders.graphs.foreign_steps import COUNTED, parse
from tests.builders.plans.compiled_steps import compile_step, import_text, random_batches, verified
from tests.builders.plans.hand_made_plans import with_changes
from tests.builders.plans.linear_plans import linear_all_reduce, linear_batches, linear_servers

# The step of tests/builders/plans/hand_made_plans.py as one replica's user wrote it: 4 samples.
STEP = """
step (double[4,3] x, double[4,2] y, double[3,2] W) => (double[3,2] W_next, double loss) {
    xt = Transpose <perm = [1, 0]> (x)
    p = MatMul (x, W)
    e = Sub (p, y)
    samples = Constant <value = double {4.0}> ()
    scaled = Div (e, samples)
    dW = MatMul (xt, scaled)
    squared = Mul (e, scaled)
    loss = ReduceSum <keepdims = 0> (squared)
    lr = Constant <value = double {0.1}> ()
    step = Mul (lr, dW)
    W_next = Sub (W, step)
}
"""


def add_reference(folder: Path, gradients: dict[str, GradientTensors] | None = None) -> Path:
    model = parse(STEP)
    recorded = {"W": GradientTensors(dense="dW")} if gradients is None else gradients
    write_bindings(model, Bindings(state={"W": "W_next"}, loss="loss", gradients=recorded))
    (folder / "train.onnx").write_bytes(model.SerializeToString())
    seal_plan_folder(folder)
    return folder


def change_plan(folder: Path, change: Callable[[Plan], Plan]) -> Path:
    (folder / "plan.json").write_bytes(encode_plan(change(read_plan_folder(folder).plan)))
    seal_plan_folder(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return add_reference(linear_all_reduce(tmp_path / "out", replicas=2))


def test_a_right_plan_passes(folder: Path) -> None:
    told: list[int] = []
    report = verify(folder, steps=3, launcher=launch_in_process, on_step=told.append)

    assert report.passed, report.summary()
    assert (report.replicas, report.ranks, told) == (2, 2, [1, 2, 3])
    assert report.variables[0].max_change > 0.01
    assert report.summary().startswith(
        "2 ranks against one device, 3 steps, per-replica batch: all 1 variables"
    )
    assert report.table().row_count == 1


def test_the_table_shows_the_worst_and_counts_the_rest(folder: Path) -> None:
    report = verify(folder, steps=1, launcher=launch_in_process)
    (check,) = report.variables
    many = replace(report, variables=(check,) * 30 + (replace(check, name="V", verdict="differs"),))

    table = many.table()

    assert table.row_count == 20
    assert next(iter(table.columns[0].cells)) == "V"
    assert table.caption == "and 11 more, 11 of them equal"


def test_a_convolution_unlike_onnxruntimes_fails(folder: Path) -> None:
    report = verify(folder, steps=1, launcher=launch_in_process)
    near, far = {"y": 1e-6, "z": 2e-6}, {"y": 1e-6, "z": 1e-3}

    assert replace(report, bodies=near).passed
    assert (
        replace(report, bodies=near)
        .summary()
        .endswith("; 2 convolutions computed partc's way, within 2e-06 of ONNX Runtime's")
    )
    assert not replace(report, bodies=far).passed
    assert "partc convolves z otherwise than ONNX Runtime" in replace(report, bodies=far).summary()
    assert not replace(report, bodies={"y": float("nan")}).passed


def test_a_plan_with_servers_passes(tmp_path: Path) -> None:
    folder = add_reference(linear_servers(tmp_path / "out", merged=True, scattered=True))

    assert verify(folder, steps=2, data=linear_batches(2, 2), launcher=launch_in_process).passed


def without_aggregation(plan: Plan) -> Plan:
    kept = [i for i in plan.instructions if not isinstance(i, Start | Wait)]
    return with_changes(plan, instructions=tuple(kept))


def updates(plan: Plan, times: int) -> Plan:
    instructions: list[Instruction] = []
    for instruction in plan.instructions:
        is_update = isinstance(instruction, Run) and "update" in instruction.segment
        instructions += [instruction] * (times if is_update else 1)
    return with_changes(plan, instructions=tuple(instructions))


@pytest.mark.parametrize(
    ("mistake", "verdict"),
    [
        (without_aggregation, "differs"),
        (lambda plan: updates(plan, times=2), "differs"),
        (lambda plan: updates(plan, times=0), "did not change"),
    ],
)
def test_a_wrong_plan_is_rejected(folder: Path, mistake: Callable[[Plan], Plan], verdict: str) -> None:
    report = verify(change_plan(folder, mistake), steps=2, launcher=launch_in_process)

    assert not report.passed
    assert report.variables[0].verdict == verdict
    assert "1 of 1 variables differ (W)" in report.summary()


def test_a_sum_in_place_of_an_average_is_rejected(folder: Path) -> None:
    segment, plan_file = folder / "segments" / "gradient.onnx", folder / "plan.json"
    averaged = segment.read_bytes()
    summed = averaged.replace(np.float64(8.0).tobytes(), np.float64(4.0).tobytes())
    digests = [hashlib.sha256(content).hexdigest().encode() for content in (averaged, summed)]
    segment.write_bytes(summed)
    plan_file.write_bytes(plan_file.read_bytes().replace(*digests))
    seal_plan_folder(plan_file.parent)

    report = verify(folder, steps=1, launcher=launch_in_process)

    assert not report.passed
    assert not report.losses[0].is_equal


def test_copies_that_differ_between_ranks_fail(folder: Path) -> None:
    report = verify(change_plan(folder, without_aggregation), steps=1, launcher=launch_in_process)

    assert report.disagreeing == ("W",)
    assert "copies of W differ between ranks" in report.summary()


def test_a_global_batch_is_held_against_the_whole_graph(folder: Path) -> None:
    def read_globally(plan: Plan) -> Plan:
        one = msgspec.structs.replace(plan.ranks[0], groups={})
        return with_changes(
            plan, batch="global", replicas=1, ranks=(one,), groups={}, instructions=alone(plan)
        )

    def alone(plan: Plan) -> tuple[Instruction, ...]:
        return tuple(i for i in plan.instructions if not isinstance(i, Start | Wait))

    change_plan(folder, read_globally)
    report = verify(folder, steps=1, launcher=launch_in_process)

    # The hand-made segment divides by 8 samples, the whole graph by 4.
    assert not report.passed


@pytest.mark.parametrize(
    ("aggregation", "joining"),
    [
        (Aggregation(), "averaged"),
        (Aggregation(average_dense=False, average_sparse=False), "summed"),
        (Aggregation(average_sparse=False), "averaged, indexed slices summed"),
    ],
)
def test_a_plan_that_is_known_to_depart_says_so_and_what_it_was_held_against(
    tmp_path: Path, aggregation: Aggregation, joining: str
) -> None:
    compiled = compile_step(
        import_text(COUNTED), tmp_path / "out", "1x2", batch="per-replica", aggregation=aggregation
    )

    report = verified(compiled, random_batches(compiled.plan, 2))

    assert report.passed
    assert report.summary().startswith(
        f"2 ranks against 2 replicas on one device, their gradients {joining}, 2 steps, per-replica batch:"
    )
    assert "known to depart from one device on all samples" in report.summary()
    assert "the gradient of W: node 'Div_9'" in report.summary()


def test_of_a_global_batch_one_device_is_the_measure_whatever_replicas_would_do(tmp_path: Path) -> None:
    batch = None  # which partc chooses, and tells why
    compiled = compile_step(import_text(COUNTED), tmp_path / "out", "1x2", batch=batch)  # type: ignore[arg-type]

    report = verified(compiled, random_batches(compiled.plan, 1))

    assert compiled.plan.departures
    assert report.summary().startswith("2 ranks against one device, 1 steps, global batch: all")
    assert "depart" not in report.summary()


def test_wrong_requests_are_refused(folder: Path) -> None:
    with pytest.raises(BadUsage, match="fix: compare at least one step"):
        verify(folder, steps=0)
    with pytest.raises(BadData, match="fix: give one total batch per step"):
        verify(folder, steps=3, data=linear_batches(2, 2), launcher=launch_in_process)


def test_a_plan_whose_model_lacks_the_gradient_is_refused(folder: Path) -> None:
    add_reference(folder, {"W": GradientTensors(dense="gone")})

    with pytest.raises(BadPlan, match="fix: compile the model again"):
        verify(folder, steps=1, launcher=launch_in_process)


def test_weights_of_8_bits_are_not_multiplied_in_8_bits(tmp_path: Path) -> None:
    """ONNX Runtime would make one op of both, a thousandth off, and another one where a batch is cut."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]> g (float[8,6] x, float[8,3] y) => (float loss)
        <int8[6,3] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}, float scale = {0.1}, float[3] b = {0, 0, 0}> {
            wide = DequantizeLinear (w, scale) product = MatMul (x, wide) made = Add (product, b)
            d = Sub (made, y) q = Mul (d, d) loss = ReduceMean <keepdims = 0> (q) }"""
    )
    train = build_training_graph(model, loss="loss", optimizer=SGD(0.1))
    compiled = compile_step(import_training_graph(train), tmp_path / "out", "2x2", "allreduce")

    assert verify(tmp_path / "out", steps=2, launcher=launch_in_process).passed
    assert compiled.plan.replicas == 4
