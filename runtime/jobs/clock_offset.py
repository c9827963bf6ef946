"""How far a rank's clock is from the first rank's: processes of one machine share a clock, hosts do not."""

import time
from collections.abc import Callable, Collection

import numpy as np
from mpi4py import MPI

_ROUND_TRIPS = 20


def offset_to_first(
    world: MPI.Intracomm, neighbours: Collection[int], barrier: Callable[[], None]
) -> tuple[float, float]:
    """Return (seconds to add to this rank's clock to read the first rank's, its uncertainty).

    `neighbours`: the ranks of this rank's machine, itself among them. A rank of the first
    one's machine has its clock, and is not asked.

        offset = (sent + received) / 2 - answered          +- (received - sent) / 2

    sent, received on the first rank's clock, answered on the other's, of the quickest round trip.
    Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989) 146-158.
    All ranks must call it; those whose turn has not come sleep in `barrier`.
    """
    own = (0.0, 0.0)
    for rank in range(1, world.size):
        barrier()
        if world.rank == 0 and rank not in neighbours:
            _ask(world, rank)
        elif world.rank == rank and 0 not in neighbours:
            own = _answer(world)
    return own


def _ask(world: MPI.Intracomm, rank: int) -> None:
    answered = np.empty(1)
    trips: list[tuple[float, float]] = []
    for _ in range(_ROUND_TRIPS):
        sent_s = time.perf_counter()
        world.Send(answered, rank)
        world.Recv(answered, rank)
        received_s = time.perf_counter()
        trips.append(((received_s - sent_s) / 2, (sent_s + received_s) / 2 - float(answered[0])))
    uncertainty_s, offset_s = min(trips)
    world.Send(np.array([offset_s, uncertainty_s]), rank)


def _answer(world: MPI.Intracomm) -> tuple[float, float]:
    message = np.empty(1)
    for _ in range(_ROUND_TRIPS):
        world.Recv(message, 0)
        message[0] = time.perf_counter()
        world.Send(message, 0)
    result = np.empty(2)
    world.Recv(result, 0)
    return float(result[0]), float(result[1])
