"""What starts ranks on hosts: the mpiexec of some MPI, or Slurm's srun.

    PARTC_MPIEXEC                       the program that it names, whatever its kind
    within an allocation of Slurm's     srun
    else                                the mpiexec installed with this Python, or else the system's

The kind is what the program says of itself. All start ranks in the plan's order, host by host, and bind them
to no cores: a rank has threads.

    mpich      mpiexec -host A:2,B:2 -n 4 ..                        Hydra, of MPICH and MVAPICH
    intel      mpiexec -n 2 -host A .. : -n 2 -host B ..            I_MPI_PIN=0
    openmpi    mpirun --host A:2,B:2 --map-by slot --bind-to none --np 4 ..
    srun       srun --distribution arbitrary --ntasks 4 ..          SLURM_HOSTFILE: a line per rank
               srun --nodelist A --nodes 1 --ntasks 2 ..            on one host
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Literal

from partc.runtime.engines.machines import Machines
from partc.runtime.errors import BadUsage
from partc.runtime.transports.locked_sockets import LOCAL

MPIEXEC = "PARTC_MPIEXEC"
RANK_VARIABLES = {
    # Threads of other libraries in the ranks would fight ONNX Runtime's for the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # MPICH gathers unequal parts in pieces of 32 KB, a poll each: 50 MB took 1.8 s, whole 20 ms.
    "MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE": str(1 << 30),
}
# MPICH's ranks of one machine speak by shared memory alone, and open no ports.
LOCAL_VARIABLES = {"UCX_TLS": "self,sm"}
BESIDE = "installed with this Python"
PASSED_ON = ("PYTHONPATH", "PATH")  # to processes on other machines
_OF_THIS_PROCESS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
_ANSWER_S = 20.0

Kind = Literal["mpich", "intel", "openmpi", "srun"]
# What a program says of itself; who says none of it takes what MPICH's takes.
_SIGNS: tuple[tuple[str, Kind], ...] = (
    ("hydra build details", "mpich"),  # which tell of Slurm, too
    ("intel(r) mpi", "intel"),
    ("open mpi", "openmpi"),
    ("open-mpi", "openmpi"),
    ("prrte", "openmpi"),
    ("slurm", "srun"),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """What starts ranks. `source`: why this one."""

    kind: Kind
    program: str
    source: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command and what its environment has besides this process's."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that follow each other, on one host, with one Python."""

    address: str
    python: str
    count: int


def find_engine() -> Engine:
    """Return what starts ranks here. Raises BadUsage where there is nothing."""
    if chosen := os.environ.get(MPIEXEC):
        return _engine(shutil.which(chosen), f"{MPIEXEC}={chosen}")
    if is_allocation() and (srun := shutil.which("srun")):
        return Engine("srun", srun, f"allocation {os.environ['SLURM_JOB_ID']} of Slurm's")
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists():
        return _engine(str(beside), BESIDE)
    return _engine(shutil.which("mpiexec"), f"{beside.parent}, then PATH")


def is_allocation() -> bool:
    """Tell whether this is within an allocation of Slurm's."""
    return "SLURM_JOB_ID" in os.environ


def find_mpiexec() -> str:
    """Return the program that starts ranks here. Raises BadUsage."""
    return find_engine().program


def start_command(
    engine: Engine, hosts: Sequence[str], machines: Machines, words: Sequence[str], folder: Path
) -> Command:
    """Return what starts a process per rank: its host's Python with `words`.

    `hosts`: each rank's. `folder`: takes files that the engine reads.
    """
    places = [machines.of(host) for host in hosts]
    starts = [(place.address, place.python or sys.executable) for place in places]
    groups = [_Group(*start, len(list(ranks))) for start, ranks in groupby(starts)]
    return _COMMANDS[engine.kind](engine, groups, machines.mpiexec, words, folder)


def rank_environment(is_joined: bool = False) -> dict[str, str]:
    """Return the environment that ranks run in.

    Of what starts this process itself, as `srun -n 1` does, its ranks know nothing, unless they join that.
    """
    of_this = {name for name in os.environ if name.startswith(_OF_THIS_PROCESS) and "_MCA_" not in name}
    inherited = {name: value for name, value in os.environ.items() if is_joined or name not in of_this}
    return RANK_VARIABLES | inherited


def passed_on() -> dict[str, str]:
    """Return of that environment what processes on other machines need, where nobody hands all on."""
    own = {name: value for name, value in os.environ.items() if name.startswith(("PARTC_", "MPI4PY_"))}
    return RANK_VARIABLES | {name: os.environ[name] for name in PASSED_ON if name in os.environ} | own


def kind_of(program: str) -> Kind:
    """Return what kind of program this is, as it says itself."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "mpich"
    output = (done.stdout + done.stderr).lower()
    return next((kind for sign, kind in _SIGNS if sign in output), "mpich")


def _engine(program: str | None, source: str) -> Engine:
    if program is None:
        raise BadUsage(
            "no mpiexec was found",
            at=source,
            fix=f"`pip install mpich`, or set {MPIEXEC} to your MPI's mpiexec, or to srun",
        )
    return Engine(kind_of(program), program, source)


def _mpich(
    engine: Engine, groups: Sequence[_Group], options: Sequence[str], words: Sequence[str], folder: Path
) -> Command:
    at = [] if _is_local(groups) else ["-host", _counted(groups)]
    segments = (["-n", str(count), python, *words] for python, count in _pythons(groups))
    program = _without_ports(engine) if _is_local(groups) and not options else engine.program
    return Command([program, *options, *at, *_joined(segments)], _own_library(engine))


def _without_ports(engine: Engine) -> str:
    """Return MPICH's mpiexec for one machine, if it lies beside: the other listens on all interfaces."""
    forker = Path(f"{engine.program}.gforker")
    return str(forker) if engine.source == BESIDE and forker.exists() else engine.program


def _intel(
    engine: Engine, groups: Sequence[_Group], options: Sequence[str], words: Sequence[str], folder: Path
) -> Command:
    if _is_local(groups):
        segments = (["-n", str(count), python, *words] for python, count in _pythons(groups))
    else:
        segments = (["-n", str(g.count), "-host", g.address, g.python, *words] for g in groups)
    environment = _own_library(engine) | {"I_MPI_PIN": "0"}
    return Command([engine.program, *options, *_joined(segments)], environment)


def _open_mpi(
    engine: Engine, groups: Sequence[_Group], options: Sequence[str], words: Sequence[str], folder: Path
) -> Command:
    environment = _own_library(engine)
    # It hands its environment on within this machine alone.
    exported = [] if _is_local(groups) else [*passed_on(), *environment]
    common = [
        "--host",
        _counted(groups),
        *(word for name in dict.fromkeys(exported) for word in ("-x", name)),
    ]
    segments = ([*common, "--np", str(count), python, *words] for python, count in _pythons(groups))
    every = [engine.program, "--map-by", "slot", "--bind-to", "none", *options]
    return Command([*every, *_joined(segments)], environment)


def _srun(
    engine: Engine, groups: Sequence[_Group], options: Sequence[str], words: Sequence[str], folder: Path
) -> Command:
    tasks = sum(group.count for group in groups)
    command = [engine.program, f"--ntasks={tasks}", "--overcommit", "--cpu-bind=none", "--kill-on-bad-exit=1"]
    environment = {"SLURM_OVERLAP": "1"}  # other steps of this allocation may still end, or run beside
    if "SLURM_MPI_TYPE" not in os.environ:
        command.append(f"--mpi={_slurm_plugin()}")
    addresses = {group.address for group in groups}
    if len(addresses) == 1 and not _is_local(groups):
        command += ["--nodes=1", f"--nodelist={groups[0].address}"]
    elif not _is_local(groups):
        nodes = folder / "nodes"
        nodes.write_text("".join(f"{group.address}\n" * group.count for group in groups))
        environment["SLURM_HOSTFILE"] = str(nodes.absolute())
        command.append("--distribution=arbitrary")
    pythons = list(_pythons(groups))
    if len(pythons) == 1:
        return Command([*command, *options, pythons[0][0], *words], environment)
    programs, first = folder / "programs", 0
    lines = []
    for python, count in pythons:
        lines.append(f"{first}-{first + count - 1} {shlex.join([python, *words])}\n")
        first += count
    programs.write_text("".join(lines))
    return Command([*command, *options, "--multi-prog", str(programs.absolute())], environment)


_Make = Callable[[Engine, Sequence[_Group], Sequence[str], Sequence[str], Path], Command]
_COMMANDS: dict[Kind, _Make] = {"mpich": _mpich, "intel": _intel, "openmpi": _open_mpi, "srun": _srun}


def _is_local(groups: Sequence[_Group]) -> bool:
    return all(group.address == LOCAL for group in groups)


def _counted(groups: Sequence[_Group]) -> str:
    """Return the hosts in order, one entry for each run of neighbours."""
    runs = ((address, sum(g.count for g in run)) for address, run in groupby(groups, lambda g: g.address))
    return ",".join(f"{address}:{count}" for address, count in runs)


def _pythons(groups: Sequence[_Group]) -> Iterator[tuple[str, int]]:
    """Yield the Pythons of neighbours, and how many ranks they run."""
    for python, run in groupby(groups, lambda group: group.python):
        yield python, sum(group.count for group in run)


def _joined(segments: Iterator[list[str]]) -> list[str]:
    """Return segments of a command line as MPI wants them: a colon between."""
    first, *rest = segments
    return [*first, *(word for segment in rest for word in (":", *segment))]


def _own_library(engine: Engine) -> dict[str, str]:
    """Let mpi4py load the library of the MPI whose mpiexec starts it, where it lies beside that."""
    prefix = Path(engine.program).resolve().parents[1]
    if "MPI4PY_LIBMPI" in os.environ or prefix == Path(sys.prefix).resolve():
        return {}
    names = ("libmpi.so.40", "libmpi.so.12", "libmpi.so")
    places = [prefix / folder / name for folder in ("lib", "lib64") for name in names]
    library = next((place for place in places if place.exists()), None)
    return {} if library is None else {"MPI4PY_LIBMPI": str(library)}


_PROBE = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)


@cache
def _slurm_plugin() -> str:
    """Return through what Slurm speaks with the MPI that mpi4py loads."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_ANSWER_S
        )
    except subprocess.TimeoutExpired:
        return "pmi2"
    return "pmix" if "Open MPI" in done.stdout else "pmi2"
