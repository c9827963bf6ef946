"""What each server keeps, how good the solver proved that to be, and the copies that every worker has."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partc.compiler.report.units import count, percent, plural, shorten, size, solver_work
from partc.cost.assignment.server_assignment import ServerAssignment
from partc.runtime.plan.held_memory import piece_bytes
from partc.runtime.plan.program import Plan, Rank


@dataclass(frozen=True, slots=True)
class ServerRow:
    """A server's load: shares are of the fullest server's."""

    host: str
    stored: str
    stored_share: float
    moved: str
    moved_share: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """The solver's answer."""

    status: str
    fullest: str
    is_cut_again: bool  # by traffic, after the solver
    objective: str
    bound: str
    gap: str
    work: str
    servers: tuple[ServerRow, ...]


def describe_servers(assignment: ServerAssignment | None) -> Assignment | None:
    """Return the assignment as text, None where no variable lives on a server."""
    if assignment is None:
        return None
    objective, bound = assignment.objective_bytes, assignment.bound_bytes
    stored, traffic = assignment.bytes_per_server, assignment.moved_bytes_per_server
    most_stored, most_moved = max([1, *stored.values()]), max([1, *traffic.values()])
    return Assignment(
        status=assignment.status.lower(),
        fullest=size(max(stored.values(), default=0)),
        is_cut_again=max(stored.values(), default=0) != objective,
        objective=size(objective),
        bound=size(bound),
        gap=percent((objective - bound) / objective if objective else 0.0),
        work=solver_work(assignment.deterministic_time),
        servers=tuple(
            ServerRow(
                host,
                size(server_bytes),
                server_bytes / most_stored,
                size(traffic[host]),
                traffic[host] / most_moved,
            )
            for host, server_bytes in stored.items()
        ),
    )


SHARD_LINES = 3


@dataclass(frozen=True, slots=True)
class ServerContents:
    """What one server owns: a headline, a few lines of it, and all of it."""

    headline: str
    lines: tuple[str, ...]
    full_list: str


def describe_contents(host: str, plan: Plan, characters: int) -> ServerContents:
    """Return what the host's server owns, in lines of at most `characters`."""
    rank = next((rank for rank in plan.ranks if rank.host == host and "server" in rank.sites), None)
    pieces = [] if rank is None else _owned_bytes(rank, plan)
    if rank is None or not pieces:
        return ServerContents("server: owns nothing", (), "")
    first_pieces = pieces if len(pieces) <= SHARD_LINES else pieces[: SHARD_LINES - 1]
    lines = [_line(parameter, size(piece_bytes), characters) for parameter, piece_bytes in first_pieces]
    if rest := pieces[len(first_pieces) :]:
        lines.append(f"{len(rest)} more: {size(sum(piece_bytes for _, piece_bytes in rest))}")
    return ServerContents(
        headline=f"server (rank {rank.rank}): {size(sum(piece_bytes for _, piece_bytes in pieces))}",
        lines=tuple(lines),
        full_list="; ".join(f"{parameter}: {size(piece_bytes)}" for parameter, piece_bytes in pieces),
    )


def _line(parameter: str, amount: str, characters: int) -> str:
    return f"{shorten(parameter, characters - len(amount) - 2)}: {amount}"


def _owned_bytes(rank: Rank, plan: Plan) -> list[tuple[str, int]]:
    """Return the bytes that a server owns of each parameter, slots included, the largest first."""
    variables = {variable.name: variable for variable in plan.variables}
    sizes: Counter[str] = Counter()
    for piece in rank.pieces:
        variable = variables[piece.variable]
        if piece.box is not None and variable.method == "servers":
            sizes[variable.parameter or variable.name] += piece_bytes(piece, variable)
    return [
        (name, piece) for name, piece in sorted(sizes.items(), key=lambda item: (-item[1], item[0])) if piece
    ]


def describe_copies(plan: Plan) -> str:
    """Say what workers keep copies of, and how much the first one keeps parts of."""
    variables = {variable.name: variable for variable in plan.variables}
    workers = [rank for rank in plan.ranks if rank.replica is not None]
    copies = [[piece for piece in worker.pieces if piece.box is None] for worker in workers]
    sizes = [sum(piece_bytes(piece, variables[piece.variable]) for piece in pieces) for pieces in copies]
    numbers = [len(pieces) for pieces in copies]
    sentence = "No worker keeps a copy of a variable"
    if min(numbers) < max(numbers) or min(sizes) < max(sizes):
        sentence = (
            f"Workers keep copies of {_range(numbers, count)} variables, {_range(sizes, size)} together"
        )
    elif numbers[0]:
        sentence = (
            f"Every worker keeps its own copy of {plural(numbers[0], 'variable')}, {size(sizes[0])} together"
        )
    first_pieces = workers[0].pieces
    parts = [p for p in first_pieces if p.box is not None and variables[p.variable].method != "servers"]
    if parts:
        others = plural(len(parts), "other")
        part_bytes = sum(piece_bytes(piece, variables[piece.variable]) for piece in parts)
        sentence += f", and a part of {others}, {size(part_bytes)} together on rank {workers[0].rank}"
    return f"{sentence}."


def _range(numbers: Sequence[int], tell: Callable[[int], str]) -> str:
    least, most = tell(min(numbers)), tell(max(numbers))
    return least if least == most else f"{least} to {most}"
