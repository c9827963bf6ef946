"""What hosts lack for a job, found by all ranks together before the first step, and told in one error.

each rank                     versions of packages; for a GPU, CUDA's provider and the GPU itself
the first of each machine     the plan's files, memory, the data's files
rank 0                        room for a checkpoint; whether versions and plans are the same everywhere

Before MPI begins, which needs it, each rank looks for shared memory. Processes of asynchronous
training do the same: asynchronous/processes/start_check.py brings together what they find.
"""

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from msgspec import structs

from partc.runtime.errors import BadPlan, HostLacks
from partc.runtime.jobs.job import Job
from partc.runtime.plan.held_memory import buffers_bytes, stored_bytes, variables_bytes
from partc.runtime.plan.plan_folder import faults_of_files, open_plan_folder
from partc.runtime.plan.program import Plan, Rank
from partc.runtime.plan.record import Record

PACKAGES = ("partc", "numpy", "onnxruntime", "mpi4py", "safetensors", "msgspec")
_ALSO_CALLED = {"onnxruntime": ("onnxruntime-gpu",)}
_SHARED = Path("/dev/shm")
# How many ranks are on this machine -> what each takes of /dev/shm: MPICH 5.0.2 1.1 MB, Open MPI 5.0.11
# 16.8 MB, of which it touches a little. Measured with 2 and 4 local ranks, November 2026.
_SEGMENTS = {"MPI_LOCALNRANKS": 1_100_000, "OMPI_COMM_WORLD_LOCAL_SIZE": 1 << 24}
_GROUP = Path("/sys/fs/cgroup")


class Lack(Record, frozen=True):
    """Something that a host has not."""

    what: str
    fix: str


class HostFindings(Record, frozen=True):
    """What one process found. `versions`: package -> version, empty where it is not installed."""

    name: str  # rank 0, worker-1
    machine: str
    host: str
    device: str
    plan_sha256: str
    versions: dict[str, str]
    lacks: tuple[Lack, ...]

    @property
    def place(self) -> str:
        """Return where this is, for messages."""
        named = f"host {self.host!r}" if self.host else self.name
        return named if self.machine == self.host else f"{named} ({self.machine})"


def look_around(job: Job | None, rank: int, here: Sequence[int]) -> HostFindings:
    """Return what this rank finds. `here`: the ranks of this machine; `job`: None where there is no plan."""
    findings = found_by(f"rank {rank}")
    if job is None:
        return findings
    try:
        plan = open_plan_folder(job.plan_folder).plan
    except BadPlan as fault:
        return structs.replace(findings, lacks=(lack_of(fault),))
    own = next((entry for entry in plan.ranks if entry.rank == rank), None)
    if own is None:  # the daemon says that their numbers differ
        return structs.replace(findings, plan_sha256=plan.sha256)
    lacks = [*gpu_lacks(own.device, own.device_index)] if own.kind == "gpu" else []
    if rank == min(here):
        # Of data that the first rank lacks, too, its daemon says more.
        lacks += file_lacks(plan, job, looks_for_data=rank > 0)
        needed = sum(needed_bytes(plan, entry) for entry in plan.ranks if entry.rank in here)
        lacks += memory_lacks(needed, f"{len(here)} ranks")
    if rank == 0:
        lacks += disk_lacks(plan, job)
    return structs.replace(
        findings, host=own.host, device=own.device, plan_sha256=plan.sha256, lacks=tuple(lacks)
    )


def found_by(name: str) -> HostFindings:
    """Return what a process finds that knows of no plan."""
    versions = {package: _version(package) for package in PACKAGES}
    return HostFindings(name, socket.gethostname(), "", "", "", versions, ())


def check_shared_memory(folder: Path = _SHARED) -> None:
    """Raise HostLacks where MPI's ranks of this machine have no room to exchange messages: before MPI begins.

    Without room, MPI ends by a signal (SIGBUS), and says nothing.
    """
    count, segment_bytes = next(
        ((os.environ[name], size) for name, size in _SEGMENTS.items() if name in os.environ), ("1", 0)
    )
    if not folder.is_dir() or not count.isdigit() or count == "1":
        return
    disk = os.statvfs(folder)
    needed, free = int(count) * segment_bytes, disk.f_bavail * disk.f_frsize
    if free < needed:
        raise HostLacks(
            f"MPI's {count} ranks of this machine need {_mb(needed)} of shared memory, {_mb(free)} are free",
            at=f"{folder} on {socket.gethostname()}",
            fix="make room there; in a container, mount a larger one (docker run --shm-size=1g)",
        )


def judge(findings: Sequence[HostFindings]) -> HostLacks | None:
    """Return the error of all that is lacking, None if nothing is."""
    first = findings[0]
    lacks: dict[tuple[str, Lack], None] = {}
    for one in findings:
        for lack in (*one.lacks, *_differences(one, first)):
            lacks[one.place, lack] = None
    if not lacks:
        return None
    if len(lacks) == 1:
        ((place, lack),) = lacks
        return HostLacks(lack.what, at=place, fix=lack.fix)
    places = len({place for place, _ in lacks})
    gap = "\n       "
    return HostLacks(
        f"{len(lacks)} things are lacking on {places} host{'s' * (places > 1)}",
        at=gap.join(f"{place}: {lack.what}" for place, lack in lacks),
        fix=gap.join(dict.fromkeys(lack.fix for _, lack in lacks)),
    )


def _differences(one: HostFindings, first: HostFindings) -> Iterator[Lack]:
    for name, version in one.versions.items():
        expected = first.versions[name]
        if not version:
            yield Lack(
                f"{name} is not installed", f"install {name} there, for the Python that runs the ranks"
            )
        elif version != expected and expected:
            fix = f"install {name} {expected} there, or name another Python in the cluster file"
            yield Lack(f"{name} is {version}, {first.place} has {expected}", fix)
    if one.plan_sha256 and first.plan_sha256 and one.plan_sha256 != first.plan_sha256:
        yield Lack(
            f"its plan.json is not that of {first.place}",
            "let all hosts see one folder, or copy the plan's folder there again",
        )


def _version(name: str) -> str:
    for called in (name, *_ALSO_CALLED.get(name, ())):
        try:
            return metadata.version(called)
        except metadata.PackageNotFoundError:
            continue
    return ""


def lack_of(fault: BadPlan) -> Lack:
    """Return what is wrong with a plan as something that its host lacks."""
    return Lack(f"{fault.what}: {fault.at}", fault.fix)


def file_lacks(plan: Plan, job: Job, looks_for_data: bool) -> Iterator[Lack]:
    """Yield which files this machine lacks."""
    yield from map(lack_of, faults_of_files(plan, Path(job.plan_folder)))
    if looks_for_data and job.data.startswith("/") and not Path(job.data).exists():
        yield Lack(f"the data is not there: {job.data}", "let every host see the data under the same path")


def gpu_lacks(device: str, index: int) -> Iterator[Lack]:
    """Yield why this machine's GPU of that number cannot be used, for a device of that name."""
    import onnxruntime as ort

    from partc.runtime.execution.gpus import count_gpus, load_cuda

    if "CUDAExecutionProvider" not in ort.get_available_providers():
        yield Lack(
            f"onnxruntime has no CUDA provider, which {device!r} needs",
            "install onnxruntime-gpu in place of onnxruntime, or compile for CPU devices",
        )
        return
    if wrong := load_cuda():
        yield Lack(
            f"onnxruntime's CUDA provider does not load, which {device!r} needs: {wrong}",
            "install CUDA 13 and cuDNN 9 there, pip install 'partc[gpu]' does, or name their folder in the "
            'host\'s `environment`, as {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}',
        )
        return
    try:
        count = count_gpus()
    except ImportError as error:
        yield Lack(f"CuPy does not load, which {device!r} needs: {error}", "pip install 'partc[gpu]'")
        return
    if count <= index:
        fix = "write the GPUs that it has in the cluster file, and compile again"
        yield Lack(f"{count} GPUs, {device!r} is number {index}, from 0", fix)


def needed_bytes(plan: Plan, rank: Rank) -> int:
    """Return the size of the host's memory that a rank takes for variables and buffers."""
    return buffers_bytes(plan, rank.sites) + (variables_bytes(plan, rank) if rank.kind == "cpu" else 0)


def memory_lacks(needed: int, whose: str) -> Iterator[Lack]:
    """Yield that this machine has less memory than its processes need for variables and buffers."""
    available = available_bytes()
    if available is not None and needed > available:
        yield Lack(
            f"its {whose} need {_gb(needed)} for variables and buffers, {_gb(available)} are free",
            "end what else runs there, raise its limit, or compile for more hosts or with --strategy fsdp",
        )


def available_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = _GROUP) -> int | None:
    """Return what memory processes can still take here, within a container's limit; None: nobody tells."""
    limits: list[int] = []
    with suppress(OSError):
        lines = meminfo.read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # no limit reads "max"
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(limits)) if limits else None


def disk_lacks(plan: Plan, job: Job) -> Iterator[Lack]:
    """Yield that there is no room for a checkpoint."""
    if job.checkpoints is None:
        return
    folder = Path(job.checkpoints.folder)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    needed, free = stored_bytes(plan), shutil.disk_usage(there).free
    if needed > free:
        yield Lack(
            f"a checkpoint takes {_gb(needed)}, {_gb(free)} are free in {there}",
            "make room there, or name another folder with --checkpoints",
        )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
