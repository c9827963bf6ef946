import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from partc.runtime.data.initial import InitialValues
from partc.runtime.errors import BadPlan
from partc.runtime.execution.device import CPU, REUSING_NODES, ExecutionDevice, Sessions
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Buffer, Rank, Run, Slice, Store
from partc.runtime.plan.variables import Constant, DataInput, PlanVariable, VariablePiece
from partc.runtime.transports.in_memory import Board, InMemoryTransport
from tests.builders.plans.hand_made_plans import Member, plan_of, rank, run, with_changes
from tests.checks.gpus import NEEDS_A_GPU

ADD = """
<ir_version: 10, opset_import: ["" : 21]>
add (float[r,2] W, float[r,2] d) => (float[r,2] W_next, float[r,2] doubled) {
    W_next = Add (W, d)
    doubled = Add (d, d)
}
"""


def executor(folder: Path, rows: int, one: Rank, *more: Store) -> Executor:
    """A variable W [rows, 2] of ones and a step W += d; d doubled lies in a buffer."""
    (folder / "segments").mkdir()
    (folder / "segments/add.onnx").write_bytes(onnx.parser.parse_model(ADD).SerializeToString())
    plan = plan_of(
        [Member(one, {})],
        [run("worker", "add", ("W", "d"), ("W_next=W", "doubled=kept")), *more],
        variables=(PlanVariable("W", "float32", (rows, 2), Constant(1.0), "parameter"),),
        data_inputs=(DataInput("d", "float32", (rows, 2), None),),
        buffers=(Buffer("bucket", "float32", 2 * rows + 1, ("worker",)),),
        slices=(Slice("kept", "bucket", 1, (rows, 2)),),
    )
    plan_folder = PlanFolder(plan, folder)
    environment = Environment(plan, one, ExecutionDevice(one.kind, 0, 1), InitialValues(plan_folder))
    return Executor(plan, one, environment, Sessions(plan_folder), InMemoryTransport(Board()))


def worker(kind: str = "cpu") -> Rank:
    one = rank(0, ("worker",), 0, {}, pieces=(VariablePiece("W", "W"),)).rank
    return Rank(**({name: getattr(one, name) for name in one.__struct_fields__} | {"kind": kind}))


def take_step(one: Executor, d: np.ndarray) -> None:
    assert list(one.step({"d": d})) == []


@pytest.mark.parametrize("rows", [3, 0])
def test_variables_and_slices_are_written_in_place(tmp_path: Path, rows: int) -> None:
    one = executor(tmp_path, rows, worker())
    W, kept = one.environment.memory("W"), one.environment.memory("kept")
    assert W is not None
    assert kept is not None

    take_step(one, np.full((rows, 2), 2, np.float32))
    take_step(one, np.full((rows, 2), 3, np.float32))

    np.testing.assert_array_equal(W, np.full((rows, 2), 6))
    np.testing.assert_array_equal(kept, np.full((rows, 2), 6))
    np.testing.assert_array_equal(one.environment.array("bucket")[0], 0)


def test_a_stored_value_is_copied(tmp_path: Path) -> None:
    one = executor(tmp_path, 3, worker(), Store("worker", "kept", "W"))

    take_step(one, np.full((3, 2), 2, np.float32))

    np.testing.assert_array_equal(one.environment.array("W"), np.full((3, 2), 4))


@pytest.mark.parametrize("shape", [(3,), (3, 2, 1), (3, 4)])
def test_what_a_segment_reads_in_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    one = executor(tmp_path, 3, worker())

    with pytest.raises(BadPlan, match=r"'d' has shape .*, the segment reads"):
        take_step(one, np.zeros(shape, np.float32))


def test_a_value_of_another_size_is_refused(tmp_path: Path) -> None:
    one = executor(tmp_path, 3, worker(), Store("worker", "d", "W"))

    with pytest.raises(BadPlan, match=r"float32\[4, 2\] was made, float32\[3, 2\] was planned"):
        one.environment.put("W", np.zeros((4, 2), np.float32))


def test_a_slice_beyond_its_buffer_is_refused(tmp_path: Path) -> None:
    plan = plan_of(
        [Member(worker(), {})],
        [],
        buffers=(Buffer("bucket", "float32", 4, ("worker",)),),
        slices=(Slice("kept", "bucket", 3, (2,)),),
    )
    lone = with_changes(plan, variables=())

    with pytest.raises(BadPlan, match="ends at element 5 of a buffer of 4"):
        Environment(
            lone,
            rank(0, ("worker",), 0, {}).rank,
            ExecutionDevice("cpu", 0, 1),
            InitialValues(PlanFolder(lone, tmp_path)),
        )


@pytest.mark.parametrize("more", [0, 1])
def test_in_large_segments_no_memory_is_looked_for(tmp_path: Path, more: int) -> None:
    executor(tmp_path, 3, worker())
    step = run("worker", "add", ("W", "d"), ("W_next=W", "doubled"))
    sessions = Sessions(PlanFolder(plan_of([], [step]), tmp_path))

    session = sessions.session(msgspec.structs.replace(step, nodes=REUSING_NODES + more), CPU)

    assert session.get_session_options().enable_mem_reuse == (not more)


def test_a_broken_segment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    sessions = Sessions(PlanFolder(plan_of([], []), tmp_path))

    with pytest.raises(BadPlan, match="refuses a segment"):
        sessions.session(Run("worker", "bad.onnx", (), ()), ExecutionDevice("cpu", 0, 1))


SHARED_ARENA = """
import sys
from pathlib import Path
import numpy as np
from partc.runtime.execution.device import ExecutionDevice, Sessions
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Run
from tests.builders.plans.hand_made_plans import plan_of
from tests.checks.peak_memory import peak_bytes

sessions = Sessions(PlanFolder(plan_of([], []), Path(sys.argv[1])))
for segment in ("one.onnx", "two.onnx"):
    session = sessions.session(Run("worker", segment, (), ()), ExecutionDevice("cpu", 0, 1))
    session.run(None, {"x": np.ones(1, np.float32)})
    print(peak_bytes())
"""
WIDE = """
<ir_version: 10, opset_import: ["" : 21]>
wide (float[1] x) => (float sum) <int64[1] size = {16000000}> {
    spread = Expand (x, size)
    ones = Exp (spread)
    waves = Sin (ones)
    mixed = Mul (ones, waves)
    sum = ReduceSum <keepdims = 0> (mixed)
}
"""


def test_what_one_segment_leaves_serves_the_next(tmp_path: Path) -> None:
    """A process of its own: its peak is what the two segments need."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.onnx").write_bytes(onnx.parser.parse_model(WIDE).SerializeToString())

    printed = subprocess.check_output(
        [sys.executable, "-c", SHARED_ARENA, str(tmp_path)], cwd=Path(__file__).parents[3], text=True
    )

    after_one, after_two = (int(line) for line in printed.split())
    assert after_two - after_one < 32e6  # of 128 MB that each segment needs at least


@pytest.mark.gpu
@NEEDS_A_GPU
def test_a_gpu_keeps_variables_in_its_memory_and_buffers_on_the_host(tmp_path: Path) -> None:
    one = executor(tmp_path, 3, worker("gpu"))

    take_step(one, np.full((3, 2), 2, np.float32))
    take_step(one, np.full((3, 2), 3, np.float32))

    assert one.environment.fixed["W"].device_name() == "cuda"
    np.testing.assert_array_equal(one.environment.array("W"), np.full((3, 2), 6))
    np.testing.assert_array_equal(one.environment.array("kept"), np.full((3, 2), 6))
