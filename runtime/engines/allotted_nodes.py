"""The nodes that a batch system, or Kubernetes, has allotted to this job, in their order.

Slurm           SLURM_JOB_NODELIST (below)
mpi-operator    a host file: a line for each node, `NAME slots=2` or `NAME:2`; which variable names it depends
                on the MPI that the MPIJob asks for

Slurm's short way to write many names or numbers is spelled out (`spell_out_nodes`, `spell_out_counts`):

node[1-3,07-08],login     node1 node2 node3 node07 node08 login
rack[1-2]node[1-2]        rack1node1 rack1node2 rack2node1 rack2node2
16(x2),8                  16 16 8
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from partc.runtime.engines.machines import Machines
from partc.runtime.errors import BadUsage

HOST_FILES = (
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
)


def allotted_nodes() -> tuple[str, ...]:
    """Return the nodes' names, none where nobody has allotted any. Raises BadUsage."""
    if (written := os.environ.get("SLURM_JOB_NODELIST")) and "SLURM_JOB_ID" in os.environ:
        return spell_out_nodes(written, f"SLURM_JOB_NODELIST={written}")
    return tuple(allotted_slots())


def on_allotted_nodes(machines: Machines, hosts: Sequence[str]) -> Machines:
    """Return where a plan's hosts are within this allocation: those without addresses on its nodes, in order.

    Raises BadUsage where there are fewer nodes than hosts, more than one.
    """
    return machines.on(allotted_nodes(), list(dict.fromkeys(hosts)))


def allotted_slots() -> dict[str, int]:
    """Return node -> slots of the file of hosts, none where nobody has allotted any. Raises BadUsage."""
    for variable in HOST_FILES:
        if path := os.environ.get(variable):
            return _read(Path(path), f"{variable}={path}")
    return {}


def _read(path: Path, at: str) -> dict[str, int]:
    """Return node -> slots: how many ranks the file gives it, 1 where it does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise BadUsage(
            f"the file of hosts cannot be read: {error.strerror}",
            at=at,
            fix="let the variable name it, or write the hosts' addresses in the cluster file",
        ) from error
    slots: dict[str, int] = {}
    for words in (line.split("#")[0].split() for line in lines):
        if words:
            name, _, count = words[0].partition(":")
            counts = [
                count,
                *(word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")),
            ]
            slots.setdefault(name, max((int(text) for text in counts if text.isdigit()), default=1))
    return slots


MOST_NODES = 1 << 16
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def spell_out_nodes(text: str, at: str) -> tuple[str, ...]:
    """Return the names that a list of nodes stands for. Raises BadUsage."""
    names: list[str] = []
    for entry in re.split(r",(?![^\[]*\])", text):
        pieces = list(_PIECE.finditer(entry))
        if not entry or "".join(piece[0] for piece in pieces) != entry:
            raise _not_understood(entry or text, at)
        ways = [[piece[2]] if piece[2] else list(_numbers(piece[1], at)) for piece in pieces]
        names += map("".join, product(*ways))
        if len(names) > MOST_NODES:
            raise _not_understood(text, at)
    return tuple(names)


def spell_out_counts(text: str, at: str) -> tuple[int, ...]:
    """Return the numbers that a list with repetitions stands for. Raises BadUsage."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d{1,5})\))?", entry)
        if match is None:
            raise _not_understood(entry, at)
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _numbers(text: str, at: str) -> Iterator[str]:
    """Yield the numbers of `1-3,07`, as wide as the first of each range is written."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _not_understood(part, at)
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + MOST_NODES:
            raise _not_understood(part, at)
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _not_understood(part: str, at: str) -> BadUsage:
    fix = "write it as Slurm does, such as node[1-4,7], or name the hosts' addresses in the cluster file"
    return BadUsage(f"{part!r} is no list of nodes", at=at, fix=fix)
