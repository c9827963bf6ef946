"""The levels of a sum that goes by them: within hosts, among their first members, and back.

hosts    (0 1) (2 3)          reduce      0 <- 1      2 <- 3
                              all_reduce  0 <-> 2
                              broadcast   0 -> 1      2 -> 3
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from partc.runtime.plan.program import Kind, Plan, Start
from partc.runtime.transports.communication import Part

Members = tuple[int, ...]  # world ranks


def by_host(members: Sequence[int], host_of: Mapping[int, str]) -> tuple[Members, ...]:
    """Return members host by host, each host's in their order."""
    hosts: dict[str, list[int]] = {}
    for member in members:
        hosts.setdefault(host_of[member], []).append(member)
    return tuple(map(tuple, hosts.values()))


def levels_in(plan: Plan) -> set[tuple[Kind, Members]]:
    """Return all levels that sums of a plan go by: what is done, and by whom."""
    host_of = {rank.rank: rank.host for rank in plan.ranks}
    names = {start.group for start in plan.instructions if isinstance(start, Start) and start.by_levels}
    groups = {by_host(members, host_of) for name in names for members in plan.groups[name]}
    return {
        level for hosts in groups for here in hosts for member in here for level in _levels_of(member, hosts)
    }


def level_parts(part: Part) -> tuple[Part, ...]:
    """Return what a member brings to each level that it takes part in, in order."""
    own = part.members[part.position]
    return tuple(_level_part(part, *level) for level in _levels_of(own, part.hosts))


def _levels_of(member: int, hosts: Sequence[Members]) -> list[tuple[Kind, Members]]:
    """Return the levels that a member takes part in; who is alone on its host has nothing to do there."""
    here = next(host for host in hosts if member in host)
    leaders = tuple(first for first, *_ in hosts)
    levels: list[tuple[Kind, Members]] = [("reduce", here), ("all_reduce", leaders), ("broadcast", here)]
    return [(kind, members) for kind, members in levels if member in members and len(members) > 1]


def _level_part(part: Part, kind: Kind, members: Members) -> Part:
    position = members.index(part.members[part.position])
    rounds_to = part.start.rounds_to if kind == "all_reduce" else ""
    start = replace_fields(part.start, kind=kind, rounds_to=rounds_to, by_levels=False)
    lands = kind != "reduce" or position == 0
    return replace(part, start=start, members=members, position=position, lands=lands, hosts=())
