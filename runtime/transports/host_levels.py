"""The two levels of a group of ranks: those on a host, and those at one place on every host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from partc.runtime.transports.sum_levels import by_host

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class HostLevels:
    """Communicators of a member's host, and across hosts.

    place   of the member on its host
    order   int64[places, hosts], each member's position in the group
    """

    here: MPI.Intracomm
    across: MPI.Intracomm
    place: int
    order: Numbers


def levels_among(comm: MPI.Intracomm, hosts: Sequence[str]) -> HostLevels | None:
    """Return the levels of a group, None if not all hosts have equally many members, and several.

    `hosts`: each member's. All members of the group must call this, in one order with other groups.
    """
    on_host = by_host(range(len(hosts)), dict(enumerate(hosts)))
    counts = {len(positions) for positions in on_host}
    if len(on_host) == 1 or len(counts) > 1 or counts == {1}:
        return None
    order = np.array(on_host, np.int64).T
    ((place, number),) = np.argwhere(order == comm.rank).tolist()
    here, across = (
        comm.Create_group(comm.group.Incl(positions.tolist()))
        for positions in (order[:, number], order[place])
    )
    return HostLevels(here, across, place, order)
