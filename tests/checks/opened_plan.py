"""Run a plan with every value of every rank kept: what the oracle looks at.

The plan is copied beside itself, every segment showing all it computes. Copies are shown, since values
may share memory with their sum; and variables are written at the end of the step, since whoever looks
at the old value would forbid to do so in place.
"""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import helper

from partc.runtime.data.batches import share_of
from partc.runtime.data.initial import InitialValues
from partc.runtime.execution.device import Sessions, device_of
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor
from partc.runtime.execution.in_process import drive_in_lockstep
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import Instruction, Output, Plan, Run, Start, Store
from partc.runtime.transports.in_memory import Board, InMemoryTransport

Batch = dict[str, np.ndarray]

SEEN = "seen."  # what a value is called where it is looked at


def run_opened(folder: PlanFolder, batch: Batch) -> dict[str, dict[int, np.ndarray]]:
    """Run one step with every value kept: value -> rank -> its piece."""
    opened, seen = _open(folder)
    board, sessions, initial = Board(), Sessions(opened), InitialValues(opened)
    environments = {
        rank.rank: Environment(opened.plan, rank, device_of(rank), initial) for rank in opened.plan.ranks
    }
    steps = {}
    for rank in opened.plan.ranks:
        transport = InMemoryTransport(board)
        executor = Executor(opened.plan, rank, environments[rank.rank], sessions, transport)
        steps[rank.rank] = executor.step(share_of(opened.plan, rank, batch))
    drive_in_lockstep(steps)
    return {
        value: {
            rank: environment.array(name).copy()
            for rank, environment in environments.items()
            if name in environment.tensors
        }
        for value, name in seen.items()
    }


def _open(folder: PlanFolder) -> tuple[PlanFolder, dict[str, str]]:
    """Copy the plan beside itself: value -> where it is seen."""
    path = folder.path.with_name(f"{folder.path.name}-opened")
    _copy_all_but_segments(folder, path)
    seen = {piece.value: piece.value for piece in folder.plan.slices}
    renamed: dict[str, str] = {}  # variable -> its next value, once it is computed
    shown_by: dict[str, list[str]] = {}  # segment -> the values that it shows
    stores: list[Instruction] = []
    instructions: list[Instruction] = []
    for instruction in folder.plan.instructions:
        if isinstance(instruction, Start):
            seen.update((value, value) for value in instruction.writes)
            reads = tuple(renamed.get(value, value) for value in instruction.reads)
            instruction = msgspec.structs.replace(instruction, reads=reads)
        elif isinstance(instruction, Run):
            segment = instruction.segment
            if segment not in shown_by:
                shown_by[segment] = _show_all(folder.path / segment, path / segment)
            shown = shown_by[segment]
            of = _microbatch_of(instruction)
            seen.update((f"{value}{of}", f"{SEEN}{value}{of}") for value in shown)
            written = _variables(folder.plan, instruction)
            reads = tuple((name, renamed.get(value, value)) for name, value in instruction.reads)
            renamed |= written
            stores += [Store(instruction.site, source, target) for target, source in written.items()]
            writes = tuple((name, written.get(value, value)) for name, value in instruction.writes)
            writes += tuple((f"{SEEN}{value}", f"{SEEN}{value}{of}") for value in shown)
            instruction = msgspec.structs.replace(instruction, reads=reads, writes=writes)
        elif isinstance(instruction, Store):
            source = renamed.get(instruction.source, instruction.source)
            instruction = msgspec.structs.replace(instruction, source=source)
        instructions.append(instruction)
    _write_plan(folder.plan, path, [*instructions, *stores], seen)
    return read_plan_folder(path), seen


def _microbatch_of(run: Run) -> str:
    """Return what the names of a micro-batch's values end with, nothing where a segment runs once."""
    pairs = (*run.reads, *run.writes)
    return next((value[len(name) :] for name, value in pairs if value.startswith(f"{name}#")), "")


def _copy_all_but_segments(folder: PlanFolder, path: Path) -> None:
    (path / "segments").mkdir(parents=True, exist_ok=True)
    for name in folder.plan.files:
        if not name.startswith("segments/"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes((folder.path / name).read_bytes())


def _variables(plan: Plan, run: Run) -> dict[str, str]:
    """Return the values of variables that a segment writes over, and a name for what it writes."""
    variables = {piece.value for rank in plan.ranks for piece in rank.pieces}
    return {value: f"next.{value}" for _, value in run.writes if value in variables}


def _write_plan(plan: Plan, path: Path, instructions: list[Instruction], seen: dict[str, str]) -> None:
    files = {
        file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "plan.json"
    }
    site = plan.outputs[0].site if plan.outputs else "worker"
    kept = tuple(Output(name, name, "whole", site=site) for name in seen.values())
    apart = tuple(msgspec.structs.replace(buffer, memory=None) for buffer in plan.buffers)
    changed = {
        "instructions": tuple(instructions),
        "outputs": kept,
        "files": files,
        "loss": None,
        "buffers": apart,  # what shares memory would be seen as it is at the end
    }
    opened = msgspec.structs.replace(plan, **changed)
    (path / "plan.json").write_bytes(encode_plan(opened))


def _show_all(segment: Path, opened: Path) -> list[str]:
    """Give every tensor that a segment computes a copy among its outputs."""
    model = onnx.load(segment)
    values = [name for node in model.graph.node for name in node.output if name]
    for value in values:
        model.graph.node.append(helper.make_node("Identity", [value], [f"{SEEN}{value}"]))
        model.graph.output.append(helper.make_empty_tensor_value_info(f"{SEEN}{value}"))
    onnx.save(model, opened)
    return values
