"""Where in a server's program a push takes effect: before it nothing is written, behind it everything.

    pulls are answered ─ rows are looked up ─ gradients come ─┤ variables are written
                                                         commit point

It lies directly behind the last wait before the first write. Other sessions' turns come there anyway, so an
update that loses no push without a commit point loses none with it.
"""

from collections.abc import Sequence

from partc.runtime.asynchronous.sessions.routes import GroupRoute, routes_of
from partc.runtime.asynchronous.sessions.session import own_ranks, servers_of
from partc.runtime.plan.program import Instruction, Plan, Rank, Run, Start, Store, Wait, instructions_of


def commit_point(program: Sequence[Instruction], rank: Rank) -> int:
    """Return the index of the first instruction that a server carries out for committed steps only."""
    variables = {piece.value for piece in rank.pieces}
    first = next((at for at, i in enumerate(program) if _written(i) & variables), len(program))
    return max((at + 1 for at in range(first) if isinstance(program[at], Wait)), default=0)


def first_unpushed(plan: Plan) -> Start | None:
    """Return what a worker could not push before a server has written something; None if there is nothing.

    Programs are played as far as they go with every server stopped at its commit point.
    """
    programs = {rank.rank: instructions_of(plan, rank) for rank in plan.ranks}
    for rank in servers_of(plan):
        programs[rank.rank] = programs[rank.rank][: commit_point(programs[rank.rank], rank)]
    routes = {rank.rank: routes_of(plan, rank) for rank in plan.ranks}
    done = dict.fromkeys(programs, 0)
    begun: set[tuple[int, int]] = set()  # (communication, rank)
    goes_on = True
    while goes_on:
        goes_on = False
        for rank_number, program in programs.items():
            while done[rank_number] < len(program):
                instruction = program[done[rank_number]]
                if isinstance(instruction, Wait) and not _has_come(
                    instruction.tag_id, routes[rank_number][instruction.tag_id], rank_number, begun
                ):
                    break
                if isinstance(instruction, Start):
                    begun.add((instruction.tag_id, rank_number))
                done[rank_number] += 1
                goes_on = True
    for rank in own_ranks(plan):
        for instruction in programs[rank.rank][done[rank.rank] :]:
            if isinstance(instruction, Start) and _pushes(routes[rank.rank][instruction.tag_id], plan, rank):
                return instruction
    return None


def _written(instruction: Instruction) -> set[str]:
    match instruction:
        case Run(writes=writes):
            return {value for _, value in writes}
        case Store(target=target):
            return {target}
    return set()


def _has_come(tag_id: int, route: GroupRoute, rank: int, begun: set[tuple[int, int]]) -> bool:
    target = route.members.index(rank)
    return all(
        (tag_id, member) in begun
        for source, member in enumerate(route.members)
        if route.carries(source, target)
    )


def _pushes(route: GroupRoute, plan: Plan, rank: Rank) -> bool:
    """Tell whether a worker's rank sends a server something."""
    servers = {server.rank for server in servers_of(plan)}
    source = route.members.index(rank.rank)
    return any(
        member in servers and route.carries(source, target) for target, member in enumerate(route.members)
    )
