"""Prove that a plan ends: execute every rank's instructions with no memory between the ranks.

A communication completes only once every member has started it, and a member must meet the
communications of a group in the same order as the others: that is what MPI and NCCL ask for.
"""

from collections import defaultdict
from collections.abc import Sequence

from partc.runtime.errors import BadPlan
from partc.runtime.plan.check_values import check_values
from partc.runtime.plan.program import Instruction, Plan, Start, Wait, instructions_of

Members = tuple[int, ...]
MessageOrder = list[tuple[Start | Wait, Members]]

_AGAIN = "compile the model again; in a plan as partc compiled it this is a mistake: report it"


def check_program(plan: Plan) -> None:
    """Raise BadPlan, naming the ranks, if some rank never ends its step or touches what it must not."""
    _check_groups(plan)
    programs = _communications(plan)
    for rank, program in programs.items():
        _check_pairs(rank, [instruction for instruction, _ in program])
    check_rendezvous(programs)
    check_values(plan)


def _communications(plan: Plan) -> dict[int, MessageOrder]:
    """Return every rank's communications; equal groups are one object."""
    groups: dict[Members, Members] = {}
    same = {name: [groups.setdefault(g, g) for g in instances] for name, instances in plan.groups.items()}
    group_of = {i.tag_id: i.group for i in plan.instructions if isinstance(i, Start)}
    shared: dict[frozenset[str], list[Start | Wait]] = {}  # ranks in groups of the same names do the same
    programs: dict[int, MessageOrder] = {}
    for rank in plan.ranks:
        names = frozenset(rank.groups)
        if names not in shared:
            own = instructions_of(plan, rank)
            shared[names] = [instruction for instruction in own if isinstance(instruction, Start | Wait)]
        programs[rank.rank] = [
            (i, same[group_of[i.tag_id]][rank.groups[group_of[i.tag_id]]]) for i in shared[names]
        ]
    return programs


def _check_groups(plan: Plan) -> None:
    """Every rank must be where it says, and every member must say so."""
    ranks = {rank.rank: rank for rank in plan.ranks}
    for rank in plan.ranks:
        for name, number in rank.groups.items():
            groups = plan.groups.get(name, ())
            if not 0 <= number < len(groups):
                raise _no_group(rank.rank, f"{name!r} {number}, which the plan does not have")
    for name, groups in plan.groups.items():
        for number, members in enumerate(groups):
            if not members or len(set(members)) != len(members):
                raise BadPlan(
                    f"{name!r} {number} is {list(members)}: it must hold somebody, and nobody twice",
                    at=f"groups: {name}",
                    fix=_AGAIN,
                )
            for member in members:
                if member not in ranks or ranks[member].groups.get(name) != number:
                    raise BadPlan(
                        f"{name!r} {number} is {list(members)}, but rank {member} does not say so",
                        at=f"groups: {name}",
                        fix=_AGAIN,
                    )
        listed = {member for members in groups for member in members}
        for rank in plan.ranks:
            if name in rank.groups and rank.rank not in listed:
                raise _no_group(rank.rank, f"{name!r} {rank.groups[name]}, which does not hold it")


def _no_group(rank: int, what: str) -> BadPlan:
    return BadPlan(f"rank {rank} is in group {what}", at=f"ranks: {rank}", fix=_AGAIN)


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
            if instruction.tag_id in waited:
                raise _mistake(f"communication {instruction.tag_id} is waited for twice", rank)
            waited.add(instruction.tag_id)
    if forgotten := started - waited:
        raise _mistake(f"nobody waits for communication {min(forgotten)}", rank)


def check_rendezvous(programs: dict[int, MessageOrder]) -> None:
    """Run all ranks until none can go on; raise BadPlan if some are not at their end."""
    numbers = _Numbers()
    arrived: dict[tuple[int, int], set[int]] = defaultdict(set)  # (group, tag) -> ranks
    orders: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # group -> rank -> tags
    position = dict.fromkeys(programs, 0)
    moved = True
    while moved:
        moved = False
        for rank, program in programs.items():
            while position[rank] < len(program):
                instruction, members = program[position[rank]]
                group = numbers.of(members)
                if isinstance(instruction, Start):
                    arrived[group, instruction.tag_id].add(rank)
                    orders[group][rank].append(instruction.tag_id)
                elif len(arrived[group, instruction.tag_id]) < len(members):
                    break
                position[rank] += 1
                moved = True
    stuck = {rank: programs[rank][at] for rank, at in position.items() if at < len(programs[rank])}
    if stuck:
        raise BadPlan(
            f"ranks {sorted(stuck)} never end their step: "
            + "; ".join(
                _why(rank, wait, members, arrived[numbers.of(members), wait.tag_id])
                for rank, (wait, members) in stuck.items()
            ),
            at="instructions",
            fix=_AGAIN,
        )
    for members, number in numbers.by_members.items():
        _check_order(members, orders[number])


class _Numbers:
    """Numbers groups. An object is hashed once, for groups may be long and are looked up often."""

    def __init__(self) -> None:
        self.by_members: dict[Members, int] = {}
        self._by_object: dict[int, int] = {}

    def of(self, members: Members) -> int:
        number = self._by_object.get(id(members))
        if number is None:
            number = self.by_members.setdefault(members, len(self.by_members))
            self._by_object[id(members)] = number
        return number


def _why(rank: int, wait: Start | Wait, members: Members, arrived: set[int]) -> str:
    absent = sorted(set(members) - arrived)
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
