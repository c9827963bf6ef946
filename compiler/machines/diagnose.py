"""What is installed here, what works, and how to get what is missing: `partc doctor`.

Each check is a function that tries the thing itself: it imports, starts, opens, writes.
"""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from partc.compiler.commands.results.machines import Check
from partc.compiler.kernel_times.measure_segments import cache_file
from partc.compiler.machines.this_machine import look_at_this_machine
from partc.cost.cluster.detect_gpus import detect_gpus
from partc.runtime.engines.engine import find_engine, rank_environment, start_command
from partc.runtime.engines.host_check import gpu_lacks
from partc.runtime.engines.machines import Machines
from partc.runtime.errors import PartcError
from partc.runtime.execution.gpus import has_nccl
from partc.runtime.jobs.job_folder import held_folder

SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 64 * 2**20  # what a container has by itself: two ranks start, eight may not
_START_S = 60.0
_TWO_RANKS = (
    "import os; from mpi4py import MPI; w = MPI.COMM_WORLD; "
    "os.write(1, f'ranks {w.Get_size()} sum {w.allreduce(w.Get_rank() + 1)};'.encode())"
)
_EXTRAS = {"parquet": "training data in Parquet files", "metrics": "`partc run --metrics-port`"}


def diagnose() -> Iterator[Check]:
    """Yield the checks one by one, as they are made."""
    yield Check("system", "ok", f"{platform.system()} {platform.machine()}, {_hardware()}")
    yield Check("python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield from _packages()
    for name, check in _CHECKS.items():
        try:
            yield check(name)
        except PartcError as error:
            yield Check(name, "failed", error.what, error.fix)
        except Exception as error:  # whatever a broken installation raises is what there is to tell
            yield Check(name, "failed", f"{type(error).__name__}: {error}", _REINSTALL)


_REINSTALL = "install partc anew into an empty environment: python -m venv .venv; .venv/bin/pip install partc"


def _hardware() -> str:
    here = look_at_this_machine()
    return f"{here.cores} cores, {here.memory_bytes / 1e9:.1f} GB of memory"


# ---------------------------------------------------------------- what is installed


def _packages() -> Iterator[Check]:
    """Yield partc, what it needs, and what its extras need."""
    yield Check("partc", "ok", metadata.version("partc"))
    for requirement in metadata.requires("partc") or ():
        name = re.split(r"[<>=;\[ ~!]", requirement)[0]
        marker = requirement.partition(";")[2]
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        if extra is None:
            yield from _needed(name, requirement, marker)
        elif extra[1] in _EXTRAS:
            yield _of_extra(name, extra[1])


def _needed(name: str, requirement: str, marker: str) -> Iterator[Check]:
    """Check a package that partc needs; of two builds of onnxruntime, the one that is there."""
    version = _version(name)
    if version is None and name.startswith("onnxruntime"):
        other = "onnxruntime" if name.endswith("-gpu") else "onnxruntime-gpu"
        if _version(other) is not None or "!=" in marker:
            return
    least = re.search(r">=\s*([\d.]+)", requirement.partition(";")[0])
    fix = f"pip install '{requirement.partition(';')[0].strip()}'"
    if version is None:
        yield Check(name, "failed", "not installed", fix)
    elif least is not None and _numbers(version) < _numbers(least[1]):
        yield Check(name, "failed", f"{version}, partc needs {least[1]} or newer", fix)
    else:
        yield Check(name, "ok", version)


def _of_extra(name: str, extra: str) -> Check:
    version = _version(name)
    if version is not None:
        return Check(name, "ok", version)
    return Check(name, "absent", f"not installed: for {_EXTRAS[extra]}", f"pip install 'partc[{extra}]'")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# ---------------------------------------------------------------- what works


def _session(name: str) -> Check:
    import numpy as np
    import onnx.parser
    import onnxruntime as ort

    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) { y = Add (x, x) }'
    model = onnx.parser.parse_model(text).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    (doubled,) = session.run(None, {"x": np.array([1.0, 2.0], np.float32)})
    if doubled.tolist() != [2.0, 4.0]:
        return Check(name, "failed", f"1 + 1, 2 + 2 is {doubled.tolist()}", _REINSTALL)
    return Check(name, "ok", f"onnxruntime {ort.__version__} runs a model on the CPU")


def _gpus(name: str) -> Check:
    detection = detect_gpus("localhost")
    gpus = [] if isinstance(detection, str) else detection
    lacks = list(gpu_lacks("a GPU", 0))
    if not gpus:
        return Check(name, "absent", detection if isinstance(detection, str) else "nvidia-smi lists no GPU")
    names = ", ".join(gpu.name or "a GPU" for gpu in gpus)
    if lacks:
        return Check(name, "failed", f"{names}; {lacks[0].what}", lacks[0].fix)
    among = "by NCCL" if has_nccl() else "through host memory: pip install 'partc[gpu]' brings NCCL"
    return Check(name, "ok", f"{names}, with onnxruntime's CUDA provider; they communicate {among}")


def _two_ranks(name: str) -> Check:
    engine = find_engine()
    with held_folder(Path(tempfile.gettempdir()), "partc-doctor-") as folder:
        command = start_command(engine, ["here", "here"], Machines(), ["-c", _TWO_RANKS], folder)
        process = subprocess.run(
            command.words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_START_S,
            env=rank_environment() | command.environment,
        )
    launcher = f"{engine.program} ({engine.kind}, {engine.source})"
    if process.returncode == 0 and process.stdout.count("ranks 2 sum 3") == 2:
        return Check(name, "ok", f"{launcher} starts two ranks, which add up")
    output = (process.stderr or process.stdout).strip().splitlines()
    fix = "see docs/engines.md; PARTC_MPIEXEC names another mpiexec, `pip install mpich` brings one"
    return Check(
        name, "failed", f"{launcher}: exit code {process.returncode}: {' / '.join(output[-3:])}", fix
    )


def _shared_memory(name: str) -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check(name, "absent", f"no {SHARED_MEMORY}: ranks of one machine exchange through files")
    disk = os.statvfs(SHARED_MEMORY)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    sizes = f"{SHARED_MEMORY} has {size / 1e6:,.0f} MB, {free / 1e6:,.0f} MB of them free"
    if free >= SHARED_BYTES:
        return Check(name, "ok", sizes)
    fix = "make room there; in a container, mount a larger one (docker run --shm-size=1g)"
    return Check(name, "absent", f"{sizes}: little for many ranks", fix)


def _ssh(name: str) -> Check:
    program = shutil.which("ssh")
    if program:
        return Check(name, "ok", program)
    return Check(name, "absent", "not installed: for several machines", "apt-get install openssh-client")


def _writing(name: str) -> Check:
    folders = {"the current folder": Path.cwd(), "the temporary folder": Path(tempfile.gettempdir())}
    folders["the folder of measured times"] = cache_file().parent
    for what, place in folders.items():
        there = next(path for path in (place, *place.parents) if path.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            return Check(name, "failed", f"{what} cannot be written: {place}", f"let this user write {there}")
    free = shutil.disk_usage(folders["the current folder"]).free
    return Check(
        name, "ok", f"here, {tempfile.gettempdir()}, {cache_file().parent}; {free / 1e9:.1f} GB free here"
    )


def _compiling(name: str) -> Check:
    import numba

    @numba.njit(cache=False)
    def plus_one(number: int) -> int:
        return number + 1

    return Check(name, "ok", f"numba {numba.__version__} compiles a function: 20 + 1 is {plus_one(20)}")


def _solving(name: str) -> Check:
    from ortools.sat.python import cp_model

    from partc.cost.new_solver import new_solver

    model = cp_model.CpModel()
    number = model.new_int_var(0, 10, "number")
    model.maximize(number)
    solver = new_solver()
    solver.solve(model)
    return Check(name, "ok", f"CP-SAT finds the largest number up to 10: {solver.objective_value:.0f}")


def _ports(name: str) -> Check:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            server.accept()[0].close()
    return Check(name, "ok", f"a process here reaches another: 127.0.0.1:{port}")


_CHECKS: dict[str, Callable[[str], Check]] = {
    "onnxruntime session": _session,
    "GPUs": _gpus,
    "MPI": _two_ranks,
    "shared memory": _shared_memory,
    "ssh": _ssh,
    "writing": _writing,
    "compiling": _compiling,
    "solving": _solving,
    "ports": _ports,
}
