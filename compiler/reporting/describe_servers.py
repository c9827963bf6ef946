"""What the solver gave to each server, and how good it proved that to be."""

from dataclasses import dataclass

from partc.compiler.reporting.units import percent, size
from partc.cost.server_assignment import ServerAssignment


@dataclass(frozen=True, slots=True)
class Server:
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
    deterministic_time: str
    servers: tuple[Server, ...]


def describe_servers(assignment: ServerAssignment | None) -> Assignment | None:
    """Return the assignment as text, None where no variable lives on a server."""
    if assignment is None:
        return None
    objective, bound = assignment.objective_bytes, assignment.bound_bytes
    stored, moved = assignment.bytes_per_server, assignment.moved_bytes_per_server
    most_stored, most_moved = max([1, *stored.values()]), max([1, *moved.values()])
    return Assignment(
        status=assignment.status.lower(),
        fullest=size(max(stored.values(), default=0)),
        is_cut_again=max(stored.values(), default=0) != objective,
        objective=size(objective),
        bound=size(bound),
        gap=percent((objective - bound) / objective if objective else 0.0),
        deterministic_time=f"{assignment.deterministic_time:.4f}",
        servers=tuple(
            Server(host, size(held), held / most_stored, size(moved[host]), moved[host] / most_moved)
            for host, held in stored.items()
        ),
    )
