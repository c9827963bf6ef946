"""Who keeps what: the shards that a host's server owns, and the copies that every worker has."""

from collections import Counter
from dataclasses import dataclass

from partc.compiler.reporting.units import plural, shortened, size
from partc.cost.memory import held_bytes
from partc.runtime.program import Plan, Rank

SHARD_LINES = 3


@dataclass(frozen=True, slots=True)
class Holding:
    """What one server owns: a headline, a few lines of it, and all of it."""

    headline: str
    lines: tuple[str, ...]
    everything: str


def holding_of(host: str, plan: Plan, characters: int) -> Holding:
    """Return what the host's server owns, in lines of at most `characters`."""
    rank = next((rank for rank in plan.ranks if rank.host == host and "server" in rank.sites), None)
    owned = [] if rank is None else _owned(rank, plan)
    if rank is None or not owned:
        return Holding("server: owns nothing", (), "")
    shown = owned if len(owned) <= SHARD_LINES else owned[: SHARD_LINES - 1]
    lines = [_line(parameter, size(held), characters) for parameter, held in shown]
    if rest := owned[len(shown) :]:
        lines.append(f"{len(rest)} more: {size(sum(held for _, held in rest))}")
    return Holding(
        headline=f"server (rank {rank.rank}): {size(sum(held for _, held in owned))}",
        lines=tuple(lines),
        everything="; ".join(f"{parameter}: {size(held)}" for parameter, held in owned),
    )


def _line(parameter: str, held: str, characters: int) -> str:
    return f"{shortened(parameter, characters - len(held) - 2)}: {held}"


def _owned(rank: Rank, plan: Plan) -> list[tuple[str, int]]:
    """Return the bytes that a server owns of each parameter, slots included, the largest first."""
    variables = {variable.name: variable for variable in plan.variables}
    sizes: Counter[str] = Counter()
    for held in rank.held:
        if held.start is not None:
            variable = variables[held.variable]
            sizes[variable.parameter or variable.name] += held_bytes(held, variable)
    return [
        (name, held) for name, held in sorted(sizes.items(), key=lambda item: (-item[1], item[0])) if held
    ]


def describe_copies(plan: Plan) -> str:
    """Say what every worker keeps a copy of."""
    variables = {variable.name: variable for variable in plan.variables}
    worker = next(rank for rank in plan.ranks if rank.replica is not None)
    copies = [held for held in worker.held if held.start is None]
    copied = sum(held_bytes(held, variables[held.variable]) for held in copies)
    return f"Every worker keeps its own copy of {plural(len(copies), 'variable')}, {size(copied)} together."
