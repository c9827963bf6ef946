"""Prove that a plan ends: execute every rank's instructions with no memory between the ranks.

A communication completes only once every member has started it, and a member must meet the
communications of a group in the same order as the others: that is what MPI and NCCL ask for.
"""

from collections import defaultdict
from collections.abc import Sequence

from partc.runtime.check_values import check_values
from partc.runtime.errors import BadPlan
from partc.runtime.program import Instruction, Plan, Rank, Start, Wait, instructions_of

Members = tuple[int, ...]
Program = list[tuple[Start | Wait, Members]]

_AGAIN = "compile the model again; in a plan as partc compiled it this is a mistake: report it"


def check_program(plan: Plan) -> None:
    """Raise BadPlan, naming the ranks, if some rank never ends its step or touches what it must not."""
    _check_groups(plan)
    programs = {rank.rank: _communications(plan, rank) for rank in plan.ranks}
    for rank, program in programs.items():
        _check_pairs(rank, [instruction for instruction, _ in program])
    check_rendezvous(programs)
    check_values(plan)


def _communications(plan: Plan, rank: Rank) -> Program:
    groups: dict[int, Members] = {}
    program: Program = []
    for instruction in instructions_of(plan, rank):
        if isinstance(instruction, Start):
            groups[instruction.tag_id] = rank.groups[instruction.group]
        if isinstance(instruction, Start | Wait):
            program.append((instruction, groups.get(instruction.tag_id, ())))
    return program


def _check_groups(plan: Plan) -> None:
    ranks = {rank.rank: rank for rank in plan.ranks}
    for rank in plan.ranks:
        for name, members in rank.groups.items():
            if rank.rank not in members or len(set(members)) != len(members):
                raise BadPlan(
                    f"group {name!r} is {list(members)}: it must hold rank {rank.rank}, and nobody twice",
                    at=f"ranks: {rank.rank}",
                    fix=_AGAIN,
                )
            others = [r for r in members if r not in ranks or ranks[r].groups.get(name) != members]
            if others:
                raise BadPlan(
                    f"rank {rank.rank} takes group {name!r} for {list(members)}, rank {others[0]} does not",
                    at=f"ranks: {rank.rank}, {others[0]}",
                    fix=_AGAIN,
                )


def _check_pairs(rank: int, program: Sequence[Instruction]) -> None:
    started: set[int] = set()
    waited: set[int] = set()
    for instruction in program:
        if isinstance(instruction, Start):
            if instruction.tag_id in started:
                raise _mistake(f"communication {instruction.tag_id} starts twice", rank)
            started.add(instruction.tag_id)
        elif isinstance(instruction, Wait):
            if instruction.tag_id not in started:
                raise _mistake(f"a wait for communication {instruction.tag_id} before its start", rank)
            waited.add(instruction.tag_id)
    if forgotten := started - waited:
        raise _mistake(f"nobody waits for communication {min(forgotten)}", rank)


def check_rendezvous(programs: dict[int, Program]) -> None:
    """Run all ranks until none can go on; raise BadPlan if some are not at their end."""
    arrived: dict[tuple[Members, int], set[int]] = defaultdict(set)
    met: dict[Members, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    position = dict.fromkeys(programs, 0)
    moved = True
    while moved:
        moved = False
        for rank, program in programs.items():
            while position[rank] < len(program):
                instruction, members = program[position[rank]]
                if isinstance(instruction, Start):
                    arrived[members, instruction.tag_id].add(rank)
                    met[members][rank].append(instruction.tag_id)
                elif len(arrived[members, instruction.tag_id]) < len(members):
                    break
                position[rank] += 1
                moved = True
    stuck = {rank: programs[rank][at] for rank, at in position.items() if at < len(programs[rank])}
    if stuck:
        raise BadPlan(
            f"ranks {sorted(stuck)} never end their step: "
            + "; ".join(_why(rank, wait, members, arrived) for rank, (wait, members) in stuck.items()),
            at="instructions",
            fix=_AGAIN,
        )
    for members, orders in met.items():
        _check_order(members, orders)


def _why(
    rank: int, wait: Start | Wait, members: Members, arrived: dict[tuple[Members, int], set[int]]
) -> str:
    absent = sorted(set(members) - arrived[members, wait.tag_id])
    return f"rank {rank} waits for {absent} in communication {wait.tag_id}"


def _check_order(members: Members, orders: dict[int, list[int]]) -> None:
    first = orders[members[0]]
    for rank in members[1:]:
        if orders[rank] != first:
            raise BadPlan(
                f"ranks {members[0]} and {rank} meet communications {first} and {orders[rank]}",
                at=f"group {list(members)}",
                fix=_AGAIN,
            )


def _mistake(what: str, rank: int) -> BadPlan:
    return BadPlan(what, at=f"the program of rank {rank}", fix=_AGAIN)
