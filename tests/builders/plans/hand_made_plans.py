"""Pieces of plans written by hand, for the tests of the runtime. Nothing here comes from the compiler."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from msgspec import structs

from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import PLAN_FORMAT, Buffer, Instruction, Output, Plan, Rank, Run, Slice
from partc.runtime.plan.variables import DataInput, PlanVariable, VariablePiece


def write_plan(plan: Plan, folder: Path, segments: dict[str, str], source: bytes = b"") -> Path:
    """Write the plan, its model and its segments (name -> ONNX text) as a plan folder."""
    (folder / "segments").mkdir(parents=True)
    (folder / plan.model).write_bytes(source)
    files = {plan.model: hashlib.sha256(source).hexdigest()}
    for name, text in segments.items():
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
        content = model.SerializeToString()
        (folder / name).write_bytes(content)
        files[name] = hashlib.sha256(content).hexdigest()
    (folder / "plan.json").write_bytes(encode_plan(with_changes(plan, files=files)))
    return folder


def with_changes(plan: Plan, **changes: object) -> Plan:
    """Return the plan with some fields replaced."""
    return Plan(**({name: getattr(plan, name) for name in plan.__struct_fields__} | changes))


def segment(name: str) -> str:
    return f"segments/{name}.onnx"


def same(*names: str) -> tuple[tuple[str, str], ...]:
    """Pair segment inputs or outputs with values of the same names; "a=b" pairs a with b."""
    return tuple((name.split("=")[0], name.split("=")[-1]) for name in names)


def run(site: str, name: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Run:
    return Run(site, segment(name), same(*reads), same(*writes), one_thread=True)


@dataclass(frozen=True)
class Member:
    """A rank, and whom it believes to meet in each group."""

    rank: Rank
    groups: Mapping[str, tuple[int, ...]]


def rank(
    number: int,
    sites: tuple[str, ...],
    replica: int | None,
    groups: dict[str, tuple[int, ...]],
    *,
    pieces: tuple[VariablePiece, ...] = (),
    slices: tuple[Slice, ...] = (),
    constants: dict[str, tuple[int, ...]] | None = None,
) -> Member:
    made = Rank(
        number, "alpha", f"cpu{number}", "cpu", 0, 1, sites, replica, {}, constants or {}, slices, pieces
    )
    return Member(made, groups)


def numbered(members: Sequence[Member]) -> tuple[tuple[Rank, ...], dict[str, tuple[tuple[int, ...], ...]]]:
    """Return the ranks with the numbers of their groups, and the groups."""
    groups: dict[str, dict[tuple[int, ...], int]] = {}
    ranks = []
    for member in members:
        own = {}
        for name, ranks_of_group in member.groups.items():
            known = groups.setdefault(name, {})
            own[name] = known.setdefault(ranks_of_group, len(known))
        ranks.append(structs.replace(member.rank, groups=own))
    return tuple(ranks), {name: tuple(known) for name, known in groups.items()}


def plan_of(
    members: Sequence[Member],
    instructions: list[Instruction],
    *,
    variables: tuple[PlanVariable, ...] = (),
    data_inputs: tuple[DataInput, ...] = (),
    buffers: tuple[Buffer, ...] = (),
    slices: tuple[Slice, ...] = (),
    outputs: tuple[Output, ...] = (),
) -> Plan:
    ranks, groups = numbered(members)
    return Plan(
        format=PLAN_FORMAT,
        model="train.onnx",
        batch="per-replica",
        replicas=len({rank.replica for rank in ranks} - {None}),
        sizes={"n": 5},
        loss="loss" if any(output.name == "loss" for output in outputs) else None,
        ranks=ranks,
        groups=groups,
        instructions=tuple(instructions),
        buffers=buffers,
        slices=slices,
        variables=variables,
        data_inputs=data_inputs,
        outputs=outputs,
        predicted_step_s=0.0,
        cost_cache_sha256="",
        files={},
    )
