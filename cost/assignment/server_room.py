"""What servers have room for, and what to say of variables that do not fit."""

from collections.abc import Sequence

from partc.cost.assignment.greedy_assignment import Rows
from partc.cost.cluster.machines import Host
from partc.runtime.errors import DoesNotFit


def server_room_bytes(host: Host) -> int:
    """Return the memory that a host has left for variables once its CPU devices took theirs."""
    claimed = sum(device.memory_bytes or 0 for device in host.devices if device.kind == "cpu")
    return host.memory_bytes - claimed


def check_room(items: Sequence[Rows], servers: Sequence[Host], rooms: Sequence[int]) -> None:
    """Raise DoesNotFit for what no solver is needed for: one too large, or all together."""
    names = [server.name for server in servers]
    roomiest = max(range(len(rooms)), key=rooms.__getitem__)
    for item in items:
        if not item.is_split and item.stored_bytes > rooms[roomiest]:
            short = item.stored_bytes - rooms[roomiest]
            raise DoesNotFit(
                f"variable {item.name!r} needs {item.stored_bytes} bytes with its slots and cannot be "
                f"split, the roomiest server {names[roomiest]!r} has {rooms[roomiest]}",
                at=f"variable {item.name!r} in server assignment",
                fix=f"raise memory_bytes of host {names[roomiest]!r} by {short}",
            )
    need, room = sum(item.stored_bytes for item in items), sum(rooms)
    if need > room:
        raise does_not_fit(items, servers, rooms)


def does_not_fit(items: Sequence[Rows], servers: Sequence[Host], rooms: Sequence[int]) -> DoesNotFit:
    """Return the error for variables that do not fit together."""
    largest = max(items, key=lambda item: item.stored_bytes)
    need, room = sum(item.stored_bytes for item in items), sum(rooms)
    what = (
        f"the variables on servers need {need} bytes with their slots, {len(rooms)} servers have {room}; "
        f"the largest is {largest.name!r} with {largest.stored_bytes}"
    )
    at = f"variable {largest.name!r} in server assignment"
    if need > room:
        where = f"of the hosts by {need - room} together, such as host {servers[0].name!r}"
        return DoesNotFit(what, at=at, fix=f"raise memory_bytes {where}, or add a host")
    # Longest first into what is free then never fails: a piece that fits nowhere would mean that
    # every server is filled beyond its old room.
    piece = max(item.stored_row_bytes if item.is_split else item.stored_bytes for item in items)
    return DoesNotFit(
        f"{what}; in pieces of up to {piece} bytes they do not pack",
        at=at,
        fix=f"raise memory_bytes of every server by {piece}",
    )
