"""Give the rows of server-held variables to servers so that the fullest server holds least.

    n[v,s]  rows of variable v that server s owns          small v: n[v,s] = rows[v] x[v,s]
    w[v]    stored bytes of a row: parameter and slots     t[v]: bytes of a row that move in a step

    first   minimise  B                                    the greatest bytes stored
    then    minimise  T   with  B <= (1 + slack) B*        the greatest bytes moved per step

    sum_s n[v,s] = rows[v]                                 every row has an owner   _own_every_row
    sum_s x[v,s] = 1            small v                    a small one stays whole  _own_every_row
    sum_v n[v,s] w[v] <= B <= M[s]                         memory                   _limit_loads
    sum_v n[v,s] t[v] <= T                                 traffic                  _limit_loads
    n[v,s] <= 1.25 rows[v] / servers                       if memory is plenty      _own_every_row

The solver takes a variable's rows for alike. Where it was measured how traffic is spread over them, a
server's share of the rows becomes its share of the traffic, as far as memory allows: of words by
frequency, one server stores the few frequent ones, another the many rare ones.

A variable is split if it is more than 1 / (4 servers) of all bytes stored or moved (and 1 KiB at
least), or larger than a server. A longest-first greedy placement is the solver's hint. Everything is
an integer: stored bytes exact, moved ones in units of 2**-40 of them all; the seed, the single worker
and the limit in deterministic time make equal inputs give equal answers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType

from ortools.sat.python import cp_model

from partc.cost.assignment.greedy_assignment import Rows, place_longest_first
from partc.cost.assignment.row_spread import cut, share_of_traffic
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Host
from partc.cost.new_solver import new_solver
from partc.cost.strategy import Shard, SyncFacts
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


MIN_SPLIT_BYTES = 1024  # smaller variables are never split for balance's sake
SPLIT_SHARE = 4  # larger than 1 / (SPLIT_SHARE x servers) of the whole: split
BALANCE_SLACK = 0.005  # stored bytes given up for evener traffic
UNEVENNESS = 0.25  # a server's share of a split variable exceeds the even one by this at most
STORED_GAP = 1e-3  # relative, good enough; the bound is reported
MOVED_GAP = 1e-2
TRAFFIC_UNITS = 2**40  # all traffic of a step together, for a solver that counts in whole numbers
CUT_WAYS = (1.0, 0.75, 0.5, 0.25)  # how far cuts by rows are moved to those by traffic
DETERMINISTIC_LIMIT = 0.1  # per solve, in CP-SAT's own unit, about a tenth of a second


@dataclass(frozen=True, slots=True)
class ServerAssignment:
    """Who stores what.

    `objective_bytes` is the fullest server's, within BALANCE_SLACK of the first solve's, whose
    proven lower bound and status these are: before tables are cut by traffic.
    """

    objective_bytes: int
    bound_bytes: int
    status: str
    deterministic_time: float
    bytes_per_server: dict[str, int]
    moved_bytes_per_server: dict[str, int]  # parameter bytes that its workers pull or push in a step


@dataclass(frozen=True)
class _Model:
    """CP-SAT's variables for one solve."""

    solver_model: cp_model.CpModel
    rows_of: list[list[cp_model.LinearExprT]]  # [variable][server]
    stored: cp_model.IntVar
    moved: cp_model.IntVar


@dataclass(frozen=True)
class _Answer:
    """Rows per [variable][server], and what the solver says of them."""

    rows_per_server: list[list[int]]
    bound: int
    status: str
    deterministic_time: float


def assign_to_servers(
    facts: Sequence[SyncFacts],
    cluster: Cluster,
    pinned: Mapping[str, tuple[Shard, ...]] = MappingProxyType({}),
) -> tuple[dict[str, tuple[Shard, ...]], ServerAssignment]:
    """Split and place the variables of `facts`; `pinned` ones stay. Raises NoPlacement."""
    servers = [host for host in cluster.hosts if host.server]
    rooms = [server_room_bytes(host) for host in servers]
    items = _rows_to_place(facts, servers, rooms, pinned)
    check_room(items, servers, rooms)
    even = _even_stored(items, rooms)
    if even is None:
        # Whole variables may leave gaps that no other fills: split all that can be.
        items = [replace(item, is_split=item.rows > 1 and item.fixed is None) for item in items]
        even = _even_stored(items, rooms)
    if even is None:
        raise does_not_fit(items, servers, rooms)
    final = _even_moved(items, rooms, even)
    rows_per_server = _by_traffic(items, final.rows_per_server, rooms)

    names = [server.name for server in servers]
    stored = _loads(rows_per_server, [item.stored_row_bytes for item in items])
    moved = _moved_bytes(items, rows_per_server)
    assignment = ServerAssignment(
        objective_bytes=max(_loads(final.rows_per_server, [item.stored_row_bytes for item in items])),
        bound_bytes=even.bound,
        status=even.status,
        deterministic_time=round(even.deterministic_time + final.deterministic_time, 6),
        bytes_per_server=dict(zip(names, stored, strict=True)),
        moved_bytes_per_server=dict(zip(names, moved, strict=True)),
    )
    shards = {item.name: _shards(rows, servers) for item, rows in zip(items, rows_per_server, strict=True)}
    return shards, assignment


def _even_stored(items: Sequence[Rows], rooms: Sequence[int]) -> _Answer | None:
    """Minimise the greatest bytes stored. None: nothing was found that fits."""
    hint = place_longest_first(items, rooms, _even_share(items, rooms))
    model = _build(items, rooms, hint)
    model.solver_model.minimize(model.stored)
    return _solve(model, STORED_GAP) or _hint_if_it_fits(items, rooms, hint)


def _hint_if_it_fits(items: Sequence[Rows], rooms: Sequence[int], hint: list[list[int]]) -> _Answer | None:
    """Take the greedy placement where the solver ran out of time before it had one."""
    row_bytes = [item.stored_row_bytes for item in items]
    if any(load > room for load, room in zip(_loads(hint, row_bytes), rooms, strict=True)):
        return None
    bound = math.ceil(sum(item.stored_bytes for item in items) / len(rooms))
    return _Answer(hint, bound, "FEASIBLE", DETERMINISTIC_LIMIT)


def _even_moved(items: Sequence[Rows], rooms: Sequence[int], even: _Answer) -> _Answer:
    """Minimise the greatest bytes moved, while nearly as even in bytes stored."""
    most_stored = max(_loads(even.rows_per_server, [item.stored_row_bytes for item in items]))
    model = _build(items, rooms, even.rows_per_server)
    model.solver_model.add(model.stored <= int(most_stored * (1 + BALANCE_SLACK)))
    model.solver_model.minimize(model.moved)
    return _solve(model, MOVED_GAP) or even


def _rows_to_place(
    facts: Sequence[SyncFacts],
    servers: Sequence[Host],
    rooms: Sequence[int],
    pinned: Mapping[str, tuple[Shard, ...]],
) -> list[Rows]:
    stored = sum(fact.rows * (fact.row_bytes + fact.slot_row_bytes) for fact in facts)
    moved = sum(fact.touched_rows * fact.row_bytes for fact in facts)
    parts = SPLIT_SHARE * len(rooms)

    def is_large(fact: SyncFacts) -> bool:
        own = fact.rows * (fact.row_bytes + fact.slot_row_bytes)
        is_large_share = own * parts > stored or fact.touched_rows * fact.row_bytes * parts > moved
        return own > min(rooms) or (own >= MIN_SPLIT_BYTES and is_large_share)

    return [
        Rows(
            name=fact.name,
            rows=fact.rows,
            stored_row_bytes=fact.row_bytes + fact.slot_row_bytes,
            moved_row_bytes=fact.touched_rows * fact.row_bytes / max(1, fact.rows),
            is_split=len(rooms) > 1 and fact.rows > 1 and is_large(fact),
            fixed=_fixed_rows(pinned.get(fact.name, ()), servers),
            spread=fact.spread,
        )
        for fact in facts
    ]


def _fixed_rows(shards: Sequence[Shard], servers: Sequence[Host]) -> tuple[int, ...] | None:
    rows = {shard.host: shard.stop - shard.start for shard in shards}
    return tuple(rows.get(server.name, 0) for server in servers) if rows else None


# ---------------------------------------------------------------- the model


def _build(items: Sequence[Rows], rooms: Sequence[int], hint: Sequence[Sequence[int]]) -> _Model:
    model = cp_model.CpModel()
    most = _even_share(items, rooms)
    rows_of = [_own_every_row(model, item, rows, most) for item, rows in zip(items, hint, strict=True)]
    weights = _traffic_weights(items)
    total_moved = sum(item.rows * weight for item, weight in zip(items, weights, strict=True))
    stored = model.new_int_var(0, max(rooms), "stored")
    moved = model.new_int_var(0, total_moved, "moved")
    _limit_loads(model, items, rows_of, rooms, stored, moved)
    model.add_hint(stored, max(_loads(hint, [item.stored_row_bytes for item in items])))
    model.add_hint(moved, max(_loads(hint, weights)))
    return _Model(model, rows_of, stored, moved)


def _traffic_weights(items: Sequence[Rows]) -> list[int]:
    """Return what a row of each item moves in a step, in units so small that rounding them is no matter."""
    total_bytes = sum(item.rows * item.moved_row_bytes for item in items)
    return [round(item.moved_row_bytes * TRAFFIC_UNITS / total_bytes) if total_bytes else 0 for item in items]


def _even_share(items: Sequence[Rows], rooms: Sequence[int]) -> float:
    """Return the share of a split variable that one server may own.

    Uneven shares would even out in the sum, yet each variable is fetched in a message of its own.
    Only where memory is tight may a server own any share.
    """
    plenty = min(rooms) >= sum(item.stored_bytes for item in items)
    return (1 + UNEVENNESS) / len(rooms) if plenty else 1.0


def _own_every_row(
    model: cp_model.CpModel, item: Rows, hint: Sequence[int], most: float
) -> list[cp_model.LinearExprT]:
    if item.fixed is not None:
        return [cp_model.LinearExpr.sum([rows]) for rows in item.fixed]
    if item.is_split:
        limit = min(item.rows, math.ceil(item.rows * most))
        counts = [model.new_int_var(0, limit, f"{item.name}@{s}") for s in range(len(hint))]
        model.add(cp_model.LinearExpr.sum(counts) == item.rows)
        for count, rows in zip(counts, hint, strict=True):
            model.add_hint(count, rows)
        return list(counts)
    owned = [model.new_bool_var(f"{item.name}@{s}") for s in range(len(hint))]
    model.add_exactly_one(owned)
    for is_owned, rows in zip(owned, hint, strict=True):
        model.add_hint(is_owned, rows > 0)
    return [is_owned * item.rows for is_owned in owned]


def _loads(rows_per_server: Sequence[Sequence[int]], row_bytes: Sequence[int]) -> list[int]:
    """Return the bytes on each server."""
    servers = range(len(rows_per_server[0]))
    return [
        sum(rows[s] * weight for rows, weight in zip(rows_per_server, row_bytes, strict=True))
        for s in servers
    ]


def _limit_loads(
    model: cp_model.CpModel,
    items: Sequence[Rows],
    rows_of: Sequence[Sequence[cp_model.LinearExprT]],
    rooms: Sequence[int],
    stored: cp_model.IntVar,
    moved: cp_model.IntVar,
) -> None:
    stored_weights = [item.stored_row_bytes for item in items]
    moved_weights = _traffic_weights(items)
    for s, room in enumerate(rooms):
        rows = [counts[s] for counts in rows_of]
        on_server = cp_model.LinearExpr.weighted_sum(rows, stored_weights)
        model.add(on_server <= stored)
        model.add(on_server <= room)
        model.add(cp_model.LinearExpr.weighted_sum(rows, moved_weights) <= moved)


def _solve(model: _Model, relative_gap: float) -> _Answer | None:
    solver = new_solver()
    solver.parameters.max_deterministic_time = DETERMINISTIC_LIMIT
    solver.parameters.relative_gap_limit = relative_gap
    solver.parameters.symmetry_level = 0  # breaking symmetry would make the hint infeasible
    status = solver.solve(model.solver_model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return _Answer(
        rows_per_server=[[int(solver.value(count)) for count in counts] for counts in model.rows_of],
        bound=math.ceil(solver.best_objective_bound),
        status=solver.status_name(status),
        deterministic_time=float(solver.response_proto.deterministic_time),
    )


# ---------------------------------------------------------------- by traffic


def _by_traffic(
    items: Sequence[Rows], rows_per_server: Sequence[Sequence[int]], rooms: Sequence[int]
) -> Sequence[Sequence[int]]:
    """Move the cuts of split items, all the way or as far as every server has room."""
    for way in CUT_WAYS:
        recut = [_recut(item, rows, way) for item, rows in zip(items, rows_per_server, strict=True)]
        stored = _loads(recut, [item.stored_row_bytes for item in items])
        if all(load <= room for load, room in zip(stored, rooms, strict=True)):
            return recut
    return rows_per_server


def _recut(item: Rows, rows: Sequence[int], way: float) -> Sequence[int]:
    if not item.spread or not item.is_split or item.fixed is not None:
        return rows
    by_traffic = accumulate(cut(item.spread, item.rows, [count / item.rows for count in rows]))
    ends = [round(way * to + (1 - way) * of) for to, of in zip(by_traffic, accumulate(rows), strict=True)]
    return [stop - start for start, stop in pairwise([0, *ends])]


def _moved_bytes(items: Sequence[Rows], rows_per_server: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes that each server's rows move in a step."""
    moved = [0.0] * len(rows_per_server[0])
    for item, rows in zip(items, rows_per_server, strict=True):
        for s, (start, stop) in enumerate(pairwise([0, *accumulate(rows)])):
            share = share_of_traffic(item.spread, item.rows, start, stop)
            moved[s] += share * item.rows * item.moved_row_bytes
    return [round(carried) for carried in moved]


# ---------------------------------------------------------------- the answer


def _shards(rows: Sequence[int], servers: Sequence[Host]) -> tuple[Shard, ...]:
    shards: list[Shard] = []
    start = 0
    for server, count in zip(servers, rows, strict=True):
        if count:
            shards.append(Shard(server.name, start, start + count))
        start += count
    return tuple(shards)
