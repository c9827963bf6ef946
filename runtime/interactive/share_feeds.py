"""What each rank is fed of a feed: a list of arrays per data input, one for every replica."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from partc.runtime.data.batches import check_share, inputs_of, unmasked
from partc.runtime.errors import BadData, some_of
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]
# data input -> a list or tuple of what numpy.asarray takes, one for each replica
ReplicaFeeds = Mapping[str, object]

AT = "feeds"


def share_feeds(plan: Plan, feeds: ReplicaFeeds) -> dict[int, dict[str, Array]]:
    """Return what every rank is fed: rank -> data input -> array. Raises BadData."""
    known = {entry.name: entry for entry in plan.data_inputs}
    if not isinstance(feeds, Mapping):
        what = f"{type(feeds).__name__}, where names of data inputs are to be given arrays"
        raise BadData(what, at=AT, fix=f"give a dictionary of {some_of(sorted(known))}")
    if stray := sorted(map(str, feeds.keys() - known.keys())):
        raise BadData(
            f"data for {stray[0]!r}, which is no input",
            at=AT,
            fix=f"supply {some_of(sorted(known))} and nothing else",
        )
    lists = {name: _list_of(plan, known[name], values) for name, values in feeds.items()}
    replicas = [{name: arrays[r] for name, arrays in lists.items()} for r in range(plan.replicas)]
    for replica, share in enumerate(replicas):
        check_share(plan, share, replica, at=f"{AT}, replica {replica}")
    return {
        rank.rank: {entry.name: replicas[rank.replica or 0][entry.name] for entry in inputs_of(plan, rank)}
        for rank in plan.ranks
    }


def _list_of(plan: Plan, entry: DataInput, values: object) -> list[Array]:
    at = f"{AT}, data input {entry.name!r}"
    if not isinstance(values, list | tuple) or len(values) != plan.replicas:
        description = (
            f"a list of {len(values)}" if isinstance(values, list | tuple) else type(values).__name__
        )
        raise BadData(
            f"{description} for {plan.replicas} replicas",
            at=at,
            fix=f"give a list of {plan.replicas} arrays, one for each replica: numpy.split makes one",
        )
    try:
        arrays = [np.asarray(unmasked(value, at), order="C") for value in values]
    except ValueError as error:
        fix = f"give arrays, which numpy.asarray(data, '{entry.dtype}') makes"
        raise BadData(f"no array can be made of what is given: {error}", at=at, fix=fix) from error
    if entry.sample_axis is None and any(not np.array_equal(array, arrays[0]) for array in arrays):
        raise BadData(
            "arrays that differ, for an input that all replicas share",
            at=at,
            fix="give every replica the same array, or compile with a sample axis for this input",
        )
    return arrays
