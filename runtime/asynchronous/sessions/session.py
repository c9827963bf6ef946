"""Who takes part in a session: one worker's own ranks, and the servers.

An asynchronous plan describes one session. Its ranks on SESSION_HOST are the worker's own (a worker on a
GPU has a CPU rank beside it, which sums for the servers); all others are servers, which all sessions share.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from partc.runtime.asynchronous.sessions.messages import SessionMessage
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan, Rank, place_of

SESSION_HOST = "session"

Array = np.ndarray[Any, np.dtype[Any]]
# Hands a message and its arrays to a peer; returns at once, and the arrays may change afterwards.
Post = Callable[[str, SessionMessage, Sequence[Array]], None]


def server_name(rank: int) -> str:
    """Return what a server is called among peers."""
    return f"server-{rank}"


def worker_name(worker: int) -> str:
    """Return what a worker is called among peers."""
    return f"worker-{worker}"


def worker_of(session: int, workers: int) -> int:
    """Return whose a session is: worker w has session w, and after each death one `workers` further."""
    return session % workers


def session_name(session: int, workers: int) -> str:
    """Return what the worker of a session is called among peers: in each of its lives otherwise."""
    life, worker = divmod(session, workers)
    return f"{worker_name(worker)}.{life + 1}" if life else worker_name(worker)


def servers_of(plan: Plan) -> tuple[Rank, ...]:
    """Return the ranks that all sessions share; the first of them, the chief, keeps the clock."""
    return tuple(rank for rank in plan.ranks if rank.host != SESSION_HOST)


def own_ranks(plan: Plan) -> tuple[Rank, ...]:
    """Return the ranks that every worker plays itself."""
    return tuple(rank for rank in plan.ranks if rank.host == SESSION_HOST)


def peer_of(plan: Plan, session: int, rank: int) -> str:
    """Return who plays a rank of a session."""
    is_own = any(own.rank == rank for own in own_ranks(plan))
    return session_name(session, len(plan.asynchronous)) if is_own else server_name(rank)


def plan_of_data(plan: Plan, sizes: Mapping[str, int] | None = None) -> Plan:
    """Return the plan as data sources see it: a total batch holds a batch for every worker."""
    return msgspec.structs.replace(
        plan, replicas=len(plan.asynchronous), sizes=plan.sizes | dict(sizes or {})
    )


def rank_of_data(rank: Rank, worker: int) -> Rank:
    """Return a session's rank as data sources see it: the worker takes its own share."""
    return rank if rank.replica is None else msgspec.structs.replace(rank, replica=worker)


def with_one_worker(folder: PlanFolder) -> PlanFolder:
    """Return an asynchronous plan with its first worker alone; any other plan as it is."""
    return PlanFolder(with_workers(folder.plan, 1), folder.path)


def with_workers(plan: Plan, workers: int) -> Plan:
    """Return an asynchronous plan with its first workers alone."""
    return msgspec.structs.replace(plan, asynchronous=plan.asynchronous[:workers])


def describe_worker(plan: Plan, worker: int) -> str:
    """Say which worker this is, for messages."""
    place = plan.asynchronous[worker]
    return f"worker {worker} ({place_of(place.host, place.device)})"
