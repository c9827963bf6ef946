"""A host's GPUs and their types: as the user says, or as the host says itself. No type is assumed.

this machine      nvidia-smi; where it is not installed, what onnxruntime sees
another machine   nvidia-smi there, through ssh without a password, as parallax-manual.txt asks for it
"""

import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import onnxruntime as ort

from partc.cost.cluster.profiles import PROFILES
from partc.runtime.errors import BadCluster, one_of

GPU_TYPES = tuple(name for name in PROFILES if name != "cpu-core")
_QUERY = ("--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_PATIENCE_S = 30.0
# What NVIDIA calls a product -> its profile; the first that fits.
_PRODUCTS = (
    (r"\bH200\b", "h200"),
    (r"\bH100\b", "h100"),
    (r"\bA100\b", "a100"),
    (r"\bV100\b", "v100"),
    (r"\bP100-SXM2\b", "p100-sxm2"),
    (r"\bP100\b", "p100"),
    (r"\bK80\b", "k80"),
    (r"\bTITAN Xp\b", "titan-xp"),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its host tells of it. `name`: its product's, empty where nobody knows it."""

    index: int
    name: str = ""
    memory_bytes: int | None = None

    @property
    def profile(self) -> str | None:
        """Return the entry of profiles.py that its product has, None where there is none."""
        fitting = (profile for pattern, profile in _PRODUCTS if re.search(pattern, self.name, re.IGNORECASE))
        return next(fitting, None)


def gpus_of(host: str, at: str, indices: Sequence[int] | None, gpu_type: str | None) -> list[tuple[Gpu, str]]:
    """Return a host's GPUs and the profile of each: of these indices, or of all that it has.

    Raises BadCluster where no GPU is found, or nobody knows its type.
    """
    if gpu_type is not None:
        check_gpu_type(gpu_type, at)
    if indices is not None and gpu_type is not None:
        return [(Gpu(index), gpu_type) for index in indices]
    detection = detect_gpus(host)
    if indices is None:
        gpus = _all_of(detection, host, at)
    else:
        known = {} if isinstance(detection, str) else {gpu.index: gpu for gpu in detection}
        gpus = [known.get(index, Gpu(index)) for index in indices]
    return [(gpu, gpu_type or _profile_of(gpu, detection, host, at)) for gpu in gpus]


def check_gpu_type(gpu_type: str, at: str) -> None:
    """Raise BadCluster where there is no profile of that name."""
    if gpu_type not in GPU_TYPES:
        raise BadCluster(f"no GPU type {gpu_type!r}", at=at, fix=one_of(GPU_TYPES, gpu_type))


def detect_gpus(host: str) -> list[Gpu] | str:
    """Return a host's GPUs, or why nobody can tell them."""
    if host not in ("localhost", "127.0.0.1", socket.gethostname()):
        return _ask("ssh", (*_SSH, host, "nvidia-smi", *_QUERY))
    if command := shutil.which("nvidia-smi"):
        return _ask("nvidia-smi", (command, *_QUERY))
    gpus = [device for device in ort.get_ep_devices() if device.ep_name == "CUDAExecutionProvider"]
    return [Gpu(index) for index in range(len(gpus))] or (
        "nvidia-smi is not installed and onnxruntime sees no GPU"
    )


def _all_of(detection: list[Gpu] | str, host: str, at: str) -> list[Gpu]:
    if isinstance(detection, str) or not detection:
        raise BadCluster(
            f"no GPU ids for {host!r}, and {detection or 'no GPU was detected there'}",
            at=at,
            fix=f"list the GPUs yourself, such as `{host}: 0,1 a100`; for CPUs write a cluster file, as "
            "examples/cluster-2x2.json",
        )
    return detection


def _profile_of(gpu: Gpu, detection: list[Gpu] | str, host: str, at: str) -> str:
    if gpu.profile is not None:
        return gpu.profile
    reason = (
        detection
        if isinstance(detection, str)
        else f"it is called {gpu.name!r}"
        if gpu.name
        else "it has no name"
    )
    raise BadCluster(
        f"the type of GPU {gpu.index} of {host!r} is not known: {reason}",
        at=at,
        fix=f"write the type that is nearest behind the ids, such as `{host}: {gpu.index} a100`, or "
        f"--gpu-type for `partc cluster init`: {', '.join(GPU_TYPES)}",
    )


def _ask(name: str, command: tuple[str, ...]) -> list[Gpu] | str:
    """Return the GPUs that nvidia-smi prints, or why there are none."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} does not answer: {error}"
    if answer.returncode != 0:
        return f"{name} fails: {answer.stderr.strip() or f'exit code {answer.returncode}'}"
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return [_gpu(row) for row in rows if row and row[0].isdigit()]


def _gpu(row: Sequence[str]) -> Gpu:
    """Read a row of nvidia-smi: index, name, MiB of memory."""
    name = row[1] if len(row) > 1 else ""
    mebibytes = row[2] if len(row) > 2 else ""
    return Gpu(int(row[0]), name, int(mebibytes) * 2**20 if mebibytes.isdigit() else None)
