"""The nodes that a batch system, or Kubernetes, has allotted to this job, in their order.

Slurm           SLURM_JOB_NODELIST (node_lists.py)
mpi-operator    a host file: a line for each node, `NAME slots=2` or `NAME:2`; which variable names it depends
                on the MPI that the MPIJob asks for
"""

import os
from collections.abc import Sequence
from pathlib import Path

from partc.runtime.engines.machines import Machines
from partc.runtime.engines.node_lists import spell_out_nodes
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
            given = [count, *(word.removeprefix("slots=") for word in words[1:] if word.startswith("slots="))]
            slots.setdefault(name, max((int(text) for text in given if text.isdigit()), default=1))
    return slots
