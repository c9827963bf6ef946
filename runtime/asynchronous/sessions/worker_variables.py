"""Variables that workers keep for themselves: a moving average of data, a state that is carried on.

The chief has each worker's as they were after its last step that was committed. Of all together they are
the mean, as under synchronous training, where each step ends with that mean. Of whole numbers, which have
no mean, the first worker's are taken.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partc.runtime.asynchronous.sessions.messages import refused
from partc.runtime.asynchronous.sessions.session import servers_of
from partc.runtime.jobs.results import owners_of
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import PlanVariable

Array = np.ndarray[Any, np.dtype[Any]]


def worker_variables(plan: Plan) -> tuple[PlanVariable, ...]:
    """Return the variables that no server has a part of."""
    servers = {rank.rank for rank in servers_of(plan)}
    owners = owners_of(plan)
    return tuple(
        variable
        for variable in plan.variables
        if not any(owner.rank in servers for owner in owners.get(variable.name, ()))
    )


def worker_arrays(
    variables: Sequence[PlanVariable], frames: Sequence[memoryview], sender: str
) -> dict[str, Array]:
    """Return what a worker sent of each variable that it keeps. Raises RankFailed."""
    planned_sizes = [int(np.prod(v.shape, dtype=np.int64)) * np.dtype(v.dtype).itemsize for v in variables]
    sizes = [len(frame) for frame in frames]
    if sizes != planned_sizes:
        raise refused(f"variables of {sizes} bytes where {planned_sizes} were planned", sender)
    return {
        variable.name: np.frombuffer(frame, variable.dtype).reshape(variable.shape)
        for variable, frame in zip(variables, frames, strict=True)
    }


def mean_over_workers(of_workers: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return what workers keep, put together."""
    return {name: _mean([values[name] for values in of_workers]) for name in (of_workers or [{}])[0]}


def _mean(values: Sequence[Array]) -> Array:
    first = values[0]
    if first.dtype.kind != "f" or len(values) == 1:
        return first.copy()
    mean = np.mean(values, axis=0, dtype=np.float64)
    return np.asarray(mean, dtype=first.dtype)
