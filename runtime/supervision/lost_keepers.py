"""Whose keepers died without a word, and whose did so first: MPI ends all others for that one.

    on this machine    their processes tell (started_keepers.py)
    on others          their janitors note it in the job's folder (janitor.py), and the mpiexec speaks

Hydra says on which host processes ended first, and has the other hosts end theirs after that: the host is
right. The process that it names is the first by its number, of those that have ended there by then.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from partc.runtime.supervision.janitor import lost_keepers
from partc.runtime.supervision.messages import STARTER_GONE
from partc.runtime.supervision.roster import Roster, Trouble
from partc.runtime.supervision.started_keepers import StartedKeepers

_HYDRA_SAYS = re.compile(r"PID \d+ RUNNING AT (\S+)")


class LostKeepers:
    """Those of one job. `hosts`: member -> host; `addresses`: host -> network name; `folder`: the job's.

    `started`: the keepers' processes, if all are of this machine.
    """

    def __init__(
        self,
        hosts: Mapping[str, str],
        addresses: Mapping[str, str],
        folder: Path,
        started: StartedKeepers | None,
    ) -> None:
        self._hosts = hosts
        self._addresses = addresses
        self._folder = folder
        self._started = started
        self._said = ""  # the network name on which, as MPI says, processes ended first

    def hear(self, line: str) -> None:
        """Take in what the mpiexec prints."""
        if not self._said and (match := _HYDRA_SAYS.search(line)):
            self._said = match[1]

    def look(self, roster: Roster) -> None:
        """See whose keepers have died, or were stopped before they could be heard."""
        unheard = roster.unheard()
        if self._started is None:
            roster.lose(self._noted(roster))
        elif unheard:
            roster.lose(self._started.ended(unheard))
            roster.stop_unheard(self._started.stopped(unheard))

    @property
    def hosts_said(self) -> list[str]:
        """The hosts, one if each has a network name of its own, that MPI says was the first."""
        hosts = dict.fromkeys(self._hosts.values())
        return [host for host in hosts if self._said and self._addresses.get(host) == self._said]

    def has_more_to_say(self, roster: Roster, is_mpi_over: bool) -> bool:
        """Tell whether notes are still to come, of keepers that MPI has ended."""
        noted = self._noted(roster)
        return is_mpi_over and bool(noted) and bool(set(self._candidates()) - {*noted, *roster.ended()})

    def name_first(self, roster: Roster, is_mpi_over: bool) -> bool:
        """Let the roster know who died first, where all troubles follow from that; tell if it is, or may be.

        What started the ranks of a host is the first where it has ended: keepers that MPI ends say nothing.
        """
        troubles = roster.troubles()
        if self._started is not None or not all(map(follows_from_mpi, troubles)):
            return True
        starterless = [
            t.cause.member for t in troubles if t.ended is not None and t.ended.by_keeper == STARTER_GONE
        ]
        noted = self._noted(roster)
        if not starterless and not noted and not self._said:
            return True
        silent = [] if not is_mpi_over else [n for n in self._candidates() if n not in roster.ended()]
        heard = set(self._hosts) - set(roster.unheard())
        first = starterless[0] if starterless else first_lost(self._candidates(), noted, silent, heard)
        if first:
            roster.lose_first(first)
            roster.lose(name for name in silent if self._hosts[name] == self._hosts[first])
        return bool(first) or not is_mpi_over

    def _candidates(self) -> list[str]:
        hosts = self.hosts_said
        return [name for name, host in self._hosts.items() if not hosts or host in hosts]

    def _noted(self, roster: Roster) -> list[str]:
        return [name for name in lost_keepers(self._folder) if roster.knows(name)]


def first_lost(
    candidates: Sequence[str], noted: Sequence[str], over: Collection[str], heard: Collection[str]
) -> str:
    """Return whose keeper died first, of those that come into question; "" where nothing tells.

    `noted`: by janitors, in the order of their notes; `over`: whose keepers are no more, noted or not. A
    keeper that was `heard` has a janitor, which outlives what MPI ends: if it noted nothing, its host went.
    """
    here = [name for name in noted if name in candidates]
    missed = [name for name in over if name not in noted]
    if noted and (with_host := [name for name in missed if name in heard]):
        return with_host[0]
    if here and not missed:
        return here[0]
    return missed[0] if len(missed) == 1 and not here else ""


def follows_from_mpi(trouble: Trouble) -> bool:
    """Tell whether the end of mpiexec explains a trouble: it takes keepers with it."""
    return trouble.is_echo or trouble.cause.kind == "lost"
