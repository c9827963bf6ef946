"""The processes of a running job, as the system tells of them (Linux)."""

import os
from dataclasses import dataclass
from pathlib import Path

from partc.runtime.engines.rank_command import KEEPER
from partc.runtime.supervision.janitor import JANITOR

STARTERS = ("mpiexec", "mpiexec.gforker", "mpirun", "prterun", "srun")


@dataclass(frozen=True)
class JobProcess:
    """`role`: member, keeper, mpiexec, or proxy, which starts MPI's ranks on a host. `name`: rank 1, say."""

    process: int
    role: str
    name: str = ""


def job_processes(folder: Path) -> list[JobProcess]:
    """Return the processes of a job in that folder, or a plan's, without launcher and janitors."""
    inside = str(folder.resolve())
    found: list[JobProcess] = []
    words = {process: _words(process) for process in _processes()}
    kept = {process: line for process, line in words.items() if KEEPER in line}
    ours = {p: line for p, line in kept.items() if any(word.startswith(inside) for word in line)}
    for process, line in ours.items():
        if _called(process) == JANITOR:
            continue
        if line[0].endswith(STARTERS):
            found.append(JobProcess(process, "mpiexec"))
            continue
        parent = _parent(process)
        is_member = parent in ours and not ours[parent][0].endswith(STARTERS)
        found.append(JobProcess(process, "member" if is_member else "keeper", _name(process, line)))
        if not is_member and "hydra_pmi_proxy" in words.get(parent, [""])[0]:
            found.append(JobProcess(parent, "proxy"))
    return list(dict.fromkeys(found))


def process_of(folder: Path, role: str, name: str = "") -> int:
    """Return a job's one process of that role and name."""
    (found,) = [p.process for p in job_processes(folder) if (p.role, p.name) == (role, name)]
    return found


def is_alive(process: int) -> bool:
    """Tell whether a process is there, zombies left out."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _words(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]


def _called(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _name(process: int, line: list[str]) -> str:
    name = line[line.index(KEEPER) + 2]
    if name != "rank":
        return name
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    ranks = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")
    return next((f"rank {e.partition(b'=')[2].decode()}" for e in environment if e.startswith(ranks)), "")
