"""Prepare the start of a job's ranks: by an engine of this cluster, or as what others have started."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partc.runtime.engines.allotted_nodes import on_allotted_nodes
from partc.runtime.engines.engine import (
    LOCAL_VARIABLES,
    Command,
    find_engine,
    rank_environment,
    start_command,
)
from partc.runtime.engines.external_launch import seen_by_others
from partc.runtime.engines.machines import Machines, write_environments
from partc.runtime.engines.place import Place
from partc.runtime.engines.rank_command import rank_words
from partc.runtime.transports.locked_sockets import LOCAL


@dataclass(frozen=True, slots=True)
class RankStart:
    """What starts ranks.

    `machines`: where the plan's hosts are. `description`: where ranks come from, for the log.
    `is_joined`: somebody else has started the others, and the command is the first rank's alone.
    `is_here`: MPICH starts them, all on this machine.
    """

    command: Command
    machines: Machines
    description: str
    is_joined: bool = False
    is_here: bool = False

    def begin(self) -> "subprocess.Popen[bytes]":
        """Start them."""
        local = LOCAL_VARIABLES if self.is_here else {}
        return subprocess.Popen(
            self.command.words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=local | rank_environment(self.is_joined) | self.command.environment,
            start_new_session=True,  # a terminal's Ctrl-C is for the launcher
            close_fds=not self.is_joined,  # what MPI left open for the rank that this process is
        )


def prepare_ranks(
    hosts: Sequence[str], job_folder: Path, machines: Machines, daemon: str, place: Place | None = None
) -> RankStart:
    """Return what starts the ranks of a job on their hosts. Raises BadUsage.

    `hosts`: each rank's. `daemon`: the module that every rank runs. `place`: of this process among those that
    somebody else has started.
    """
    folder = str(job_folder.absolute())
    distinct = list(dict.fromkeys(hosts))
    if place is not None:
        words = [sys.executable, *rank_words("joined", daemon, folder)]
        description = f"{place.size} ranks, which others have started ({place.source})"
        return RankStart(
            Command(words), seen_by_others(machines, distinct, place), description, is_joined=True
        )
    engine = find_engine()
    machines = on_allotted_nodes(machines, hosts)
    write_environments(job_folder, {f"rank {rank}": host for rank, host in enumerate(hosts)}, machines)
    words = rank_words("started", daemon, folder)
    command = start_command(engine, hosts, machines, words, job_folder)
    line = shlex.join(f"{name}={value}" for name, value in command.environment.items())
    description = (
        f"{len(hosts)} ranks, by {engine.kind} ({engine.source}): {line} {shlex.join(command.words)}"
    )
    here = engine.kind == "mpich" and all(machines.of(host).address == LOCAL for host in distinct)
    return RankStart(command, machines, description, is_here=here)
