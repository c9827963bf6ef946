"""`partc run` as one of several processes that somebody else has started, each of which becomes a rank.

    srun -n 4 partc run out ..          mpiexec -n 4 partc run out ..          Kubernetes' mpi-operator

    process 0      launcher, and its child the keeper of rank 0 ─┐ the job's folder, by MPI
    process 1..3   the keepers of ranks 1..3 <───────────────────┘

Nobody but MPI knows which processes belong together, and so the members of the keepers tell them the folder.
"""

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from partc.runtime.engines.allotted_nodes import allotted_nodes
from partc.runtime.engines.machines import Machines
from partc.runtime.engines.place import Place, own_place
from partc.runtime.engines.rank_command import DAEMON, UNTOLD, rank_words
from partc.runtime.errors import BadUsage
from partc.runtime.transports.locked_sockets import LOCAL, own_address


def seen_by_others(machines: Machines, hosts: Sequence[str], place: Place) -> Machines:
    """Return where hosts are whose ranks somebody else has started.

    What counts is that their keepers find this machine: the placement is done. Raises BadUsage where nothing
    tells how others see it.
    """
    known = machines.addresses
    if place.is_one_machine:
        return Machines()
    if all(known.get(host, LOCAL) != LOCAL for host in hosts):
        return machines
    this = socket.gethostname()
    other = next(
        (node for node in allotted_nodes() if node.partition(".")[0] != this.partition(".")[0]), this
    )
    if (own := own_address(other)).startswith("127."):
        raise BadUsage(
            "nothing tells under which address other machines see this one",
            at=f"{this}, which is {own} to itself",
            fix="write the hosts' addresses in the cluster file, and compile with it",
        )
    return Machines.at(dict.fromkeys(hosts, other))


def take_place() -> Place | None:
    """Return this process's place, the first; None if it was started alone. Any other becomes a rank here.

    If this process ends without a job, so do the others.
    """
    place = own_place()
    if place is None:
        return None
    if place.rank > 0:
        os.execv(sys.executable, [sys.executable, *rank_words("joined", DAEMON, UNTOLD)])
    atexit.register(_dismiss_others, place)
    return place


def _dismiss_others(place: Place) -> None:
    """Let the others end, to whom MPI is to tell of a job: as the first rank, with none."""
    if not place.has_begun:
        words = [sys.executable, *rank_words("joined", DAEMON, UNTOLD)]
        subprocess.run(words, close_fds=False, stdin=subprocess.DEVNULL)


def check_place(place: Place, ranks: int, restarts: int, is_asynchronous: bool) -> None:
    """Raise BadUsage where these processes cannot be the ranks of a plan."""
    at = f"{place.source}: {place.size} processes, started by others"
    if is_asynchronous:
        raise BadUsage(
            "an asynchronous plan's workers and servers are no ranks of one MPI job",
            at=at,
            fix="start one `partc run`: it starts them, here and over ssh",
        )
    if place.size != ranks:
        raise BadUsage(f"the plan has {ranks} ranks", at=at, fix=f"start {ranks}, or one, which starts them")
    if restarts:
        raise BadUsage(
            "ranks that others have started cannot be started again from here",
            at=f"--restarts {restarts}; {at}",
            fix="let the batch system start the job again, with --resume; or start one `partc run`",
        )
