"""Who takes part: a communication's members that supply and receive, replicas, and the shards of the data.

Shards tell replicas apart: how many the data has, and which of them is a replica's own.

They are inputs of a rank and not constants of its graph, so that all replicas share their segments.
"""

from collections.abc import Hashable, Iterable
from typing import Any, Literal

import numpy as np

from partc.runtime.plan.program import Plan, Rank, Start, members_of

_ROOTED_RESULTS = frozenset({"reduce", "gather_rows"})
_ROOTED_SOURCES = frozenset({"broadcast", "scatter_rows"})


def sends_at(start: Start, rank: Rank, root: int) -> bool:
    """Tell whether a member supplies the reads: from some kinds' roots alone anything goes out."""
    is_root = root == rank.rank
    return start.senders in rank.sites and (is_root or start.kind not in _ROOTED_SOURCES)


def lands_at(start: Start, rank: Rank, root: int) -> bool:
    """Tell whether a member ends with the writes: at some kinds' roots alone anything arrives."""
    is_root = root == rank.rank
    return start.receivers in rank.sites and (is_root or start.kind not in _ROOTED_RESULTS)


def roots_of(plan: Plan, rank: Rank) -> dict[str, int]:
    """Return the root of every group that a rank is in."""
    return {group: members_of(plan, group, rank)[0] for group in rank.groups}


def are_spread_alike(groups: Iterable[Iterable[Hashable]]) -> bool:
    """Tell whether all groups, each given by its members' hosts, have the same places together on hosts.

    Sums that begin on each host are then of the same terms first in all groups: copies of what is summed in
    several of them are equal bit for bit.
    """
    patterns = set()
    for hosts in groups:
        numbers: dict[Hashable, int] = {}
        patterns.add(tuple(numbers.setdefault(host, len(numbers)) for host in hosts))
    return len(patterns) == 1


def leaders_of(plan: Plan) -> tuple[Rank, ...]:
    """Return the first rank of every replica, by replica: it tells the replica's outputs.

    The other ranks of a replica have the same outputs, but for rounding: what each computes for itself may be
    summed by other kernels, on other devices and numbers of threads. Nobody reads theirs. What goes on from
    step to step are variables, and copies of those must be equal bit for bit.
    """
    leaders: dict[int, Rank] = {}
    for rank in plan.ranks:
        if rank.replica is not None and has_outputs(plan, rank):
            leaders.setdefault(rank.replica, rank)
    return tuple(leaders[replica] for replica in sorted(leaders))


def has_outputs(plan: Plan, rank: Rank) -> bool:
    """Tell whether a rank has the step's outputs at its end: one mesh of workers has all of them."""
    if not plan.outputs:
        return rank.replica is not None
    return plan.outputs[0].site in rank.sites


Array = np.ndarray[Any, np.dtype[Any]]
Holds = Literal["num_shards", "shard_id"]

# Graph inputs of these names hold what their key says, without a word in the graph's metadata.
SHARD_INPUTS: dict[Holds, str] = {"num_shards": "partc.num_shards", "shard_id": "partc.shard_id"}


def shard_values(plan: Plan, rank: Rank) -> dict[str, Array]:
    """Return the shard inputs of one rank; a server without a worker has no shard of its own."""
    values = shards_of_replica(plan, rank.replica or 0)
    own = {shard_input.name for shard_input in plan.shard_inputs if shard_input.holds == "shard_id"}
    return values if rank.replica is not None else {n: v for n, v in values.items() if n not in own}


def shards_of_replica(plan: Plan, replica: int) -> dict[str, Array]:
    """Return the shard inputs of one replica: input name -> scalar."""
    values = {"num_shards": plan.replicas, "shard_id": replica}
    return {
        shard_input.name: np.array(values[shard_input.holds], shard_input.dtype)
        for shard_input in plan.shard_inputs
    }
