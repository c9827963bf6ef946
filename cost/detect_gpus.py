"""The GPUs of a host whose ids a resource file leaves out (parallax-manual.txt).

this machine      nvidia-smi; where it is not installed, what onnxruntime sees
another machine   nvidia-smi there, through ssh without a password, as the manual asks for it
"""

import shutil
import socket
import subprocess

import onnxruntime as ort

from partc.runtime.errors import BadCluster

_QUERY = ("--query-gpu=index", "--format=csv,noheader")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_PATIENCE_S = 30.0


def detect_gpus(host: str, at: str) -> list[int]:
    """Return the ordinals of a host's GPUs. Raises BadCluster if there is none to be found."""
    is_here = host in ("localhost", "127.0.0.1", socket.gethostname())
    found = _ask_this_machine() if is_here else _ask("ssh", (*_SSH, host, "nvidia-smi", *_QUERY))
    if isinstance(found, str) or not found:
        raise BadCluster(
            f"no GPU ids for {host!r}, and {found or 'no GPU was detected there'}",
            at=at,
            fix=f"list the GPUs yourself, such as `{host}: 0,1`; for CPUs write a cluster file, as "
            "examples/cluster-2x2.json",
        )
    return found


def _ask_this_machine() -> list[int] | str:
    if command := shutil.which("nvidia-smi"):
        return _ask("nvidia-smi", (command, *_QUERY))
    seen = [device for device in ort.get_ep_devices() if device.ep_name == "CUDAExecutionProvider"]
    return list(range(len(seen))) or "nvidia-smi is not installed and onnxruntime sees no GPU"


def _ask(name: str, command: tuple[str, ...]) -> list[int] | str:
    """Return the ordinals that nvidia-smi prints, or why there are none."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} does not answer: {error}"
    if answer.returncode != 0:
        return f"{name} fails: {answer.stderr.strip() or f'exit code {answer.returncode}'}"
    return [int(line) for line in answer.stdout.split() if line.isdigit()]
