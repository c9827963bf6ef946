"""The nodes that a batch system, or Kubernetes, has allotted to this job, in their order.

Slurm           SLURM_JOB_NODELIST, spelled out by `scontrol show hostnames`
mpi-operator    a host file: a line for each node, `NAME slots=2` or `NAME:2`; which variable names it depends
                on the MPI that the MPIJob asks for
"""

import os
import shutil
import subprocess
from pathlib import Path

from partc.runtime.errors import BadUsage

HOST_FILES = (
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
)
_ANSWER_S = 20.0


def allotted_nodes() -> tuple[str, ...]:
    """Return the nodes' names, none where nobody has allotted any. Raises BadUsage."""
    if (written := os.environ.get("SLURM_JOB_NODELIST")) and "SLURM_JOB_ID" in os.environ:
        return _spelled_out(written)
    for variable in HOST_FILES:
        if path := os.environ.get(variable):
            return _read(variable, Path(path))
    return ()


def _spelled_out(written: str) -> tuple[str, ...]:
    if "[" not in written:
        return tuple(written.split(","))
    scontrol = shutil.which("scontrol")
    done = scontrol and subprocess.run(
        [scontrol, "show", "hostnames", written], capture_output=True, text=True, timeout=_ANSWER_S
    )
    if not done or done.returncode:
        raise BadUsage(
            "Slurm's list of nodes cannot be spelled out: scontrol "
            + (f"fails: {done.stderr.strip()}" if done else "is not installed"),
            at=f"SLURM_JOB_NODELIST={written}",
            fix="install Slurm's commands there, or write the hosts' addresses in the cluster file",
        )
    return tuple(done.stdout.split())


def _read(variable: str, path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise BadUsage(
            f"the file of hosts cannot be read: {error.strerror}",
            at=f"{variable}={path}",
            fix="let the variable name it, or write the hosts' addresses in the cluster file",
        ) from error
    names = (line.split("#")[0].split() for line in lines)
    return tuple(dict.fromkeys(words[0].partition(":")[0] for words in names if words))
