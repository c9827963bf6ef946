from pathlib import Path

import numpy as np

from partc.runtime.data.initial import InitialValues
from partc.runtime.execution.device import ExecutionDevice, Sessions
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.execution.recorder import Recorder
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Store, Wait, instructions_of
from partc.runtime.transports.in_memory import Board, InMemoryTransport
from partc.runtime.transports.transport import Traffic
from tests.builders.plans.linear_plans import linear_all_reduce, linear_batches

PROGRAM = (Wait(1), Store("worker", "a", "b"), Wait(2))


def test_the_program_passes_through_unchanged() -> None:
    assert tuple(Recorder(1, Traffic()).watch(PROGRAM)) == PROGRAM


def test_an_instruction_ends_when_the_next_one_is_asked_for() -> None:
    traffic = Traffic()
    recorder = Recorder(1, traffic)

    for instruction in recorder.watch(PROGRAM):
        traffic.payload_bytes["sum"] += 5 * isinstance(instruction, Store)

    (step,) = recorder.steps()
    assert step.sent_bytes == (0, 5, 0)
    assert all(begin <= end for begin, end in zip(step.begin_s, step.end_s, strict=True))
    assert all(end <= begin for end, begin in zip(step.end_s, step.begin_s[1:], strict=False))


def test_only_the_last_steps_are_kept() -> None:
    recorder = Recorder(2, Traffic())
    for _ in range(5):
        list(recorder.watch(PROGRAM))

    assert [step.step for step in recorder.steps()] == [4, 5]


def test_chosen_steps_are_kept_and_counted_from_the_first_of_the_training() -> None:
    recorder = Recorder(((3, 4), (7, 7)), Traffic(), first_step=2)
    for _ in range(6):
        assert tuple(recorder.watch(PROGRAM)) == PROGRAM

    assert [step.step for step in recorder.steps()] == [3, 4, 7]


def test_a_watched_executor_computes_the_same_and_notes_every_instruction(tmp_path: Path) -> None:
    folder = read_plan_folder(linear_all_reduce(tmp_path / "out", replicas=1))
    batches = linear_batches(1, steps=2)
    (rank,) = folder.plan.ranks
    transport = InMemoryTransport(Board())
    recorder = Recorder(2, transport.traffic)
    environment = Environment(folder.plan, rank, ExecutionDevice("cpu", 0, 1), InitialValues(folder, None))
    executor = Executor(folder.plan, rank, environment, Sessions(folder), transport, recorder.watch)

    for batch in batches:
        list(executor.step(batch))

    expected = train_in_process(folder, batches)
    for piece in rank.pieces:
        np.testing.assert_array_equal(environment.array(piece.value), expected.variables[piece.variable])
    program = instructions_of(folder.plan, rank)
    assert [len(step.begin_s) for step in recorder.steps()] == [len(program)] * 2
