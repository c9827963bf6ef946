"""Every variable: what it is, where it went, and what the alternatives would have cost."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from partc.compiler.report.methods import NAMES
from partc.compiler.report.units import count, percent, plural, ranges, seconds, size
from partc.cost.assignment.synchronisation import Choice
from partc.cost.strategy import Shard, SyncFacts
from partc.runtime.jobs.results import Owner, copies_of, owners_of
from partc.runtime.plan.boxes import describe_box
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import PlanVariable

FIGURE = re.compile(r"[\d.,]*\d\s?(?:%|[kMGT]?B\b|[mµ]?s\b)?")  # with its unit
TIMED = ("all_reduce", "all_gather", "servers")


@dataclass(frozen=True, slots=True)
class MethodTime:
    """A method's predicted time for one variable, empty where it does not apply."""

    method: str
    text: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class VariableRow:
    """A line of the table: a variable, or several of which all that is told is equal."""

    name: str
    alike: tuple[str, ...]  # the others' names
    role: str
    dtype: str
    shape: str
    size: str
    gradient: str
    touched: str
    method: str
    method_name: str
    where: str
    where_title: str
    times: tuple[MethodTime, ...]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some parameters went where they went: the largest one's figures stand for all."""

    name: str
    alike: tuple[str, ...]  # the others' names, the largest first
    together: str  # their bytes
    method: str
    method_name: str
    reason: str


def describe_variables(
    plan: Plan, choices: tuple[Choice, ...], facts: Mapping[str, SyncFacts]
) -> tuple[VariableRow, ...]:
    """Return all variables, the largest first, equal ones together."""
    choice_of = {choice.variable: choice for choice in choices}
    priced = {choice.variable for choice in priced_as_kept(plan, choices)}
    ordered = sorted(plan.variables, key=lambda variable: (-_nbytes(variable), variable.name))
    owners = owners_of(plan)
    workers = sum(rank.replica is not None for rank in plan.ranks)
    rows = [
        _describe(
            variable,
            choice_of,
            facts.get(variable.name),
            copies_of(owners.get(variable.name, ())),
            workers,
            variable.name in priced,
        )
        for variable in ordered
    ]
    alike: dict[VariableRow, list[str]] = {}
    for row in rows:
        alike.setdefault(replace(row, name=""), []).append(row.name)
    return tuple(replace(row, name=names[0], alike=tuple(names[1:])) for row, names in alike.items())


def priced_as_kept(plan: Plan, choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices whose prices are of what ranks keep: the whole on every worker, or on servers.

    Of a part, or of what some workers alone have, a price of the whole among all workers says nothing; nor
    does any without a step of all workers.
    """
    if plan.asynchronous:
        return ()
    owners = owners_of(plan)
    workers = sum(rank.replica is not None for rank in plan.ranks)
    return tuple(
        choice
        for choice in choices
        if choice.method == "servers" or _is_on_all(copies_of(owners.get(choice.variable, ())), workers)
    )


def _is_on_all(parts: Sequence[tuple[Owner, ...]], workers: int) -> bool:
    return not _are_boxes(parts) and _holders(parts) >= workers


def group_reasons(choices: Sequence[Choice]) -> tuple[Reason, ...]:
    """Return each reason once, for all parameters for which it differs in figures alone."""
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in sorted(choices, key=lambda choice: (-choice.bytes, choice.variable)):
        groups.setdefault((choice.method, FIGURE.sub("#", choice.reason)), []).append(choice)
    return tuple(
        Reason(
            same[0].variable,
            tuple(choice.variable for choice in same[1:]),
            size(sum(choice.bytes for choice in same)),
            method,
            NAMES[method],
            same[0].reason,
        )
        for (method, _), same in groups.items()
    )


def _nbytes(variable: PlanVariable) -> int:
    return prod(variable.shape) * np.dtype(variable.dtype).itemsize


def _describe(
    variable: PlanVariable,
    choice_of: Mapping[str, Choice],
    fact: SyncFacts | None,
    parts: Sequence[tuple[Owner, ...]],
    workers: int,
    is_priced: bool,
) -> VariableRow:
    choice = choice_of.get(variable.name)
    owner = choice_of.get(variable.parameter or variable.name)
    shards = owner.shards if owner is not None and variable.method == "servers" else ()
    method = variable.method if shards or _holders(parts) != 1 else "replicated"
    return VariableRow(
        name=variable.name,
        alike=(),
        role=variable.role if variable.parameter is None else f"{variable.role} of its parameter",
        dtype=variable.dtype,
        shape=" × ".join(count(length) for length in variable.shape) or "scalar",
        size=size(_nbytes(variable)),
        gradient="" if choice is None else "sparse" if choice.sparse else "dense",
        touched=_touched_rows_text(fact),
        method=method,
        method_name=NAMES[method],
        where=_where(shards, parts, workers),
        where_title="; ".join(f"{s.host}: rows {s.start:,} to {s.stop:,}" for s in shards) or _title(parts),
        times=tuple(
            MethodTime(method, _time(choice, method), choice is not None and choice.method == method)
            for method in (TIMED if is_priced else ())
        ),
    )


def _touched_rows_text(fact: SyncFacts | None) -> str:
    if fact is None or not fact.sparse:
        return ""
    source = "measured" if fact.distinct else "assumed"
    return f"{count(fact.touched_rows)} rows, {percent(fact.touched_rows / max(1, fact.rows))}, {source}"


def _where(shards: tuple[Shard, ...], parts: Sequence[tuple[Owner, ...]], workers: int) -> str:
    holders = {owner.rank for copies in parts for owner in copies}
    if not shards and _are_boxes(parts):
        return f"{plural(len(parts), 'part')}: ranks {ranges(holders)}"
    if not shards and holders and len(holders) < workers:  # of a stage, of an operator's own devices
        return f"{'rank' if len(holders) == 1 else 'ranks'} {ranges(holders)}"
    if not shards:
        return "every worker"
    if len(shards) == 1:
        return shards[0].host
    return f"{plural(len(shards), 'shard')}: {shards[0].host} – {shards[-1].host}"


def _holders(parts: Sequence[tuple[Owner, ...]]) -> int:
    """Return how many ranks keep a part of a variable."""
    return len({owner.rank for copies in parts for owner in copies})


def _are_boxes(parts: Sequence[tuple[Owner, ...]]) -> bool:
    return any(owner.piece.box is not None for copies in parts for owner in copies)


def _title(parts: Sequence[tuple[Owner, ...]]) -> str:
    if not _are_boxes(parts):
        return ""
    return "; ".join(
        f"rank {ranges(owner.rank for owner in copies)}: {describe_box(copies[0].piece.box)}"
        for copies in parts
    )


def _time(choice: Choice | None, method: str) -> str:
    times: Mapping[str, float] = {} if choice is None else {str(k): v for k, v in choice.seconds.items()}
    return seconds(times[method]) if method in times else ""
